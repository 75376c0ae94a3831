"""AdamW with warm-up, cosine decay and clipping, from optax; and the expert-bias rule per layer."""

from itertools import accumulate

import jax
import optax

from moe_course.balance import update_expert_bias
from moe_course.parallel import STACKED, path_names
from moe_course.train.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 over ``warmup_steps``, then cosine to ``final_learning_rate_ratio`` of the peak."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_learning_rate_ratio,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip by the norm over all parameters and shards, then AdamW. Vectors (norm scales) do not decay."""

    def is_matrix(params):
        def of_leaf(path, p):
            return p.ndim - (STACKED in path_names(path)) >= 2  # the layer axis makes no matrix of a vector

        return jax.tree_util.tree_map_with_path(of_leaf, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=is_matrix,
        ),
    )


def apply_gradients(optimizer, grads, opt_state, params):
    """(new parameters, new optimizer state)."""
    # optax mixes float and int32 (decay ** count); our tests run with strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def learning_rate_at(schedule: optax.Schedule, step):
    """The schedule's value, float32."""
    with jax.numpy_dtype_promotion("standard"):
        return schedule(step)


def update_biases(biases: dict, load, rate: float) -> dict:
    """Move every router's selection bias by its own layer's load.

    ``biases``: nested dict with leaves [E] or, stacked, [layers, E]; ``load``: [layers, E], stacked in that order
    (trunk layers first, then MTP modules, which is also the order of the dict's keys). Empty is a no-op.
    """
    leaves, tree = jax.tree.flatten(biases)
    if not leaves:
        return biases
    experts = load.shape[-1]
    ends = list(accumulate(leaf.size // experts for leaf in leaves))
    if ends[-1] != load.shape[0]:
        raise ValueError(f"{ends[-1]} expert biases but loads of {load.shape[0]} layers")
    loads = [
        load[end - leaf.size // experts : end].reshape(leaf.shape)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    moved = [update_expert_bias(bias, own, rate) for bias, own in zip(leaves, loads, strict=True)]
    return jax.tree.unflatten(tree, moved)
