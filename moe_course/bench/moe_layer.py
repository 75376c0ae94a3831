"""``moe-course bench moe-layer``: cost follows the experts a token uses, not the experts there are.

A whole MoE layer (router, grouping, experts, combine), forward and backward with respect to input and weights,
with 8, 32 and 128 experts of which every token uses 4: the same matmul FLOPs. Against it, the masked dense layer
that runs every expert on every token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from moe_course.bench.timing import interleaved, median_ratio
from moe_course.grouped_gemm import Backend
from moe_course.layers.moe import MoE
from moe_course.routing import RouterConfig, dense_routing

EXPERTS = (8, 32, 128)


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench moe-layer``."""

    tokens: int = 2048
    d_model: int = 256
    d_ff: int = 128
    top_k: int = 4
    backend: Backend = "auto"
    rounds: int = 15
    slow_rounds: int = 3
    """Rounds against the masked dense layer; 0 skips it."""


def run(options: Options = Options()) -> dict:
    """``{"e32_over_e8": r, "e128_over_e8": r, "vs_masked_dense": {"8": r, ...}}``.

    The first two are our time over our time with 8 experts (lower is better), the last the dense layer's time
    over ours (higher is better); medians of interleaved rounds.
    """
    ours = {f"{experts}": _program(options, experts, dense=False) for experts in EXPERTS}
    seconds = interleaved(ours, options.rounds)
    result = {f"e{e}_over_e8": round(median_ratio(seconds, f"{e}", "8"), 3) for e in EXPERTS[1:]}
    if options.slow_rounds:
        result["vs_masked_dense"] = {
            name: round(_against_dense(options, int(name), program), 2) for name, program in ours.items()
        }
    return result


def _against_dense(options: Options, experts: int, ours) -> float:
    pair = {"ours": ours, "dense": _program(options, experts, dense=True)}
    return median_ratio(interleaved(pair, options.slow_rounds), "dense", "ours")


def _program(options: Options, experts: int, *, dense: bool):
    """Forward and backward of one layer, ready to call."""
    router = RouterConfig(experts, options.top_k, score_fn="sigmoid")
    layer = MoE(options.d_model, options.d_ff, router, num_shared_experts=0, rngs=nnx.Rngs(params=0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (options.tokens, options.d_model))
    probe = jax.random.normal(jax.random.key(2), x.shape)

    def loss(params, x):
        layer = nnx.merge(graph, params, rest)
        out = masked_dense(layer, x) if dense else layer(x, backend=options.backend)[0]
        return jnp.vdot(out, probe)

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return lambda: step(params, x)


def masked_dense(layer: MoE, x: jax.Array) -> jax.Array:
    """The layer with every expert on every token, weighed by 0 where it was not picked."""
    _, routing = layer.router(x, None)
    weights = dense_routing(routing, layer.router.config.num_experts).probs
    gate, up = jnp.split(jnp.einsum("td,edf->etf", x, layer.experts.gate_up[...]), 2, axis=-1)
    return jnp.einsum("etf,efd,te->td", jax.nn.silu(gate) * up, layer.experts.down[...], weights)
