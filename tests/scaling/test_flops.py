"""FLOPs and parameter counts against XLA's own count, the real model, and published figures."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from moe_course.layers import causal_attention
from moe_course.layers.attention import MLA
from moe_course.layers.linear import SwiGLU
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3, ModelConfig
from moe_course.scaling import flops

CONFIG = ModelConfig(d_model=256, q_lora_rank=96)
SEQ = 256
XLA_TOLERANCE = 0.05  # XLA also counts norms, softmax, activations: a few per cent at these widths


def xla_flops(fn, *args) -> float:
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def total(terms: dict[str, int]) -> int:
    return sum(terms.values())


@st.composite
def configs(draw, mtp: int = 0) -> ModelConfig:
    size = st.integers(1, 40)
    experts = draw(st.integers(1, 9))
    layers = draw(st.integers(1, 4))
    names = ("vocab_size", "d_model", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    return ModelConfig(
        **{name: draw(size) for name in (*names, "d_ff_dense", "d_ff")},
        q_lora_rank=draw(st.integers(0, 9)),
        qk_rope_head_dim=2 * draw(st.integers(1, 4)),
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        num_shared_experts=draw(st.integers(0, 2)),
        num_layers=layers,
        num_dense_layers=draw(st.integers(0, layers)),
        mtp_depth=draw(st.integers(0, mtp)),
    )


# Against XLA's count


def swiglu_and_input():
    module = SwiGLU(256, 512, std=0.02, down_std=0.02, dtype="float32", rngs=nnx.Rngs(params=0))
    graph, state = nnx.split(module)
    return (lambda state, x: nnx.merge(graph, state)(x)), state, jnp.ones((SEQ, 256), jnp.float32)


def test_b89_dense_feed_forward_matches_the_count_of_xla():
    fn, state, x = swiglu_and_input()
    counted = xla_flops(fn, state, x) / SEQ
    assert flops.swiglu_flops(256, 512) == pytest.approx(counted, rel=XLA_TOLERANCE)


def test_b89_a_training_step_costs_three_forwards():
    fn, state, x = swiglu_and_input()
    gradient = jax.grad(lambda state, x: jnp.sum(fn(state, x) ** 2), argnums=(0, 1))
    counted = xla_flops(gradient, state, x) / SEQ
    assert 3 * flops.swiglu_flops(256, 512) == pytest.approx(counted, rel=XLA_TOLERANCE)
    assert 2 * flops.swiglu_flops(256, 512) != pytest.approx(counted, rel=XLA_TOLERANCE)


@pytest.mark.parametrize("q_lora_rank", [0, 96])
def test_attention_matches_the_count_of_xla(q_lora_rank, monkeypatch):
    monkeypatch.setattr(causal_attention, "_BLOCK", SEQ)  # one block of queries: the whole square
    c = replace(CONFIG, q_lora_rank=q_lora_rank)
    names = (
        "num_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_theta norm_eps"
    )
    sizes = {name: getattr(c, name) for name in names.split()}
    module = MLA(c.d_model, **sizes, std=0.02, out_std=0.02, dtype="float32", rngs=nnx.Rngs(params=0))
    graph, state = nnx.split(module)
    x, segments = jnp.ones((2 * SEQ, c.d_model), jnp.float32), jnp.zeros((2, SEQ), jnp.int32)
    counted = xla_flops(lambda state, x: nnx.merge(graph, state)(x, segments), state, x) / (2 * SEQ)
    assert total(flops.mla_flops(c, SEQ, causal=False)) == pytest.approx(counted, rel=XLA_TOLERANCE)
    # Within a block the layer masks, it does not skip: XLA multiplies what the causal convention leaves out.
    assert total(flops.mla_flops(c, SEQ, causal=True)) != pytest.approx(counted, rel=XLA_TOLERANCE)


def test_b89_moe_matches_a_dense_equivalent():
    """Every expert for every token: a grouped GEMM hides in loops that XLA's count does not unroll."""
    c = replace(CONFIG, num_experts=8, top_k=2, num_shared_experts=1)
    experts, d, f = c.num_experts + c.num_shared_experts, c.d_model, c.d_ff

    def masked_dense(x, router, gate, up, down):
        weights = jnp.pad(jax.nn.softmax(x @ router), ((0, 0), (0, 1)), constant_values=1.0)
        hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, gate)) * jnp.einsum("td,edf->etf", x, up)
        return jnp.einsum("etf,efd,te->td", hidden, down, weights)

    shapes = (SEQ, d), (d, c.num_experts), (experts, d, f), (experts, d, f), (experts, f, d)
    counted = xla_flops(masked_dense, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)) / SEQ
    assert total(flops.moe_flops(c, experts="all")) == pytest.approx(counted, rel=XLA_TOLERANCE)
    assert total(flops.moe_flops(replace(c, top_k=8))) == total(flops.moe_flops(c, experts="all"))
    assert total(flops.moe_flops(c)) < counted / 2


def test_whole_dense_model_matches_the_count_of_xla():
    from moe_course.models.deepseek import DeepSeekLM

    c = replace(CONFIG, vocab_size=1024, num_layers=2, num_dense_layers=2)
    model = nnx.eval_shape(lambda: DeepSeekLM(c, rngs=nnx.Rngs(params=0)))
    graph, state = nnx.split(model)
    batch = jax.ShapeDtypeStruct((2, SEQ), jnp.int32)
    run = lambda state, tokens, segments: nnx.merge(graph, state)(tokens, segments, scan_from=99).logits  # noqa: E731
    counted = xla_flops(run, state, batch, batch) / (2 * SEQ)
    predicted = total(flops.forward_flops(c, SEQ, causal=False))
    assert predicted == pytest.approx(counted, rel=XLA_TOLERANCE)
    look_up_as_matmul = predicted + flops.matmul_flops(c.vocab_size, c.d_model)
    assert look_up_as_matmul != pytest.approx(counted, rel=XLA_TOLERANCE)


# Against published figures


def mixtral_flops(experts: str) -> int:
    """Mixtral 8x7B (arXiv 2401.04088): its grouped-query attention in the place of ours."""
    c = ModelConfig(
        vocab_size=32_000,
        d_model=4096,
        num_layers=32,
        num_dense_layers=0,
        d_ff=14_336,
        num_experts=8,
        num_shared_experts=0,
        top_k=2,
    )
    seq_len, heads, kv_heads, head_dim = 4096, 32, 8, 128
    projections = flops.matmul_flops(4096, head_dim * (2 * heads + 2 * kv_heads))
    core = 2 * flops.attention_core_flops(seq_len, heads, head_dim)
    terms = flops.training_flops(c, seq_len, experts=experts)
    ours = set(flops.mla_flops(c, seq_len))
    return sum(n for name, n in terms.items() if name not in ours) + 3 * 32 * (projections + core)


def test_b89_mixtral_active_against_total():
    active, every = mixtral_flops("active"), mixtral_flops("all")
    assert active == pytest.approx(7.97e10, rel=1e-3)
    assert every == pytest.approx(2.83e11, rel=2e-3)
    assert every / active == pytest.approx(3.55, rel=2e-3)


@pytest.mark.parametrize(
    ("mtp", "causal", "published"),
    [(0, True, 249.81), (1, True, 259.99), (0, False, 280.5), (1, False, 291.2)],
)
def test_deepseek_v3_training_flops(mtp, causal, published):
    """GFLOP per token at 4,096 as Megatron-Bridge counts them, which leaves the router out."""
    c = replace(DEEPSEEK_V3, mtp_depth=mtp)
    router = 3 * (c.num_moe_layers + mtp) * flops.matmul_flops(c.d_model, c.num_experts)
    ours = (total(flops.training_flops(c, 4096, causal=causal)) - router) / 1e9
    assert ours == pytest.approx(published, abs=0.05 if published > 270 else 0.005)


def test_published_parameter_counts():
    v3 = flops.parameter_counts(replace(DEEPSEEK_V3, mtp_depth=0))
    biases = DEEPSEEK_V3.num_moe_layers * DEEPSEEK_V3.num_experts
    assert v3.total + biases == 671_026_419_200  # Hugging Face counts the expert bias as a parameter
    assert round(v3.active / 1e9) == 37
    lite = flops.parameter_counts(DEEPSEEK_V2_LITE)
    assert (round(lite.total / 1e9, 1), f"{lite.active / 1e9:.2f}") == (15.7, "2.45")  # published as 2.4B


# Against the real model


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        ModelConfig(q_lora_rank=24, mtp_depth=2, num_shared_experts=0),
        ModelConfig(num_layers=2, num_dense_layers=2),
        ModelConfig(num_layers=3, num_dense_layers=0, num_shared_experts=2, top_k=16),
    ],
)
def test_counts_equal_those_of_the_model(config):
    from moe_course.models.deepseek import DeepSeekLM, ExpertBias

    model = nnx.eval_shape(lambda: DeepSeekLM(config, rngs=nnx.Rngs(params=0)))
    of_kind = lambda kind: sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, kind)))  # noqa: E731
    assert flops.parameter_counts(config).total == of_kind(nnx.Param)
    assert of_kind(ExpertBias) == (config.num_moe_layers + config.mtp_depth) * config.num_experts


# Properties


@given(configs())
def test_every_active_weight_costs_two_flops(config):
    """Without the attention core, a token's FLOPs are twice its matmul weights: two counts, one truth."""
    forward = total(flops.forward_flops(config, seq_len=0))
    counts = flops.parameter_counts(config)
    assert forward == 2 * (counts.active - counts.norms)
    idle_experts = total(flops.forward_flops(config, 0, experts="all")) - forward
    assert idle_experts == 2 * counts.idle


@given(configs(mtp=2), st.integers(1, 5000))
def test_convention_properties(config, seq_len):
    causal, full = (flops.forward_flops(config, seq_len, causal=flag) for flag in (True, False))
    core = {"attention scores", "attention values"}
    assert all(
        full[name] == (2 if name in core else 1) * causal[name] for name in causal if name[:3] != "MTP"
    )
    assert total(flops.training_flops(config, seq_len)) == 3 * total(causal)
    zero, one, two = (total(flops.forward_flops(config, n * seq_len)) for n in range(3))
    assert two - one == one - zero
    every = total(flops.forward_flops(config, seq_len, experts="all"))
    has_idle = config.top_k < config.num_experts and config.num_moe_layers + config.mtp_depth > 0
    assert (every > total(causal)) == has_idle


@given(configs(), st.integers(0, 100))
def test_mtp_adds_one_moe_layer_its_projection_and_a_head(config, seq_len):
    without = total(flops.forward_flops(config, seq_len))
    with_one = total(flops.forward_flops(replace(config, mtp_depth=1), seq_len))
    one_moe_layer = replace(config, num_layers=1, num_dense_layers=0)
    projection = flops.matmul_flops(2 * config.d_model, config.d_model)
    assert with_one - without == projection + total(flops.forward_flops(one_moe_layer, seq_len))


def test_b91_utilisation_halves_when_the_peak_doubles():
    run = {"flops_per_token": 2.5e11, "tokens": 1e6, "seconds": 10.0, "devices": 64}
    assert flops.mfu(**run, peak_tflops=4500) == flops.mfu(**run, peak_tflops=2250) / 2
    assert flops.tflops_per_device(**run) == pytest.approx(2.5e11 * 1e6 / 10 / 64 / 1e12)
    assert all(word in flops.MFU_FORMULA for word in ("active", "peak", "seconds", "devices"))
