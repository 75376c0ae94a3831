"""The Pallas kernels lower for CUDA on a machine without a GPU. They have not run on one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe_course.grouped_gemm import pallas
from moe_course.varying import vary_alike

TRITON = "__gpu$xla.gpu.triton"
# JAX 0.12 announces the end of Pallas on Triton; moe_course.grouped_gemm.pallas says what that means.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
SIZES = [(5, 0, 16, 17), (0, 0, 0, 0), (40, 0, 0, 0), (0, 0, 0, 41), (64, 64, 64, 64)]


def abstract_gpu(axis_sizes=(), axis_names=()):
    """A mesh that says which GPU to lower for: JAX 0.12 asks, JAX 0.10 does not."""
    try:
        from jax.sharding import AbstractDevice
    except ImportError:
        return AbstractMesh(axis_sizes, axis_names, (AxisType.Auto,) * len(axis_names))
    device = AbstractDevice(device_kind="NVIDIA B200", num_cores=None, platform="gpu")
    axis_types = (AxisType.Auto,) * len(axis_names)
    return AbstractMesh(axis_sizes, axis_names, axis_types, abstract_device=device)


def shapes(rows, d_model, d_ff, experts, dtype):
    kinds = ((rows, d_model), dtype), ((experts, d_model, d_ff), dtype), ((experts,), jnp.int32)
    return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in kinds]


def gradients(rows, kernels, sizes):
    def loss(rows, kernels):
        return jnp.sum(pallas.grouped_gemm(rows, kernels, sizes).astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1))(rows, kernels)


def lower(f, *arguments, mesh=None) -> str:
    with jax.sharding.use_abstract_mesh(mesh or abstract_gpu()):
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_product_dgrad_and_wgrad_lower_for_cuda(dtype):
    text = lower(gradients, *shapes(512, 192, 384, 8, dtype))
    assert text.count(f"custom_call @{TRITON}(") == 3
    names = re.findall(r'name = "(\w+)"', text)
    assert names == ["_product_program", "_product_program", "_wgrad_program"]
    assert text.count("num_stages = 2") == 3, "the pipeliner that double-buffers the loads"


def triton_modules(text: str) -> list[str]:
    """The Triton programs inside a lowered module, as text."""
    from jax._src.lib import triton
    from jax._src.lib.mlir import ir

    def byte(match):
        code = match.group(1)
        return bytes([int(code, 16)]) if len(code) == 2 else code

    context = ir.Context()
    triton.dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    programs = []
    for escaped in re.findall(r'ir = "((?:[^"\\]|\\.)*)"', text):
        bytecode = re.sub(rb'\\([0-9A-Fa-f]{2}|\\|")', byte, escaped.encode("latin1"))
        with context:
            programs.append(str(ir.Module.parse(bytecode)))
    return programs


def test_b46_addresses_of_large_arrays_are_64_bits():
    def programs(rows):
        return triton_modules(lower(pallas.grouped_gemm, *shapes(rows, 7168, 128, 8, jnp.bfloat16)))

    (small,), (large,) = programs(1024), programs(524_288)
    offsets = r"arith.muli .*tensor<64x32x(i\d+)>"  # of the blocks of rows
    assert set(re.findall(offsets, small)) == {"i32"}
    assert set(re.findall(offsets, large)) == {"i64"}
    assert small.count("tt.dot ") == large.count("tt.dot ") == 1


def test_lowers_inside_shard_map():
    mesh = abstract_gpu((2, 4), ("data", "expert"))

    def local(rows, kernels, sizes):
        return pallas.grouped_gemm(*vary_alike(rows, kernels, sizes[0]))

    def sharded(rows, kernels, sizes):
        specs = P(("data", "expert")), P("expert"), P(("data", "expert"))
        f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(("data", "expert")), check_vma=True)
        return jax.grad(lambda r, k: jnp.sum(f(r, k, sizes).astype(jnp.float32)), (0, 1))(rows, kernels)

    rows, kernels, _ = shapes(8 * 128, 64, 64, 8, jnp.bfloat16)
    text = lower(sharded, rows, kernels, jax.ShapeDtypeStruct((8, 2), jnp.int32), mesh=mesh)
    assert text.count(f"custom_call @{TRITON}(") >= 2
    assert "all_reduce" in text, "the gradient of kernels replicated over data"


@pytest.mark.parametrize(
    "sizes", [(5, 0, 16, 17), (0, 0, 0, 0), (40, 0, 0, 0), (0, 0, 0, 41), (64, 64, 64, 64)]
)
def test_tile_map_covers_each_row_once(sizes):
    expert, begin, end = (np.asarray(a) for a in pallas.tile_map(jnp.array(sizes), 60, 16))
    seen = np.full(60, -1)
    for e, first, last in zip(expert, begin, end, strict=True):
        assert np.all(seen[first:last] == -1)
        assert last - first <= 16
        seen[first:last] = e
    want = np.repeat(np.arange(4), sizes)[:60]
    assert np.array_equal(seen, np.pad(want, (0, 60 - len(want)), constant_values=-1))
