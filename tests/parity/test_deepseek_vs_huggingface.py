"""The whole model against transformers' ``DeepseekV3ForCausalLM`` on the same files, in and out, in float32."""

import json
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_course.interop.hf_config import config_from_hf
from moe_course.interop.huggingface import export_model, import_model
from moe_course.interop.names import path_of
from moe_course.models import deepseek
from moe_course.models.deepseek import DeepSeekLM, shifted_targets, token_losses
from tests.dispatch.dispatch_cases import QUICK
from tests.oracle import assert_close, path_terms
from tests.parity.peers import MARKS, torch, transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

pytestmark = MARKS
BATCH, SEQ, VOCAB = 2, 24, 96
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
MODELS = {
    "plain": {},
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "best two where three are picked of one": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
    "direct queries": {"q_lora_rank": None},
    "no dense layer": {"first_k_dense_replace": 0},
    "two dense layers": {"first_k_dense_replace": 2},
    "weights not normalised": {"norm_topk_prob": False},
    "two shared experts": {"n_shared_experts": 2},
    "rotary dimensions in halves": {"rope_interleave": False},
    "other epsilon": {"rms_norm_eps": 1e-3},
    "yarn": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, two scales": {
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4, "beta_slow": 0.5}
    },
    "yarn, scales not given": {"rope_parameters": YARN},
    "all": {
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "q_lora_rank": None,
        "first_k_dense_replace": 2,
        "num_hidden_layers": 4,
        "n_shared_experts": 2,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


def their_model(changes: dict, seed: int):
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(**BASE | changes, attn_implementation="eager")
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.normal_(1.0, 0.3)
            elif "e_score_correction_bias" in name:
                tensor.normal_(0.0, 0.3)
    return model


def random_tokens(seed=0, seq=SEQ):
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, seq)).astype(np.int32)


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def random_weights(config, seed):
    """Ours, with vectors that are neither ones nor zeros."""
    _, params, bias = deepseek.split(DeepSeekLM(config, rngs=nnx.Rngs(params=seed)))
    rng = np.random.default_rng(seed)

    def disturb(keys, leaf):
        is_vector = path_of(keys).endswith(("scale", "bias"))
        return leaf + jnp.float32(0.3) * rng.standard_normal(leaf.shape, np.float32) if is_vector else leaf

    return tuple(jax.tree_util.tree_map_with_path(disturb, tree) for tree in (params, bias))


def their_logits_and_drafts(folder, tokens):
    """(logits, those of each MTP module) of the model in a folder; a module's are of the positions it has a token for."""
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    layers, seq = theirs.config.num_hidden_layers, tokens.shape[1]
    theirs._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({layers}|{layers + 1})\..*"]
    module = MtpModel.from_pretrained(theirs).eval()
    ids, cache, drafts = torch.from_numpy(tokens).long(), MtpCache(config=module.config), []
    with torch.no_grad():
        hidden = theirs.model(ids, use_cache=False).last_hidden_state
        for depth in range(theirs.config.num_mtp_layers):
            positions = torch.arange(depth + 1, seq)[None]
            hidden = hidden[:, : seq - 1 - depth]
            hidden = module.forward_layer(depth, hidden, positions, cache, input_ids=ids[:, depth + 1 :])
            drafts.append(theirs.lm_head(hidden).numpy())
    return their_logits(theirs, tokens), drafts


def our_output(imported, tokens, segments=None):
    model = deepseek.merger(imported.config)(imported.params, imported.bias)
    return jax.jit(lambda t, s: model(t, s), compiler_options=QUICK)(
        tokens, np.zeros_like(tokens) if segments is None else segments
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_loss_equal(name, tmp_path):
    """In float32; then out again, read by transformers, to the bits of what it had written."""
    theirs = their_model(MODELS[name], seed=sorted(MODELS).index(name))
    theirs.save_pretrained(tmp_path / "theirs")
    imported = import_model(tmp_path / "theirs")
    tokens = random_tokens(1, SEQ + 1)
    terms = path_terms(imported.config, SEQ)
    ours = our_output(imported, tokens[:, :-1])
    assert_close(ours.logits, their_logits(theirs, tokens[:, :-1]), jnp.float32, terms, "logits")

    targets, valid = shifted_targets(jnp.asarray(tokens), jnp.zeros_like(tokens), 1)
    loss = np.asarray(token_losses(ours.logits, targets))[np.asarray(valid)].mean()
    labels = torch.from_numpy(tokens).long()
    with torch.no_grad():
        theirs_loss = float(theirs(labels, labels=labels, use_cache=False).loss)
    assert_close(loss, theirs_loss, jnp.float32, terms, "loss")

    export_model(tmp_path / "ours", *imported, max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    again = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    if name != "rotary dimensions in halves":  # we write them interleaved
        state = again.state_dict()
        assert state.keys() == theirs.state_dict().keys()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, state[key]), key
    assert_close(their_logits(again, tokens), their_logits(theirs, tokens), jnp.float32, terms, "exported")


def test_mtp_modules_equal(tmp_path):
    """Of depth 2, with YaRN and groups: our weights written out, run by transformers' module for drafting tokens."""
    changes = MODELS["all"] | {"num_nextn_predict_layers": 2}
    config = config_from_hf(transformers.DeepseekV3Config(**BASE | changes).to_dict())
    params, bias = random_weights(config, 3)
    export_model(tmp_path, config, params, bias)
    again = import_model(tmp_path)
    assert again.config == config
    trees = [jax.tree.leaves(tree) for tree in ((params, bias), again[1:])]
    assert all(np.array_equal(a, b) for a, b in zip(*trees, strict=True))

    tokens = random_tokens(2)
    ours, (_, drafts) = our_output(again, tokens), their_logits_and_drafts(tmp_path, tokens)
    for depth, logits in enumerate(drafts):
        terms = path_terms(config, SEQ, depth + 1)
        for module, got in enumerate(ours.mtp_logits):
            close = partial(assert_close, got[:, : SEQ - 1 - depth], logits, jnp.float32, terms)
            if module == depth:
                close(f"depth {depth + 1}")
            else:
                with pytest.raises(AssertionError, match="rounding explains"):
                    close()


def test_the_comparison_notices_what_it_should(tmp_path):
    """Broken twins: no bias, no YaRN, an unpermuted rotary half, another epsilon, groups by another rule."""
    theirs = their_model(MODELS["all"] | {"rms_norm_eps": 1e-3}, seed=0)
    theirs.save_pretrained(tmp_path)
    tokens = random_tokens()
    want = their_logits(theirs, tokens)
    right = import_model(tmp_path)
    terms = path_terms(right.config, SEQ)
    assert_close(our_output(right, tokens).logits, want, jnp.float32, terms)
    config = json.loads((tmp_path / "config.json").read_text())
    no_yarn = {"rope_type": "default", "rope_theta": 100.0}
    twins = [right._replace(bias=jax.tree.map(jnp.zeros_like, right.bias))]
    for change in (
        {"rope_parameters": no_yarn},
        {"rope_interleave": False},
        {"rms_norm_eps": 1e-6},
        {"n_group": 1, "topk_group": 1},
        {"routed_scaling_factor": 1.0},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        twins.append(import_model(tmp_path))
    for twin in twins:
        with pytest.raises(AssertionError, match="rounding explains"):
            assert_close(our_output(twin, tokens).logits, want, jnp.float32, terms)
