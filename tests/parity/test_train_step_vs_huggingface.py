"""The bench's opponent is the model it claims to be."""

import warnings

import pytest

from moe_course.bench import train_step
from moe_course.scaling.flops import parameter_counts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_their_model_has_our_parameters(monkeypatch):
    """All of ours, and per MoE layer nothing but the router's bias buffer and MLA's norms beside."""
    seen = {}
    real = transformers.DeepseekV3ForCausalLM

    def spy(config):
        seen["model"] = real(config)
        return seen["model"]

    monkeypatch.setattr(transformers, "DeepseekV3ForCausalLM", spy)
    step = train_step.huggingface_step(train_step.Options(batch=1, seq=8), "eager")
    before = [p.detach().clone() for p in seen["model"].parameters()]
    step()
    assert any((a != b).any() for a, b in zip(before, seen["model"].parameters(), strict=True))
    theirs = sum(p.numel() for p in seen["model"].parameters())
    assert theirs == pytest.approx(parameter_counts(train_step.MODEL).total, rel=1e-3)
