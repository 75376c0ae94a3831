"""The bench's opponent is the model it claims to be."""

import pytest

from moe_course.bench import train_step
from moe_course.scaling.flops import parameter_counts
from tests.parity.peers import MARKS

pytestmark = MARKS


def test_their_model_has_our_parameters():
    """All of ours, and per MoE layer nothing but the router's bias buffer and MLA's norms beside."""
    options = train_step.Options(batch=1, seq=8)
    model = train_step.huggingface_model(options, "eager")
    before = [p.detach().clone() for p in model.parameters()]
    train_step.huggingface_step(options, model)()
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
    theirs = sum(p.numel() for p in model.parameters())
    assert theirs == pytest.approx(parameter_counts(train_step.MODEL).total, rel=1e-3)
