"""The bench of a whole step: its sizes are those it claims, and it prints the keys it promises."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from moe_course import bench
from moe_course.bench import train_step
from moe_course.scaling.flops import parameter_counts


def test_the_model_has_18_million_parameters():
    assert round(parameter_counts(train_step.MODEL).total / 1e6, 1) == 18.3


@pytest.fixture
def small(monkeypatch):
    widths = {"d_model": 32, "d_ff_dense": 48, "d_ff": 16, "q_lora_rank": 16, "kv_lora_rank": 16}
    heads = {"num_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    counts = {"num_layers": 2, "num_experts": 8, "top_k": 2}
    monkeypatch.setattr(train_step, "MODEL", replace(train_step.MODEL, **widths, **heads, **counts))
    return train_step.Options(batch=2, seq=16, rounds=1, huggingface=False)


@pytest.mark.slow
def test_keys(small):
    figures = bench.run("train-step", small)
    assert set(figures) == {"tokens_per_s", "parameters"}
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.slow
def test_every_call_is_another_step_of_training(small):
    """Not the same step again: the loss of one batch falls."""
    step = train_step.our_step(small)
    losses = [float(np.asarray(jax.device_get(step()["loss"]))) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.05
