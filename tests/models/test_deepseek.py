"""The language model: what a prediction may depend on, where it starts, how settings fail."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.errors import SettingError
from moe_course.models import deepseek
from moe_course.models.config import DEEPSEEK_V3, ModelConfig
from moe_course.models.deepseek import DeepSeekLM, shifted_targets, token_losses
from tests.dispatch.dispatch_cases import QUICK
from tests.oracle import assert_close, path_terms, relative_error

CONFIG = ModelConfig(
    d_model=32, num_layers=2, num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, d_ff_dense=48, d_ff=16, num_experts=8, top_k=2, mtp_depth=2,
)  # fmt: skip
BATCH, SEQ = 2, 12


@pytest.fixture(scope="module")
def model():
    return DeepSeekLM(CONFIG, rngs=nnx.Rngs(params=0))


@pytest.fixture(scope="module")
def forward(model):
    graph, state = nnx.split(model)
    return jax.jit(lambda tokens, segments: nnx.merge(graph, state)(tokens, segments))


def random_tokens(seed=0, seq=SEQ):
    return np.random.default_rng(seed).integers(0, 256, (BATCH, seq)).astype(np.int32)


def test_b98_untrained_loss_is_that_of_a_uniform_guess(forward):
    tokens = random_tokens(seq=SEQ + 1)
    out = forward(tokens[:, :-1], np.zeros((BATCH, SEQ), np.int32))
    loss = float(token_losses(out.logits, jnp.asarray(tokens[:, 1:])).mean())
    assert loss == pytest.approx(math.log(CONFIG.vocab_size), rel=0.02)
    assert np.asarray(out.finite).all()
    assert out.finite.shape == (CONFIG.num_layers + CONFIG.mtp_depth,)
    # One row of statistics per MoE layer, the MTP modules' included (B24, B40).
    assert out.moe.load.shape == (CONFIG.num_moe_layers + CONFIG.mtp_depth, CONFIG.num_experts)
    assert (np.asarray(out.moe.load).sum(1) == BATCH * SEQ * CONFIG.top_k).all()


def test_predictions_look_back_only(forward):
    tokens, segments = random_tokens(), np.zeros((BATCH, SEQ), np.int32)
    changed = tokens.copy()
    changed[:, 8] += 1
    a, b = (np.asarray(forward(t, segments).logits) for t in (tokens, changed))
    np.testing.assert_array_equal(a[:, :8], b[:, :8])
    assert np.abs(a[:, 8:] - b[:, 8:]).max() > 0
    # MTP at depth d reads the tokens up to i + d + 1, and not one more.
    for depth in range(CONFIG.mtp_depth):
        a, b = (np.asarray(forward(t, segments).mtp_logits[depth]) for t in (tokens, changed))
        np.testing.assert_array_equal(a[:, : 7 - depth], b[:, : 7 - depth])
        assert np.abs(a[:, 7 - depth] - b[:, 7 - depth]).max() > 0


def test_documents_in_one_window_do_not_see_each_other(forward):
    tokens = random_tokens()
    segments = np.repeat(np.array([[0] * 5 + [1] * 7]), BATCH, axis=0).astype(np.int32)
    changed = tokens.copy()
    changed[:, :5] = random_tokens(9)[:, :5]
    a, b = (np.asarray(forward(t, segments).logits) for t in (tokens, changed))
    # Values of other rows reach the expert GEMM's other tiles, never this row: equal to the last bit or nearly.
    np.testing.assert_allclose(a[:, 5:], b[:, 5:], rtol=0, atol=1e-6 * np.abs(a).max())
    joined = np.asarray(forward(changed, np.zeros_like(segments)).logits)
    assert np.abs(joined[:, 5:] - b[:, 5:]).max() > 1e-4


def test_packed_documents_equal_separate_ones():
    """Three documents in one window against each on its own, with YaRN and both MTP modules, in any place."""
    config = replace(CONFIG, rope_factor=4.0, rope_original_length=8, init_std=0.2)
    graph, state = nnx.split(DeepSeekLM(config, rngs=nnx.Rngs(params=0)))
    forward = jax.jit(
        lambda tokens, segments: nnx.merge(graph, state)(tokens, segments), compiler_options=QUICK
    )
    lengths, tokens = (5, 4, 3), random_tokens()[:1]
    starts = np.cumsum((0, *lengths))
    packed = forward(tokens, np.repeat(np.arange(3), lengths)[None].astype(np.int32))
    alone = np.zeros((3, 5), np.int32)
    for i, length in enumerate(lengths):
        alone[i, :length] = tokens[0, starts[i] : starts[i + 1]]
    separate = forward(alone, np.zeros_like(alone))
    joined = forward(tokens, np.zeros_like(tokens))
    for depth in range(-1, config.mtp_depth):
        ours, one_by_one, mixed = (
            out.logits if depth < 0 else out.mtp_logits[depth] for out in (packed, separate, joined)
        )
        for i, length in enumerate(lengths):
            with_target = length - 2 - depth  # the rest has no target: its later token is not the document's
            if with_target <= 0:
                continue
            here, there = ours[0, starts[i] :][:with_target], one_by_one[i, :with_target]
            assert_close(
                here, there, jnp.float32, path_terms(config, SEQ, depth + 1), f"{depth}, document {i}"
            )
            if i:  # the broken twin: one document
                assert relative_error(mixed[0, starts[i] :][:with_target], there) > 1e-3


def test_start_as_deepseek_starts():
    """All matrices alike (arXiv 2412.19437, section 4.2), or those that write to the residual stream smaller."""
    wide = replace(CONFIG, d_model=128, d_ff=128, d_ff_dense=128, v_head_dim=64, mtp_depth=1, init_std=0.006)
    for scaled, smaller in ((False, 1.0), (True, 1 / math.sqrt(2 * wide.num_layers))):
        config = replace(wide, scaled_init=scaled)
        _, params, bias = deepseek.split(DeepSeekLM(config, rngs=nnx.Rngs(params=0)))
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
            path = jax.tree_util.keystr(keys)
            if "scale" in path:
                assert (leaf == 1).all(), path
                continue
            to_residual = "['down']" in path or "['out']" in path
            expected = 0.006 * (smaller if to_residual else 1.0)
            spread = 5 / math.sqrt(2 * leaf.size)  # of an estimated standard deviation, five times its own
            assert float(jnp.std(leaf)) == pytest.approx(expected, rel=spread), path
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(bias))


def test_b95_targets_stay_inside_window_and_document():
    tokens = jnp.asarray([[10, 11, 12, 13, 14, 15]], jnp.int32)
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1]], jnp.int32)
    expected = {1: [0, 1, 3, 4], 2: [0, 3], 3: []}
    for shift, positions in expected.items():
        targets, valid = shifted_targets(tokens, segments, shift)
        assert np.flatnonzero(valid[0]).tolist() == positions
        assert [int(targets[0, i]) for i in positions] == [10 + i + shift for i in positions]
    # The broken twin that forgets documents would also score positions 1 and 2 at depth 2.
    _, careless = shifted_targets(tokens, jnp.zeros_like(segments), 2)
    assert np.flatnonzero(careless[0]).tolist() == [0, 1, 2, 3]


def test_split_and_merge_are_inverse(model):
    _, params, bias = deepseek.split(model)
    again = deepseek.merger(CONFIG)(params, bias)
    tokens, segments = random_tokens(), np.zeros((BATCH, SEQ), np.int32)
    np.testing.assert_array_equal(again(tokens, segments).logits, model(tokens, segments).logits)
    sizes = [leaf.size for leaf in jax.tree.leaves(bias)]
    assert sum(sizes) == (CONFIG.num_moe_layers + CONFIG.mtp_depth) * CONFIG.num_experts


STACKS = replace(CONFIG, num_layers=5, num_dense_layers=2, mtp_depth=1)


def test_stacked_layers_start_as_layers_made_one_by_one():
    """The numbers of every layer, and of what is made after the layers, for a program that only stacks."""

    def one_by_one():
        rngs = nnx.Rngs(params=3)
        rngs.params()  # the embedding's
        blocks = [deepseek._block(STACKS, index >= 2, rngs) for index in range(5)]
        return blocks, rngs.params()

    def stacked():
        model = DeepSeekLM(STACKS, rngs=nnx.Rngs(params=3))
        return [model.layer(index) for index in range(5)], model.head

    blocks, next_key = jax.jit(one_by_one)()
    layers, head = jax.jit(stacked)()
    assert jax.tree.structure(layers) == jax.tree.structure(blocks)
    for ours, theirs in zip(jax.tree.leaves(layers), jax.tree.leaves(blocks), strict=True):
        assert (
            relative_error(ours, theirs) < 2**-22
        )  # the same draws; the compiler may round a product otherwise
    shape = (STACKS.d_model, STACKS.vocab_size)
    expected = STACKS.init_std * jax.random.normal(next_key, shape, jnp.float32)
    assert relative_error(head.kernel[...], expected) < 2**-22


def program(config, **how) -> str:
    """The gradient of a sum of logits, as lowered."""
    return traced(config, **how).lower().as_text()


def traced(config, **how):
    abstract = nnx.eval_shape(lambda: DeepSeekLM(config, rngs=nnx.Rngs(params=0)))
    graph, params, bias = nnx.split(abstract, nnx.Param, deepseek.ExpertBias)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)

    def total(params, bias, tokens):
        return nnx.merge(graph, params, bias)(tokens, tokens, **how).logits.sum()

    return jax.jit(jax.grad(total)).trace(params, bias, tokens)


def test_the_program_does_not_grow_with_depth():
    few, many = replace(STACKS, mtp_depth=0), replace(STACKS, num_layers=12, num_dense_layers=4, mtp_depth=0)

    def lines(config, scan_from):
        return len(program(config, scan_from=scan_from).splitlines())

    assert lines(many, 1) < 1.01 * lines(few, 1)
    assert lines(many, 99) > 1.5 * lines(few, 99)
    assert (
        lines(many, 5) == lines(replace(many, num_layers=9), 5) > lines(many, 1)
    )  # eight or five MoE layers, one loop


def test_remat_recomputes_what_it_does_not_name():
    """Matrix products in the program: more are recomputed the fewer names are kept; a block's input always is."""
    config = replace(CONFIG, mtp_depth=0)
    products = {remat: program(config, remat=remat).count("dot_general") for remat in deepseek.REMAT}
    assert products["none"] < products["experts"] < products["attention"] < products["full"]
    assert products["offload"] == products["attention"]
    # A CPU has one memory, and the lowered program says nothing of it; the traced one does.
    moves = {remat: str(traced(config, remat=remat).jaxpr).count("device_put") for remat in deepseek.REMAT}
    assert moves.pop("offload") == 2 * config.num_layers  # there and back
    assert not any(moves.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 40}, "top_k is 40 but there are 8 experts. Set --model.top-k to 8 or less."),
        ({"num_heads": 0}, "num_heads is 0. Set --model.num-heads to 1 or more."),
        ({"num_dense_layers": 3}, "Set --model.num-dense-layers to 2 or less."),
        ({"qk_rope_head_dim": 3}, "Set --model.qk-rope-head-dim to an even number."),
        ({"num_groups": 3}, "Set --model.num-groups to a divisor of 8."),
        ({"num_groups": 4, "top_groups": 5}, "Set --model.top-groups to 4 or less."),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "only 2 experts. Set --model.top-k to 2 or less"),
        ({"mtp_depth": -1}, "Set --model.mtp-depth to 0 or more."),
        ({"rope_factor": 0.5}, "rope_factor is 0.5. Set --model.rope-factor to 1 or more."),
        ({"rope_beta_slow": 40.0}, "Set --model.rope-beta-fast above --model.rope-beta-slow"),
        ({"num_groups": 4, "group_score_top": 3}, "Set --model.group-score-top to a number from 1 to 2."),
    ],
)
def test_impossible_models_name_the_flag(change, message):
    with pytest.raises(SettingError) as error:
        replace(CONFIG, **change).validate()
    assert message in str(error.value)


def test_published_configurations_are_possible():
    DEEPSEEK_V3.validate()
    assert deepseek.router_config(DEEPSEEK_V3).experts_per_group == 32
