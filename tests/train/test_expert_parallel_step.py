"""The compiled step over every dispatcher, and checkpoints that move between meshes."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from moe_course.dispatch import ledger
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.train.checkpoint import Checkpoints
from moe_course.train.config import OptimizerConfig, TrainConfig
from moe_course.train.step import abstract_state, init_state, make_train_step, state_shardings
from tests.dispatch.dispatch_cases import QUICK
from tests.oracle import assert_close, relative_error, tolerance

pytestmark = pytest.mark.slow

BATCH, SEQ = 8, 8
MODEL = ModelConfig(
    d_model=16, num_layers=2, num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4,
    v_head_dim=4, d_ff_dense=16, d_ff=8, num_experts=8, top_k=2, init_std=0.2,
)  # fmt: skip
PATH = 4 * BATCH * SEQ * MODEL.num_layers
"""Terms that rounding adds up from an embedding to the loss, generously."""


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    """Steps here run once or twice: half the time to compile them is worth slower programs."""
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICK))


def config(mesh, dispatcher="all_to_all", **changes) -> TrainConfig:
    mesh = MeshConfig(*mesh)
    base = TrainConfig(model=MODEL, mesh=mesh, devices=mesh.size, batch_size=BATCH, seq_len=SEQ, steps=100)
    optimizer = OptimizerConfig(warmup_steps=1, learning_rate=0.1, expert_bias_rate=0.1)
    usual = {"capacity_factor": 8.0, "backend": "ragged_dot", "optimizer": optimizer}
    return replace(base, dispatcher=dispatcher, **(usual | changes))


def batch(seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (BATCH, SEQ + 1)).astype(np.int32)
    return {
        "tokens": tokens,
        "segments": np.zeros_like(tokens),
        "domain": np.arange(BATCH, dtype=np.int32) % 4,
    }


@cache
def fresh_state():
    """The same first state for all, made once, on the host."""
    one = config((1, 1, 1))
    return jax.device_get(init_state(one, make_mesh(one.mesh)))


@cache
def step_on(config):
    """(state on the host or any mesh, batch) -> (state, metrics) on the host; compiled once per mesh."""
    mesh = make_mesh(config.mesh)
    step = make_train_step(config, mesh, 0)

    def call(state, batch):
        placed = jax.device_put(state, state_shardings(config, mesh))
        return jax.device_get(step(placed, jax.device_put(batch, batch_sharding(mesh))))

    return call


def test_dispatchers_train_the_same_model():
    """One optimizer step on 8 devices: loss, gradient norm, load and books. test_step.py has all_to_all."""
    want = step_on(config((1, 1, 1)))(fresh_state(), batch())[1]
    for dispatcher, mesh in (("ragged", (2, 2, 2)), ("hierarchical", (1, 2, 4, 2))):
        _, got = step_on(config(mesh, dispatcher))(fresh_state(), batch())
        for name in ("loss", "gradient_norm", "balance_loss"):
            assert_close(got[name], want[name], np.float32, PATH, f"{dispatcher}: {name}")
        assert np.array_equal(got["load"], want["load"])
        books = {name: int(value) for name, value in vars(got["ledger"]).items()}
        assert ledger.check(**books) is None
        assert books["made"] == int(want["ledger"].made)
        assert not got["overflow"]


def test_b56_a_step_that_overflows_is_refused_and_says_how_much_it_needs():
    """The state comes back unchanged; the demand is what the largest rank really needs; the books say what is missing."""
    tight = config((1, 1, 8), "dedup", capacity_factor=0.5)
    before = fresh_state()
    state, metrics = step_on(tight)(before, batch())
    assert metrics["overflow"]
    assert state.halted
    for name in ("params", "opt_state", "bias"):
        pairs = zip(
            jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(state, name)), strict=True
        )
        assert all(np.array_equal(a, b) for a, b in pairs), name
    load = metrics["load"].reshape(-1)  # one MoE layer, one expert a rank: its load is the rank's demand
    capacity = BATCH * SEQ // 8  # half of K = 2 copies for each of its tokens
    assert metrics["demand"] == load.max() > capacity
    assert int(metrics["ledger"].made) == load.sum() == BATCH * SEQ * MODEL.top_k
    assert int(metrics["ledger"].made - metrics["ledger"].computed) == np.maximum(load - capacity, 0).sum()


WRITER = config((1, 4, 2), "dedup")
"""Its checkpoint is read by every expert axis of 1, 2, 4, 8 beside an fsdp axis of 8, 4, 2, 1."""
READERS = [config((1, 8 // ranks, ranks), "dedup") for ranks in (1, 2, 4, 8)]


def two_losses(config, state):
    """Of the next two steps: the first sees weights and bias, the second the optimizer's moments too."""
    step = step_on(config)
    state, first = step(state, batch(2))
    return [float(first["loss"]), float(step(state, batch(3))[1]["loss"])]


def test_b38_b67_b68_checkpoints_move_between_meshes(tmp_path):
    """Values, optimizer state, expert bias; then the losses of the two steps that follow."""
    state, _ = step_on(WRITER)(fresh_state(), batch())
    experts = state.params["layers"][1]["feed_forward"]["experts"]["down"].reshape(8, -1)
    assert len(np.unique(experts[:, 0])) == 8
    assert all(np.any(bias) for bias in jax.tree.leaves(state.bias))
    goes_on = two_losses(WRITER, state)

    checkpoints = Checkpoints(tmp_path / "ck", keep=1)
    checkpoints.save(1, jax.device_put(state, state_shardings(WRITER, make_mesh(WRITER.mesh))), {})
    checkpoints.wait()
    for reader in READERS:
        restored, _ = checkpoints.restore(abstract_state(reader), make_mesh(reader.mesh))
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
        weights = restored.params["layers"][1]["feed_forward"]["experts"]["gate_up"]
        assert weights.sharding.shard_shape(weights.shape)[0] == 8 // reader.mesh.expert
        losses = two_losses(reader, restored)
        if reader == WRITER:
            assert losses == goes_on  # the silent case: same mesh, same bits
        assert_close(losses[0], goes_on[0], np.float32, PATH, str(reader.mesh))
        assert_close(losses[1], goes_on[1], np.float32, PATH, str(reader.mesh))
    checkpoints.close()


def rank_0_only(state):
    """B67's mistake: both ranks read the file of rank 0."""

    def of_leaf(path, leaf):
        is_expert = any(getattr(key, "key", None) == "experts" for key in path)
        return np.concatenate([leaf[:4], leaf[:4]]) if is_expert else leaf

    return replace(state, params=jax.tree_util.tree_map_with_path(of_leaf, state.params))


def test_broken_twins_of_a_checkpoint_change_a_loss():
    """Half of the experts, a bias or moments that were not saved: each shows in one of the two losses."""
    state, _ = step_on(WRITER)(fresh_state(), batch())
    right = two_losses(WRITER, state)
    limit = 10 * tolerance(np.float32, PATH)
    no_bias = replace(state, bias=jax.tree.map(np.zeros_like, state.bias))
    for broken in (rank_0_only(state), no_bias):
        assert relative_error(two_losses(WRITER, broken)[0], right[0]) > limit
    no_moments = replace(state, opt_state=jax.tree.map(np.zeros_like, state.opt_state))
    losses = two_losses(WRITER, no_moments)
    assert losses[0] == right[0]
    assert relative_error(losses[1], right[1]) > limit
