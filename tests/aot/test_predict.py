"""The formulas of collectives and FLOPs against a step compiled for 8 simulated devices: no GPU compiler needed."""

from dataclasses import replace

import jax
import pytest

from moe_course.aot import fit_to, flops, hlo, predict
from moe_course.aot.worker import arguments, bytes_per_device, compile_step, memory
from moe_course.models.config import DEEPSEEK_V3, ModelConfig
from moe_course.parallel import make_mesh
from moe_course.train.config import TrainConfig

MODEL = ModelConfig(
    d_model=64,
    num_layers=3,
    num_dense_layers=1,
    num_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    d_ff_dense=128,
    d_ff=32,
    num_experts=8,
    top_k=2,
    vocab_size=128,
)
CONFIG = fit_to(TrainConfig(model=MODEL, seq_len=32, backend="ragged_dot", capacity_factor=1.5), 8, ep=4)


@pytest.fixture(scope="module", params=["none", "full"])
def step(request):
    config = replace(CONFIG, remat=request.param)
    mesh = make_mesh(config.mesh)
    compiled, _ = compile_step(config, mesh)
    return config, mesh, compiled, hlo.parse(compiled.as_text())


@pytest.mark.slow
def test_collectives_of_a_step_are_those_of_the_formula(step):
    config, mesh, _, module = step
    found = hlo.collectives(module, dict(mesh.shape))
    # XLA:CPU of either version leaves the embedding's gradient whole, as the GPU compiler of JAX 0.10 does.
    entries = {(e["kind"], e["axis"]): e for e in predict.beside(found, config, "0.10")}
    for key in (("all-to-all", "expert"), ("all-gather", "fsdp")):
        assert entries[key]["bytes"] == entries[key]["predicted"] > 0, key
    for axis in ("expert", "fsdp+expert"):
        entry = entries["all-reduce", axis]
        assert entry["bytes"] == pytest.approx(entry["predicted"], rel=0.01), axis
    # XLA:CPU writes most scatters as an all-reduce and a slice, which sends twice as much.
    scattered, reduced = entries["reduce-scatter", "fsdp"], entries["all-reduce", "fsdp"]
    assert scattered["bytes"] + reduced["bytes"] / 2 == pytest.approx(scattered["predicted"], rel=0.01)


@pytest.mark.slow
def test_flops_of_a_step_are_those_of_the_formula(step):
    """The padded rows and the products with other experts that ``ragged_dot`` becomes, too."""
    config, _, _, module = step
    found = flops.split(hlo.products(module), config)
    assert found["compiled"] == found["total"]
    assert module.unknown_loops == []
    assert min(found["padding"], found["fallback"], found["masked"]) > 0
    assert (found["recompute"] > 0) == (config.remat == "full")
    by_phase = found["compiled_by_phase"]
    assert set(by_phase) == {"forward", "backward"} | ({"recompute"} if config.remat == "full" else set())


@pytest.mark.slow
def test_state_and_batch_are_the_arguments(step):
    config, mesh, compiled, _ = step
    assert sum(map(bytes_per_device, arguments(config, mesh))) == memory(compiled)["argument_size"]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments(config, mesh)))


def test_flops_of_deepseek_v3_by_part():
    """Against figures worked out by hand: T = 4,096 tokens; forward terms x 3; a 1/8 of the core masked away."""
    model = replace(DEEPSEEK_V3, mtp_depth=0)
    config = replace(
        fit_to(TrainConfig(model=model, seq_len=4096, capacity_factor=1.25), 256, ep=64), remat="full"
    )
    parts = flops.predicted(config)
    assert parts["model"] == pytest.approx(1025.8e12, rel=1e-4)
    core = 4096 * 61 * 128 * 4096 * (192 + 128)
    assert parts["masked"] == pytest.approx(3 * core / 8, rel=1e-9)
    assert parts["padding"] == parts["fallback"] == 0
    expert = 4096 * 58 * 8 * 3 * 2 * 7168 * 2048
    dense = flops.predicted(replace(config, backend="ragged_dot"))
    products = 3 * expert + expert * 2 // 3
    assert dense["padding"] == pytest.approx(products / 4, rel=1e-9)
    assert dense["fallback"] == pytest.approx(products * 1.25 * 3, rel=1e-9)
    assert flops.predicted(replace(config, remat="none"))["recompute"] == 0


@pytest.mark.parametrize("remat", ["none", "experts", "attention", "full"])
def test_keeping_more_recomputes_less(remat):
    order = ["none", "experts", "attention", "full"]
    again = [flops.predicted(replace(CONFIG, remat=name))["recompute"] for name in order]
    assert again == sorted(again)
    assert len(set(again)) == len(again)
    assert flops.predicted(replace(CONFIG, remat="offload")) == flops.predicted(
        replace(CONFIG, remat="attention")
    )
