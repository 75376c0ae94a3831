"""Keeping experts busy: balance losses, the bias update, and load statistics.

One mask rules all of them, the one given to ``route``: tokens it left out have id E and zero scores, so
they are in no count, no loss and no gradient. Counts are outputs of the forward pass, never side effects,
and carry no gradient; sum them over micro-batches and devices before a "global" loss or a bias update.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from moe_course.errors import SettingError
from moe_course.routing import RouterConfig

SCOPES = ("global", "sequence", "microbatch")


def expert_load(
    expert_ids: Int[Array, "*batch tokens top_k"],
    num_experts: int,
    mask: Bool[Array, "*batch tokens"] | None = None,
) -> Int[Array, "*batch experts"]:
    """Token copies that each expert was given, int32. Ids outside [0, E) count nowhere.

    Leading axes are kept: ids [sequences, tokens, K] give the load of each sequence.
    """
    counted = expert_ids if mask is None else jnp.where(mask.astype(bool)[..., None], expert_ids, num_experts)
    flat = counted.reshape(*counted.shape[:-2], -1)
    experts = jnp.arange(num_experts, dtype=flat.dtype).reshape((1,) * flat.ndim + (-1,))
    return (flat[..., None] == experts).sum(axis=-2, dtype=jnp.int32)


def load_balancing_loss(
    scores: Float[Array, "tokens experts"],
    load: Int[Array, " experts"] | Int[Array, "sequences experts"],
    config: RouterConfig,
    *,
    scope: Literal["global", "sequence", "microbatch"] = "global",
    mask: Bool[Array, " tokens"] | None = None,
    total_sequences: Int[Array, ""] | int | None = None,
) -> Float[Array, ""]:
    """E sum_e f_e P_e: 1.0 in balance, whatever K and T; E/K when K experts get all picks and probability.

    f_e is expert e's share of all picks (Switch Transformer, arXiv 2101.03961, eq. 4 to 6; with the 1/K of
    DeepSeek-V3, arXiv 2412.19437, eq. 18), P_e the mean probability; sigmoid scores are first divided by
    their sum over experts (eq. 19). Only P has a gradient. No coefficient is applied here.

    ``scope`` says over which tokens f and P are taken:

    - ``"global"``: over the tokens that ``load`` counts. Give this part's scores and the load summed over
      *all* micro-batches and devices, and *add* the parts: the sum is exactly the loss of the whole batch.
    - ``"microbatch"``: P over the tokens given here; *average* the parts. f P is a product of means, so this
      only approximates the global loss and depends on the split.
    - ``"sequence"``: ``load`` is [sequences, E] (``expert_load`` of [sequences, length, K] ids) and the
      tokens are that many consecutive sequences of one length. The mean over sequences that have a real
      token. With ``total_sequences``, the number of those over all parts, add the parts instead.

    ``scores`` [T, E] are ``Routing.scores``. ``mask`` is needed only if they do not come from a masked
    ``route``. No token at all gives 0.
    """
    if scope not in SCOPES:
        raise SettingError(f"scope is {scope!r}. Set it to one of {', '.join(map(repr, SCOPES))}.")
    num_experts, sequences = config.num_experts, load.shape[0] if scope == "sequence" else 1
    if load.shape != ((sequences, num_experts) if scope == "sequence" else (num_experts,)):
        raise SettingError(
            f"load has shape {load.shape} but scope {scope!r} needs "
            f"{'[sequences, experts]' if scope == 'sequence' else '[experts]'} with {num_experts} experts. "
            f"Count with expert_load on ids {'[sequences, length, K]' if scope == 'sequence' else '[T, K]'}."
        )
    scores = scores.reshape(-1, num_experts).astype(jnp.float32)
    if len(scores) % max(sequences, 1):
        raise SettingError(
            f"{len(scores)} tokens do not divide into {sequences} sequences. "
            f"Give the scores of whole sequences of one length."
        )
    real = (scores != 0).any(-1) if mask is None else mask.reshape(-1).astype(bool)
    # 1e-18: the square of its inverse, in the derivative of the quotient, is still a float32.
    probs = jnp.where(real[:, None], scores, 0.0)
    probs = probs / jnp.maximum(probs.sum(-1, keepdims=True), 1e-18)

    by_sequence = probs.reshape(sequences, len(scores) // max(sequences, 1), num_experts)
    tokens_here = real.reshape(by_sequence.shape[:2]).sum(-1, dtype=jnp.int32)
    load = lax.stop_gradient(load).reshape(sequences, num_experts).astype(jnp.float32)
    picks = load.sum(-1, keepdims=True)
    tokens = picks[:, 0] / config.top_k if scope == "global" else tokens_here.astype(jnp.float32)
    share = load / jnp.maximum(picks, 1.0)
    losses = num_experts * (share * by_sequence.sum(1)).sum(-1) / jnp.maximum(tokens, 1.0)
    if scope != "sequence":
        return losses[0]
    counted = (tokens_here > 0).sum() if total_sequences is None else jnp.asarray(total_sequences)
    return losses.sum() / jnp.maximum(counted.astype(jnp.float32), 1.0)


def router_z_loss(
    logits: Float[Array, "*tokens experts"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    total_tokens: Int[Array, ""] | int | None = None,
) -> Float[Array, ""]:
    """Mean over real tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5). Keeps logits small.

    With ``total_tokens``, the number of real tokens over all micro-batches and devices, add the parts.
    """
    logits = logits.astype(jnp.float32)
    real = jnp.ones(logits.shape[:-1], bool) if mask is None else mask.astype(bool)
    logits = jnp.where(real[..., None], logits, 0.0)
    squares = jnp.where(real, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0)
    counted = real.sum(dtype=jnp.int32) if total_tokens is None else jnp.asarray(total_tokens)
    return squares.sum() / jnp.maximum(counted.astype(jnp.float32), 1.0)


def update_expert_bias(
    bias: Float[Array, "*layers experts"],
    load: Int[Array, "*layers experts"],
    rate: float | Float[Array, ""],
    *,
    recentre: bool = False,
) -> Float[Array, "*layers experts"]:
    """Raise the bias of experts below the mean load by ``rate``, lower it above, leave it at the mean.

    DeepSeek-V3's balancing without a loss (arXiv 2412.19437, section 2.1.2; arXiv 2408.15664). Call it once
    per optimizer step with the load of the whole batch: signs of partial counts do not add up. ``recentre``
    takes the mean off the change, so that the biases do not drift together. Layers may be stacked, each
    moving from its own counts; map over a tree for layers with and without experts. Rate 0 returns the bias
    unchanged, which is what forced or evaluation routing needs. Returns float32.
    """
    num_experts = load.shape[-1]
    load = lax.stop_gradient(load)
    # The mean as a whole part and a remainder: exact, and no sum that could pass 2**31.
    left_over = (load % num_experts).sum(-1, keepdims=True, dtype=load.dtype)
    floor = (load // num_experts).sum(-1, keepdims=True, dtype=load.dtype) + left_over // num_experts
    ceiling = floor + (left_over % num_experts > 0).astype(load.dtype)
    change = (load < ceiling).astype(jnp.float32) - (load > floor).astype(jnp.float32)
    if recentre:
        change = change - change.mean(-1, keepdims=True)
    return lax.stop_gradient(bias).astype(jnp.float32) + jnp.asarray(rate, jnp.float32) * change


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoadReport:
    """How even a load is. float32 and int32 scalars on the device (or one per leading axis)."""

    cv: Float[Array, "*layers"]
    """Coefficient of variation: standard deviation over mean. 0 is even; chance alone gives about
    sqrt(E / picks)."""
    entropy: Float[Array, "*layers"]
    """Of the shares, in nats over ln E: 1 is even, 0 is one expert taking all. With one expert, 1."""
    dead: Int[Array, "*layers"]
    """Experts that got nothing."""
    max_over_mean: Float[Array, "*layers"]
    """The busiest expert over the mean: with experts on equal devices, the slowdown of the slowest."""
    min_over_mean: Float[Array, "*layers"]
    total: Int[Array, "*layers"]
    """Picks counted."""


def load_report(load: Int[Array, "*layers experts"]) -> LoadReport:
    """Statistics of a load. No picks at all reads as cv 0, entropy 0, every expert dead."""
    num_experts = load.shape[-1]
    counts = load.astype(jnp.float32)
    total = counts.sum(-1)
    mean = jnp.maximum(total, 1.0) / num_experts
    share = counts / jnp.maximum(total, 1.0)[..., None]
    nats = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0).sum(-1)
    return LoadReport(
        cv=counts.std(-1) / mean,
        entropy=nats / math.log(num_experts) if num_experts > 1 else (total > 0).astype(jnp.float32),
        dead=(load == 0).sum(-1, dtype=jnp.int32),
        max_over_mean=counts.max(-1) / mean,
        min_over_mean=counts.min(-1) / mean,
        total=load.sum(-1, dtype=jnp.int32),
    )
