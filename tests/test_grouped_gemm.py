"""Every grouped GEMM backend that can run here, held to one contract."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moe_course.bench.arguments import LARGE, SMALL, make_group_sizes
from moe_course.errors import SettingError
from moe_course.grouped_gemm import grouped_gemm, tiled
from moe_course.grouped_gemm.bounds import group_bounds
from moe_course.parallel import MeshConfig, make_mesh
from tests import oracle

BACKENDS = ("reference", "tiled", "ragged_dot", "pallas_interpret")
FAST = ("tiled", "ragged_dot")
ALL_AXES = ("data", "fsdp", "expert")


@cache  # one function per backend, so that jit knows it again
def use(backend):
    return partial(grouped_gemm, backend=backend)


@partial(jax.jit, static_argnums=0)
def product_and_gradients(gemm, rows, kernels, sizes, d_out):
    out, pull_back = jax.vjp(lambda rows, kernels: gemm(rows, kernels, sizes), rows, kernels)
    return out, *pull_back(d_out)


def check(gemm, rows, kernels, sizes, *, poison=np.nan, seed=7):
    """The contract on one problem: product, dgrad and wgrad against the loop, the tail poisoned."""
    total, longest = int(sizes.sum()), int(sizes.max(initial=1))
    d_out = np.random.default_rng(seed).standard_normal((len(rows), kernels.shape[2])).astype(rows.dtype)
    clean = [np.where(np.arange(len(rows))[:, None] < total, a, np.zeros_like(a)) for a in (rows, d_out)]
    rows, d_out = (np.where(np.arange(len(a))[:, None] < total, a, np.full_like(a, poison)) for a in clean)
    out, d_rows, d_kernels = product_and_gradients(gemm, rows, kernels, jnp.asarray(sizes), d_out)
    want = oracle.grouped_gemm(clean[0], kernels, sizes)
    want_rows, want_kernels = oracle.grouped_gemm_vjp(clean[0], kernels, sizes, clean[1])
    dtype = rows.dtype
    assert (out.dtype, d_rows.dtype, d_kernels.dtype) == (dtype, dtype, dtype)
    oracle.assert_close(out[:total], want[:total], dtype, kernels.shape[1], "product")
    oracle.assert_close(d_rows, want_rows, dtype, kernels.shape[2], "dgrad")
    oracle.assert_close(d_kernels, want_kernels, dtype, longest, "wgrad")
    assert not np.any(np.asarray(d_rows[total:])), "gradient of rows that belong to no group"
    assert not np.any(np.asarray(d_kernels)[sizes == 0]), "weight gradient of an empty group"


def problem(rows, d_model, d_ff, experts, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (rows, d_model), (experts, d_model, d_ff)
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_named_arguments(case, backend):
    check(use(backend), *case.make())


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_rounds_once(backend):
    check(use(backend), *SMALL[1].make(dtype=jnp.bfloat16))


@pytest.mark.parametrize("backend", ["tiled", "pallas_interpret"])
def test_bfloat16_sums_in_float32(backend):
    """A bfloat16 running sum of ones stops at 256."""
    ones, sizes = np.ones((700, 8), jnp.bfloat16), np.array([640, 0], np.int32)
    _, _, d_kernels = product_and_gradients(use(backend), ones, np.ones((2, 8, 8), jnp.bfloat16), sizes, ones)
    assert np.all(np.asarray(d_kernels[0], np.float32) == 640)


@pytest.mark.parametrize("backend", BACKENDS)
def test_b41_every_pattern_of_empty_groups(backend):
    rows, kernels = problem(26, 8, 8, 8)
    for pattern in itertools.product((0, 1), repeat=8):
        check(use(backend), rows, kernels, np.array(pattern, np.int32) * 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_b42_rows_past_the_last_group(backend, poison):
    check(use(backend), *problem(6, 8, 8, 2), np.array([2, 2], np.int32), poison=poison)


@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=25)
@given(st.lists(st.sampled_from([0, 1, 7, 8, 31, 33, 127, 129]), min_size=8, max_size=8))
def test_b44_sizes_off_every_tile(backend, sizes):
    check(use(backend), *problem(8 * 129, 16, 16, 8), np.array(sizes, np.int32))


def test_b44_the_same_through_pallas():
    check(
        use("pallas_interpret"), *problem(370, 16, 16, 8), np.array([31, 0, 129, 1, 7, 33, 127, 8], np.int32)
    )


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 2500) | st.sampled_from([63, 64, 65, 513, 1023, 1024, 1025, 2047]), max_size=4)
)
def test_tiled_on_large_groups(sizes):
    sizes = np.diff(np.minimum(np.cumsum([0, *sizes, *[0] * (4 - len(sizes))]), 2600)).astype(np.int32)
    check(use("tiled"), *problem(2600, 4, 4, 4), sizes)


@pytest.mark.parametrize("backend", ["tiled", "pallas_interpret"])
@pytest.mark.parametrize("d_model", [96, 1, 63, 65])
def test_b45_depth_off_the_tile(backend, d_model):
    check(use(backend), *problem(32, d_model, 96, 32), np.ones(32, np.int32))


def test_b46_bounds_never_wrap():
    huge = jnp.full(8, 2**31 - 1, jnp.int32)
    for sizes in (huge, jnp.array([5, -3, 2**31 - 1, 4], jnp.int32), jnp.array([2**32 - 1, 7], jnp.uint32)):
        for num_rows in (0, 524_288, 2**31 - 1):
            lengths, ends = group_bounds(sizes, num_rows)
            assert np.all((np.asarray(ends) >= 0) & (np.asarray(ends) <= num_rows))
            assert np.all(np.asarray(lengths) >= 0)
            assert int(ends[-1]) == int(np.asarray(lengths, np.int64).sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_b48_one_takes_all_and_few_rows(backend):
    rows, kernels = problem(40, 8, 8, 4)
    out = jax.jit(use(backend))(rows, kernels, jnp.array([0, 40, 0, 0]))
    oracle.assert_close(out, rows.astype(np.float64) @ kernels[1], np.float32, 8)
    for num_rows in (0, 1, 3, 4, 5) if backend == "tiled" else (0, 3):
        check(use(backend), *problem(num_rows, 8, 8, 4), make_group_sizes("uniform", num_rows, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_b51_finite_differences(backend):
    """The product is linear in each argument: a central difference has no truncation error, at any step."""
    rows, kernels, sizes = SMALL[1].make()
    rng = np.random.default_rng(3)
    step_rows, step_kernels = (rng.standard_normal(a.shape, np.float32) for a in (rows, kernels))
    d_out = rng.standard_normal((len(rows), kernels.shape[2]), np.float32)
    d_out[sizes.sum() :] = 0

    f = jax.jit(use(backend))
    _, d_rows, d_kernels = product_and_gradients(use(backend), rows, kernels, jnp.asarray(sizes), d_out)
    for gradient, step, plus, minus in (
        (d_rows, step_rows, (rows + step_rows, kernels), (rows - step_rows, kernels)),
        (d_kernels, step_kernels, (rows, kernels + step_kernels), (rows, kernels - step_kernels)),
    ):
        change = (np.asarray(f(*plus, sizes), np.float64) - np.asarray(f(*minus, sizes), np.float64)) / 2
        terms = (change * d_out)[: sizes.sum()]
        scale = np.linalg.norm(terms)  # the sum of the terms may cancel
        assert abs(np.vdot(gradient, step) - terms.sum()) < oracle.tolerance(np.float32, terms.size) * scale
        assert abs(terms.sum()) > 1e-3 * scale


@pytest.mark.parametrize("backend", BACKENDS)
def test_b92_sizes_are_data(backend):
    traces = []

    @jax.jit
    def f(rows, kernels, sizes):
        traces.append(1)
        return grouped_gemm(rows, kernels, sizes, backend=backend)

    rows, kernels = problem(26, 8, 8, 8)
    for kind in ("uniform", "zipf", "one", "empties"):
        f(rows, kernels, make_group_sizes(kind, 26, 8))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("sizes", "tails"),
    [((3, 0, 50, 8), (0, 1, 37, 4096)), ((1100, 0, 300, 97), (0, 37, 4096))],
)
def test_buffer_length_changes_no_bit(sizes, tails):
    sizes = np.array(sizes, np.int32)
    rows, kernels = problem(sizes.sum(), 24, 40, 4)
    d_out = np.random.default_rng(1).standard_normal((sizes.sum(), 40), np.float32)
    results = []
    for tail in tails:
        longer = (np.concatenate([a, np.full((tail, a.shape[1]), np.nan, np.float32)]) for a in (rows, d_out))
        rows_, d_out_ = longer
        out, d_rows, d_kernels = product_and_gradients(use("tiled"), rows_, kernels, sizes, d_out_)
        results.append((np.asarray(out)[: len(rows)], np.asarray(d_rows)[: len(rows)], np.asarray(d_kernels)))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(
    "backend", FAST
)  # JAX cannot interpret a Pallas kernel inside shard_map with check_vma
@pytest.mark.parametrize("kernel_axes", [P(), P("expert")], ids=["replicated", "expert-parallel"])
def test_gradients_on_a_mesh_equal_one_device(devices, backend, kernel_axes):
    """Kernels replicated over axes that rows vary over: their gradient is the sum over those devices."""
    mesh = make_mesh(MeshConfig(2, 2, 2))
    rng = np.random.default_rng(0)
    rows, kernels = problem(8 * 21, 8, 16, 4)
    per_rank = 4 // (2 if kernel_axes else 1)
    sizes = np.stack([rng.multinomial(20, np.ones(per_rank) / per_rank) for _ in devices]).astype(np.int32)
    d_out = rng.standard_normal((8 * 21, 16), np.float32)

    def local(rows, kernels, sizes):
        return grouped_gemm(rows, kernels, sizes[0], backend=backend)

    specs = P(ALL_AXES), kernel_axes, P(ALL_AXES)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(ALL_AXES), check_vma=True)
    out, d_rows, d_kernels = product_and_gradients(
        lambda r, k, s: sharded(r, k, s), rows, kernels, sizes, d_out
    )
    want_kernels = np.zeros(kernels.shape)
    for rank in range(8):  # "expert" is the innermost axis
        mine, experts = slice(21 * rank, 21 * rank + 20), slice(None)
        if kernel_axes:
            experts = slice(per_rank * (rank % 2), per_rank * (rank % 2 + 1))
        want = oracle.grouped_gemm(rows[mine], kernels[experts], sizes[rank])
        want_rows, part = oracle.grouped_gemm_vjp(rows[mine], kernels[experts], sizes[rank], d_out[mine])
        want_kernels[experts] += part
        oracle.assert_close(out[mine], want, np.float32, 8)
        oracle.assert_close(d_rows[mine], want_rows, np.float32, 16)
    oracle.assert_close(d_kernels, want_kernels, np.float32, 8 * 20)


def test_bad_arguments():
    rows, kernels, sizes = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([2, 2])
    with pytest.raises(TypeError, match="integers"):
        grouped_gemm(rows, kernels, jnp.array([2.0, 2.0]))
    with pytest.raises(TypeError, match="dtype"):
        grouped_gemm(rows.astype(jnp.bfloat16), kernels, sizes)
    for bad in ((rows[:, :4], kernels, sizes), (rows, kernels, sizes[:1]), (rows[0], kernels, sizes)):
        with pytest.raises(ValueError, match="rows"):
            grouped_gemm(*bad)
    with pytest.raises(SettingError, match="MXFP8"):
        grouped_gemm(rows, kernels, sizes, recipe="mxfp8")
    for backend, fix in (("pallas", "tiled"), ("te", "tiled"), ("tokamax", "install"), ("best", "tiled")):
        with pytest.raises(SettingError, match=fix):
            grouped_gemm(rows, kernels, sizes, backend=backend)


def test_plan_covers_every_size_by_tiles_that_fit():
    for units, counts in enumerate(tiled.PLAN):
        chosen = np.repeat(tiled.TILES, counts)
        assert chosen.sum() >= units * tiled.TILES[-1] > chosen.sum() - chosen.min(initial=9999)
        for rows in range(max(0, (units - 1) * tiled.TILES[-1] + 1), units * tiled.TILES[-1] + 1):
            assert chosen.max(initial=0) <= tiled.room(rows)


def test_no_large_temporary():
    """Beyond its result a product needs one tile per thread: rows, the expert's weights, their product."""
    case = LARGE[0]
    shapes = (case.rows, case.d_model), (case.experts, case.d_model, case.d_ff), (case.experts,)
    rows, kernels, sizes = (
        jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, (jnp.float32,) * 2 + (jnp.int32,), strict=True)
    )
    largest = tiled.TILES[0]
    tile = 4 * (largest * case.d_model + case.d_model * case.d_ff + largest * case.d_ff)
    threads = 2
    forward = jax.jit(tiled.grouped_gemm).lower(rows, kernels, sizes).compile().memory_analysis()
    assert forward.temp_size_in_bytes <= threads * tile
    d_out = jax.ShapeDtypeStruct((case.rows, case.d_ff), jnp.float32)
    memory = jax.jit(tiled._backward).lower((rows, kernels, sizes), d_out).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * threads * tile  # dgrad's and wgrad's


# Broken twins: each must fail the check that the sound kernels pass.


@jax.custom_vjp
def without_the_last_tile(rows, kernels, sizes):
    return tiled.grouped_gemm(rows, kernels, sizes)


def _zero_last_tile(residuals, d_out):
    rows, _, sizes = residuals
    d_rows, _, _ = tiled._backward(residuals, d_out)
    _, ends = group_bounds(sizes, rows.shape[0])
    keep = jnp.arange(rows.shape[0])[:, None] < ends[-1] - 3
    return d_rows, tiled._weight_gradients(rows, jnp.where(keep, d_out, 0.0), sizes), None


without_the_last_tile.defvjp(lambda *args: (without_the_last_tile(*args), args), _zero_last_tile)


def masked_by_multiplication(rows, kernels, sizes):
    row, ends = jnp.arange(rows.shape[0])[:, None], jnp.cumsum(sizes)
    masks = [(row >= ends[e] - sizes[e]) & (row < ends[e]) for e in range(len(kernels))]
    return sum((rows @ k) * mask.astype(rows.dtype) for k, mask in zip(kernels, masks, strict=True))


def with_the_tail(rows, kernels, sizes):
    return tiled.grouped_gemm(rows, kernels, sizes.at[-1].set(rows.shape[0]))


def one_row_late(rows, kernels, sizes):
    return jnp.roll(tiled.grouped_gemm(jnp.roll(rows, -1, axis=0), kernels, sizes), 1, axis=0)


MUTANTS = {
    "swapped sizes": lambda rows, kernels, sizes: tiled.grouped_gemm(rows, kernels, sizes[::-1]),
    "transposed kernels": lambda rows, kernels, sizes: tiled.grouped_gemm(rows, kernels.mT, sizes),
    "no gradient for kernels": lambda r, k, s: tiled.grouped_gemm(r, jax.lax.stop_gradient(k), s),
    "no gradient for rows": lambda r, k, s: tiled.grouped_gemm(jax.lax.stop_gradient(r), k, s),
    "tail rows written by the last expert": lambda r, k, s: tiled.grouped_gemm(
        r, k, s.at[-1].set(r.shape[0])
    ),
    "wgrad without the last tile": without_the_last_tile,
    "mask by multiplication": masked_by_multiplication,
    "off by one row": one_row_late,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_b88_broken_twins_fail(mutant):
    arguments = *problem(40, 8, 8, 4), np.array([9, 0, 17, 11], np.int32)
    check(tiled.grouped_gemm, *arguments)
    with pytest.raises(AssertionError):
        check(MUTANTS[mutant], *arguments)
