"""A small step compiled by XLA's GPU compiler, where the aot extra is installed: the program against the formulas."""

from dataclasses import replace

import jax
import pytest

from moe_course.aot import compile_plan, fit_to, missing
from moe_course.models.config import ModelConfig
from moe_course.train.config import TrainConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "the GPU compiler is here"),
]
MODEL = ModelConfig(
    d_model=256,
    num_layers=3,
    num_dense_layers=1,
    num_heads=2,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    d_ff_dense=512,
    d_ff=128,
    num_experts=8,
    top_k=2,
    vocab_size=512,
    compute_dtype="bfloat16",
)
CONFIG = TrainConfig(model=MODEL, remat="full", capacity_factor=1.25, seq_len=256)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiled anew: a kept result would hide that compiling broke."""
    return compile_plan(fit_to(CONFIG, 8, ep=4), "h100", 8, cache=tmp_path_factory.mktemp("compiled"))


def test_every_collective_moves_what_the_formula_says(compiled):
    total = sum(entry["bytes"] for entry in compiled.collectives)
    large = [entry for entry in compiled.collectives if entry["bytes"] > total / 100]
    assert {entry["kind"] for entry in large} == {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"}
    for entry in large:
        assert entry["predicted"] == pytest.approx(entry["bytes"], rel=0.01), entry


def test_flops_are_those_of_the_formula_and_kernels_are_ours(compiled):
    f = compiled.flops
    assert f["compiled"] + f["in_kernels"] == pytest.approx(f["total"], rel=0.001)
    assert f["padding"] == f["fallback"] == 0
    # Of the grouped GEMM: 2 forward, 1 recomputed, 2 x 2 backward; in each of two layers.
    assert compiled.kernels["__gpu$xla.gpu.triton"] == 7 * MODEL.num_moe_layers
    assert compiled.notes == []


def test_state_is_exact_and_small_steps_fit(compiled):
    arguments = compiled.needed_bytes_per_gpu - compiled.temp_bytes_per_gpu
    assert compiled.state_bytes_per_gpu == pytest.approx(arguments, rel=0.01)
    assert (
        compiled.state_bytes_per_gpu * 8 > 12 * compiled.parameters
    )  # weights and two moments, some replicated
    assert compiled.fits


def test_the_formula_is_not_of_any_other_step(compiled):
    """The same program against another remat's formula must not pass."""
    from moe_course.aot import predict

    right = predict.expected(fit_to(CONFIG, 8, ep=4), jax.__version__)
    wrong = predict.expected(fit_to(replace(CONFIG, remat="none"), 8, ep=4), jax.__version__)
    found = {(entry["kind"], entry["axis"]): entry["bytes"] for entry in compiled.collectives}
    for key in (("all-gather", "fsdp"), ("all-to-all", "expert")):
        assert right[key] == pytest.approx(found[key], rel=0.01)
        assert wrong[key] != pytest.approx(found[key], rel=0.01)
