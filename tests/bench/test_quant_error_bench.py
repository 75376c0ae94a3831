"""The bench of quantisation errors: the table is met, recipes rank as their formats do."""

import json

import numpy as np
import pytest

from moe_course.bench import quant_error
from tests.quant.golden import GOLDEN


def test_the_table_is_the_published_one():
    for kind, table in quant_error.THEIRS.items():
        for name, value in GOLDEN["sqnr_db"][kind].items():
            assert table[name] == value


def test_signal_to_noise_of_normal_values_is_the_published_one():
    """The whole million: within 0.1 dB for every format and rounding."""
    x = quant_error.draw("normal", 4096 * 256, 0)
    for name, theirs in quant_error.THEIRS["normal"].items():
        ours = quant_error.sqnr_db(x, quant_error._round_trip(x, *quant_error.FORMATS[name]))
        assert abs(ours - theirs) < 0.1, name


@pytest.mark.slow
def test_experts(monkeypatch):
    measured = {name: quant_error.MEASURED[name] for name in ("bf16", "fp8-delayed", "mxfp8", "nvfp4")}
    monkeypatch.setattr(quant_error, "MEASURED", measured)
    options = quant_error.Options(rows=256, d_model=64, d_ff=32, experts=4)
    figures = quant_error.expert_errors(options)
    assert json.loads(json.dumps(figures)) == figures
    output = {name: errors["output"] for name, errors in figures.items()}
    assert 0 < output["bf16"] < output["mxfp8"] < output["nvfp4"] < 0.3
    for errors in figures.values():
        assert all(0.95 < v < 1 for k, v in errors.items() if k.startswith("cosine"))


def test_cosine_and_error_notice_a_wrong_sign():
    x = np.arange(4.0)
    assert quant_error._cosine(x, -x) == pytest.approx(-1)
    assert quant_error._relative(-x, x) == pytest.approx(2)


def test_the_backward_pass_is_given_a_byte_per_element():
    """bfloat16 rows of D + F elements: 2 bytes each; FP8: 1; MXFP8: 1 + 1/32, each expert in whole blocks."""
    o = quant_error.Options(rows=256, d_model=64, d_ff=32, experts=4)
    kept = {n: quant_error.saved_bytes_per_row(quant_error.MEASURED[n], o) for n in ("bf16", "fp8", "mxfp8")}
    elements = o.d_model + o.d_ff
    assert kept["bf16"] == pytest.approx(2 * elements, rel=0.01)
    assert kept["fp8"] == pytest.approx(elements, rel=0.1)
    in_blocks = (o.rows + o.experts * 31) / o.rows
    assert kept["mxfp8"] == pytest.approx(elements * (1 + 1 / 32) * in_blocks, rel=0.05)
