"""What the partitioned train step moves of its weights: bfloat16 gathers, scattered gradients.

Read from the program as XLA's partitioner left it. XLA:CPU then turns every bfloat16 collective into a float32 one,
and keeps as all-reduce and slice what other backends make one reduce-scatter of.
"""

import re
from collections import Counter
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_course import parallel
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, batch_sharding, gather_weight, make_mesh, matrix_spec
from moe_course.train.config import TrainConfig
from moe_course.train.step import abstract_state, make_train_step

MODEL = ModelConfig(
    vocab_size=320, d_model=48, num_layers=2, num_dense_layers=1, num_heads=2, q_lora_rank=24, kv_lora_rank=22,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12, d_ff_dense=112, d_ff=28, num_experts=4, top_k=2,
    compute_dtype="bfloat16",
)  # fmt: skip
BATCH, SEQ = 8, 16
FLOATS = ("f32", "bf16")


@contextmanager
def without_cache():
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def partitioned(lowered, folder) -> str:
    """The program of a lowered function after SPMD partitioning."""
    dump = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd.*", "xla_backend_optimization_level": 0}
    # A program from the cache on disk goes through no pass.
    with without_cache():
        lowered.compile(dump)
    (file,) = folder.glob("*after_spmd-partitioning*")
    return file.read_text()


def collectives(text: str) -> list[tuple[str, str, tuple[int, ...], str]]:
    """(operation, dtype, shape of the result, name) of every collective of one array."""
    pattern = r"%(\S+) = (\w+)\[([\d,]*)\]\S* (all-gather|reduce-scatter|all-reduce)\("
    return [
        (op, dtype, tuple(int(n) for n in shape.split(",") if n), name)
        for name, dtype, shape, op in re.findall(pattern, text)
    ]


def users(text: str, name: str) -> list[str]:
    """Operations that read an array."""
    return re.findall(rf" ([\w-]+)\([^\n]*%{re.escape(name)}[,)]", text)


def faults(text: str, weights: Counter) -> list[str]:
    """What is wrong with how a program moves its weights; ``weights``: shapes of whole matrices, as computed with."""
    found = []
    gathered = {(dtype, shape) for op, dtype, shape, _ in collectives(text) if op == "all-gather"}
    found += [f"float32 gathered: {shape}" for dtype, shape in gathered if dtype == "f32"]
    found += [f"not gathered: {shape}" for shape in weights if ("bf16", shape) not in gathered]
    for op, dtype, shape, name in collectives(text):
        if op == "all-reduce" and dtype in FLOATS and shape in weights:
            how = set(users(text, name))
            if how != {"dynamic-slice"}:
                found.append(f"whole gradient {shape} read by {sorted(how)}")
    return found


@pytest.mark.slow
def test_the_step_gathers_bfloat16_and_scatters_gradients(tmp_path):
    config = TrainConfig(
        model=MODEL, mesh=MeshConfig(2, 2, 2), devices=8, batch_size=BATCH, seq_len=SEQ, steps=100
    )
    mesh = make_mesh(config.mesh)
    cut = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=batch_sharding(mesh))
    batch = {"tokens": cut((BATCH, SEQ + 1)), "segments": cut((BATCH, SEQ + 1)), "domain": cut((BATCH,))}
    state = abstract_state(config)
    with jax.set_mesh(mesh):
        text = partitioned(make_train_step(config, mesh, 0).jitted.lower(state, batch), tmp_path)

    weights, experts = Counter(), []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        path = parallel.path_names(keys)
        inner = leaf.shape[1:] if path[0] == "layers" else leaf.shape
        if "experts" in path:
            experts.append((inner[0] // config.mesh.expert, *inner[1:]))
        elif len(inner) == 2 and "router" not in path:
            weights[inner] += 1
    assert (
        sum(weights.values()) == 2 + 2 * 5 + 2 + 2
    )  # embedding, head; attention; dense and shared feed-forward
    assert faults(text, weights) == []
    # The broken twin: whoever reads a whole gradient takes all of it. The embedding's never is whole.
    told = "\n".join(faults(text.replace(" dynamic-slice(", " copy("), weights))
    assert all(f"whole gradient {shape} " in told for shape in weights if shape != (320, 48))
    # Experts: gathered in bfloat16, scattered first, and only then summed over the replicas.
    found = {(op, dtype, shape) for op, dtype, shape, _ in collectives(text)}
    for shape in experts:
        parts = {(op, dtype, there) for op, dtype, there in found if np.prod(there) == np.prod(shape) // 2}
        assert ("all-gather", "bf16", shape) in found
        assert {"reduce-scatter", "all-reduce"} <= {op for op, dtype, _ in parts if dtype == "bf16"}
        assert not [f for f in found if f[0] == "all-reduce" and f[2] == shape], (
            "whole expert gradients are summed"
        )


@pytest.mark.parametrize("twin", [None, "gathers the master"])
def test_broken_twins_are_noticed(tmp_path, monkeypatch, twin):
    """One matrix: as it is; cast after the gather."""
    mesh, shape = make_mesh(MeshConfig(1, 4, 2)), (48, 112)
    constrain = jax.lax.with_sharding_constraint

    def gathers_the_master(weight, spec, dtype):
        return constrain(constrain(weight, P()), P()).astype(dtype)

    def loss(w, x):
        gather = gathers_the_master if twin == "gathers the master" else parallel._gather
        monkeypatch.setattr(parallel, "_gather", gather)
        return jnp.square((x @ gather_weight(w, jnp.bfloat16)).astype(jnp.float32)).sum()

    spec = NamedSharding(mesh, matrix_spec(shape, 4))
    w = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec)
    x = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16, sharding=batch_sharding(mesh))
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss), out_shardings=spec).lower(w, x)
        found = faults(partitioned(lowered, tmp_path), Counter([shape]))
    expected = {None: [], "gathers the master": ["float32 gathered", "not gathered"]}
    assert [one.partition(":")[0].partition(" (")[0] for one in found] == expected[twin]
