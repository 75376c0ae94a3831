"""DeepSeek-V3 checkpoints in and out without transformers: bits, shards, memory, FP8, complaints."""

import json
import tracemalloc
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_course.errors import RunError
from moe_course.interop import load, names
from moe_course.interop.huggingface import _abstract, export_model, import_model
from moe_course.interop.safetensors import Checkpoint
from moe_course.models.config import DEEPSEEK_V3, ModelConfig
from moe_course.parallel import MeshConfig, make_mesh, tree_shardings
from moe_course.scaling.flops import parameter_counts

CONFIG = ModelConfig(
    vocab_size=24, d_model=16, num_layers=4, num_dense_layers=2, num_heads=2, q_lora_rank=8, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6, d_ff_dense=24, d_ff=8, num_experts=8, top_k=4,
    num_groups=4, top_groups=2, mtp_depth=2, rope_factor=4.0, rope_original_length=64, scaled_init=False,
)  # fmt: skip
DIRECT = replace(
    CONFIG, q_lora_rank=0, num_dense_layers=0, num_shared_experts=2, mtp_depth=0, rope_factor=1.0,
    rope_original_length=4096,
)  # fmt: skip


def random_weights(config, dtype="float32"):
    """(parameters, biases) of that precision, held as float32."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape).astype(dtype).astype(np.float32))

    return jax.tree.map(draw, _abstract(config))


def assert_same(ours, theirs):
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree_util.tree_leaves_with_path(theirs), strict=True
    )
    for (path, a), (other, b) in pairs:
        assert path == other
        assert a.dtype == b.dtype == jnp.float32
        assert np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)), path


@pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["all", "direct"])
def test_out_and_in_again_loses_no_bit(tmp_path, config):
    weights = random_weights(config)
    files = export_model(tmp_path, config, *weights, max_shard_bytes=10_000)
    assert len(files) > 3
    imported = import_model(tmp_path)
    assert imported.config == config
    assert_same(imported[1:], weights)


def test_bfloat16_in_and_out_again_loses_no_bit(tmp_path):
    config = replace(CONFIG, compute_dtype="bfloat16")
    weights = random_weights(config, ml_dtypes.bfloat16)
    (file,) = export_model(tmp_path / "a", config, *weights, dtype="bfloat16")
    dtypes = {name: entry.code for name, entry in Checkpoint(tmp_path / "a").entries.items()}
    assert {name for name, code in dtypes.items() if code == "F32"} == {
        n for n in dtypes if n.endswith("_bias")
    }
    assert set(dtypes.values()) == {"F32", "BF16"}
    imported = import_model(tmp_path / "a")
    assert_same(imported[1:], weights)
    (again,) = export_model(tmp_path / "b", *imported, dtype="bfloat16")
    assert again.read_bytes() == file.read_bytes()


def test_the_published_layout(tmp_path):
    """Where a number lies, spelled out for one tensor of each kind."""
    params, bias = random_weights(CONFIG)
    (file,) = export_model(tmp_path, CONFIG, params, bias)
    theirs = load_file(file)
    moe, layer = params["layers"]["moe"], "model.layers.3."  # the second MoE layer
    experts, attention = moe["feed_forward"]["experts"], moe["attention"]
    for expert in (0, 5):
        own = layer + f"mlp.experts.{expert}."
        gate, up = np.split(np.asarray(experts["gate_up"])[1, expert], 2, axis=1)
        np.testing.assert_array_equal(theirs[own + "gate_proj.weight"], gate.T)
        np.testing.assert_array_equal(theirs[own + "up_proj.weight"], up.T)
        np.testing.assert_array_equal(
            theirs[own + "down_proj.weight"], np.asarray(experts["down"])[1, expert].T
        )
    np.testing.assert_array_equal(
        theirs[layer + "mlp.gate.e_score_correction_bias"],
        bias["layers"]["moe"]["feed_forward"]["router"]["bias"][1],
    )
    query, ours = (
        theirs[layer + "self_attn.q_b_proj.weight"],
        np.asarray(attention["query_up"]["kernel"])[1].T,
    )
    for head in (0, 1):
        first = head * 8
        np.testing.assert_array_equal(query[first : first + 4], ours[first : first + 4])
        # Pairs that one angle rotates: neighbours there, half a width apart here.
        for pair in (0, 1):
            np.testing.assert_array_equal(query[first + 4 + 2 * pair], ours[first + 4 + pair])
            np.testing.assert_array_equal(query[first + 5 + 2 * pair], ours[first + 6 + pair])
    down = np.asarray(attention["kv_down"]["kernel"])[1].T
    order = [*range(8), 8, 10, 9, 11]
    np.testing.assert_array_equal(theirs[layer + "self_attn.kv_a_proj_with_mqa.weight"], down[order])
    project = np.asarray(params["mtp"][1]["project"]["kernel"])  # joins (hidden, embedding) here
    np.testing.assert_array_equal(theirs["model.layers.5.eh_proj.weight"][:, :16], project[16:].T)
    np.testing.assert_array_equal(theirs["model.layers.5.eh_proj.weight"][:, 16:], project[:16].T)
    np.testing.assert_array_equal(theirs["model.layers.5.embed_tokens.weight"], params["embedding"]["table"])
    np.testing.assert_array_equal(theirs["model.layers.4.shared_head.head.weight"], theirs["lm_head.weight"])


def test_deepseek_v3_has_its_671_billion_parameters_under_published_names():
    source = names.model_source(DEEPSEEK_V3, interleaved=True)
    pieces = [
        p for tree in _abstract(DEEPSEEK_V3) for part in names.all_pieces(tree, source).values() for p in part
    ]
    sizes = {piece.name: int(np.prod(piece.shape, dtype=np.int64)) for piece in pieces}
    assert len(sizes) == len(pieces), "a tensor is used twice"
    biases = {name for name in sizes if name.endswith("e_score_correction_bias")}
    assert len(biases) == 58 + 1
    assert (
        sum(size for name, size in sizes.items() if name not in biases) == parameter_counts(DEEPSEEK_V3).total
    )
    for name in ("model.layers.61.mlp.experts.255.down_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        assert name in sizes
    assert "model.layers.3.mlp.down_proj.weight" not in sizes


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with the model, and its weights."""
    folder = tmp_path_factory.mktemp("stored")
    weights = random_weights(CONFIG)
    export_model(folder, CONFIG, *weights)
    return folder, weights


@pytest.mark.parametrize("sizes", [(1, 2, 4), (2, 2, 2)])
def test_each_device_is_given_its_own_part_and_reads_no_more(stored, sizes, monkeypatch, tmp_path):
    folder, weights = stored
    mesh = make_mesh(MeshConfig(*sizes))
    read = []

    def counting(*args):
        values = honest(*args)
        read.append(values.size)
        return values

    honest = load._read
    monkeypatch.setattr(load, "_read", counting)
    imported = import_model(folder, mesh)
    assert_same(imported[1:], weights)
    shards = 0
    for tree in imported[1:]:
        for leaf, sharding in zip(
            jax.tree.leaves(tree), jax.tree.leaves(tree_shardings(tree, mesh)), strict=True
        ):
            assert leaf.sharding == sharding
            shards += sum(shard.data.size for shard in leaf.addressable_shards)
    assert sum(read) == shards
    assert max(read) <= 2 * CONFIG.d_model**2  # the largest of their tensors, eh_proj
    export_model(tmp_path, *imported)  # from all devices
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_memory_of_the_host_is_that_of_a_tensor_or_two(tmp_path):
    config = replace(
        CONFIG,
        d_model=128,
        d_ff=128,
        num_experts=16,
        num_layers=6,
        mtp_depth=0,
        vocab_size=256,
        d_ff_dense=128,
    )
    weights = random_weights(config)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    tensor = config.vocab_size * config.d_model * 4
    assert total > 80 * tensor
    for _ in range(2):  # the first time, XLA compiles
        tracemalloc.start()
        export_model(tmp_path, config, *weights)
        out = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        import_model(tmp_path)
        back = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    bookkeeping = 2**20
    assert out < 3 * tensor + bookkeeping
    assert back < 3 * tensor + bookkeeping


def test_fp8_weights_are_scaled_block_by_block(tmp_path):
    """Against the same model with weights multiplied out by hand, on a mesh that cuts blocks apart."""
    rows, columns = 5, 3
    export_model(tmp_path / "plain", CONFIG, *random_weights(CONFIG))
    rng, quantised, plain = np.random.default_rng(1), {}, {}
    for name, array in load_file(tmp_path / "plain" / "model.safetensors").items():
        quantised[name] = plain[name] = array
        if "_proj" in name and "eh_proj" not in name:
            codes = array.astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(
                0.5, 2, [-(-n // b) for n, b in zip(array.shape, (rows, columns), strict=True)]
            )
            quantised[name], quantised[name + "_scale_inv"] = codes, scale.astype(np.float32)
            spread = np.kron(scale.astype(np.float32), np.ones((rows, columns), np.float32))
            plain[name] = codes.astype(np.float32) * spread[: array.shape[0], : array.shape[1]]
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    for folder, tensors in (("plain", plain), ("fp8", quantised)):
        (tmp_path / folder).mkdir(exist_ok=True)
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    want = import_model(tmp_path / "plain")
    assert_same(import_model(tmp_path / "fp8", make_mesh(MeshConfig(1, 2, 4)))[1:], want[1:])
    del quantised["model.layers.2.self_attn.o_proj.weight_scale_inv"]
    quantised["model.layers.3.self_attn.o_proj.weight_scale_inv"] = np.ones((2, 2), np.float32)
    save_file(quantised, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(RunError) as error:
        import_model(tmp_path / "fp8")
    assert "missing: model.layers.2.self_attn.o_proj.weight_scale_inv; wrong: " in str(error.value)
    assert "model.layers.3.self_attn.o_proj.weight_scale_inv [2, 2] instead of [4, 4]" in str(error.value)


def test_one_error_lists_all_that_is_missing_unexpected_or_wrong(stored, tmp_path):
    folder, _ = stored
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    broken = dict(tensors)
    del broken["model.layers.0.mlp.gate_proj.weight"], broken["model.layers.2.mlp.experts.3.up_proj.weight"]
    broken["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    broken["model.norm.weight"] = np.zeros(17, np.float32)
    broken["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    broken["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)  # old files have it
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(RunError) as error:
        import_model(tmp_path)
    assert str(error.value).endswith(
        "missing: model.layers.0.mlp.gate_proj.weight, model.layers.2.mlp.experts.3.up_proj.weight; "
        "unexpected: model.layers.9.mlp.up_proj.weight; "
        "wrong: lm_head.weight of dtype I32, model.norm.weight [17] instead of [16]."
    )
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"and [0-9]+ more"):
        import_model(tmp_path)


def test_a_module_that_repeats_another_embedding_is_refused(stored, tmp_path):
    folder, _ = stored
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors["model.layers.5.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        RunError, match=r"layers.5.embed_tokens.weight, which is not model.embed_tokens.weight"
    ):
        import_model(tmp_path)


def test_without_any_mtp_tensor_there_is_no_module(stored, tmp_path):
    """As transformers saves models: it drops the modules and still counts them."""
    folder, weights = stored
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    trunk = {n: a for n, a in tensors.items() if not n.startswith(("model.layers.4", "model.layers.5"))}
    save_file(trunk, tmp_path / "model.safetensors")
    imported = import_model(tmp_path)
    assert imported.config == replace(CONFIG, mtp_depth=0)
    assert_same(imported.params["layers"], weights[0]["layers"])
    with pytest.raises(RunError, match=r"there is no config.json"):
        import_model(tmp_path / "elsewhere")
