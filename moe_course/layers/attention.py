"""Multi-head latent attention (MLA) with decoupled rotary position embedding.

DeepSeek-V2, arXiv 2405.04434, section 2.1: keys and values are projected up from one narrow vector per
token (all that inference would cache); position enters through a few extra query and key dimensions, and
the key's are shared by all heads.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_course.layers.causal_attention import causal_attention
from moe_course.layers.linear import Linear, RMSNorm


def rope_angles(
    length: int, dim: int, theta: float
) -> tuple[Float[Array, "seq half"], Float[Array, "seq half"]]:
    """Cosine and sine of position x frequency (RoFormer, arXiv 2104.09864), float32."""
    frequency = 1.0 / theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle), jnp.sin(angle)


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
    ):
        self.num_heads, self.rope_theta = num_heads, rope_theta
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
        """1/sqrt of the whole query width, rotary dimensions included (DeepSeek-V2, equation 18)."""
        return (self.nope + self.rope) ** -0.5

    def __call__(
        self, x: Float[Array, "tokens d_model"], segments: Int[Array, "batch seq"]
    ) -> Float[Array, "tokens d_model"]:
        batch, seq = segments.shape
        cos, sin = rope_angles(seq, self.rope, self.rope_theta)

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
