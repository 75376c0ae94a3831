"""The Mixture-of-Experts feed-forward: router, dispatch, experts, combine, shared expert.

DeepSeekMoE (arXiv 2401.06066) with the sigmoid router and expert bias of DeepSeek-V3 (arXiv 2412.19437,
sections 2.1.2 and 2.1.3).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from moe_course.balance import expert_load, load_balancing_loss, router_z_loss
from moe_course.dispatch import DispatchPlan, combine, dispatch
from moe_course.dispatch.ledger import Ledger, count
from moe_course.dispatch.waves import add_ledgers, demand_of, join_waves, split_waves
from moe_course.experts import swiglu_experts
from moe_course.grouped_gemm import resolve_backend
from moe_course.layers.linear import SwiGLU
from moe_course.parallel import (
    FSDP,
    ambient_mesh,
    expert_axes,
    expert_spec,
    keep_tokens_sharded,
    per_device,
    token_axes,
)
from moe_course.quant.recipes import Recipe
from moe_course.routing import RouterConfig, Routing, route
from moe_course.varying import vary_over


class ExpertBias(nnx.Variable):
    """Selection bias of a router: state that the load moves, not a parameter that a gradient moves."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["load", "demand", "ledger", "balance_loss", "z_loss"],
    meta_fields=[],
)
@dataclass(frozen=True)
class MoEStats:
    """What one MoE layer did to one batch. An output, never a side effect (so recompute counts it once)."""

    load: Int[Array, "experts"]
    """Token copies per expert over the whole batch."""
    demand: Int[Array, ""]
    """The largest number of receive rows that any rank was asked for."""
    ledger: Ledger
    balance_loss: Float[Array, ""]
    """Mean per-sequence balance loss, 1.0 when balanced (DeepSeek-V3, equations 17 to 20)."""
    z_loss: Float[Array, ""]


class Router(nnx.Module):
    """Logits for every expert, in float32 whatever the activations are, and the selection bias."""

    def __init__(self, d_model: int, config: RouterConfig, *, std: float, rngs: nnx.Rngs):
        self.config = config
        self.kernel = nnx.Param(
            std * jax.random.normal(rngs.params(), (d_model, config.num_experts), jnp.float32)
        )
        self.bias = ExpertBias(jnp.zeros((config.num_experts,), jnp.float32))

    def __call__(
        self, x: Float[Array, "tokens d_model"], mask: Bool[Array, "tokens"] | None
    ) -> tuple[Float[Array, "tokens experts"], Routing]:
        logits = x.astype(jnp.float32) @ self.kernel[...]
        return logits, route(logits, self.config, bias=self.bias[...], mask=mask)


class Experts(nnx.Module):
    """E SwiGLU experts. ``gate_up`` [E, D, 2F] (gate first), ``down`` [E, F, D]; cut over expert and fsdp."""

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        *,
        std: float,
        down_std: float,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        shape_in, shape_out = (num_experts, d_model, 2 * d_ff), (num_experts, d_ff, d_model)
        self.gate_up = nnx.Param(std * jax.random.normal(rngs.params(), shape_in, jnp.float32))
        self.down = nnx.Param(down_std * jax.random.normal(rngs.params(), shape_out, jnp.float32))
        self.dtype = dtype

    def __call__(
        self,
        rows: Float[Array, "N_C d_model"],
        group_sizes: Int[Array, "N experts_per_rank"],
        row_weights: Float[Array, "N_C"],
        *,
        backend: str = "auto",
        recipe: Recipe | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "N_C d_model"]:
        """Weighted expert outputs, each device on its own rows with its own experts."""
        mesh = ambient_mesh()
        run = partial(_expert_rows, backend=backend, recipe=recipe, dtype=self.dtype)
        gate_up, down = self.gate_up[...], self.down[...]
        if mesh is None:
            return run(rows, group_sizes, row_weights, gate_up, down, key, specs=None)
        specs = tuple(expert_spec(w.shape, mesh.shape[FSDP], expert_axes(mesh)) for w in (gate_up, down))
        tokens = P(token_axes(mesh))
        fn = per_device(
            partial(run, specs=specs),
            in_specs=(tokens, tokens, tokens, *specs, P()),
            out_specs=tokens,
            check=resolve_backend(backend) != "te",
        )
        return fn(rows, group_sizes, row_weights, gate_up, down, key)


def _expert_rows(rows, group_sizes, row_weights, gate_up, down, key, *, specs, backend, recipe, dtype):
    gate_up, down = gate_up.astype(dtype), down.astype(dtype)
    if specs is not None:
        gate_up, down = _gather_fsdp(gate_up, specs[0]), _gather_fsdp(down, specs[1])
        if key is not None:  # every device rounds its own rows
            key = jax.random.fold_in(key, jax.lax.axis_index(token_axes(ambient_mesh())))
    how = {"backend": backend, "recipe": recipe, "key": key}
    return swiglu_experts(rows.astype(dtype), gate_up, down, group_sizes[0], row_weights, **how)


def _gather_fsdp(weight, spec):
    """All-gather the dimension that ``spec`` cuts over fsdp; its transpose scatters the gradient."""
    for dim, name in enumerate(spec):
        if name == FSDP:
            # Typed as varying over the replicas from here on, it is their cut gradients that are summed, not the whole.
            weight = vary_over(weight, frozenset(token_axes(ambient_mesh())))
            return jax.lax.all_gather(weight, FSDP, axis=dim, tiled=True)
    return weight


class MoE(nnx.Module):
    """``shared(x) + sum over the K chosen experts of weight * expert(x)``."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        router: RouterConfig,
        *,
        num_shared_experts: int = 1,
        std: float = 0.02,
        down_std: float = 0.02,
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        init = {"std": std, "down_std": down_std, "dtype": dtype, "rngs": rngs}
        self.router = Router(d_model, router, std=std, rngs=rngs)
        self.experts = Experts(router.num_experts, d_model, d_ff, **init)
        self.shared = SwiGLU(d_model, num_shared_experts * d_ff, **init) if num_shared_experts else None

    def __call__(
        self,
        x: Float[Array, "tokens d_model"],
        *,
        plan: DispatchPlan | None = None,
        mask: Bool[Array, "tokens"] | None = None,
        num_sequences: int = 1,
        backend: str = "auto",
        recipe: Recipe | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "tokens d_model"], MoEStats]:
        """Apply the layer to [T, D]; ``num_sequences`` cuts T into the sequences of the balance loss.

        ``recipe`` quantises the routed experts' GEMMs (``moe_course.quant``) and nothing else; ``key`` as there.
        The shared expert computes while tokens travel; with ``plan.waves`` so do the experts of other waves.
        """
        config = self.router.config
        plan = plan or DispatchPlan(config.num_experts)
        with jax.named_scope("router"):
            logits, routing = self.router(x, mask)
        # No step reads more than it must: the shared expert and a wave's experts may run while other waves travel.
        sent = []
        for wave, (tokens, picks, one) in enumerate(split_waves(x, routing, plan)):
            with jax.named_scope(f"dispatch_{wave}"):
                sent.append(dispatch(tokens, picks, plan=one))
        with jax.named_scope("shared_expert"):
            shared = self.shared(x) if self.shared is not None else jnp.zeros((), x.dtype)
        out = []
        for wave, s in enumerate(sent):
            with jax.named_scope(f"experts_{wave}"):
                wave_key = None if key is None else jax.random.fold_in(key, wave)
                how = {"backend": backend, "recipe": recipe, "key": wave_key}
                rows = self.experts(s.rows, s.group_sizes, s.row_weights, **how)
            with jax.named_scope(f"combine_{wave}"):
                out.append(combine(rows, s))
        routed = keep_tokens_sharded(join_waves(out)).astype(x.dtype)
        stats = MoEStats(
            load=expert_load(routing.expert_ids, config.num_experts),
            demand=demand_of(sent),
            ledger=add_ledgers([count(s) for s in sent]),
            balance_loss=_sequence_balance(routing, config, num_sequences),
            z_loss=router_z_loss(logits, mask),
        )
        return shared + routed, stats


def _sequence_balance(routing: Routing, config: RouterConfig, num_sequences: int) -> Float[Array, ""]:
    ids = routing.expert_ids.reshape(num_sequences, -1, config.top_k)
    load = expert_load(ids, config.num_experts)
    return load_balancing_loss(routing.scores, load, config, scope="sequence")
