"""One optimizer step as one compiled function, with sizes that never leave the device.

The step is *guarded*: if a receive buffer would overflow, or anything is not finite, it returns the state
unchanged and sets ``halted``; every later step is then a no-op until the host clears the flag. So the host
may read flags one step late, go back to the first bad batch, and the order of updates is that of a run
that never overflowed.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from moe_course.balance import load_report
from moe_course.dispatch.plan import DispatchPlan, bucket_capacity, largest_bucket
from moe_course.models import deepseek
from moe_course.models.deepseek import DeepSeekLM, shifted_targets, token_losses
from moe_course.parallel import batch_sharding, tree_shardings
from moe_course.quant.recipes import RECIPES
from moe_course.train.config import TrainConfig
from moe_course.train.corpora import DOMAINS
from moe_course.train.optimizer import (
    apply_gradients,
    learning_rate_at,
    learning_rate_schedule,
    make_optimizer,
    update_biases,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "bias", "opt_state", "step", "halted"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step. Weights and moments are float32."""

    params: dict
    bias: dict
    opt_state: optax.OptState
    step: Int[Array, ""]
    """Updates done."""
    halted: Bool[Array, ""]


def _fresh_state(config: TrainConfig) -> TrainState:
    _, params, bias = deepseek.split(DeepSeekLM(config.model, rngs=nnx.Rngs(params=config.seed)))
    opt_state = make_optimizer(config.optimizer, config.steps).init(params)
    return TrainState(params, bias, opt_state, jnp.int32(0), jnp.bool_(False))


def abstract_state(config: TrainConfig) -> TrainState:
    """Shapes and dtypes of the state; nothing is allocated."""
    return jax.eval_shape(partial(_fresh_state, config))


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Fresh weights, made in place on ``mesh``; the same numbers on every mesh."""
    return jax.jit(partial(_fresh_state, config), out_shardings=state_shardings(config, mesh))()


def state_shardings(config: TrainConfig, mesh: Mesh) -> TrainState:
    """``NamedSharding`` of every leaf of the state."""
    return tree_shardings(abstract_state(config), mesh)


def dispatch_plan(config: TrainConfig, bucket: int) -> DispatchPlan:
    """The receive buffers of one capacity bucket (see ``dispatch.plan.bucket_capacity``)."""
    m, ranks = config.model, config.mesh.expert
    capacity = bucket_capacity(
        bucket, config.capacity_factor, config.tokens_per_device, m.top_k, m.num_experts, ranks
    )
    return DispatchPlan(m.num_experts, ranks, capacity, config.dispatcher, config.waves)


def batch_loss(model: DeepSeekLM, batch: dict, config: TrainConfig, plan: DispatchPlan, step: Int[Array, ""]):
    """(training loss, auxiliary outputs) of one batch. Loss: nats per valid target, plus weighted extras.

    ``step`` decides how a recipe with stochastic rounding rounds.
    """
    tokens, segments = batch["tokens"], batch["segments"]
    recipe = RECIPES[config.recipe]
    key = None
    if recipe is not None and recipe.needs_key:
        key = jax.random.fold_in(jax.random.key(config.seed), step)
    experts = {"backend": config.backend, "recipe": recipe, "key": key}
    how = {"remat": config.remat, "scan_from": config.scan_from}
    out = model(tokens[:, :-1], segments[:, :-1], plan=plan, **experts, **how)
    targets, valid = shifted_targets(tokens, segments, 1)
    nats = jnp.where(valid, token_losses(out.logits, targets), 0.0)
    loss = nats.sum() / jnp.maximum(valid.sum(), 1).astype(jnp.float32)

    o, total = config.optimizer, loss
    for depth, logits in enumerate(out.mtp_logits):
        later, later_valid = shifted_targets(tokens, segments, depth + 2)
        mtp = jnp.where(later_valid, token_losses(logits, later), 0.0).sum()
        count = jnp.maximum(later_valid.sum(), 1).astype(jnp.float32)
        total += jnp.float32(o.mtp_coefficient / len(out.mtp_logits)) * mtp / count
    if out.moe is not None and o.balance_coefficient:
        total += jnp.float32(o.balance_coefficient) * out.moe.balance_loss.sum()
    if out.moe is not None and o.z_coefficient:
        total += jnp.float32(o.z_coefficient) * out.moe.z_loss.sum()

    in_domain = jax.nn.one_hot(batch["domain"], len(DOMAINS), dtype=jnp.float32)
    aux = {
        "loss": loss,
        "nats_by_domain": in_domain.T @ nats.sum(axis=1),
        "targets_by_domain": (in_domain.T @ valid.sum(axis=1).astype(jnp.float32)).astype(jnp.int32),
        "layer_finite": out.finite,
        "moe": out.moe,
    }
    return total, aux


def make_train_step(config: TrainConfig, mesh: Mesh, bucket: int):
    """Compiled ``(state, batch) -> (state, metrics)`` for one capacity bucket; the state is donated."""
    plan = dispatch_plan(config, bucket)
    merge = deepseek.merger(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    def step(state: TrainState, batch: dict):
        def loss_fn(params):
            return batch_loss(merge(params, state.bias), batch, config, plan, state.step)

        (total, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        gradient_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(total) & jnp.isfinite(gradient_norm)
        moe = aux.pop("moe")
        demand = jnp.int32(0) if moe is None else moe.demand.max()
        overflow = demand > plan.capacity if plan.ranks > 1 else jnp.bool_(False)
        ok = finite & ~overflow & ~state.halted

        params, opt_state = apply_gradients(optimizer, grads, state.opt_state, state.params)
        bias = (
            state.bias
            if moe is None
            else update_biases(state.bias, moe.load, config.optimizer.expert_bias_rate)
        )
        new = TrainState(params, bias, opt_state, state.step + 1, state.halted)
        kept = jax.tree.map(lambda after, before: jnp.where(ok, after, before), new, state)
        metrics = aux | {
            "total_loss": total,
            "gradient_norm": gradient_norm,
            "gradient_finite": finite_parts(grads),
            "learning_rate": learning_rate_at(schedule, state.step),
            "overflow": overflow,
            "finite": finite,
            "skipped": state.halted,
            "demand": demand,
        }
        if moe is not None:
            metrics |= {
                "load": moe.load,
                "max_over_mean": jax.vmap(load_report)(moe.load).max_over_mean,
                "ledger": jax.tree.map(jnp.sum, moe.ledger),
                "balance_loss": moe.balance_loss,
                "bias_range": jnp.concatenate(
                    [jnp.ptp(b, axis=-1).reshape(-1) for b in jax.tree.leaves(state.bias)]
                ),
            }
        return replace(kept, halted=~ok), metrics

    shardings = state_shardings(config, mesh)
    replicated = NamedSharding(mesh, P())
    return _on_mesh(
        mesh,
        jax.jit(
            step,
            in_shardings=(shardings, batch_sharding(mesh)),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        ),
    )


def make_eval_step(config: TrainConfig, mesh: Mesh):
    """Compiled ``(params, bias, batch) -> sums``: cross-entropy only, nothing is changed or remembered.

    The buffer holds the worst case, so that no routing can overflow.
    """
    m = config.model
    args = (config.capacity_factor, config.tokens_per_device, m.top_k, m.num_experts, config.mesh.expert)
    plan = dispatch_plan(config, largest_bucket(*args))
    merge = deepseek.merger(config.model)

    def evaluate(params, bias, batch):
        _, aux = batch_loss(merge(params, bias), batch, config, plan, jnp.int32(0))
        load = None if aux["moe"] is None else aux["moe"].load
        return {"nats": aux["nats_by_domain"].sum(), "targets": aux["targets_by_domain"].sum(), "load": load}

    state = state_shardings(config, mesh)
    return _on_mesh(mesh, jax.jit(evaluate, in_shardings=(state.params, state.bias, batch_sharding(mesh))))


def finite_parts(grads: dict) -> dict[str, Bool[Array, ""] | Bool[Array, "layers"]]:
    """Whether the norm of each part's gradient is finite; for "layers" and "mtp" one by one, in their order."""

    def finite(tree):
        return jnp.isfinite(optax.tree.norm(tree))

    parts = {name: finite(tree) for name, tree in grads.items() if name not in ("layers", "mtp")}
    stacks = [grads["layers"][kind] for kind in sorted(grads["layers"])]  # dense, then moe
    parts["layers"] = jnp.concatenate([jax.vmap(finite)(stack) for stack in stacks])
    if "mtp" in grads:
        parts["mtp"] = jnp.stack([finite(grads["mtp"][depth]) for depth in sorted(grads["mtp"])])
    return parts


def _on_mesh(mesh: Mesh, jitted):
    """``jitted`` under ``jax.set_mesh(mesh)``, with its compilation cache at hand for counting."""

    def call(*args):
        with jax.set_mesh(mesh):
            return jitted(*args)

    call.jitted = jitted
    return call
