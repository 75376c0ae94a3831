"""TE's MoE layer in one call: router, dispatch, experts, combine under one hand-written derivative."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from moe_course.errors import SettingError
from moe_course.quant.recipes import Recipe
from moe_course.routing import RouterConfig
from moe_course.te import native
from moe_course.te.checks import require, require_dtype, require_shape
from moe_course.te.expert_parallel import ExpertParallel, check_resources, resources
from moe_course.te.matmul import TILE, layer_quantizers
from moe_course.te.router import unsupported


class LayerResult(NamedTuple):
    """What :func:`moe` returns."""

    out: Float[Array, "batch length d_model"]
    balance_loss: Float[Array, ""]
    """Over the global batch, already times its coefficient; 0 without one."""
    demand: Int[Array, "N"]
    """Rows each device was asked for before any was dropped; compare with ``setup.capacity``."""


def moe(
    x: Float[Array, "batch length d_model"],
    router: Float[Array, "d_model experts"],
    gate_up: Float[Array, "experts d_model 2*d_ff"],
    down: Float[Array, "experts d_ff d_model"],
    config: RouterConfig,
    *,
    setup: ExpertParallel,
    bias: Float[Array, " experts"] | None = None,
    balance_coeff: float = 0.0,
    recipe: Recipe | None = None,
) -> LayerResult:
    """``sum over the K chosen experts of weight * expert(x)`` by TE's ``moe``, bf16 or MXFP8.

    The weights' layouts are ours: ``gate_up`` holds gate first. No shared expert, z-loss or mask: add the first two
    outside, and use the parts where there is a mask. NCCL EP must have been started with ``setup``
    (:func:`~moe_course.te.expert_parallel.bootstrap`). Give ``jit`` explicit ``out_shardings``: without, XLA 0.12
    does not compile it. TE's own tests run it on Blackwell only.

    Raises ``TypeError`` and ``ValueError`` for dtypes and shapes, :class:`SettingError` for what it cannot do.
    """
    quantised = layer_quantizers(recipe, setup.groups * setup.num_experts, setup.num_experts)
    require("moe_mxfp8" if quantised else "moe")
    batch, length, d_model = x.shape
    num_experts, d_ff = setup.num_experts, down.shape[1]
    _check(config, setup, bias)
    require_shape("x", x, None, None, setup.d_model)
    require_shape("router", router, d_model, num_experts)
    require_shape("gate_up", gate_up, num_experts, d_model, 2 * d_ff)
    require_shape("down", down, num_experts, d_ff, d_model)
    require_dtype("x", x, jnp.bfloat16)
    if batch % setup.devices or batch * length != setup.tokens_per_rank * setup.devices:
        raise ValueError(
            f"x is [{batch}, {length}, ...]; {setup.devices} devices of {setup.tokens_per_rank} tokens need a batch "
            f"that divides by {setup.devices} and {setup.tokens_per_rank * setup.devices} tokens"
        )
    if quantised and (d_model % TILE or d_ff % TILE):
        raise SettingError(f"TE's MXFP8 experts need multiples of {TILE}: d_model {d_model}, d_ff {d_ff}.")
    outer = (setup.outer_axis,) if setup.groups > 1 else ()
    check_resources(setup)
    out, loss, demand = native.api().moe(
        x,
        router.astype(x.dtype),
        gate_up.astype(x.dtype),
        down.astype(x.dtype),
        expert_bias=None if bias is None else lax.stop_gradient(bias).astype(jnp.float32),
        num_experts=num_experts,
        num_experts_per_tok=config.top_k,
        score_function=config.score_fn,
        use_pre_softmax=config.score_fn == "softmax" and (not config.normalize or config.top_k == 1),
        num_groups=config.num_groups if config.num_groups > 1 else None,
        group_topk=config.top_groups if config.num_groups > 1 else None,
        scaling_factor=float(config.scaling_factor),
        aux_loss_coeff=float(balance_coeff),
        dtype=x.dtype,
        recv_capacity_per_rank=setup.capacity,
        wi_kernel_axes=(),
        wo_kernel_axes=(),
        **native.moe_axes(setup.expert_axis, outer, resources(setup)),
        **quantised,
    )
    loss = jnp.zeros((), jnp.float32) if loss is None else loss.reshape(())
    return LayerResult(out, loss, demand.reshape(-1))


def _check(config: RouterConfig, setup: ExpertParallel, bias: Array | None) -> None:
    if (config.num_experts, config.top_k) != (setup.num_experts, setup.top_k):
        raise SettingError(
            f"the router has {config.num_experts} experts and {config.top_k} picks, the exchange "
            f"{setup.num_experts} and {setup.top_k}."
        )
    reason = unsupported(config, biased=bias is not None)
    if not reason and config.score_fn == "softmax" and config.normalize and config.num_groups > 1:
        reason = "it scores groups by logits where softmax weights are normalised"
    if reason:
        raise SettingError(f"TE's MoE layer cannot do this: {reason}. Use the parts, or layers.moe.MoE.")
