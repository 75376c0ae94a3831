"""``moe-course export-hf``: from a run's folder to a Hugging Face folder."""

import jax
import numpy as np
import pytest

from moe_course import cli
from moe_course.interop.huggingface import _abstract, import_model
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.train.checkpoint import Checkpoints
from moe_course.train.config import TrainConfig
from moe_course.train.run_dir import RunDir
from moe_course.train.step import abstract_state, state_shardings

MODEL = ModelConfig(
    vocab_size=264, d_model=8, num_layers=2, num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4,
    v_head_dim=4, d_ff_dense=8, d_ff=4, num_experts=4, top_k=2, mtp_depth=1, scaled_init=False,
)  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run's folder, written on 8 devices, and the weights of its checkpoint."""
    config = TrainConfig(model=MODEL, mesh=MeshConfig(1, 2, 4), seq_len=32)
    folder = RunDir(tmp_path / "run")
    folder.create(config, "tiny")
    rng = np.random.default_rng(0)

    def draw(leaf):
        return rng.integers(0, 100, leaf.shape).astype(leaf.dtype)

    state = jax.tree.map(draw, abstract_state(config))
    checkpoints = Checkpoints(folder.checkpoints, keep=1)
    checkpoints.save(3, jax.device_put(state, state_shardings(config, make_mesh(config.mesh))), {})
    checkpoints.close()
    return folder.path, state


def test_the_newest_checkpoint_is_written(run, tmp_path, capsys):
    path, state = run
    assert cli.main(["export-hf", str(path), str(tmp_path / "out"), "--shard-gb", "1e-5"]) == 0
    imported = import_model(tmp_path / "out")
    assert imported.config == MODEL
    assert jax.tree.structure(imported[1:]) == jax.tree.structure(_abstract(MODEL))
    pairs = zip(jax.tree.leaves(imported[1:]), jax.tree.leaves((state.params, state.bias)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    count = len(list((tmp_path / "out").glob("*.safetensors")))
    assert count > 2
    assert f"{count} files" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["export-hf", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "there is no run in" in capsys.readouterr().err
