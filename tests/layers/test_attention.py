"""MLA against a loop over heads and positions in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.layers.attention import MLA
from moe_course.layers.causal_attention import causal_attention
from tests.oracle import relative_error, softmax

SIZES = {
    "num_heads": 3,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
    "std": 0.5,
    "out_std": 0.5,
    "dtype": "float32",
}
D, BATCH, SEQ = 8, 2, 7


def rms_norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rope(x, position, theta=100.0):
    half = len(x) // 2
    angle = position / theta ** (np.arange(half) * 2 / len(x))
    a, b = x[:half], x[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)])


def mla_loop(weights, x, segments):
    """One head, one query position at a time. x [B, S, D]."""
    heads, nope, rank = SIZES["num_heads"], SIZES["qk_nope_head_dim"], SIZES["kv_lora_rank"]
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        if "query" in weights:
            q = x[b] @ weights["query"]
        else:
            q = rms_norm(x[b] @ weights["query_down"]) @ weights["query_up"]
        down = x[b] @ weights["kv_down"]
        kv = rms_norm(down[:, :rank]) @ weights["kv_up"]
        q, kv = q.reshape(SEQ, heads, -1), kv.reshape(SEQ, heads, -1)
        for i in range(SEQ):
            attended = []
            for h in range(heads):
                keys = [j for j in range(i + 1) if segments[b, j] == segments[b, i]]
                scores = [
                    q[i, h, :nope] @ kv[j, h, :nope] + rope(q[i, h, nope:], i) @ rope(down[j, rank:], j)
                    for j in keys
                ]
                p = softmax(np.array(scores) / np.sqrt(nope + SIZES["qk_rope_head_dim"]))
                attended.append(sum(w * kv[j, h, nope:] for w, j in zip(p, keys, strict=True)))
            out[b, i] = np.concatenate(attended) @ weights["out"]
    return out


@pytest.fixture(params=[0, 6], ids=["direct queries", "compressed queries"])
def mla(request):
    return MLA(D, q_lora_rank=request.param, rngs=nnx.Rngs(params=1), **SIZES)


def weights_of(mla) -> dict:
    names = ("query", "query_down", "query_up", "kv_down", "kv_up", "out")
    return {n: np.asarray(getattr(mla, n).kernel[...], np.float64) for n in names if hasattr(mla, n)}


def test_mla_equals_a_loop_with_packed_documents(mla):
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, D)).astype(np.float32)
    segments = np.array([[0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2]], np.int32)
    got = mla(jnp.asarray(x.reshape(-1, D)), jnp.asarray(segments)).reshape(x.shape)
    assert relative_error(got, mla_loop(weights_of(mla), x.astype(np.float64), segments)) < 1e-5


def test_b97_scale_counts_the_rotary_dimensions(mla):
    """1/sqrt(nope + rope). Position 0 has one key and is right with any scale, so look past it."""
    assert mla.softmax_scale == pytest.approx(1 / np.sqrt(10))
    x = np.random.default_rng(1).standard_normal((1, SEQ, D)).astype(np.float32)
    segments = np.zeros((1, SEQ), np.int32)
    reference = mla_loop(weights_of(mla), x.astype(np.float64), segments)
    type(mla).softmax_scale, honest = 6**-0.5, type(mla).softmax_scale  # the broken twin: nope alone
    try:
        wrong = mla(jnp.asarray(x[0]), jnp.asarray(segments)).reshape(x.shape)
    finally:
        type(mla).softmax_scale = honest
    assert relative_error(wrong[:, 0], reference[:, 0]) < 1e-5
    assert relative_error(wrong[:, 1:], reference[:, 1:]) > 1e-3


def test_bfloat16_inputs_keep_float32_scores():
    """Two keys whose scores differ by less than bfloat16 resolves at that size must be told apart."""
    q = jnp.full((1, 2, 1, 4), 8.0, jnp.bfloat16)
    k = jnp.asarray([[[[8.0] * 4], [[8.0, 8.0, 8.0, 8.0625]]]], jnp.bfloat16)
    v = jnp.asarray([[[[1.0]], [[0.0]]]], jnp.bfloat16)
    out = causal_attention(q, k, v, jnp.zeros((1, 2), jnp.int32), 1.0)
    assert float(out[0, 1, 0, 0]) == pytest.approx(1 / (1 + np.exp(0.5)), abs=2e-3)
