"""The compiled step over every dispatcher, and checkpoints that move between expert axes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from moe_course.dispatch import ledger
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.train.checkpoint import Checkpoints
from moe_course.train.config import TrainConfig
from moe_course.train.step import abstract_state, init_state, make_eval_step, make_train_step
from tests.oracle import assert_close

BATCH, SEQ = 8, 8
MODEL = ModelConfig(
    d_model=16, num_layers=2, num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4,
    v_head_dim=4, d_ff_dense=16, d_ff=8, num_experts=8, top_k=2,
)  # fmt: skip
PATH = 4 * BATCH * SEQ * MODEL.num_layers
"""Terms that rounding adds up from an embedding to the loss, generously."""


def config(mesh, dispatcher="all_to_all", **changes) -> TrainConfig:
    mesh = MeshConfig(*mesh)
    base = TrainConfig(model=MODEL, mesh=mesh, devices=mesh.size, batch_size=BATCH, seq_len=SEQ, steps=100)
    return replace(base, dispatcher=dispatcher, **({"capacity_factor": 8.0} | changes))


def batch():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, (BATCH, SEQ + 1)).astype(np.int32)
    return {
        "tokens": tokens,
        "segments": np.zeros_like(tokens),
        "domain": np.arange(BATCH, dtype=np.int32) % 4,
    }


def one_step(config):
    mesh = make_mesh(config.mesh)
    step = make_train_step(config, mesh, 0)
    state, metrics = step(init_state(config, mesh), jax.device_put(batch(), batch_sharding(mesh)))
    return jax.device_get((state, metrics))


@pytest.mark.slow
def test_every_dispatcher_trains_the_same_model():
    """One optimizer step on data x fsdp x expert = 2 x 2 x 2: loss, gradient norm, load and books."""
    want = one_step(config((1, 1, 1)))[1]
    for dispatcher in ("all_to_all", "all_gather", "ragged", "dedup"):
        _, got = one_step(config((2, 2, 2), dispatcher))
        for name in ("loss", "gradient_norm", "balance_loss"):
            assert_close(got[name], want[name], np.float32, PATH, f"{dispatcher}: {name}")
        assert np.array_equal(got["load"], want["load"])
        books = {name: int(value) for name, value in vars(got["ledger"]).items()}
        assert ledger.check(**books) is None
        assert books["made"] == int(want["ledger"].made)
        assert not got["overflow"]


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["ragged", "dedup"])
def test_a_step_that_overflows_is_refused_and_says_how_much_it_needs(dispatcher):
    """The state comes back unchanged; the demand is what the largest rank really needs."""
    tight = config((1, 1, 8), dispatcher, capacity_factor=0.5)
    before = jax.device_get(init_state(tight, make_mesh(tight.mesh)))
    state, metrics = one_step(tight)
    assert metrics["overflow"]
    assert state.halted
    assert all(map(np.array_equal, jax.tree.leaves(before.params), jax.tree.leaves(state.params)))
    _, roomy = one_step(config((1, 1, 8), dispatcher))
    loads = roomy["load"].reshape(-1, 8)  # one expert a rank: its load is the rank's demand
    assert roomy["demand"] == loads.max()


@pytest.mark.slow
def test_b67_b68_checkpoints_move_between_expert_axes(tmp_path):
    """Saved on an expert axis of 2, loaded on 1, 2, 4 and 8: every leaf, and the loss that the weights give."""
    saved_on = config((1, 1, 2), "dedup")
    state, _ = one_step(saved_on)
    assert (
        len(np.unique(state.params["layers"][1]["feed_forward"]["experts"]["down"].reshape(8, -1)[:, 0])) == 8
    )
    checkpoints = Checkpoints(tmp_path / "ck", keep=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    losses = []
    for ranks in (1, 2, 4, 8):
        here = config((1, 1, ranks), "dedup")
        mesh = make_mesh(here.mesh)
        restored, _ = checkpoints.restore(abstract_state(here), mesh)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
        on_device = jax.device_put(batch(), batch_sharding(mesh))
        sums = jax.device_get(make_eval_step(here, mesh)(restored.params, restored.bias, on_device))
        losses.append(float(sums["nats"]))
    checkpoints.close()
    for loss in losses[1:]:
        assert_close(loss, losses[0], np.float32, PATH)
