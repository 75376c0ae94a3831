"""Checkpoints: any mesh, full disk, nothing there."""

import shutil
from collections import namedtuple
from dataclasses import replace

import jax
import numpy as np
import pytest

from moe_course.errors import RunError
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.train.checkpoint import Checkpoints
from moe_course.train.config import TrainConfig
from moe_course.train.step import abstract_state, init_state

CONFIG = TrainConfig(
    model=ModelConfig(d_model=16, num_layers=2, num_heads=2, num_experts=8, top_k=2, d_ff=8, d_ff_dense=16)
)


@pytest.fixture
def saved(tmp_path):
    """A state whose expert bias, experts and moments are all distinct (B38, B67), saved from 2 x 4 devices."""
    mesh = make_mesh(CONFIG.mesh)
    state = init_state(CONFIG, mesh)

    def distinct(leaf):
        if leaf.dtype == bool:
            return leaf
        values = np.arange(leaf.size, dtype=np.float64).reshape(leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    state = jax.tree.map(distinct, state)
    checkpoints = Checkpoints(tmp_path / "ck", keep=2)
    checkpoints.save(7, state, {"bucket": 1, "seconds": 2.5, "data": "x"})
    checkpoints.wait()
    yield checkpoints, state
    checkpoints.close()


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2), (1, 2, 4), (2, 1, 4), (1, 1, 8), (1, 8, 1)])
def test_loads_on_any_mesh(saved, mesh):
    checkpoints, state = saved
    config = replace(CONFIG, mesh=MeshConfig(*mesh))
    restored, meta = checkpoints.restore(abstract_state(config), make_mesh(config.mesh))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert meta == {"bucket": 1, "seconds": 2.5, "data": "x"}
    gate_up = restored.params["layers"]["moe"]["feed_forward"]["experts"]["gate_up"]
    assert gate_up.sharding.shard_shape(gate_up.shape)[:2] == (1, 8 // mesh[2])


def test_layers_that_were_kept_apart_are_told_from_damage(saved, tmp_path):
    _, state = saved
    apart = replace(state, params={"layers": {0: {"kernel": np.zeros(2)}, 1: {"kernel": np.zeros(2)}}})
    old = Checkpoints(tmp_path / "old", keep=1)
    old.save(3, apart, {})
    old.wait()
    with pytest.raises(RunError, match=r"step 3 .* kept each layer's weights apart; .* with another --name"):
        old.restore(abstract_state(CONFIG), make_mesh(CONFIG.mesh))
    old.close()


def test_full_disk_is_told_before_anything_is_written(saved, monkeypatch):
    checkpoints, state = saved
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RunError, match=r"0 MB are free; the last good checkpoint is step 7"):
        checkpoints.save(8, state, {})
    assert checkpoints.latest() == 7
    assert not (checkpoints.directory / "8").exists()


@pytest.mark.parametrize("damage", ["cut", "one bit", "gone"])
def test_damage_is_found_before_anything_is_used(saved, damage):
    checkpoints, _ = saved
    file = max((checkpoints.directory / "7").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(
        RunError, match=r"step 7 cannot be read \(.* is damaged\). Delete .*/7 and start again"
    ):
        checkpoints.restore(abstract_state(CONFIG), make_mesh(CONFIG.mesh))


def test_no_checkpoint_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", keep=1)
    with pytest.raises(RunError, match=r"no checkpoint in .* Leave out --resume"):
        checkpoints.restore(abstract_state(CONFIG), make_mesh(CONFIG.mesh))
    checkpoints.close()
