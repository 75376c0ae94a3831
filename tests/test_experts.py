"""The SwiGLU experts, fused and not, against loops; their gradients, residuals and poisoned tails."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint exports only its printer
from jax.sharding import PartitionSpec as P

from moe_course import experts
from moe_course.bench.arguments import make_group_sizes
from moe_course.experts import EXPERT_HIDDEN, EXPERT_ROWS, RESIDUAL_NAMES, swiglu_experts
from moe_course.parallel import MeshConfig, make_mesh
from tests import oracle

BACKENDS = ("reference", "tiled", "ragged_dot", "pallas_interpret")
ALL_AXES = ("data", "fsdp", "expert")


@cache
def use(backend):
    return partial(swiglu_experts, backend=backend)


@partial(jax.jit, static_argnums=0)
def result_and_gradients(f, rows, gate_up, down, sizes, d_out, *row_weights):
    out, pull_back = jax.vjp(lambda r, g, d, *w: f(r, g, d, sizes, *w), rows, gate_up, down, *row_weights)
    return out, *pull_back(d_out)


def problem(num_rows, d_model, d_ff, num_experts, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (num_rows, d_model), (num_experts, d_model, 2 * d_ff), (num_experts, d_ff, d_model)
    scales = 1, d_model**-0.5, d_ff**-0.5
    pairs = zip(shapes, scales, strict=True)
    return [(rng.standard_normal(s, np.float32) * np.float32(k)).astype(dtype) for s, k in pairs]


def check(f, rows, gate_up, down, sizes, poison=np.nan, weighted=False):
    """Against the loop: result and gradients, with the tail of rows, weights and cotangents poisoned."""
    total, dtype = int(sizes.sum()), rows.dtype
    rng = np.random.default_rng(5)
    d_out = rng.standard_normal(rows.shape).astype(dtype)
    weights = [rng.standard_normal(len(rows), np.float32)] if weighted else []

    def tail(a, value):
        return np.concatenate([a[:total], np.full_like(a[total:], value)])

    clean_rows, clean_d_out, *clean_weights = (tail(a, 0) for a in (rows, d_out, *weights))
    rows, d_out, *weights = (tail(a, poison) for a in (rows, d_out, *weights))
    out, *gradients = result_and_gradients(f, rows, gate_up, down, jnp.asarray(sizes), d_out, *weights)
    want = oracle.swiglu_experts(clean_rows, gate_up, down, sizes, *clean_weights)
    wants = oracle.swiglu_experts_vjp(clean_rows, gate_up, down, sizes, clean_d_out, *clean_weights)
    depth = max(gate_up.shape[2], len(rows))
    oracle.assert_close(out[:total], want[:total], dtype, depth, "result")
    names = ("rows", "gate_up", "down", "row_weights")[: len(wants)]
    for gradient, reference, name in zip(gradients, wants, names, strict=True):
        assert gradient.dtype == (np.float32 if name == "row_weights" else dtype)
        oracle.assert_close(gradient, reference, dtype, depth, f"gradient of {name}")
    d_rows, d_gate_up, d_down, *d_weights = map(np.asarray, gradients)
    assert not any(np.any(d[total:]) for d in (d_rows, *d_weights))
    assert not any(np.any(d[sizes == 0]) for d in (d_gate_up, d_down))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["zipf", "one", "empties"])
def test_equals_the_loop(backend, kind):
    check(use(backend), *problem(90, 12, 20, 5), make_group_sizes(kind, 83, 5))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend, weighted):
    arguments = *problem(90, 12, 20, 5, dtype=jnp.bfloat16), make_group_sizes("zipf", 83, 5)
    check(use(backend), *arguments, weighted=weighted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_combine_weights(backend, poison):
    check(use(backend), *problem(90, 12, 20, 5), make_group_sizes("empties", 83, 5), poison, weighted=True)


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0, 1, 31, 33, 63, 64, 65, 127, 129, 400, 1100]), min_size=4, max_size=4))
def test_fused_walk_on_and_off_every_tile(sizes):
    sizes = np.diff(np.minimum(np.cumsum([0, *sizes]), 1500)).astype(np.int32)
    check(use("tiled"), *problem(1500, 6, 8, 4), sizes, weighted=True)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5])
def test_b48_few_rows(num_rows):
    check(use("tiled"), *problem(num_rows, 8, 4, 4), make_group_sizes("uniform", num_rows, 4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_b42_the_tail_stops_before_the_activation(backend, poison):
    check(use(backend), *problem(6, 8, 4, 2), np.array([2, 2], np.int32), poison=poison)


def test_b42_where_the_mask_stands():
    """Why the mask must come before silu: after it, and by multiplication, the gradient is NaN."""
    x, keep = jnp.float32(np.inf), jnp.array(False)

    def silu_gate(x):
        return jax.nn.silu(x) * x

    before = jax.grad(lambda x: silu_gate(jnp.where(keep, x, 0.0)))(x)
    after = jax.grad(lambda x: jnp.where(keep, silu_gate(x), 0.0))(x)
    times = jax.grad(lambda x: silu_gate(x) * keep.astype(jnp.float32))(x)
    assert before == 0
    assert jnp.isnan(after)
    assert jnp.isnan(times)


@pytest.mark.parametrize("backend", ["tiled", "ragged_dot"])
def test_b51_finite_differences(backend):
    rows, gate_up, down = problem(40, 8, 8, 4)
    sizes = np.array([11, 0, 20, 6], np.int32)
    d_out = np.random.default_rng(2).standard_normal(rows.shape)
    d_out[sizes.sum() :] = 0
    _, *gradients = result_and_gradients(use(backend), rows, gate_up, down, sizes, d_out.astype(np.float32))
    arguments = [a.astype(np.float64) for a in (rows, gate_up, down)]
    for i, gradient in enumerate(gradients):
        step = np.random.default_rng(i).standard_normal(arguments[i].shape)

        def loss(h, i=i, step=step):
            moved = [a + h * step if j == i else a for j, a in enumerate(arguments)]
            return np.vdot(oracle.swiglu_experts(*moved, sizes), d_out)

        want = (loss(1e-5) - loss(-1e-5)) / 2e-5
        scale = np.linalg.norm(np.asarray(gradient)) * np.linalg.norm(step)
        assert abs(np.vdot(gradient, step) - want) < oracle.tolerance(np.float32, 40) * scale
        assert abs(want) > 1e-3 * scale


@pytest.mark.parametrize("backend", ["tiled", "ragged_dot"])
def test_mesh_gradients_equal_one_device(devices, backend):
    """Experts cut over "expert", replicated over "data" and "fsdp"."""
    mesh = make_mesh(MeshConfig(2, 2, 2))
    rows, gate_up, down = problem(8 * 13, 8, 4, 4)
    rng = np.random.default_rng(0)
    sizes = np.stack([rng.multinomial(12, [0.5, 0.5]) for _ in devices]).astype(np.int32)
    d_out = rng.standard_normal(rows.shape, np.float32)

    def local(rows, gate_up, down, sizes):
        return swiglu_experts(rows, gate_up, down, sizes[0], backend=backend)

    specs = P(ALL_AXES), P("expert"), P("expert"), P(ALL_AXES)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(ALL_AXES), check_vma=True)
    out, d_rows, *d_weights = result_and_gradients(sharded, rows, gate_up, down, sizes, d_out)
    want_weights = [np.zeros(gate_up.shape), np.zeros(down.shape)]
    for rank in range(8):
        mine, own = slice(13 * rank, 13 * rank + 12), slice(2 * (rank % 2), 2 * (rank % 2) + 2)
        one = rows[mine], gate_up[own], down[own], sizes[rank]
        oracle.assert_close(out[mine], oracle.swiglu_experts(*one), np.float32, 8)
        want_rows, *parts = oracle.swiglu_experts_vjp(*one, d_out[mine])
        oracle.assert_close(d_rows[mine], want_rows, np.float32, 8)
        for want, part in zip(want_weights, parts, strict=True):
            want[own] += part
    for gradient, want in zip(d_weights, want_weights, strict=True):
        oracle.assert_close(gradient, want, np.float32, 8 * 12)


def test_buffer_length_changes_no_bit():
    sizes = np.array([70, 0, 20, 40], np.int32)
    rows, gate_up, down = problem(130, 8, 12, 4)
    results = []
    for tail in (0, 1, 37, 4096):
        longer = np.concatenate([rows, np.full((tail, 8), np.nan, np.float32)])
        arguments = longer, gate_up, down, sizes, longer, longer[:, 0]
        out, d_rows, d_gate_up, d_down, d_weights = result_and_gradients(use("tiled"), *arguments)
        per_row = (a[:130] for a in (out, d_rows, d_weights))
        results.append([np.asarray(a) for a in (*per_row, d_gate_up, d_down)])
    for result in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], result, strict=True))


# Residuals, by name.


def saved_names(policy, backend="tiled") -> set[str]:
    """Checkpoint names among what the backward pass of the experts is given under ``policy``."""
    rows, gate_up, down = problem(24, 8, 4, 3)
    sizes = jnp.array([8, 0, 16])

    @partial(jax.checkpoint, policy=policy)
    def layer(rows, gate_up, down):
        return jnp.sum(jnp.sin(swiglu_experts(jnp.sin(rows), gate_up, down, sizes, backend=backend)))

    saved = saved_residuals(layer, rows, gate_up, down)
    return {name for _, why in saved for name in RESIDUAL_NAMES if f"named '{name}'" in why}


@pytest.mark.parametrize("backend", ["tiled", "ragged_dot"])
def test_b94_each_name_saves_what_it_names(backend):
    only = jax.checkpoint_policies.save_only_these_names
    for name in RESIDUAL_NAMES:
        assert saved_names(only(name), backend) == {name}
    assert saved_names(only(*RESIDUAL_NAMES), backend) == set(RESIDUAL_NAMES)
    assert saved_names(only("moe_experts_hidden"), backend) == set(), "a misspelt name saves nothing"
    assert (EXPERT_ROWS, EXPERT_HIDDEN) == RESIDUAL_NAMES


@pytest.mark.parametrize("backend", ["tiled", "ragged_dot"])
def test_b93_recompute_gives_the_same_bits(backend):
    rows, gate_up, down = problem(90, 12, 20, 5)
    sizes = jnp.asarray(make_group_sizes("zipf", 83, 5))

    def loss(rows, gate_up, down):
        return jnp.sum(swiglu_experts(rows, gate_up, down, sizes, backend=backend)[:83] ** 2)

    policies = jax.checkpoint_policies
    results = [
        jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2)))(rows, gate_up, down)
        for policy in (policies.everything_saveable, policies.nothing_saveable)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_bad_arguments():
    rows, gate_up, down = (jnp.asarray(a) for a in problem(6, 8, 4, 2))
    sizes = jnp.array([3, 3])
    with pytest.raises(ValueError, match=r"down \[E, F, D\]"):
        swiglu_experts(rows, gate_up, down.mT, sizes)
    with pytest.raises(TypeError, match="down"):
        swiglu_experts(rows, gate_up, down.astype(jnp.bfloat16), sizes)
    with pytest.raises(TypeError, match="integers"):
        swiglu_experts(rows, gate_up, down, jnp.array([3.0, 3.0]))
    with pytest.raises(ValueError, match=r"row_weights must be \[rows\]"):
        swiglu_experts(rows, gate_up, down, sizes, jnp.ones(5))


MUTANTS = {
    "up before gate": lambda r, g, d, *a: swiglu_experts(r, jnp.roll(g, g.shape[2] // 2, axis=2), d, *a),
    "kernels of the next expert": lambda r, g, d, *a: swiglu_experts(r, g, jnp.roll(d, 1, axis=0), *a),
    "no gradient for down": lambda r, g, d, *a: swiglu_experts(r, g, jax.lax.stop_gradient(d), *a),
    "no gradient for gate_up": lambda r, g, d, *a: swiglu_experts(r, jax.lax.stop_gradient(g), d, *a),
    "no gradient for weights": lambda r, g, d, s, w: swiglu_experts(r, g, d, s, jax.lax.stop_gradient(w)),
    "weights before the experts": lambda r, g, d, s, w: swiglu_experts(r * w[:, None], g, d, s),
    "weights of the next row": lambda r, g, d, s, w: swiglu_experts(r, g, d, s, jnp.roll(w, 1)),
    "hidden of rounded rows": lambda r, g, d, *a: swiglu_experts(
        r.astype(jnp.bfloat16).astype(jnp.float32), g, d, *a
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_b88_broken_twins_fail(mutant):
    arguments = *problem(40, 8, 4, 4), np.array([9, 0, 17, 11], np.int32)
    with pytest.raises(AssertionError):
        check(MUTANTS[mutant], *arguments, weighted=True)


def test_b88_a_backward_pass_that_forgets_the_mask_fails(monkeypatch):
    def unmasked(x, start, size, fresh=None):
        return jax.lax.dynamic_slice_in_dim(x, start, size)

    monkeypatch.setattr(experts, "read_rows", unmasked)
    with pytest.raises(AssertionError):
        check(
            partial(swiglu_experts, backend="tiled"),
            *problem(41, 8, 4, 4),
            np.array([9, 0, 17, 11], np.int32),
        )
