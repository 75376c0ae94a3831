"""The parts that are timed are the parts of the layer; the peak says what it is a peak of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.dispatch import DispatchPlan, combine
from moe_course.dispatch.plan import worst_case_capacity
from moe_course.models.config import ModelConfig
from moe_course.parallel import EXPERT, MeshConfig, make_mesh
from moe_course.train import latency

CONFIG = ModelConfig(d_model=32, d_ff=16, num_experts=8, top_k=2, num_shared_experts=0)
TOKENS = 64


def mesh_and_capacity(fsdp: int, expert: int):
    mesh = make_mesh(MeshConfig(1, fsdp, expert))
    tokens = TOKENS // mesh.size
    return mesh, worst_case_capacity(tokens, CONFIG.top_k, CONFIG.num_experts, expert) if expert > 1 else 0


@pytest.mark.parametrize(("fsdp", "expert"), [(1, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_the_timed_parts_make_up_the_layer(fsdp, expert):
    """dispatch -> experts -> weigh -> combine, from the pieces, equals the layer timed beside them."""
    mesh, capacity = mesh_and_capacity(fsdp, expert)
    with jax.set_mesh(mesh):
        plan = DispatchPlan(CONFIG.num_experts, mesh.shape[EXPERT], capacity)
        pieces, demand = latency.moe_pieces(CONFIG, mesh, TOKENS, plan)
        sent, out, whole = pieces["dispatch"](), pieces["grouped_gemm"](), pieces["moe_layer"]()
        used = jnp.arange(out.shape[0] // mesh.size)[None] < sent.group_sizes.sum(1)[:, None]
        weighted = jnp.where(used.reshape(-1, 1), out, 0.0) * sent.row_weights[:, None]
        error = jnp.max(jnp.abs(combine(weighted, sent) - whole)) / jnp.max(jnp.abs(whole))
        unweighted = jnp.max(jnp.abs(combine(out, sent) - whole)) / jnp.max(jnp.abs(whole))
        back = pieces["combine"]()
    tolerance = 16 * np.finfo(np.float32).eps
    assert error < tolerance < unweighted
    assert back.shape == (TOKENS, CONFIG.d_model)
    assert int(sent.group_sizes.sum()) == TOKENS * CONFIG.top_k
    assert 0 < int(demand) <= max(capacity, TOKENS * CONFIG.top_k)


@pytest.mark.slow
def test_a_trained_layer_decides_the_routing_and_survives():
    """A router that sends everything to the experts of one rank: the demand shows it. Nothing is donated."""
    mesh, capacity = mesh_and_capacity(2, 4)
    layer = latency.random_layer(CONFIG)
    layer.router.bias[...] = jnp.arange(CONFIG.num_experts, dtype=jnp.float32) * 10
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(layer)))
    hidden = jnp.ones((TOKENS, CONFIG.d_model), jnp.float32)

    measured = latency.measure_latency(CONFIG, mesh, TOKENS, capacity, hidden, rounds=2, layer=layer)

    how = measured.pop("how")
    assert set(measured) == {"dispatch", "combine", "grouped_gemm", "moe_layer"}
    assert all(milliseconds > 0 for milliseconds in measured.values())
    assert f"the routing of a real batch that asks for {capacity} of {capacity} receive rows" in how
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(layer)))


def test_a_dense_model_has_nothing_to_measure():
    dense = ModelConfig(num_layers=1, num_dense_layers=1)
    mesh, _ = mesh_and_capacity(1, 1)
    assert latency.measure_latency(dense, mesh, TOKENS, 0) == {"how": "the model has no MoE layer"}


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2450),
        ("NVIDIA GB200", "float8", 4900),
        ("NVIDIA GH200 480GB", "bfloat16", None),  # not an H200, though it holds the letters
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA H200", "float32", None),
        ("cpu", "float32", None),
    ],
)
def test_published_peaks(kind, dtype, peak):
    assert latency.published_peak(kind, dtype) == peak


def test_b91_a_measured_peak_names_its_method(monkeypatch):
    monkeypatch.setattr(latency, "GEMM_SIZE", 256)
    times = iter([0.5, 0.25, 1.0])
    monkeypatch.setattr(latency, "interleaved", lambda candidates, rounds: {"gemm": list(times)})
    peak = latency.measure_peak("float32", rounds=3, devices=8)
    assert peak["tflops_per_device"] == 2 * 256**3 / 0.25 / 1e12 / 8
    assert peak["dtype"] == "float32"
    assert "256^3" in peak["how"]
    assert "8 simulated devices" in peak["how"]


def test_the_real_measurement_runs(monkeypatch):
    monkeypatch.setattr(latency, "GEMM_SIZE", 128)
    assert latency.measure_peak(rounds=1)["tflops_per_device"] > 0
