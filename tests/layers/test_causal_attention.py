"""Attention by blocks of queries against the plain form, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_course.layers import causal_attention as blocks
from moe_course.layers.causal_attention import causal_attention
from tests.oracle import relative_error


def plain(query, key, value, segments, scale):
    """All scores at once, differentiated by JAX."""
    seq = query.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * jnp.float32(scale)
    allowed = jnp.tril(jnp.ones((seq, seq), bool))[None] & (segments[:, :, None] == segments[:, None, :])
    p = jax.nn.softmax(jnp.where(allowed[:, None], scores, jnp.float32(-1e30)), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, value)


def arguments(batch, seq, heads=2, dim=4, v_dim=3, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(rng.standard_normal((batch, seq, heads, dim)), jnp.float32) for _ in range(2))
    v, d_out = (jnp.asarray(rng.standard_normal((batch, seq, heads, v_dim)), jnp.float32) for _ in range(2))
    segments = np.cumsum(rng.uniform(size=(batch, seq)) < 0.2, axis=1).astype(np.int32)
    return q, k, v, jnp.asarray(segments), d_out


def both(attention, q, k, v, segments, d_out):
    out, pull_back = jax.vjp(lambda *a: attention(*a, segments, 0.5), q, k, v)
    return out, *pull_back(d_out)


@pytest.mark.parametrize(("batch", "seq"), [(1, 3), (2, 4), (2, 7), (1, 12)])
def test_blocks_equal_the_plain_form(monkeypatch, batch, seq):
    """Blocks of 3 queries: one block, a full and a short one, several, with documents across their borders."""
    monkeypatch.setattr(blocks, "_BLOCK", 3)
    args = arguments(batch, seq)
    for name, ours, theirs in zip(
        "out d_query d_key d_value".split(), both(causal_attention, *args), both(plain, *args), strict=True
    ):
        assert relative_error(ours, theirs) < 1e-5, name


def test_one_position_attends_to_itself():
    """Its output is its value, and the scores' gradient is 0 up to the rounding of sums of order 1."""
    q, k, v, segments, d_out = arguments(2, 1)
    out, d_query, d_key, d_value = both(causal_attention, q, k, v, segments, d_out)
    np.testing.assert_array_equal(out, v)
    np.testing.assert_array_equal(d_value, d_out)
    assert max(np.abs(d_query).max(), np.abs(d_key).max()) < 8 * np.finfo(np.float32).eps


def test_gradients_by_finite_differences(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK", 2)
    q, k, v, segments, _ = arguments(1, 5)

    def loss(q, k, v):
        return (causal_attention(q, k, v, segments, 0.5) ** 2).sum()

    check_grads(loss, (q, k, v), order=1, modes=["rev"], rtol=2e-2)


def test_blocks_cover_every_query_once_and_stay_few():
    for seq in (0, 1, 127, 128, 129, 1000, 1024, 4096, 5000):
        covered = [row for first, end in blocks._blocks(seq) for row in range(first, end)]
        assert covered == list(range(seq))
        assert len(blocks._blocks(seq)) <= 8


def test_no_sequence_and_no_batch():
    for batch, seq in ((1, 0), (0, 4)):
        q, k, v, segments, d_out = arguments(batch, seq)
        assert [g.shape for g in both(causal_attention, q, k, v, segments, d_out)] == [
            x.shape for x in (v, q, k, v)
        ]


def test_gradients_keep_the_dtypes():
    q, k, v, segments, d_out = (
        x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in arguments(1, 5)
    )
    ours = both(causal_attention, q, k, v, segments, d_out)
    assert {g.dtype for g in ours} == {jnp.dtype(jnp.bfloat16)}
    wide = both(plain, *(x.astype(jnp.float32) for x in (q, k, v)), segments, d_out.astype(jnp.float32))
    for our, their in zip(ours, wide, strict=True):
        assert relative_error(our.astype(jnp.float32), their) < 0.03  # eight bits, sums of up to five terms


def test_only_part_of_the_scores_is_computed():
    """Four blocks of 128 queries see 128, 256, 384 and 512 keys: five eighths of the square."""
    q, k, v, segments, _ = arguments(1, 512, heads=1)
    cost = jax.jit(causal_attention, static_argnums=4).lower(q, k, v, segments, 0.5).compile().cost_analysis()
    whole = jax.jit(plain, static_argnums=4).lower(q, k, v, segments, 0.5).compile().cost_analysis()
    assert cost["flops"] < 0.75 * whole["flops"]


def test_the_comparison_notices_a_missing_scale(monkeypatch):
    """The broken twin: scores' gradient without the scale."""
    monkeypatch.setattr(blocks, "_BLOCK", 3)
    args = arguments(2, 7)
    honest = both(plain, *args)
    q, k, v, segments, d_out = args
    wrong = jax.vjp(lambda q, k, v: plain(q, k, v, segments, 1.0), q, k, v)[1](d_out)
    assert relative_error(wrong[0], honest[1]) > 1e-2
