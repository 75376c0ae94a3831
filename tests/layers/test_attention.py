"""MLA against a loop over heads and positions in float64; YaRN against its paper's words."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.layers.attention import MLA, Yarn, rope_angles
from moe_course.layers.causal_attention import causal_attention
from moe_course.models import deepseek
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from tests.oracle import relative_error, softmax, tolerance

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


# --- YaRN ---------------------------------------------------------------------------------------------------

YARNS = {
    "DeepSeek-V3": (deepseek.yarn(DEEPSEEK_V3), 64, 10_000.0),
    "V2-Lite": (deepseek.yarn(DEEPSEEK_V2_LITE), 64, 10_000.0),
    "short": (Yarn(8.0, 16, 4.0, 0.5, 0.7, 1.3), 8, 100.0),
    "all dimensions fast": (Yarn(4.0, 21_000), 8, 100.0),
    "all dimensions slow": (Yarn(4.0, 4), 8, 100.0),
}


def yarn_frequencies(yarn, dim, theta):
    """arXiv 2309.00071, section 3.2, pair by pair in float64, with the ramp by pair number of the authors' program."""

    def pair_with_turns(turns):  # solve original_length / (2 pi theta**(2 pair / dim)) = turns
        return dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with_turns(yarn.beta_fast), pair_with_turns(yarn.beta_slow)
    first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
    out = []
    for pair in range(dim // 2):
        own = theta ** (-2 * pair / dim)
        if pair <= first:
            kept = 1.0
        elif pair >= last:
            kept = 0.0
        else:
            kept = (last - pair) / (last - first)
        out.append(kept * own + (1 - kept) * own / yarn.factor)
    return np.array(out)


@pytest.mark.parametrize("name", YARNS)
def test_yarn_frequencies_and_scales(name):
    yarn, dim, theta = YARNS[name]
    frequencies = yarn_frequencies(yarn, dim, theta)
    angle = np.arange(50)[:, None] * frequencies
    grow = lambda mscale: 0.1 * mscale * math.log(yarn.factor) + 1  # noqa: E731
    scale = grow(yarn.mscale) / grow(yarn.mscale_all_dim)
    cos, sin = rope_angles(50, dim, theta, yarn)
    limit = tolerance(jnp.float32, 50)  # an angle's rounding error grows with the position
    assert relative_error(cos, scale * np.cos(angle)) < limit
    assert relative_error(sin, scale * np.sin(angle)) < limit
    # The fastest pair keeps its frequency, the slowest loses the factor, unless all pairs are of one kind.
    slowed = 1 / frequencies / theta ** (2 * np.arange(dim // 2) / dim)
    if name == "DeepSeek-V3":
        assert slowed[0] == pytest.approx(1)
        assert slowed[-1] == pytest.approx(40)
        assert (np.diff(slowed) >= -1e-9).all()
        assert 5 < ((slowed > 1.001) & (slowed < 39.9)).sum() < 20
    plain = rope_angles(50, dim, theta)[1]
    assert (relative_error(sin / scale, plain) < limit) == (name == "all dimensions fast")


def test_b97_published_softmax_scales():
    """1/sqrt(192) times mscale squared: 1.874 for DeepSeek-V3, 1.590 for V2-Lite; cosines are not scaled."""
    for config, factor in ((DEEPSEEK_V3, 1.874), (DEEPSEEK_V2_LITE, 1.590)):
        assert deepseek.yarn(config).score_scale == pytest.approx(factor, abs=5e-4)
        assert deepseek.yarn(config).rotation_scale == 1.0
    yarn = deepseek.yarn(DEEPSEEK_V3)
    mla = MLA(D, q_lora_rank=0, rngs=nnx.Rngs(params=1), yarn=yarn, **SIZES)
    assert mla.softmax_scale == pytest.approx(1.874 / np.sqrt(10), rel=5e-4)


def test_yarn_of_factor_one_is_plain_rope():
    yarn = Yarn(1.0, 16, mscale=0.7)
    assert yarn.score_scale == yarn.rotation_scale == 1.0
    for ours, plain in zip(rope_angles(9, 8, 100.0, yarn), rope_angles(9, 8, 100.0), strict=True):
        assert relative_error(ours, plain) < 4e-7


def test_mla_with_yarn_equals_the_loop(monkeypatch):
    yarn = Yarn(8.0, 16, 2.0, 0.1, 0.7, 1.3)
    mla = MLA(D, q_lora_rank=0, rngs=nnx.Rngs(params=1), yarn=yarn, **SIZES)
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, D)).astype(np.float32)
    segments = np.array([[0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 2, 2]], np.int32)
    got = jax.jit(mla)(jnp.asarray(x.reshape(-1, D)), jnp.asarray(segments)).reshape(x.shape)
    plain = mla_loop(weights_of(mla), x.astype(np.float64), segments)
    assert relative_error(got, plain) > 1e-3
    frequencies = yarn_frequencies(yarn, 4, 100.0)

    def stretched(x, position):
        angle, (a, b) = position * frequencies, np.split(x, 2)
        rotated = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
        return yarn.rotation_scale * np.concatenate(rotated)

    monkeypatch.setitem(globals(), "rope", stretched)
    weights = weights_of(mla)
    weights["query"] = weights["query"] * yarn.score_scale
    assert relative_error(got, mla_loop(weights, x.astype(np.float64), segments)) < 1e-5
