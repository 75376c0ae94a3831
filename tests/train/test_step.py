"""The compiled step: the same on every mesh, guarded, traced once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.train.config import OptimizerConfig, TrainConfig
from moe_course.train.optimizer import apply_gradients, make_optimizer, update_biases
from moe_course.train.readout import non_finite_part
from moe_course.train.step import (
    dispatch_plan,
    finite_parts,
    init_state,
    make_eval_step,
    make_train_step,
)
from tests.oracle import relative_error

MODEL = ModelConfig(
    d_model=32, num_layers=2, num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8, d_ff_dense=48, d_ff=16, num_experts=8, top_k=2,
)  # fmt: skip
BATCH, SEQ = 8, 16


def config(mesh=(1, 2, 4), **changes) -> TrainConfig:
    optimizer = changes.pop("optimizer", OptimizerConfig(warmup_steps=2, expert_bias_rate=0.01))
    mesh = MeshConfig(*mesh)
    base = TrainConfig(
        model=MODEL,
        mesh=mesh,
        devices=mesh.size,
        batch_size=BATCH,
        seq_len=SEQ,
        steps=20,
        capacity_factor=8.0,
    )
    return replace(base, optimizer=optimizer, **changes)


def random_batch(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    segments = np.cumsum(rng.uniform(size=(BATCH, SEQ + 1)) < 0.1, axis=1).astype(np.int32)
    tokens = rng.integers(0, 256, (BATCH, SEQ + 1)).astype(np.int32)
    return {"tokens": tokens, "segments": segments, "domain": (np.arange(BATCH) % 4).astype(np.int32)}


class Run:
    """A few steps of one configuration."""

    def __init__(self, config, bucket=0):
        self.mesh = make_mesh(config.mesh)
        self.step = make_train_step(config, self.mesh, bucket)
        self.state = init_state(config, self.mesh)

    def __call__(self, batch):
        batch = jax.device_put(batch, batch_sharding(self.mesh))
        self.state, metrics = self.step(self.state, batch)
        return jax.device_get(metrics)


def snapshot(state):
    return jax.tree.map(np.array, jax.device_get((state.params, state.bias, state.opt_state, state.step)))


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
def test_same_training_on_1_2_4_and_8_devices():
    """Losses, gradient norms, loads and parameters after three steps, against one device."""
    results = {}
    for mesh in [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 2, 4)]:
        run = Run(
            config(
                mesh, optimizer=OptimizerConfig(warmup_steps=2, balance_coefficient=0.01, z_coefficient=1e-3)
            )
        )
        metrics = [run(random_batch(i)) for i in range(3)]
        results[mesh] = metrics, snapshot(run.state)
    reference, (params, bias, *_) = results.pop((1, 1, 1))
    for mesh, (metrics, (their_params, their_bias, *_)) in results.items():
        for ours, theirs in zip(reference, metrics, strict=True):
            for name in ("loss", "total_loss", "gradient_norm", "nats_by_domain", "balance_loss"):
                assert relative_error(theirs[name], ours[name]) < 5e-6, (mesh, name)
            np.testing.assert_array_equal(theirs["load"], ours["load"])
            assert int(theirs["ledger"].dropped) == 0
        errors = jax.tree.map(relative_error, their_params, params)
        assert max(jax.tree.leaves(errors)) < 5e-5, mesh
        assert equal(their_bias, bias)


DEEP = replace(MODEL, num_layers=5, num_dense_layers=2, mtp_depth=1)


@pytest.mark.slow
def test_one_loop_over_layers_trains_as_layers_one_by_one():
    """Three steps of either program, from the same state, with everything recomputed in a third."""
    results = []
    for how in ({}, {"scan_from": 1}, {"remat": "full"}):
        run = Run(config(model=DEEP, **how))
        results.append(([run(random_batch(i)) for i in range(3)], snapshot(run.state)))
    (reference, (params, bias, *_)), *others = results
    for metrics, (their_params, their_bias, *_) in others:
        for ours, theirs in zip(reference, metrics, strict=True):
            for name in ("loss", "total_loss", "gradient_norm", "nats_by_domain", "balance_loss"):
                assert relative_error(theirs[name], ours[name]) < 5e-6, name
            np.testing.assert_array_equal(theirs["load"], ours["load"])
        assert max(jax.tree.leaves(jax.tree.map(relative_error, their_params, params))) < 5e-5
        assert equal(their_bias, bias)


def test_a_stack_of_vectors_is_no_matrix_to_weight_decay():
    """With no gradient, only decay moves a weight: matrices shrink, stacked or not, norm scales stay."""
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 10)
    layer = {"norm": {"scale": jnp.ones((3, 4))}, "out": {"kernel": jnp.ones((3, 4, 4))}}
    mtp = {0: {"norm": {"scale": jnp.ones(4)}, "out": {"kernel": jnp.ones((4, 4))}}}
    params = {"layers": {"moe": layer}, "mtp": mtp}
    state, nothing = optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
    new = params
    for _ in range(2):  # the first step has learning rate 0
        new, state = apply_gradients(optimizer, nothing, state, new)
    for part in (new["layers"]["moe"], new["mtp"][0]):
        assert (part["norm"]["scale"] == 1).all()
        assert (part["out"]["kernel"] < 1).all()


def test_each_layer_of_a_stack_moves_its_bias_by_its_own_load():
    biases = {"layers": {"moe": {"bias": jnp.zeros((2, 2))}}, "mtp": {0: {"bias": jnp.zeros(2)}}}
    load = jnp.array([[3, 1], [1, 3], [2, 2]])
    moved = update_biases(biases, load, 0.5)
    np.testing.assert_array_equal(moved["layers"]["moe"]["bias"], [[-0.5, 0.5], [0.5, -0.5]])
    np.testing.assert_array_equal(moved["mtp"][0]["bias"], [0, 0])
    with pytest.raises(ValueError, match="3 expert biases but loads of 2 layers"):
        update_biases(biases, load[:2], 0.5)


def test_a_gradient_that_is_not_finite_is_named_by_its_layer():
    kernel = jnp.ones((2, 3))
    grads = {
        "head": {"kernel": kernel},
        "layers": {"dense": {"a": kernel}, "moe": {"a": kernel.at[1, 2].set(jnp.nan), "b": kernel}},
        "mtp": {0: {"a": kernel}, 1: {"a": kernel.at[0, 0].set(jnp.inf)}},
    }
    metrics = {"layer_finite": [True] * 6, "total_loss": 1.0, "gradient_finite": finite_parts(grads)}
    assert non_finite_part(metrics, 4) == "the gradient of layers 3, mtp 1"


@pytest.fixture(scope="module")
def run():
    return Run(config())


def test_b92_one_trace_for_any_routing(run):
    for seed in range(5):
        metrics = run(random_batch(seed))
        assert not metrics["overflow"]
    assert run.step.jitted._cache_size() == 1


def test_bias_moves_once_per_step_against_the_load(run):
    _, before, *_ = snapshot(run.state)
    metrics = run(random_batch(17))
    _, after, *_ = snapshot(run.state)
    (old,), (new,) = jax.tree.leaves(before), jax.tree.leaves(after)
    load = metrics["load"]  # of the one MoE layer
    np.testing.assert_allclose(new - old, 0.01 * np.sign(load.mean() - load), atol=1e-7)


def test_non_finite_loss_changes_nothing_and_halts(run):
    poisoned = jax.tree.map(jnp.array, run.state)
    out = poisoned.params["layers"]["moe"]["attention"]["out"]
    out["kernel"] = out["kernel"].at[0, 0, 0].set(jnp.nan)
    before = snapshot(poisoned)
    batch = jax.device_put(random_batch(1), batch_sharding(run.mesh))
    state, metrics = run.step(poisoned, batch)
    assert not metrics["finite"]
    assert np.asarray(metrics["layer_finite"]).tolist() == [True, False]
    after = snapshot(state)
    nan_aware = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in nan_aware)
    assert bool(state.halted)


def test_evaluation_changes_nothing_and_counts_every_target(run):
    """B26: cross-entropy only, no side effects; the sums are those of the training metrics."""
    before = snapshot(run.state)
    batch = random_batch(3)
    on_device = jax.device_put(batch, batch_sharding(run.mesh))
    sums = make_eval_step(config(), run.mesh)(run.state.params, run.state.bias, on_device)
    assert equal(before, snapshot(run.state))
    valid = (batch["segments"][:, 1:] == batch["segments"][:, :-1]).sum()
    assert int(sums["targets"]) == valid
    metrics = run(batch)
    assert float(sums["nats"]) == pytest.approx(float(metrics["nats_by_domain"].sum()), rel=1e-6)


def test_overflow_returns_the_state_unchanged_until_cleared():
    """The guarded step: a buffer too small for the demand is reported, applied never, and later steps wait."""
    small = config(capacity_factor=0.25)
    run = Run(small)
    before = snapshot(run.state)
    first, second = run(random_batch(0)), run(random_batch(1))
    assert first["overflow"]
    assert first["demand"] > dispatch_plan(small, 0).capacity
    assert second["skipped"]
    assert equal(before, snapshot(run.state))
    # The same batches in the smallest bucket that holds them give the bits of a run that never overflowed.
    bucket = 0
    while dispatch_plan(small, bucket).capacity < max(first["demand"], 64):
        bucket += 1
    run.step = make_train_step(small, run.mesh, bucket)
    run.state = replace(run.state, halted=jnp.zeros_like(run.state.halted))
    unbounded = Run(config())
    assert dispatch_plan(small, bucket).capacity < dispatch_plan(config(), 0).capacity
    for seed in range(3):
        again = run(random_batch(seed))
        assert not again["overflow"]
        assert float(again["loss"]) == float(unbounded(random_batch(seed))["loss"])
    assert equal(snapshot(run.state), snapshot(unbounded.state))
