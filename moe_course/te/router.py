"""TE's fused router and its fused balance loss, held to :mod:`moe_course.routing` and :mod:`moe_course.balance`."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from moe_course.errors import SettingError
from moe_course.routing import RouterConfig, Routing, largest
from moe_course.te import native
from moe_course.te.checks import require, require_integers, require_shape

_MAX_TABLE = 2**31 - 1
"""TE counts the elements of the [T, E] tables in int32."""


def route(
    logits: Float[Array, "*tokens experts"],
    config: RouterConfig,
    *,
    bias: Float[Array, " experts"] | None = None,
    mask: Bool[Array, "*tokens"] | None = None,
) -> Routing:
    """The contract of :func:`moe_course.routing.route` by TE's ``fused_topk_with_score_function``.

    TE returns a dense table of weights and a map, no ids: they are recovered in descending (biased) score, ties to
    the lower id. Among equal scores at the K-th place TE's kernel may keep another expert than ours below K = 16.
    ``scores`` are computed beside it, as TE keeps its own to itself.

    Raises :class:`SettingError` for a rule that the kernel does not have (:func:`unsupported`), and where it cannot
    run; ``ValueError`` for shapes.
    """
    require("route")
    num_experts = config.num_experts
    require_shape("logits", logits, *logits.shape[:-1], num_experts)
    if reason := unsupported(config, biased=bias is not None):
        raise SettingError(f"TE's router cannot do this: {reason}. Use moe_course.routing.route.")
    lead, top_k = logits.shape[:-1], config.top_k
    flat = logits.reshape(-1, num_experts).astype(jnp.float32)
    if flat.size > _MAX_TABLE:
        raise SettingError(
            f"{flat.shape[0]} tokens x {num_experts} experts is past int32. Route fewer at once."
        )
    real = jnp.ones(flat.shape[:1], bool) if mask is None else mask.reshape(-1).astype(bool)
    flat = jnp.where(real[:, None], flat, 0.0)
    scores = jax.nn.softmax(flat, axis=-1) if config.score_fn == "softmax" else jax.nn.sigmoid(flat)
    if flat.shape[0] == 0:
        probs, routing_map = flat, jnp.zeros(flat.shape, bool)
    else:
        probs, routing_map = native.api().fused_topk_with_score_function(
            flat,
            top_k,
            use_pre_softmax=_softmax_first(config),
            num_groups=config.num_groups if config.num_groups > 1 else -1,
            group_topk=config.top_groups if config.num_groups > 1 else -1,
            scaling_factor=float(config.scaling_factor),
            score_function=config.score_fn,
            expert_bias=None if bias is None else lax.stop_gradient(bias).astype(jnp.float32),
        )
    ids = _ids_of(routing_map, flat, scores, bias, config)
    weights = jnp.take_along_axis(probs, ids, axis=-1)
    if config.score_fn == "softmax" and config.normalize and _softmax_first(config) and top_k > 1:
        total = jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        weights = weights / total * config.scaling_factor
    return Routing(
        expert_ids=jnp.where(real[:, None], ids, num_experts).reshape(*lead, top_k),
        weights=jnp.where(real[:, None], weights, 0.0).reshape(*lead, top_k),
        scores=jnp.where(real[:, None], scores, 0.0).reshape(*lead, num_experts),
    )


def unsupported(config: RouterConfig, *, biased: bool) -> str:
    """Which part of this router TE's kernel does not have; "" if it has all of it."""
    if biased and config.score_fn == "softmax":
        return "an expert bias goes with sigmoid scores only"
    if config.score_fn == "sigmoid" and not config.normalize and config.top_k > 1:
        return "sigmoid weights are always normalised"
    if config.num_groups == 1:
        return ""
    if config.top_k % config.top_groups:
        return f"top_k {config.top_k} is not a multiple of top_groups {config.top_groups}"
    per_group = config.top_k // config.top_groups
    if (config.group_score_top or per_group) != per_group:
        return f"a group is scored by its best top_k / top_groups = {per_group}, not {config.group_score_top}"
    if per_group > config.experts_per_group:
        return f"{per_group} picks per group of {config.experts_per_group} experts"
    return ""


def _softmax_first(config: RouterConfig) -> bool:
    """Softmax over all experts before the choice, for what a softmax over the picks cannot give.

    That is weights which are not normalised; one pick, whose softmax over the picks would be the constant 1 without a
    gradient; and groups, whose scores TE would otherwise add up from logits, not from probabilities.
    """
    if config.score_fn != "softmax":
        return False
    return not config.normalize or config.top_k == 1 or config.num_groups > 1


def _ids_of(routing_map, logits, scores, bias, config: RouterConfig) -> Int[Array, "tokens top_k"]:
    by_logit = config.score_fn == "softmax" and config.num_groups == 1
    keys = lax.stop_gradient(logits if by_logit else scores)
    if bias is not None:
        keys = keys + lax.stop_gradient(bias).astype(jnp.float32)[None, :]
    keys = jnp.where(jnp.isnan(keys), jnp.inf, jnp.maximum(keys, jnp.finfo(jnp.float32).min))
    return largest(jnp.where(routing_map.astype(bool), keys, -jnp.inf), config.top_k)[1]


def balance(
    scores: Float[Array, "tokens experts"], load: Int[Array, " experts"], config: RouterConfig
) -> Float[Array, ""]:
    """The contract of ``load_balancing_loss(..., scope="global")`` by TE's ``fused_moe_aux_loss``.

    TE divides by the square of the rows it is given. This corrects for rows that the mask left out and for a ``load``
    summed over more tokens than are here, so parts still add up to the loss of the whole batch. The kernel needs all
    its rows on each device: give it local rows and add the parts, as an all-gather costs more than the sum.

    Raises ``ValueError`` and ``TypeError`` for shapes and dtypes, :class:`SettingError` where it cannot run.
    """
    require("balance")
    require_shape("scores", scores, None, config.num_experts)
    require_shape("load", load, config.num_experts)
    require_integers("load", load)
    rows = scores.shape[0]
    if rows == 0:
        return jnp.zeros((), jnp.float32)
    scores = scores.astype(jnp.float32)
    # Masked rows are all zero: their gradient, too. 1e-18: the square of its inverse is still a float32.
    probs = jnp.where((scores != 0).any(-1, keepdims=True), scores, 0.0)
    probs = probs / jnp.maximum(probs.sum(-1, keepdims=True), 1e-18)
    load = lax.stop_gradient(load).astype(jnp.int32)
    loss = native.api().fused_moe_aux_loss(probs, load, config.top_k, 1.0)
    picks = load.sum(dtype=jnp.int32).astype(jnp.float32)
    tokens = jnp.maximum(picks / config.top_k, 1.0)
    return loss.reshape(()) * (rows * rows * config.top_k / (jnp.maximum(picks, 1.0) * tokens))
