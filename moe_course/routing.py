"""The router: from logits to the experts of each token and the weights of their answers.

``route`` scores every expert, picks ``top_k`` of them for each token and weighs the picks. It covers the
routers in use: Mixtral and Qwen3-MoE (softmax, normalised), DeepSeek-V2 (softmax, groups scored by their best
expert, not normalised), DeepSeek-V3 (sigmoid, expert bias, groups scored by their best two, normalised and
scaled). Everything is float32 inside, whatever the logits are; nothing waits for the host.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from moe_course.errors import SettingError

_SCAN_TOP_K = 16
"""Up to this many picks, repeated maximum; beyond it, a sort (see :func:`largest`)."""


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts. Raises :class:`SettingError` (a ``ValueError``) for what cannot work."""

    num_experts: int
    top_k: int
    score_fn: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """Divide a token's weights by their sum. Skipped for ``top_k`` 1, where the quotient would be the
    constant 1 and the router would get no gradient."""
    scaling_factor: float = 1.0
    """Multiplies the weights, after normalisation."""
    num_groups: int = 1
    """Experts come in this many equal groups of neighbours, and a token may use only some of the groups."""
    top_groups: int = 1
    """Groups that a token may use."""
    group_score_top: int | None = None
    """A group's score is the sum of its best this many (biased) scores. Default ``top_k // top_groups``,
    at least 1: for DeepSeek-V3 (8 picks from 4 groups) the best two, its published rule. DeepSeek-V2: 1."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups", "group_score_top"):
            value = getattr(self, name)
            if name == "group_score_top" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingError(f"{name} is {value!r}. Set it to a whole number, 1 or more.")
        if self.score_fn not in ("softmax", "sigmoid"):
            raise SettingError(f"score_fn is {self.score_fn!r}. Set it to 'softmax' or 'sigmoid'.")
        if not (math.isfinite(self.scaling_factor) and self.scaling_factor > 0):
            raise SettingError(f"scaling_factor is {self.scaling_factor}. Set it to a finite number above 0.")
        if self.top_k > self.num_experts:
            raise SettingError(
                f"top_k is {self.top_k} but there are {self.num_experts} experts. "
                f"Set top_k to {self.num_experts} or less."
            )
        if self.num_experts % self.num_groups:
            raise SettingError(
                f"num_experts {self.num_experts} does not divide into {self.num_groups} groups. "
                f"Set num_groups to a divisor of {self.num_experts}."
            )
        if self.top_groups > self.num_groups:
            raise SettingError(
                f"top_groups is {self.top_groups} but there are {self.num_groups} groups. "
                f"Set top_groups to {self.num_groups} or less."
            )
        reachable = self.top_groups * self.experts_per_group
        if self.top_k > reachable:
            raise SettingError(
                f"top_k is {self.top_k} but {self.top_groups} of {self.num_groups} groups hold only "
                f"{reachable} experts. Set top_k to {reachable} or less, or raise top_groups."
            )
        if self.group_score_top is not None and self.group_score_top > self.experts_per_group:
            raise SettingError(
                f"group_score_top is {self.group_score_top} but a group holds {self.experts_per_group} "
                f"experts. Set group_score_top to {self.experts_per_group} or less."
            )

    @property
    def experts_per_group(self) -> int:
        return self.num_experts // self.num_groups


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where each token goes. A token that the mask left out has ids E, weights 0 and scores 0."""

    expert_ids: Int[Array, "*tokens top_k"]
    """Distinct experts in descending (biased) score, ties to the lower id. E means no expert."""
    weights: Float[Array, "*tokens top_k"]
    """float32 combine weights, from unbiased scores."""
    scores: Float[Array, "*tokens experts"]
    """float32 unbiased scores of all experts (softmax or sigmoid), for the balance losses."""


class DenseRouting(NamedTuple):
    """A routing as Transformer Engine's router returns it: one column per expert."""

    probs: Float[Array, "*tokens experts"]
    routing_map: Bool[Array, "*tokens experts"]


def route(
    logits: Float[Array, "*tokens experts"],
    config: RouterConfig,
    *,
    bias: Float[Array, " experts"] | None = None,
    mask: Bool[Array, "*tokens"] | None = None,
    replay_ids: Int[Array, "*tokens top_k"] | None = None,
) -> Routing:
    """Choose ``top_k`` experts for every token and weigh them.

    ``bias`` is added to the scores to choose, never to weigh, and its gradient is exactly zero (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). ``mask`` is True for real tokens: whatever the logits of the others
    hold, NaN included, they get id E, weight 0 and zero gradient. ``replay_ids`` fixes the choice (recorded
    routes) while the weights are taken afresh from the current scores; ids outside [0, E) mean no expert.

    Normalised softmax weights are the softmax over the picked logits, which is the same number as picking
    from the softmax over all experts and dividing by the sum, and cannot divide by zero; normalised sigmoid
    weights are computed in the same way from log-sigmoids. A NaN logit of a real token gives NaN weights
    under valid, distinct ids, so that the loss shows it.

    Raises :class:`SettingError` when the last axis of ``logits`` is not ``config.num_experts``.
    """
    num_experts = config.num_experts
    if logits.ndim < 1 or logits.shape[-1] != num_experts:
        raise SettingError(
            f"logits have shape {logits.shape} but the router has {num_experts} experts. "
            f"Give logits whose last axis is {num_experts}."
        )
    logits = logits.astype(jnp.float32)
    real = jnp.ones(logits.shape[:-1], bool) if mask is None else mask.astype(bool)
    # Before any arithmetic: 0 * NaN is NaN, and the gradient of a later `where` would carry it back.
    logits = jnp.where(real[..., None], logits, 0.0)
    scores = jax.nn.softmax(logits, axis=-1) if config.score_fn == "softmax" else jax.nn.sigmoid(logits)

    ids = _choose(logits, scores, bias, config) if replay_ids is None else replay_ids.astype(jnp.int32)
    routed = real[..., None] & (ids >= 0) & (ids < num_experts)
    weights = _weigh(logits, scores, jnp.where(routed, ids, 0), routed, config)
    return Routing(
        expert_ids=jnp.where(routed, ids, num_experts),
        weights=weights,
        scores=jnp.where(real[..., None], scores, 0.0),
    )


def _choose(logits, scores, bias, config: RouterConfig) -> Int[Array, "*tokens top_k"]:
    """The ids of the picks. Integers: no gradient passes."""
    # Softmax keeps the order of the logits, which tell apart experts whose probabilities round to the same
    # number (or to 0). Bias and group sums need the scores themselves.
    by_logit = config.score_fn == "softmax" and bias is None and config.num_groups == 1
    keys = lax.stop_gradient(logits if by_logit else scores)
    if bias is not None:
        keys = keys + _expand(lax.stop_gradient(bias).astype(jnp.float32), keys.ndim)
    # Minus infinity is kept for experts that may not be picked, so that K picks are always K distinct,
    # allowed experts. NaN counts as the largest, as in lax.top_k.
    keys = jnp.where(jnp.isnan(keys), jnp.inf, jnp.maximum(keys, jnp.finfo(jnp.float32).min))
    if config.num_groups > 1:
        keys = jnp.where(_allowed(keys, config), keys, -jnp.inf)
    return largest(keys, config.top_k)[1]


def _allowed(keys, config: RouterConfig) -> Bool[Array, "*tokens experts"]:
    """True for the experts of the best ``top_groups`` groups (node-limited routing)."""
    grouped = keys.reshape(*keys.shape[:-1], config.num_groups, config.experts_per_group)
    group_top = config.group_score_top or max(1, config.top_k // config.top_groups)
    group_scores = jnp.maximum(largest(grouped, group_top)[0].sum(-1), jnp.finfo(jnp.float32).min)
    kept = _one_hot(largest(group_scores, config.top_groups)[1], config.num_groups).any(-2)
    return jnp.repeat(kept, config.experts_per_group, axis=-1)


def _weigh(logits, scores, ids, routed, config: RouterConfig) -> Float[Array, "*tokens top_k"]:
    """Combine weights of the picks ``ids`` from unbiased scores; 0 where not ``routed``."""
    if config.normalize and config.top_k > 1:
        picked = jnp.take_along_axis(logits, ids, axis=-1)
        log_scores = picked if config.score_fn == "softmax" else jax.nn.log_sigmoid(picked)
        weights = jax.nn.softmax(jnp.where(routed, log_scores, jnp.finfo(jnp.float32).min), axis=-1)
    else:
        weights = jnp.take_along_axis(scores, ids, axis=-1)
    return jnp.where(routed, weights * config.scaling_factor, 0.0)


def largest(values: Float[Array, "*rows n"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The ``k`` largest of the last axis, descending, ties to the lower index. No NaN, no gradient.

    Distinct as long as ``k`` values are above minus infinity. In place of ``lax.top_k``, which XLA does not
    partition: with tokens cut over devices it gathers all of them on each. Up to 16 picks, one maximum after
    another is about as fast on a CPU (2048 x 32 and 4096 x 128, k = 4: 0.7 to 1.6 times ``top_k``).
    """
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    if k > _SCAN_TOP_K:
        ordered = lax.sort((-values, index), dimension=values.ndim - 1, num_keys=1, is_stable=True)
        return -ordered[0][..., :k], ordered[1][..., :k]
    best_values, best_ids = [], []
    for _ in range(k):
        best = values.max(axis=-1, keepdims=True)
        first = jnp.where(values == best, index, values.shape[-1]).min(axis=-1, keepdims=True)
        values = jnp.where(index == first, -jnp.inf, values)
        best_values.append(best)
        best_ids.append(first)
    return jnp.concatenate(best_values, axis=-1), jnp.concatenate(best_ids, axis=-1)


def dense_routing(routing: Routing, num_experts: int) -> DenseRouting:
    """``routing`` as a dense [T, E] table of weights and a boolean map, the form of Transformer Engine's
    ``fused_topk_with_score_function`` (which never returns ids)."""
    hit = _one_hot(routing.expert_ids, num_experts)
    return DenseRouting(jnp.where(hit, routing.weights[..., None], 0.0).sum(-2), hit.any(-2))


def _one_hot(ids: Int[Array, "*rows k"], size: int) -> Bool[Array, "*rows k size"]:
    return ids[..., None] == _expand(jnp.arange(size, dtype=ids.dtype), ids.ndim + 1)


def _expand(vector: Array, ndim: int) -> Array:
    """``vector`` [n] as [1, ..., 1, n]."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))
