"""A grouped GEMM whose operands are quantised by a recipe, in each of its three products.

The emulation is exact: quantised values, multiplied by any backend with float32 sums. Tensor cores do the same but
for the order of the sums. A kernel that takes the codes themselves (Transformer Engine's) has its slot in
:data:`moe_course.grouped_gemm.BACKENDS`.

Each operand is quantised from the source for the product that it enters: blocks run along the axis that is
contracted. In wgrad that axis is the rows, so there each expert's rows start a new block
(:mod:`moe_course.quant.groups`). The forward pass makes wgrad's copy of the rows, and saves that instead of the
rows: a byte per element, under the name :data:`QUANTIZED_ROWS`.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from moe_course.errors import SettingError
from moe_course.grouped_gemm.bounds import group_bounds
from moe_course.quant.groups import align_groups, group_amax, make_groups, take_rows
from moe_course.quant.recipes import Recipe, kernel_amax, quantize_kernels, quantize_rows, values
from moe_course.varying import varying_axes

QUANTIZED_ROWS = "moe_quantized_rows"
"""Checkpoint name of wgrad's copy of the rows, codes and scales: all of the rows that the backward pass needs."""
QUANTIZED_GEMM = "moe_quantized_gemm_"
"""Checkpoint names of the products: this and fprop, dgrad or wgrad."""


def check_recipe(recipe: Recipe, key: Array | None, state: dict | None) -> None:
    """SettingError unless ``recipe`` is one, with the key or the state that it needs."""
    if not isinstance(recipe, Recipe):
        raise SettingError(
            f"recipe is {recipe!r}. Pass one of moe_course.quant's recipes, as in recipe=MXFP8(), or None."
        )
    if recipe.needs_key and key is None:
        raise SettingError(
            f"{recipe.name} rounds gradients stochastically. Pass key=jax.random.key(...), a new one each step "
            "and layer, or NVFP4(stochastic_rounding=False)."
        )
    if recipe.needs_state and state is None:
        raise SettingError(
            f"{recipe.name} takes its scales from earlier steps. Pass state=recipe.init_state(num_experts) at "
            "first, and then what the gradient with respect to state returned."
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_grouped_gemm(
    multiply: Callable, recipe: Recipe, rows, kernels, group_sizes, key, state
) -> Array:
    """The contract of :func:`moe_course.grouped_gemm.grouped_gemm` by ``multiply`` of quantised operands."""
    return _forward(multiply, recipe, rows, kernels, group_sizes, key, state)[0]


def _forward(multiply, recipe, rows, kernels, group_sizes, key, state):
    sizes, ends = group_bounds(group_sizes, rows.shape[0])
    groups = make_groups(sizes, ends, rows.shape[0])
    of_rows, of_kernels = recipe.operands("fprop")
    states = state or {}
    lhs = quantize_rows(rows, of_rows, groups, axis=1, state=states.get("rows"))
    rhs = quantize_kernels(kernels, of_kernels, axis=1, state=states.get("kernels"))
    out = multiply(values(lhs), values(rhs), group_sizes).astype(rows.dtype)
    out = checkpoint_name(out, QUANTIZED_GEMM + "fprop")
    aligned, source = align_groups(sizes, ends, rows.shape[0], recipe.row_block)
    for_wgrad, _ = recipe.operands("wgrad")
    saved = quantize_rows(take_rows(rows, source), for_wgrad, aligned, axis=0, state=states.get("rows"))
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, QUANTIZED_ROWS), saved)
    amax = {"rows": group_amax(rows, groups), "kernels": kernel_amax(kernels)} if state else None
    return out, (saved, kernels, group_sizes, key, state, amax)


def _backward(multiply, recipe, residuals, d_out):
    saved, kernels, group_sizes, key, state, amax = residuals
    num_rows, states = d_out.shape[0], state or {}
    sizes, ends = group_bounds(group_sizes, num_rows)
    groups = make_groups(sizes, ends, num_rows)
    keys = (None, None) if key is None else jax.random.split(key)

    of_d_out, of_kernels = recipe.operands("dgrad")
    lhs = quantize_rows(d_out, of_d_out, groups, axis=1, key=keys[0], state=states.get("d_out"))
    rhs = quantize_kernels(kernels, of_kernels, axis=2, state=states.get("kernels"))
    d_rows = multiply(values(lhs), values(rhs).mT, group_sizes)
    d_rows = jnp.where(groups.valid, d_rows, jnp.zeros_like(d_rows)).astype(d_out.dtype)
    d_rows = checkpoint_name(d_rows, QUANTIZED_GEMM + "dgrad")

    aligned, source = align_groups(sizes, ends, num_rows, recipe.row_block)
    _, of_d_out = recipe.operands("wgrad")
    rhs = quantize_rows(
        take_rows(d_out, source), of_d_out, aligned, axis=0, key=keys[1], state=states.get("d_out")
    )
    # The product is linear in the kernels: its transpose at any point is wgrad.
    at = jnp.zeros_like(kernels, jnp.float32)
    _, wgrad = jax.vjp(lambda kernels: multiply(values(saved), kernels, aligned.sizes), at)
    d_kernels = wgrad(values(rhs))[0].astype(kernels.dtype)
    d_kernels = checkpoint_name(d_kernels, QUANTIZED_GEMM + "wgrad")

    if state:
        amax = _agree({**amax, "d_out": group_amax(d_out, groups)}, state["d_out"].scale)
    d_state = recipe.next_state(state, amax) if state else None
    return d_rows, d_kernels, None, None, d_state


def _agree(amax: dict[str, Array], like: Array) -> dict[str, Array]:
    """Devices that share a state take the largest amax of them all."""
    shared = {name: tuple(sorted(varying_axes(a) - varying_axes(like))) for name, a in amax.items()}
    return {name: jax.lax.pmax(a, shared[name]) if shared[name] else a for name, a in amax.items()}


quantized_grouped_gemm.defvjp(_forward, _backward)


def count_quantized_gemms(f: Callable, *args) -> dict[str, int]:
    """How many quantised products tracing ``f(*args)`` meets, by kind: proof that a recipe reached its layers."""
    found = Counter()
    _count(jax.make_jaxpr(f)(*args).jaxpr, found, 1)
    return {gemm: found[QUANTIZED_GEMM + gemm] for gemm in ("fprop", "dgrad", "wgrad")}


def _count(jaxpr, found: Counter, times: int) -> None:
    for equation in jaxpr.eqns:
        found[equation.params.get("name") if equation.primitive.name == "name" else None] += times
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                _count(inner, found, inside)
