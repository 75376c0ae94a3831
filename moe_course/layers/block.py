"""One decoder layer, and the multi-token-prediction module made of one."""

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe_course.dispatch import DispatchPlan
from moe_course.layers.attention import MLA
from moe_course.layers.linear import Linear, RMSNorm, SwiGLU
from moe_course.layers.moe import MoE, MoEStats

ATTENTION_OUT = "attention_out"
"""Checkpoint name of what attention adds to the residual stream [tokens, d_model]."""


class Block(nnx.Module):
    """Pre-norm decoder layer: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, attention: MLA, feed_forward: SwiGLU | MoE, d_model: int, *, eps: float, dtype: str):
        self.attention_norm = RMSNorm(d_model, eps=eps, dtype=dtype)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(d_model, eps=eps, dtype=dtype)
        self.feed_forward = feed_forward

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        segments: Int[Array, "batch seq"],
        plan: DispatchPlan | None,
        **experts,
    ) -> tuple[Float[Array, "tokens d_model"], MoEStats | None]:
        """``experts``: backend, recipe and key of :class:`MoE`."""
        x, hidden = self.before_feed_forward(x, segments)
        if isinstance(self.feed_forward, MoE):
            out, stats = self.feed_forward(hidden, plan=plan, num_sequences=segments.shape[0], **experts)
            return x + out, stats
        return x + self.feed_forward(hidden), None

    def before_feed_forward(
        self, x: Float[Array, "tokens d_model"], segments: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "tokens d_model"], Float[Array, "tokens d_model"]]:
        """(residual stream after attention, what the feed-forward sees)."""
        x = x + checkpoint_name(self.attention(self.attention_norm(x), segments), ATTENTION_OUT)
        return x, self.feed_forward_norm(x)


class MTP(nnx.Module):
    """One multi-token-prediction module (DeepSeek-V3, section 2.2): from the state at position i (the trunk's
    after its last norm, or that of the module before) and the embedding of a later token, the state, normalised
    and ready for the head, that predicts the token after that one. Embedding and head are the model's own; the
    last norm is the module's (``shared_head.norm`` in the published weights)."""

    def __init__(self, block: Block, d_model: int, *, eps: float, std: float, dtype: str, rngs: nnx.Rngs):
        self.hidden_norm = RMSNorm(d_model, eps=eps, dtype=dtype)
        self.embedding_norm = RMSNorm(d_model, eps=eps, dtype=dtype)
        self.project = Linear(2 * d_model, d_model, std=std, dtype=dtype, rngs=rngs)
        self.block = block
        self.output_norm = RMSNorm(d_model, eps=eps, dtype=dtype)

    def __call__(
        self,
        hidden: Float[Array, "tokens d_model"],
        later: Float[Array, "tokens d_model"],
        segments: Int[Array, "batch seq"],
        plan: DispatchPlan | None,
        **experts,
    ) -> tuple[Float[Array, "tokens d_model"], MoEStats | None]:
        joined = jnp.concatenate([self.hidden_norm(hidden), self.embedding_norm(later)], axis=-1)
        out, stats = self.block(self.project(joined), segments, plan, **experts)
        return self.output_norm(out), stats
