"""Grouped GEMM and experts with recipes: against each expert alone, in float64; B71, B72, B80, B86, B87."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint exports only its printer
from jax.sharding import PartitionSpec as P

from moe_course.errors import SettingError
from moe_course.experts import swiglu_experts
from moe_course.grouped_gemm import grouped_gemm, quantized
from moe_course.grouped_gemm.quantized import QUANTIZED_ROWS, count_quantized_gemms
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.quant import (
    BF16,
    MXFP8,
    NVFP4,
    FP8BlockScaling,
    FP8CurrentScaling,
    FP8DelayedScaling,
    dequantize,
    hadamard,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_mxfp8,
    quantize_nvfp4,
)
from tests import oracle

pytestmark = pytest.mark.thorough

SIZES = np.array([5, 0, 33, 26], np.int32)
ROWS, D, F = 74, 48, 40  # ten rows in the tail; no dimension is a multiple of 32
PLAIN_NVFP4 = NVFP4(stochastic_rounding=False)
KEY = jax.random.key(0)


@cache
def use(recipe, backend="reference"):
    """The reference backend compiles fastest; the recipe is the same on each."""
    return partial(grouped_gemm, recipe=recipe, backend=backend)


@partial(jax.jit, static_argnums=0)
def product_and_gradients(gemm, rows, kernels, sizes, d_out, key=None):
    how = {} if key is None else {"key": key}
    out, pull_back = jax.vjp(lambda rows, kernels: gemm(rows, kernels, sizes, **how), rows, kernels)
    return out, *pull_back(d_out)


def problem(tail=np.nan, sizes=SIZES, seed=0, dtype=np.float32, spread=10):
    """Rows, kernels and cotangent; the rows of expert e are 10**e as large as those of expert 0.

    Rows and columns are spread over ``2**(2 spread)``, and what is small in one operand meets what is large in the
    other. Otherwise a power-of-two scale would hardly matter: E4M3 rounds alike under each, until it underflows.
    """
    rng = np.random.default_rng(seed)
    rows, kernels, d_out = (
        rng.standard_normal(s, np.float32) for s in ((ROWS, D), (len(sizes), D, F), (ROWS, F))
    )
    of_row, of_d, of_f = (
        np.float32(2.0) ** rng.integers(-spread, spread + 1, n).astype(np.float32) for n in (ROWS, D, F)
    )
    rows *= of_row[:, None] / of_d
    kernels *= of_d[:, None] * of_f
    d_out /= of_row[:, None] * of_f
    expert = np.minimum(np.repeat(np.arange(len(sizes) + 1), [*sizes, ROWS - sizes.sum()]), 3)
    rows *= np.float32(10.0) ** expert[:, None]
    rows[sizes.sum() :], d_out[sizes.sum() :] = tail, tail
    return rows.astype(dtype), kernels.astype(dtype), d_out.astype(dtype)


# --- the oracle: each expert alone, filled up with zero rows, through the quantisers of a single array

SINGLE = {
    BF16(): lambda x, axis, weight, gradient, wgrad: x.astype(jnp.bfloat16).astype(jnp.float32),
    MXFP8(): lambda x, axis, weight, gradient, wgrad: dequantize(quantize_mxfp8(x, axis=axis)),
    MXFP8("floor"): lambda x, axis, weight, gradient, wgrad: dequantize(
        quantize_mxfp8(x, axis=axis, rounding="floor")
    ),
    FP8CurrentScaling(): lambda x, axis, weight, gradient, wgrad: dequantize(
        quantize_fp8(x, fmt="e5m2" if gradient else "e4m3")
    ),
    FP8BlockScaling(): lambda x, axis, weight, gradient, wgrad: dequantize(
        quantize_fp8_blocks(x, axis=axis, square=weight)
    ),
    PLAIN_NVFP4: lambda x, axis, weight, gradient, wgrad: dequantize(
        quantize_nvfp4(hadamard(x, 0) if wgrad else x, axis=axis, square=weight)
    ),
}


def by_expert(x):
    """Each expert's rows, filled up to 48 with zeros: [E, 48, d]."""
    return np.stack([np.pad(x[g], ((0, 48 - len(x[g])), (0, 0))) for g in oracle.group_slices(SIZES)])


@partial(jax.jit, static_argnums=0)
def operands(recipe, rows, kernels, d_out):
    """The values of the six operands, each expert alone with the quantiser of a single array."""

    def alone(x, axis, weight=False, gradient=False, wgrad=False):
        return jax.vmap(lambda x: SINGLE[recipe](x, axis, weight, gradient, wgrad))(x)

    return (
        alone(rows, 1),
        alone(kernels, 0, weight=True),
        alone(d_out, 1, gradient=True),
        alone(kernels, 1, weight=True),
        alone(rows, 0, wgrad=True),
        alone(d_out, 0, gradient=True, wgrad=True),
    )


def expected(recipe, rows, kernels, d_out):
    """(the three products, the three sums of the magnitudes of their terms), float64."""
    found = [np.asarray(a, np.float64) for a in operands(recipe, by_expert(rows), kernels, by_expert(d_out))]
    return three_products(*found), three_products(*map(np.abs, found))


def three_products(x, w, dy, wt, x_down, dy_down):
    out, d_rows = np.zeros((ROWS, F)), np.zeros((ROWS, D))
    for e, group in enumerate(oracle.group_slices(SIZES)):
        out[group] = (x[e] @ w[e])[: SIZES[e]]
        d_rows[group] = (dy[e] @ wt[e].T)[: SIZES[e]]
    return out, d_rows, np.einsum("emd,emf->edf", x_down, dy_down)


def check(gemm, recipe):
    """Every element to within rounding of its own sum: the terms may cancel, so their magnitudes are the measure."""
    arguments = problem(spread=2 if isinstance(recipe, NVFP4) else 10)  # E2M1 underflows sooner
    actual = product_and_gradients(gemm, arguments[0], arguments[1], SIZES, arguments[2])
    wants, magnitudes = expected(recipe, *arguments)
    for got, want, terms, what in zip(actual, wants, magnitudes, ("fprop", "dgrad", "wgrad"), strict=True):
        cut = slice(None) if what == "wgrad" else slice(SIZES.sum())
        assert np.mean(want[cut] != 0) > 0.2, f"{what} is mostly zeros and shows nothing"
        error = np.abs(np.asarray(got, np.float64) - want)[cut]
        worst = np.max(error - oracle.tolerance(np.float32, 48) * terms[cut])
        assert worst <= 0, f"{what}: an error of {error.max():.3g} is more than rounding explains"
    assert not np.any(np.asarray(actual[1][SIZES.sum() :]))
    assert not np.any(np.asarray(actual[2])[SIZES == 0])


@pytest.mark.parametrize("recipe", SINGLE, ids=str)
def test_equals_each_expert_alone(recipe):
    """Three products of the right copies, groups apart, a tail of NaN kept out."""
    check(use(recipe), recipe)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tiled", "ragged_dot", "pallas_interpret"])
def test_every_backend(backend):
    check(use(MXFP8(), backend), MXFP8())


def test_b71_padding_reaches_no_statistic():
    """Rows past the last expert hold 1e6: nothing of the real rows changes, under scales of whole experts too."""
    for recipe in (FP8CurrentScaling(), PLAIN_NVFP4, MXFP8()):
        results = [
            product_and_gradients(use(recipe), rows, kernels, SIZES, d_out)
            for rows, kernels, d_out in (problem(0.0), problem(1e6), problem(np.nan))
        ]
        for result in results[1:]:
            for one, other in zip(results[0], result, strict=True):
                np.testing.assert_array_equal(one[: SIZES.sum()], other[: SIZES.sum()])


def test_b80_an_expert_changes_nothing_in_another():
    """Sizes 5, 0, 33, 26: without alignment a block of 32 rows would hold three experts."""
    rows, kernels, d_out = problem()
    changed, d_changed = rows.copy(), d_out.copy()
    changed[:5] *= 1000
    d_changed[:5] *= 1000
    for recipe in (MXFP8(), PLAIN_NVFP4, FP8CurrentScaling()):
        one = product_and_gradients(use(recipe), rows, kernels, SIZES, d_out)
        other = product_and_gradients(use(recipe), changed, kernels, SIZES, d_changed)
        np.testing.assert_array_equal(one[0][5:64], other[0][5:64])
        np.testing.assert_array_equal(one[1][5:64], other[1][5:64])
        np.testing.assert_array_equal(one[2][1:], other[2][1:])
        assert np.any(np.asarray(one[2][0]) != np.asarray(other[2][0]))


def test_b72_experts_of_zeros():
    zeros = np.zeros((ROWS, D), np.float32), np.zeros((4, D, F), np.float32), np.zeros((ROWS, F), np.float32)
    for recipe in (FP8CurrentScaling(), MXFP8(), PLAIN_NVFP4):
        for result in product_and_gradients(use(recipe), zeros[0], zeros[1], SIZES, zeros[2]):
            assert not np.any(np.asarray(result)), recipe


def test_b48_few_rows():
    for num_rows in (0, 1):
        rows, kernels = np.ones((num_rows, D), np.float32), np.ones((4, D, F), np.float32)
        sizes = np.array([0, 0, num_rows, 0], np.int32)
        d_out = np.ones((num_rows, F), np.float32)
        out, d_rows, d_kernels = product_and_gradients(use(MXFP8()), rows, kernels, sizes, d_out)
        assert np.all(np.asarray(out) == D)
        assert np.all(np.asarray(d_rows) == F)
        np.testing.assert_array_equal(d_kernels[2], np.full((D, F), num_rows))


def test_bfloat16_arguments_give_bfloat16_results():
    arguments = problem(dtype=jnp.bfloat16)
    results = product_and_gradients(use(MXFP8()), arguments[0], arguments[1], SIZES, arguments[2])
    wants, _ = expected(MXFP8(), *arguments)
    for result, want in zip(results, wants, strict=True):
        assert result.dtype == jnp.bfloat16
        real = slice(None) if want.ndim == 3 else slice(SIZES.sum())
        oracle.assert_close(result[real], want[real], jnp.bfloat16)


# --- NVFP4's keys, delayed scaling's state


def test_b83_keys_decide_the_gradients_and_nothing_else():
    rows, kernels, d_out = problem(spread=0)
    run = partial(product_and_gradients, use(NVFP4()), rows, kernels, SIZES, d_out)
    one, again, other = run(KEY), run(KEY), run(jax.random.key(1))
    plain = product_and_gradients(use(PLAIN_NVFP4), rows, kernels, SIZES, d_out)
    np.testing.assert_array_equal(one[0][:64], plain[0][:64])
    np.testing.assert_array_equal(one[0][:64], other[0][:64])
    for i in (1, 2):
        np.testing.assert_array_equal(one[i], again[i])
        assert np.any(np.asarray(one[i]) != np.asarray(other[i]))
    with pytest.raises(SettingError, match=r"jax\.random\.key"):
        grouped_gemm(rows, kernels, SIZES, recipe=NVFP4())


@pytest.mark.slow
def test_b83_the_mean_over_keys_is_the_gradient_of_the_rounded_weights():
    """Stochastic rounding is right on average; rounding to nearest is not."""
    rows, kernels, d_out = problem(spread=0)
    gemm = use(NVFP4(hadamard=False))
    many = jax.jit(jax.vmap(lambda key: product_and_gradients(gemm, rows, kernels, SIZES, d_out, key)[1]))(
        jax.random.split(KEY, 256)
    )
    w = operands(PLAIN_NVFP4, by_expert(rows), kernels, by_expert(d_out))[3]
    w = np.asarray(w, np.float64)
    want = oracle.grouped_gemm(np.where(np.isnan(d_out), 0, d_out), np.swapaxes(w, 1, 2), SIZES)
    nearest = product_and_gradients(use(PLAIN_NVFP4), rows, kernels, SIZES, d_out)[1]
    mean_error = oracle.relative_error(np.mean(many, 0), want)
    assert mean_error < 0.3 * oracle.relative_error(nearest, want)


def test_delayed_scaling_state_arrives_as_a_gradient():
    recipe = FP8DelayedScaling(history=3)
    rows, kernels, d_out = problem()
    state = recipe.init_state(4)

    @jax.jit
    def step(rows, kernels, d_out, state):
        out, pull_back = jax.vjp(
            lambda r, k, s: grouped_gemm(r, k, SIZES, recipe=recipe, state=s, backend="reference"),
            rows,
            kernels,
            state,
        )
        return out, *pull_back(d_out)

    _, _, _, state = step(rows, kernels, d_out, state)
    amax = [np.abs(rows[g]).max(initial=0) for g in oracle.group_slices(SIZES)]
    np.testing.assert_array_equal(state["rows"].amax_history[0], amax)
    scale = [448 / a if a else 1 for a in np.float32(amax)]
    np.testing.assert_allclose(state["rows"].scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(state["kernels"].amax_history[0], np.abs(kernels).max((1, 2)))
    assert state["d_out"].scale[1] == 1, "an expert without rows keeps its scale"
    # From the second step of the same batch on it is current scaling.
    out, d_rows, d_kernels, _ = step(rows, kernels, d_out, state)
    want = product_and_gradients(use(FP8CurrentScaling()), rows, kernels, SIZES, d_out)
    for a, b in zip((out[:64], d_rows, d_kernels), (want[0][:64], *want[1:]), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(SettingError, match="init_state"):
        grouped_gemm(rows, kernels, SIZES, recipe=recipe)


# --- under shard_map


def test_mesh_equals_one_device(devices):
    mesh = make_mesh(MeshConfig(2, 2, 2))
    axes = ("data", "fsdp", "expert")
    rng = np.random.default_rng(0)
    rows, kernels = rng.standard_normal((8 * 13, 8), np.float32), rng.standard_normal((4, 8, 8), np.float32)
    sizes = np.stack([rng.multinomial(12, [0.5, 0.5]) for _ in devices]).astype(np.int32)
    d_out = rng.standard_normal(rows.shape).astype(np.float32)

    def local(rows, kernels, sizes):
        return grouped_gemm(rows, kernels, sizes[0], recipe=MXFP8(), backend="reference")

    specs = P(axes), P("expert"), P(axes)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=True)
    out, d_rows, d_kernels = product_and_gradients(sharded, rows, kernels, sizes, d_out)
    want_kernels = np.zeros(kernels.shape)
    for rank in range(8):
        mine, own = slice(13 * rank, 13 * rank + 13), slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        one = product_and_gradients(use(MXFP8()), rows[mine], kernels[own], sizes[rank], d_out[mine])
        np.testing.assert_array_equal(out[mine][:12], one[0][:12])
        np.testing.assert_array_equal(d_rows[mine], one[1])
        want_kernels[own] += np.asarray(one[2])
    oracle.assert_close(d_kernels, want_kernels, np.float32, 8)


# --- the experts


def experts_problem(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (ROWS, D), (4, D, 2 * F), (4, F, D)
    scales = 1, D**-0.5, F**-0.5
    return [rng.standard_normal(s, np.float32) * np.float32(k) for s, k in zip(shapes, scales, strict=True)]


@partial(jax.jit, static_argnums=0)
def experts_and_gradients(recipe, rows, gate_up, down, weights, d_out, key=None):
    def f(*arguments):
        how = {"recipe": recipe, "key": key, "backend": "reference"}
        return swiglu_experts(*arguments[:3], SIZES, arguments[3], **how)

    out, pull_back = jax.vjp(f, rows, gate_up, down, weights)
    return out, *pull_back(d_out)


@pytest.mark.parametrize("recipe", [BF16(), FP8CurrentScaling(), MXFP8(), NVFP4()], ids=str)
def test_b87_the_recipe_reaches_both_gemms(recipe):
    """Two grouped GEMMs, three products each; the result differs from float32, by what the format explains."""
    rows, gate_up, down = experts_problem()
    weights, d_out = np.ones(ROWS, np.float32), rows

    def loss(rows, gate_up, down, recipe):
        out = swiglu_experts(rows, gate_up, down, SIZES, recipe=recipe, key=KEY, backend="reference")
        return jnp.vdot(out, d_out)

    counts = {
        r: count_quantized_gemms(jax.grad(partial(loss, recipe=r), (0, 1, 2)), rows, gate_up, down)
        for r in (recipe, None)
    }
    assert counts[recipe] == {"fprop": 2, "dgrad": 2, "wgrad": 2}
    assert counts[None] == {"fprop": 0, "dgrad": 0, "wgrad": 0}
    high = experts_and_gradients(None, rows, gate_up, down, weights, d_out)
    low = experts_and_gradients(recipe, rows, gate_up, down, weights, d_out, KEY)
    # A product of operands of relative error e has sqrt(2) e; a gradient passes four products in a row.
    noise = {"BF16": 2**-9, "FP8CurrentScaling": 0.053, "MXFP8": 0.0266, "NVFP4": 2**0.5 * 0.095}[recipe.name]
    bound = np.sqrt(8) * noise
    for a, b in zip(low, high, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape[0] == ROWS:
            a, b = a[:64], b[:64]
        assert 0 < np.linalg.norm(a - b) / np.linalg.norm(b) < bound


def test_b42_the_tail_of_the_experts():
    rows, gate_up, down = experts_problem()
    results = []
    for tail in (0.0, np.nan):
        rows[64:] = tail
        weights = np.concatenate([np.ones(64, np.float32), np.full(10, tail, np.float32)])
        results.append(experts_and_gradients(MXFP8(), rows, gate_up, down, weights, rows))
    for one, other in zip(*results, strict=True):
        cut = slice(64) if one.shape[0] == ROWS else slice(None)
        np.testing.assert_array_equal(one[cut], other[cut])
    assert not np.any(np.asarray(results[1][1][64:]))


def test_residuals_are_a_byte_per_element():
    """Under a policy by name the backward pass is given E4M3 rows, not those of the activations' dtype."""
    rows, kernels, _ = problem(0.0)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(QUANTIZED_ROWS))
    def layer(rows, kernels):
        return jnp.sum(
            jnp.sin(grouped_gemm(jnp.sin(rows), kernels, SIZES, recipe=MXFP8(), backend="reference"))
        )

    named = [a for a, why in saved_residuals(layer, rows, kernels) if f"named '{QUANTIZED_ROWS}'" in why]
    assert {str(a.dtype) for a in named} == {"float8_e4m3fn", "uint8"}
    codes = next(a for a in named if a.dtype == jnp.float8_e4m3fn)
    assert codes.shape == (-(-(ROWS + 4 * 31) // 32) * 32, D), "each expert in whole blocks"


# --- broken twins


def twin_transposed_scales(monkeypatch):
    """wgrad reads the row-wise copy as if its scales ran along the columns."""
    right = quantized.quantize_rows

    def wrong(x, operand, groups, *, axis, **rest):
        return right(x, operand, groups, axis=1, **rest)

    monkeypatch.setattr(quantized, "quantize_rows", wrong)


def twin_unaligned(monkeypatch):
    """Blocks of 32 rows wherever they fall."""
    real = quantized.align_groups
    monkeypatch.setattr(quantized, "align_groups", lambda s, e, n, block: real(s, e, n, 1))


def twin_one_copy_of_the_weights(monkeypatch):
    right = quantized.quantize_kernels
    monkeypatch.setattr(
        quantized, "quantize_kernels", lambda k, op, axis, **rest: right(k, op, axis=1, **rest)
    )


def twin_not_quantised(monkeypatch):
    monkeypatch.setattr(
        quantized, "quantize_rows", lambda x, op, groups, **_: jnp.where(groups.valid, x, 0.0)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "twin", [twin_transposed_scales, twin_unaligned, twin_one_copy_of_the_weights, twin_not_quantised]
)
def test_b88_broken_twins_fail(twin, monkeypatch):
    jax.clear_caches()  # a trace of the sound code must not stand in for the twin, nor the reverse
    twin(monkeypatch)
    with pytest.raises(AssertionError):
        check(lambda *a: grouped_gemm(*a, recipe=MXFP8(), backend="reference"), MXFP8())
    jax.clear_caches()


def test_bad_recipes():
    rows, kernels, _ = problem(0.0)
    with pytest.raises(SettingError, match="MXFP8"):
        grouped_gemm(rows, kernels, SIZES, recipe="mxfp8")
    with pytest.raises(SettingError, match="tiled"):
        grouped_gemm(rows, kernels, SIZES, recipe=MXFP8(), backend="te")
