"""Dense building blocks: linear map, RMSNorm, token embedding, SwiGLU feed-forward."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from moe_course.parallel import gather_weight
from moe_course.products import dot_rows


class Linear(nnx.Module):
    """``x @ kernel``, no bias. ``kernel`` is [d_in, d_out], float32, cut over fsdp."""

    def __init__(self, d_in: int, d_out: int, *, std: float, dtype: str, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (d_in, d_out), jnp.float32))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "tokens d_in"]) -> Float[Array, "tokens d_out"]:
        return matmul(x.astype(self.dtype), gather_weight(self.kernel[...], self.dtype))


@jax.custom_vjp
def matmul(
    x: Float[Array, "tokens d_in"], kernel: Float[Array, "d_in d_out"]
) -> Float[Array, "tokens d_out"]:
    """``x @ kernel`` whose weight gradient takes the fast way of :func:`dot_rows`."""
    return x @ kernel


def _matmul_forward(x, kernel):
    return matmul(x, kernel), (x, kernel)


def _matmul_backward(residuals, d_out):
    x, kernel = residuals
    return d_out @ kernel.T, dot_rows(x, d_out).astype(kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), computed in float32, returned in ``dtype``."""

    def __init__(self, width: int, *, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        x = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(self.eps))
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x * inverse * scale).astype(self.dtype)


class Embedding(nnx.Module):
    """Token id -> row of ``table`` [vocab, d_model]."""

    def __init__(self, vocab_size: int, d_model: int, *, std: float, dtype: str, rngs: nnx.Rngs):
        self.table = nnx.Param(std * jax.random.normal(rngs.params(), (vocab_size, d_model), jnp.float32))
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch d_model"]:
        return jnp.take(gather_weight(self.table[...], self.dtype), tokens, axis=0)


class SwiGLU(nnx.Module):
    """Dense feed-forward ``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202), gate and up in one matmul."""

    def __init__(self, d_model: int, d_ff: int, *, std: float, down_std: float, dtype: str, rngs: nnx.Rngs):
        self.gate_up = Linear(d_model, 2 * d_ff, std=std, dtype=dtype, rngs=rngs)
        self.down = Linear(d_ff, d_model, std=down_std, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "tokens d_model"]) -> Float[Array, "tokens d_model"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)
