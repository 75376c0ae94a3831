"""TE's GEMMs: grouped, dense, and the fused MLP, in bf16, FP8 per tensor and MXFP8."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from moe_course.errors import SettingError
from moe_course.quant.recipes import BF16, MXFP8, FP8CurrentScaling, Recipe
from moe_course.te import native
from moe_course.te.checks import (
    require,
    require_dtype,
    require_integers,
    require_multiple,
    require_shape,
)
from moe_course.varying import varying_axes

TILE = 128
"""Rows that an MXFP8 group must be a multiple of, and both inner dimensions: scales are swizzled in such tiles."""
_FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def grouped_gemm(
    rows: Float[Array, "rows d_model"],
    kernels: Float[Array, "experts d_model d_ff"],
    group_sizes: Int[Array, "experts"],
    *,
    recipe: Recipe | None = None,
    sizes_on_device: bool = True,
) -> Float[Array, "rows d_ff"]:
    """The contract of :func:`moe_course.grouped_gemm.grouped_gemm` by TE's ``grouped_dense``; bf16 in and out.

    With ``sizes_on_device`` (no host sync; TE's "V2", cuBLAS's grouped kernel) a call that TE would quietly send to
    its older path is refused, with TE's reason. Without it, TE may copy the sizes to the host at each call and launch
    one GEMM per expert ("V1"): the only way for FP8 per tensor, and for bf16 before Hopper.

    TE leaves rows past the last group unwritten, in the result and in the gradient of ``rows``: both are zeroed here.
    With ``MXFP8`` every size must be a multiple of 128 (align groups with ``align=128``); sizes are on the device, so
    nobody checks that.

    No partitioning rule and no ``vmap``: call it on one device or inside ``shard_map(..., check_vma=False)``, as TE's
    derivatives do not say along which mesh axes their results vary.

    Raises ``TypeError`` and ``ValueError`` for dtypes and shapes (TE lets a K mismatch and float sizes through),
    :class:`SettingError` where it cannot run.
    """
    require_shape("kernels", kernels, None, None, None)
    experts, d_model, d_ff = kernels.shape
    require_shape("rows", rows, None, d_model)
    require_shape("group_sizes", group_sizes, experts)
    require_integers("group_sizes", group_sizes)
    require_dtype("rows", rows, jnp.bfloat16)
    require_dtype("kernels", kernels, jnp.bfloat16)
    if varying_axes(rows) | varying_axes(kernels):
        raise SettingError("TE's derivatives do not know varying axes. Use shard_map(..., check_vma=False).")
    mode, quantizers = _quantizers(recipe, experts)
    num_rows = rows.shape[0]
    if mode == "MXFP8_1D_SCALING":
        for what, size in (("rows", num_rows), ("d_model", d_model), ("d_ff", d_ff)):
            require_multiple(what, size, TILE, "TE's MXFP8 grouped GEMM")
    sizes = group_sizes.astype(jnp.int32)
    live = (lax.iota(jnp.int32, num_rows) < sizes.sum(dtype=jnp.int32))[:, None]
    if sizes_on_device:
        require("grouped_gemm_mxfp8" if mode == "MXFP8_1D_SCALING" else "grouped_gemm")
        _require_v2(mode, rows, kernels)
        rows = _zero_gradient_unless(live, rows)
    else:
        require("dense_mxfp8" if mode == "MXFP8_1D_SCALING" else "grouped_gemm_copied_sizes")
        # V1 wants the sizes to add up to the buffer: the rest goes to the last expert, as zeros.
        rows = jnp.where(live, rows, jnp.zeros_like(rows))
        sizes = sizes.at[-1].add(num_rows - sizes.sum(dtype=jnp.int32))
    out = native.api().grouped_dense(rows, kernels, sizes, **quantizers)
    return jnp.where(live, out, jnp.zeros_like(out))


def _require_v2(mode: str, rows: Array, kernels: Array) -> None:
    """SettingError unless TE takes its kernel with sizes on the device, in all three products."""
    api = native.api()
    dtype = jnp.bfloat16 if mode == "NO_SCALING" else jnp.float8_e4m3fn
    (m, d), (e, _, f) = rows.shape, kernels.shape
    products = {
        "fprop": ((m, d), (e, d, f), 1, 2),
        "dgrad": ((m, f), (e, d, f), 1, 2),
        "wgrad": ((m, d), (m, f), 1, 1),
    }
    for product, (lhs, rhs, at_lhs, at_rhs) in products.items():
        try:
            ok, reason = api.is_v2_grouped_gemm_supported(
                getattr(api.ScalingMode, mode), dtype, False, lhs, rhs, at_lhs, at_rhs
            )
        except RuntimeError as error:  # NVTE_JAX_ENFORCE_V2_GROUPED_GEMM is set
            ok, reason = False, str(error)
        if not ok:
            raise SettingError(
                f"TE has no kernel with sizes on the device for {product} here: {reason} Pass "
                "sizes_on_device=False to let it copy them to the host, or use backend='pallas'."
            )


@jax.custom_vjp
def _zero_gradient_unless(live: Array, x: Array) -> Array:
    """``x``; its gradient is 0 where not ``live``, whatever comes back there. Moves nothing going forward."""
    return x


_zero_gradient_unless.defvjp(
    lambda live, x: (x, live), lambda live, grad: (None, jnp.where(live, grad, jnp.zeros_like(grad)))
)


def dense(
    x: Float[Array, "*batch d_in"], kernel: Float[Array, "d_in d_out"], *, recipe: Recipe | None = None
) -> Float[Array, "*batch d_out"]:
    """``x @ kernel`` by TE's ``dense``; bf16, FP8CurrentScaling or MXFP8. Partitions like a matmul under ``jit``.

    Raises ``TypeError`` and ``ValueError`` for dtypes and shapes, :class:`SettingError` where it cannot run.
    """
    require_shape("kernel", kernel, None, None)
    require_shape("x", x, *x.shape[:-1], kernel.shape[0])
    require_dtype("x", x, jnp.bfloat16)
    require_dtype("kernel", kernel, jnp.bfloat16)
    mode, quantizers = _quantizers(recipe, None)
    _require_dense(mode, x.size // max(x.shape[-1], 1), *kernel.shape)
    contract = ((x.ndim - 1,), (0,))
    return native.api().dense(x, kernel, contracting_dims=contract, **quantizers)


def layernorm_mlp(
    x: Float[Array, "*batch d_model"],
    scale: Float[Array, " d_model"],
    gate_up: Float[Array, "d_model 2*d_ff"],
    down: Float[Array, "d_ff d_model"],
    *,
    epsilon: float = 1e-6,
    recipe: Recipe | None = None,
) -> Float[Array, "*batch d_model"]:
    """RMSNorm, then SwiGLU: ``down(silu(gate) * up)``, by TE's fused ``layernorm_mlp``. ``gate_up``: gate first.

    The first product is saved under the name ``ffn1``, the second under ``ffn2``, for remat policies. Raises
    ``TypeError`` and ``ValueError`` for dtypes and shapes, :class:`SettingError` where it cannot run.
    """
    d_model, d_ff = x.shape[-1], down.shape[0]
    require_shape("scale", scale, d_model)
    require_shape("gate_up", gate_up, d_model, 2 * d_ff)
    require_shape("down", down, d_ff, d_model)
    for what, array in (("x", x), ("gate_up", gate_up), ("down", down)):
        require_dtype(what, array, jnp.bfloat16)
    mode, first = _quantizers(recipe, None)
    second = _quantizers(recipe, None)[1]
    for shape in ((d_model, 2 * d_ff), (d_ff, d_model)):
        _require_dense(mode, x.size // max(d_model, 1), *shape)
    sets = {"quantizer_sets": (first["quantizer_set"], second["quantizer_set"])} if first else {}
    return native.api().layernorm_mlp(
        x,
        scale.astype(x.dtype),
        None,
        [gate_up.reshape(d_model, 2, d_ff), down],
        [None, None],
        norm_type="rmsnorm",
        epsilon=epsilon,
        activation_type=("silu", "linear"),
        **sets,
    )


def _require_dense(mode: str, num_rows: int, d_in: int, d_out: int) -> None:
    ops = {"NO_SCALING": "dense", "CURRENT_TENSOR_SCALING": "dense_fp8", "MXFP8_1D_SCALING": "dense_mxfp8"}
    require(ops[mode])
    block = {"NO_SCALING": 1, "CURRENT_TENSOR_SCALING": 16, "MXFP8_1D_SCALING": 32}[mode]
    for what, size in (("the number of rows", num_rows), ("d_in", d_in), ("d_out", d_out)):
        require_multiple(what, size, block, "a quantised GEMM")


def _quantizers(recipe: Recipe | None, num_groups: int | None) -> tuple[str, dict]:
    """The name of TE's scaling mode for a recipe, and the quantizers as a keyword argument; none for bf16."""
    if recipe is None or isinstance(recipe, BF16):
        return "NO_SCALING", {}
    if isinstance(recipe, MXFP8) and recipe.rounding == "rceil":
        mode = "MXFP8_1D_SCALING"
    elif isinstance(recipe, FP8CurrentScaling):
        mode = "CURRENT_TENSOR_SCALING"
    else:
        raise SettingError(
            f"{recipe} has no adapter to TE: FP8BlockScaling and MXFP8's 'floor' are not in TE-JAX, NVFP4 not in its "
            "grouped GEMM, delayed scaling keeps its state in Flax. Use another backend, or MXFP8() or "
            "FP8CurrentScaling()."
        )
    api = native.api()
    quantizer_set = api.create_set(
        scaling_mode=getattr(api.ScalingMode, mode),
        fwd_dtype=_FORMATS[recipe.forward],
        bwd_dtype=_FORMATS[recipe.gradient],
        n_groups=num_groups,
    )
    return mode, {"quantizer_set": quantizer_set}


def layer_quantizers(recipe: Recipe | None, token_groups: int, kernel_groups: int) -> dict:
    """The two sets that TE's ``moe`` takes, as a keyword argument; none for bf16.

    They describe the whole operation, not one device's part: tokens in ``token_groups`` groups, weights in
    ``kernel_groups``.
    """
    mode, _ = _quantizers(recipe, None)
    if mode == "NO_SCALING":
        return {}
    if mode != "MXFP8_1D_SCALING":
        raise SettingError(f"TE's MoE layer takes bf16 and MXFP8, not {recipe}.")

    def one():
        tokens, kernels = (_quantizers(recipe, n)[1]["quantizer_set"] for n in (token_groups, kernel_groups))
        return replace(tokens, kernel=kernels.kernel)

    return {"quantizer_sets": (one(), one())}
