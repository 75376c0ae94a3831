"""Multi-head latent attention (MLA) with decoupled rotary position embedding.

DeepSeek-V2, arXiv 2405.04434, section 2.1: keys and values are projected up from one narrow vector per
token (all that inference would cache); position enters through a few extra query and key dimensions, and
the key's are shared by all heads.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_course.layers.causal_attention import causal_attention
from moe_course.layers.linear import Linear, RMSNorm


@dataclass(frozen=True)
class Yarn:
    """RoPE stretched to a context ``factor`` times longer than it was trained for (YaRN, arXiv 2309.00071).

    A dimension that turns more than ``beta_fast`` times over the original length keeps its frequency, one that turns
    less than ``beta_slow`` times is slowed by ``factor``; between the two, a ramp that is linear in the dimension's
    number and starts and ends at whole numbers. That is the authors' program, and DeepSeek's; the paper's section
    3.2 writes the ramp as linear in the number of turns.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def slowed(self, dim: int, theta: float) -> Float[Array, "half"]:
        """Share of each pair's frequency that is divided by ``factor``: 0 for the fastest, 1 for the slowest."""

        def pair_that_turns(times: float) -> float:
            return dim * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_that_turns(self.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(self.beta_slow)), dim - 1)
        pair = jnp.arange(dim // 2, dtype=jnp.float32)
        return jnp.clip((pair - low) / ((high - low) or 0.001), 0.0, 1.0)

    @property
    def rotation_scale(self) -> float:
        """What cosine and sine, and so the rotated dimensions, are multiplied by."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by besides 1/sqrt(width): 1.874 for DeepSeek-V3, 1.590 for V2-Lite."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def rope_angles(
    length: int, dim: int, theta: float, yarn: Yarn | None = None
) -> tuple[Float[Array, "seq half"], Float[Array, "seq half"]]:
    """Cosine and sine of position x frequency (RoFormer, arXiv 2104.09864), float32; scaled as ``yarn`` says."""
    frequency = 1.0 / theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    scale = 1.0
    if yarn is not None:
        slowed = yarn.slowed(dim, theta)
        frequency = frequency * (1.0 - slowed) + frequency / yarn.factor * slowed
        scale = yarn.rotation_scale
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: Float[Array, "batch seq heads dim"], cos, sin) -> Float[Array, "batch seq heads dim"]:
    """Rotate the pairs (x[i], x[i + dim/2]) by each position's angle; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


class MLA(nnx.Module):
    """Multi-head latent attention over packed sequences. ``q_lora_rank`` 0 projects queries directly."""

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope_theta: float,
        norm_eps: float,
        std: float,
        out_std: float,
        dtype: str,
        rngs: nnx.Rngs,
        yarn: Yarn | None = None,
    ):
        self.num_heads, self.rope_theta, self.yarn = num_heads, rope_theta, yarn
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.nope, self.rope = qk_nope_head_dim, qk_rope_head_dim
        linear = {"std": std, "dtype": dtype, "rngs": rngs}
        norm = {"eps": norm_eps, "dtype": dtype}
        query_width = num_heads * (self.nope + self.rope)
        if q_lora_rank:
            self.query_down = Linear(d_model, q_lora_rank, **linear)
            self.query_norm = RMSNorm(q_lora_rank, **norm)
            self.query_up = Linear(q_lora_rank, query_width, **linear)
        else:
            self.query = Linear(d_model, query_width, **linear)
        self.kv_down = Linear(d_model, kv_lora_rank + self.rope, **linear)
        self.kv_norm = RMSNorm(kv_lora_rank, **norm)
        self.kv_up = Linear(kv_lora_rank, num_heads * (self.nope + v_head_dim), **linear)
        self.out = Linear(num_heads * v_head_dim, d_model, **(linear | {"std": out_std}))

    @property
    def softmax_scale(self) -> float:
        """1/sqrt of the whole query width, rotary dimensions included (DeepSeek-V2, equation 18), times YaRN's."""
        return (self.nope + self.rope) ** -0.5 * (1.0 if self.yarn is None else self.yarn.score_scale)

    def __call__(
        self, x: Float[Array, "tokens d_model"], segments: Int[Array, "batch seq"]
    ) -> Float[Array, "tokens d_model"]:
        batch, seq = segments.shape
        cos, sin = rope_angles(seq, self.rope, self.rope_theta, self.yarn)

        q = self.query_up(self.query_norm(self.query_down(x))) if self.q_lora_rank else self.query(x)
        q_nope, q_rope = jnp.split(q.reshape(batch, seq, self.num_heads, -1), [self.nope], axis=-1)

        latent, k_rope = jnp.split(self.kv_down(x), [self.kv_lora_rank], axis=-1)
        kv = self.kv_up(self.kv_norm(latent)).reshape(batch, seq, self.num_heads, -1)
        k_nope, value = jnp.split(kv, [self.nope], axis=-1)
        k_rope = rotate(k_rope.reshape(batch, seq, 1, -1), cos, sin)
        k_rope = jnp.broadcast_to(k_rope, (batch, seq, self.num_heads, self.rope))

        query = jnp.concatenate([q_nope, rotate(q_rope, cos, sin)], axis=-1)
        key = jnp.concatenate([k_nope, k_rope], axis=-1)
        attended = causal_attention(query, key, value, segments, self.softmax_scale)
        return self.out(attended.reshape(batch * seq, -1))
