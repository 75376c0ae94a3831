"""Recipes in a whole training step: they reach the experts, nothing else, and round anew at each step."""

import typing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.grouped_gemm.quantized import count_quantized_gemms
from moe_course.layers.moe import MoE
from moe_course.models import deepseek
from moe_course.models.config import ModelConfig
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.quant import RECIPES
from moe_course.routing import RouterConfig
from moe_course.train.config import OptimizerConfig, TrainConfig
from moe_course.train.step import abstract_state, batch_loss, dispatch_plan, init_state, make_train_step

pytestmark = pytest.mark.thorough

MODEL = ModelConfig(
    d_model=32, num_layers=3, num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8, d_ff_dense=48, d_ff=16, num_experts=4, top_k=2, mtp_depth=1,
)  # fmt: skip
BATCH, SEQ = 4, 16
CONFIG = TrainConfig(
    model=MODEL,
    mesh=MeshConfig(1, 1, 1),
    devices=1,
    batch_size=BATCH,
    seq_len=SEQ,
    steps=20,
    optimizer=OptimizerConfig(warmup_steps=2),
    backend="ragged_dot",
)


def batch():
    tokens = np.random.default_rng(0).integers(0, 256, (BATCH, SEQ + 1)).astype(np.int32)
    return {"tokens": tokens, "segments": np.zeros_like(tokens), "domain": np.arange(BATCH, dtype=np.int32)}


def test_the_command_line_offers_every_recipe():
    offered = typing.get_args(typing.get_type_hints(TrainConfig)["recipe"])
    assert offered == tuple(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_b87_every_moe_layer_and_no_other_is_quantised(name):
    """Two layers with experts and one MTP module: two grouped GEMMs each, three products each."""
    config = replace(CONFIG, recipe=name)
    merge, plan = deepseek.merger(MODEL), dispatch_plan(config, 0)
    state = abstract_state(config)

    def gradients(params, bias, batch):
        return jax.grad(lambda params: batch_loss(merge(params, bias), batch, config, plan, jnp.int32(0))[0])(
            params
        )

    found = count_quantized_gemms(gradients, state.params, state.bias, batch())
    want = 0 if name == "none" else 2 * 3
    assert found == {"fprop": want, "dgrad": want, "wgrad": want}


@pytest.mark.slow
def test_stochastic_rounding_differs_from_step_to_step_and_is_repeatable():
    config = replace(
        CONFIG, recipe="nvfp4", model=replace(MODEL, num_layers=1, num_dense_layers=0, mtp_depth=0)
    )
    mesh = make_mesh(config.mesh)
    step = make_train_step(config, mesh, 0)
    on_device = jax.device_put(batch(), batch_sharding(mesh))

    def norm_at(index: int) -> float:
        state = replace(init_state(config, mesh), step=jnp.int32(index))
        return float(step(state, on_device)[1]["gradient_norm"])

    assert norm_at(0) == norm_at(0)
    assert norm_at(0) != norm_at(1)
    assert step.jitted._cache_size() == 1


def test_every_device_rounds_for_itself(devices):
    """Eight ranks with the same tokens: with one key for all they would round alike."""
    mesh = make_mesh(MeshConfig(1, 8, 1))
    layer = MoE(32, 16, RouterConfig(num_experts=4, top_k=1), num_shared_experts=0, rngs=nnx.Rngs(params=0))
    graph, state = nnx.split(layer)
    one = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    x, pull = np.tile(one, (8, 1)), np.tile(np.roll(one, 1, axis=1), (8, 1))

    @jax.jit
    def gradient(x):
        def loss(x):
            out, _ = nnx.merge(graph, state)(
                x, recipe=RECIPES["nvfp4"], key=jax.random.key(0), backend="ragged_dot"
            )
            return jnp.vdot(out, pull)

        return jax.grad(loss)(x)

    with jax.set_mesh(mesh):
        by_rank = np.asarray(gradient(x)).reshape(8, 8, 32)
    assert not any(np.array_equal(by_rank[0], other) for other in by_rank[1:])
