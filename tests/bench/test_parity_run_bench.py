"""The parity run: its band is declared once, broken quantisers are broken, and it is run to the end in small."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from moe_course.bench import parity_run
from moe_course.errors import RunError, SettingError
from moe_course.models.config import ModelConfig
from moe_course.quant import dequantize, quantize_mxfp8
from moe_course.train.config import OptimizerConfig, TrainConfig
from moe_course.train.presets import Preset

BASELINE = [{"loss": loss, "held_out": 3.0} for loss in (2.0, 2.25, 2.5)]


def test_the_band_is_written_down_once(tmp_path):
    declared = parity_run.declare(BASELINE, tmp_path / "declared.json")
    assert (declared["mean"], declared["band"]) == (2.25, 0.5)
    assert parity_run.declare([{"loss": 9.0, "held_out": 9.0}] * 2, tmp_path / "declared.json") == declared
    with pytest.raises(RunError, match="no band"):
        parity_run.declare([{"loss": None, "held_out": None}], tmp_path / "other.json")


@pytest.mark.parametrize(("loss", "inside"), [(2.75, True), (2.76, False), (1.75, True), (1.74, False)])
def test_a_run_is_judged_on_both_sides(loss, inside, tmp_path):
    declared = parity_run.declare(BASELINE, tmp_path / "declared.json")
    judged = parity_run.judge({"loss": loss, "held_out": 3.0}, declared)
    assert judged["inside"] is inside
    assert judged["gap"] == pytest.approx(loss - 2.25)
    assert judged["paired_gap"] == pytest.approx(loss - 2.0)
    assert judged["gap_over_band"] == pytest.approx(abs(loss - 2.25) / 0.5)


def test_a_run_that_ended_early_is_outside(tmp_path):
    declared = parity_run.declare(BASELINE, tmp_path / "declared.json")
    judged = parity_run.judge({"loss": None, "stopped": "step 3: the loss is not finite"}, declared)
    assert judged == {"loss": None, "inside": False, "stopped": "step 3: the loss is not finite"}


def test_the_twins_are_broken():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    x[:, 32:] *= 1000
    x[7, :32] = 0
    right = np.asarray(dequantize(quantize_mxfp8(x)))
    zero = np.asarray(dequantize(parity_run.zero_block_is_nan(x)))
    assert np.all(np.isnan(zero[7, :32]))
    np.testing.assert_array_equal(np.delete(zero, 7, 0), np.delete(right, 7, 0))
    swapped = np.asarray(dequantize(parity_run.scales_transposed(x)))
    assert np.linalg.norm(swapped - x) > 10 * np.linalg.norm(right - x)


def test_settings():
    with pytest.raises(SettingError, match="mxfp8"):
        parity_run.run(parity_run.Options(recipes=("mxfp9",)))
    with pytest.raises(SettingError, match="--seeds"):
        parity_run.run(parity_run.Options(seeds=1))


@pytest.mark.slow
def test_a_whole_run_in_small(tmp_path, monkeypatch):
    """Two BF16 runs make the band; a NaN for a block of zeros leaves it; a second call reads what is there."""
    model = ModelConfig(
        d_model=32, num_layers=1, num_dense_layers=0, num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, d_ff=32, num_experts=4, top_k=2,
    )  # fmt: skip
    config = TrainConfig(
        model=model,
        batch_size=4,
        seq_len=32,
        steps=6,
        optimizer=OptimizerConfig(warmup_steps=2),
        eval_bytes=256,
        backend="ragged_dot",
    )
    monkeypatch.setattr(parity_run, "get_preset", lambda name: Preset("", config))
    monkeypatch.setattr(parity_run, "TWINS", {"twin": parity_run.zero_block_is_nan})
    options = parity_run.Options(seeds=2, recipes=(), out=tmp_path)
    result = parity_run.run(options)
    assert result["declared"]["band"] > 0
    assert result["twin"]["loss"] is None
    assert "not finite" in result["twin"]["stopped"]
    assert json.loads(json.dumps(result)) == result

    monkeypatch.setattr(parity_run, "Trainer", None)
    again = parity_run.run(options)
    assert {k: again[k] for k in ("declared", "twin")} == {k: result[k] for k in ("declared", "twin")}
    with pytest.raises(SettingError, match="--out"):
        parity_run.run(replace(options, steps=7))
    jax.clear_caches()
