"""The bench compares equals, and prints the keys it promises."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course import bench
from moe_course.bench.moe_layer import Options, masked_dense
from moe_course.layers.moe import MoE
from moe_course.routing import RouterConfig
from tests.oracle import relative_error


def test_the_dense_opponent_computes_the_same_layer():
    layer = MoE(
        12, 6, RouterConfig(8, 2), num_shared_experts=0, std=0.3, down_std=0.3, rngs=nnx.Rngs(params=0)
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 12)), jnp.float32)
    assert relative_error(masked_dense(layer, x), layer(x)[0]) < 1e-5


@pytest.mark.slow
def test_keys(capsys):
    small = Options(tokens=64, d_model=16, d_ff=8, rounds=1, slow_rounds=1)
    figures = bench.run("moe-layer", small)
    assert set(figures) == {"e32_over_e8", "e128_over_e8", "vs_masked_dense"}
    assert set(figures["vs_masked_dense"]) == {"8", "32", "128"}
    assert json.loads(json.dumps(figures)) == figures
