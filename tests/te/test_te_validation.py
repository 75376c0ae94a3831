"""What the adapters refuse, with words that help: TE itself would trace most of these calls."""

import jax
import jax.numpy as jnp
import pytest

from moe_course import te
from moe_course.errors import SettingError
from moe_course.grouped_gemm import grouped_gemm, why_not
from moe_course.parallel import MeshConfig, make_mesh
from moe_course.quant import MXFP8, NVFP4, FP8BlockScaling, FP8CurrentScaling, FP8DelayedScaling
from moe_course.routing import RouterConfig, Routing
from moe_course.te import native
from tests.te import fake_te

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(capability)``: Transformer Engine in plain JAX, on such a GPU."""
    space = fake_te.namespace()
    monkeypatch.setattr(native, "api", lambda: space)

    def choose(capability):
        monkeypatch.setattr(fake_te, "CAPABILITY", capability)
        return space

    return choose


def zeros(*shape, dtype=BF16):
    return jnp.zeros(shape, dtype)


SIGMOID = {"score_fn": "sigmoid"}


@pytest.mark.parametrize(
    ("config", "bias", "says"),
    [
        (RouterConfig(8, 2), True, "bias goes with sigmoid scores only"),
        (RouterConfig(8, 2, normalize=False, **SIGMOID), False, "sigmoid weights are always normalised"),
        (RouterConfig(8, 3, num_groups=4, top_groups=2, **SIGMOID), False, "top_k 3 is not a multiple"),
        (
            RouterConfig(8, 4, num_groups=2, top_groups=2, group_score_top=1, **SIGMOID),
            False,
            "best top_k / top_groups = 2, not 1",
        ),
    ],
)
def test_what_te_cannot_route_is_refused(gpu, config, bias, says):
    gpu(90)
    with pytest.raises(SettingError, match=says):
        te.route(zeros(4, 8, dtype=F32), config, bias=zeros(8, dtype=F32) if bias else None)


def test_router_shapes(gpu):
    gpu(90)
    with pytest.raises(ValueError, match=r"logits must be \[4, 8\], got \[4, 6\]"):
        te.route(zeros(4, 6, dtype=F32), RouterConfig(8, 2))
    with pytest.raises(ValueError, match=r"load must be \[8\]"):  # TE does not look
        te.balance(zeros(4, 8, dtype=F32), zeros(7, dtype=jnp.int32), RouterConfig(8, 2))
    with pytest.raises(TypeError, match="load must be integers"):
        te.balance(zeros(4, 8, dtype=F32), zeros(8, dtype=F32), RouterConfig(8, 2))


ROWS, KERNELS, SIZES = zeros(256, 128), zeros(2, 128, 128), zeros(2, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((zeros(256, 64), KERNELS, SIZES), ValueError, r"rows must be \[any, 128\], got \[256, 64\]"),
        ((ROWS, zeros(3, 128, 128), SIZES), ValueError, r"group_sizes must be \[3\], got \[2\]"),
        ((ROWS, KERNELS, zeros(2, dtype=F32)), TypeError, "group_sizes must be integers, got float32"),
        ((zeros(256, 128, dtype=F32), KERNELS, SIZES), TypeError, "rows must be bfloat16"),
        ((ROWS, zeros(2, 128, 128, dtype=F32), SIZES), TypeError, "kernels must be bfloat16"),
        ((ROWS[None], KERNELS, SIZES), ValueError, "rows must be"),
    ],
)
def test_grouped_gemm_shapes_and_dtypes(gpu, arguments, error, says):
    gpu(100)
    with pytest.raises(error, match=says):
        te.grouped_gemm(*arguments)
    with pytest.raises(error, match=says):
        te.grouped_gemm(*arguments, recipe=MXFP8())


@pytest.mark.parametrize(
    ("rows", "kernels", "says"),
    [
        (zeros(200, 128), KERNELS, "rows is 200"),
        (zeros(256, 96), zeros(2, 96, 128), "d_model is 96"),
        (ROWS, zeros(2, 128, 192), "d_ff is 192"),
    ],
)
def test_mxfp8_needs_tiles_of_128(gpu, rows, kernels, says):
    gpu(100)
    te.grouped_gemm(rows, kernels, SIZES)  # bf16 does not
    with pytest.raises(SettingError, match=says):
        te.grouped_gemm(rows, kernels, SIZES, recipe=MXFP8())


@pytest.mark.parametrize(
    ("capability", "recipe", "says"),
    [
        (80, None, "too old for TE's grouped_gemm"),
        (90, MXFP8(), "too old for TE's grouped_gemm_mxfp8"),
        (120, None, "below compute capability 12.0"),
        (100, FP8CurrentScaling(), "no kernel with sizes on the device for fprop"),
        (100, NVFP4(), "has no adapter"),
        (100, FP8BlockScaling(), "has no adapter"),
        (100, FP8DelayedScaling(), "has no adapter"),
        (100, MXFP8(rounding="floor"), "has no adapter"),
    ],
)
def test_sizes_stay_on_the_device_or_the_call_is_refused(gpu, capability, recipe, says):
    gpu(capability)
    with pytest.raises(SettingError, match=says):
        te.grouped_gemm(ROWS, KERNELS, SIZES, recipe=recipe)


def test_enforcing_v2_by_te_s_variable_gives_the_same_words(gpu, monkeypatch):
    def strict(*_):
        raise RuntimeError("The TE V2 grouped GEMM is not supported, reason: cuBLAS.")

    monkeypatch.setattr(gpu(100), "is_v2_grouped_gemm_supported", strict)
    with pytest.raises(SettingError, match=r"fprop here: The TE V2.*sizes_on_device=False"):
        te.grouped_gemm(ROWS, KERNELS, SIZES)


def test_grouped_gemm_in_shard_map_needs_the_check_off(gpu, devices):
    gpu(100)
    mesh = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,), devices=devices[:2])
    spec = jax.sharding.PartitionSpec("expert")

    def run(check):
        f = jax.shard_map(te.grouped_gemm, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        return jax.eval_shape(f, zeros(512, 128), zeros(4, 128, 128), zeros(4, dtype=jnp.int32))

    assert run(False).shape == (512, 128)
    with pytest.raises(SettingError, match="check_vma=False"):
        run(True)


def test_dense_shapes_dtypes_and_gpus(gpu):
    gpu(90)
    with pytest.raises(ValueError, match=r"x must be \[4, 64\]"):
        te.dense(zeros(4, 32), zeros(64, 64))
    with pytest.raises(TypeError, match="kernel must be bfloat16"):
        te.dense(zeros(4, 64), zeros(64, 64, dtype=F32))
    with pytest.raises(SettingError, match="too old for TE's dense_mxfp8"):
        te.dense(zeros(32, 64), zeros(64, 64), recipe=MXFP8())
    with pytest.raises(SettingError, match="the number of rows is 4, which a quantised GEMM needs"):
        te.dense(zeros(4, 64), zeros(64, 64), recipe=FP8CurrentScaling())
    with pytest.raises(ValueError, match=r"down must be \[96, 64\]"):
        te.layernorm_mlp(zeros(4, 64), zeros(64), zeros(64, 192), zeros(96, 32))
    with pytest.raises(ValueError, match=r"gate_up must be \[64, 192\]"):
        te.layernorm_mlp(zeros(4, 64), zeros(64), zeros(64, 128), zeros(96, 64))


def test_permute_shapes(gpu):
    gpu(90)
    ids, weights = jnp.zeros((4, 2), jnp.int32), zeros(4, 2, dtype=F32)
    with pytest.raises(ValueError, match=r"expert_ids must be \[5, any\]"):
        te.permute(zeros(5, 8), Routing(ids, weights, None), 8)
    with pytest.raises(SettingError, match="at least one row"):
        te.permute(zeros(0, 8), Routing(ids[:0], weights[:0], None), 8)


EXCHANGE = {"num_experts": 8, "top_k": 2, "ranks": 4, "groups": 2}
EXCHANGE |= {"tokens_per_rank": 8, "d_model": 16, "capacity": 256}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": 1}, "2 ranks at least"),
        ({"num_experts": 6}, "6 experts do not divide over 4 ranks"),
        ({"top_k": 9}, "top_k is 9 of 8 experts"),
        ({"capacity": 200}, "multiple of 128"),
        ({"d_model": 12}, "16 bytes"),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(change, says):
    with pytest.raises(SettingError, match=says):
        te.ExpertParallel(**EXCHANGE | change)


def test_an_exchange_knows_one_axis_outside_the_experts(devices):
    with pytest.raises(SettingError, match=r"--mesh.data or --mesh.fsdp to 1"):
        te.ExpertParallel.for_mesh(
            make_mesh(MeshConfig(2, 2, 2)), num_experts=8, top_k=2, tokens=64, d_model=16, factor=1.0
        )
    with pytest.raises(SettingError, match="63 tokens do not divide"):
        te.ExpertParallel.for_mesh(
            make_mesh(MeshConfig(1, 2, 4)), num_experts=8, top_k=2, tokens=63, d_model=16, factor=1.0
        )
    with pytest.raises(SettingError, match=r"factor is 0.5"):
        te.receive_capacity(64, 2, 8, 4, 0.5)


def test_dispatch_and_combine_shapes_dtypes_and_gpus(gpu):
    gpu(90)
    setup = te.ExpertParallel(**EXCHANGE)
    routing = Routing(jnp.zeros((64, 2), jnp.int32), zeros(64, 2, dtype=F32), None)
    with pytest.raises(ValueError, match=r"x must be \[64, 16\]"):
        te.dispatch(zeros(32, 16), routing, setup=setup)
    with pytest.raises(TypeError, match="x must be bfloat16"):
        te.dispatch(zeros(64, 16, dtype=F32), routing, setup=setup)
    with pytest.raises(TypeError, match="expert_ids must be integers"):
        te.dispatch(zeros(64, 16), Routing(routing.weights, routing.weights, None), setup=setup)
    with pytest.raises(SettingError, match=r"axes None.*with te.mesh_resources"):
        te.dispatch(zeros(64, 16), routing, setup=setup)
    received = te.Received(None, None, None, None, None, setup)
    with pytest.raises(ValueError, match=r"rows must be \[2048, 16\]"):
        te.combine(zeros(64, 16), received)
    gpu(80)
    with pytest.raises(SettingError, match="too old for TE's dispatch"):
        te.dispatch(zeros(64, 16), routing, setup=setup)
    with pytest.raises(SettingError, match="too old"):
        te.bootstrap(setup, None)


def test_moe_refuses_what_its_kernel_does_not_have(gpu):
    gpu(100)
    setup = te.ExpertParallel(**EXCHANGE)
    x, weights = zeros(8, 8, 16), (zeros(16, 8), zeros(8, 16, 64), zeros(8, 32, 16))

    def refused(error, says, x=x, config=RouterConfig(8, 2), weights=weights, **settings):  # noqa: B008
        with pytest.raises(error, match=says):
            te.moe(x, *weights, config, setup=setup, **settings)

    refused(SettingError, "8 experts and 4 picks", config=RouterConfig(8, 4))
    refused(SettingError, "groups by logits", config=RouterConfig(8, 2, num_groups=4, top_groups=2))
    refused(SettingError, "bias goes with sigmoid", bias=zeros(8))
    refused(ValueError, "down must be", weights=(*weights[:2], zeros(8, 32, 17)))
    refused(ValueError, "divides by 8", x=zeros(4, 16, 16))
    refused(TypeError, "x must be bfloat16", x=zeros(8, 8, 16, dtype=F32))
    refused(SettingError, "multiples of 128", recipe=MXFP8())
    refused(SettingError, "bf16 and MXFP8", recipe=FP8CurrentScaling())
    gpu(90)
    refused(SettingError, "too old for TE's moe_mxfp8", recipe=MXFP8())


def test_unknown_policy(gpu):
    gpu(90)
    with pytest.raises(SettingError, match="unknown policy 'dots'"):
        te.remat_policy("dots")


def test_the_backend_says_why_it_cannot_run_here():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    assert why_not("te").startswith("JAX uses no GPU here")
    with pytest.raises(SettingError, match=r"'te' cannot run here: JAX uses no GPU.*backend='tiled'"):
        grouped_gemm(ROWS, KERNELS, SIZES, backend="te")


def test_the_backend_gives_te_the_recipe(gpu, monkeypatch):
    space, seen = gpu(100), []
    monkeypatch.setattr("moe_course.grouped_gemm.resolve_backend", lambda backend: backend)
    monkeypatch.setattr(space, "grouped_dense", lambda x, k, s, **kw: seen.append(kw) or x)
    grouped_gemm(ROWS, KERNELS, SIZES, backend="te")
    grouped_gemm(ROWS, KERNELS, SIZES, backend="te", recipe=MXFP8())
    assert [set(kw) for kw in seen] == [set(), {"quantizer_set"}], "TE quantises; we do not emulate it"
