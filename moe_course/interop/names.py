"""Which Hugging Face tensor is which part of which of our arrays: the one table, for import and export.

Theirs are matrices [out, in], one for each layer, expert and projection; ours are [in, out], with gate and up in one
matrix (gate first) and leading axes for the stacked layers and the experts. Two arrays differ by more than that. The
rotary dimensions are pairs of neighbours in the published DeepSeek weights (0, 1), (2, 3), ... and lie half a width
apart here. And the multi-token-prediction module joins (embedding, hidden) there, (hidden, embedding) here.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from moe_course.models.config import ModelConfig
from moe_course.parallel import path_names

TOP = {
    "embedding.table": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.query.kernel": "self_attn.q_proj.weight",
    "attention.query_down.kernel": "self_attn.q_a_proj.weight",
    "attention.query_norm.scale": "self_attn.q_a_layernorm.weight",
    "attention.query_up.kernel": "self_attn.q_b_proj.weight",
    "attention.kv_down.kernel": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.scale": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.kernel": "self_attn.kv_b_proj.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
    "feed_forward.gate_up.kernel": "mlp.gate_proj.weight mlp.up_proj.weight",
    "feed_forward.down.kernel": "mlp.down_proj.weight",
    "feed_forward.router.kernel": "mlp.gate.weight",
    "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.experts.gate_up": "mlp.experts.{expert}.gate_proj.weight mlp.experts.{expert}.up_proj.weight",
    "feed_forward.experts.down": "mlp.experts.{expert}.down_proj.weight",
    "feed_forward.shared.gate_up.kernel": "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
    "feed_forward.shared.down.kernel": "mlp.shared_experts.down_proj.weight",
}
"""After ``model.layers.{layer}.``; our path is that inside a block."""
MTP = {
    "hidden_norm.scale": "hnorm.weight",
    "embedding_norm.scale": "enorm.weight",
    "project.kernel": "eh_proj.weight",
    "output_norm.scale": "shared_head.norm.weight",
}
"""Beside a block's, in the layers that follow the last one."""
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Of an MTP layer: what the published files store again, and what it must equal."""
MIXTRAL = {
    "router.kernel": "block_sparse_moe.gate.weight",
    "experts.gate_up": "block_sparse_moe.experts.{expert}.w1.weight block_sparse_moe.experts.{expert}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}
MOE = {path.removeprefix("feed_forward."): names for path, names in LAYER.items() if "feed_forward." in path}
MOE_LAYERS = {"deepseek_v3": MOE, "qwen3_moe": {path: MOE[path] for path in MIXTRAL}, "mixtral": MIXTRAL}
"""Names in one MoE layer by ``model_type``; Qwen3-MoE's are DeepSeek's, with neither bias nor shared expert."""


class Piece(NamedTuple):
    """One Hugging Face tensor, and the part of one of our arrays that it is."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    """Its index in the leading axes of our array: layer, expert."""
    start: int
    """Its first place on our last axis; it goes on for ``width``."""
    width: int
    transposed: bool
    outputs: np.ndarray | None
    """Our output j (place j of the last axis) is their output ``outputs[j]``; None: the same order."""
    inputs: np.ndarray | None
    """The same for our second last axis and their inputs."""


class Source(NamedTuple):
    """Where one of our arrays comes from: names with ``{layer}`` and ``{expert}`` to fill in, and the orders."""

    names: str
    first_layer: int = 0
    stacked: bool = False
    outputs: np.ndarray | None = None
    inputs: np.ndarray | None = None


def model_source(config: ModelConfig, *, interleaved: bool) -> Callable[[str], Source]:
    """The :class:`Source` of every parameter and bias of a DeepSeek model, by its path."""
    c = config
    first = {"dense": 0, "moe": c.num_dense_layers}
    query = _interleaved(c.num_heads * [c.qk_nope_head_dim], c.qk_rope_head_dim)
    orders = {
        "attention.query.kernel": query,
        "attention.query_up.kernel": query,
        "attention.kv_down.kernel": _interleaved([c.kv_lora_rank], c.qk_rope_head_dim),
    }
    hidden_second = np.roll(np.arange(2 * c.d_model), c.d_model)

    def source(path: str) -> Source:
        if path in TOP:
            return Source(TOP[path])
        part, which, inside = path.split(".", 2)
        stacked = part == "layers"
        layer = first[which] if stacked else c.num_layers + int(which)
        prefix = "model.layers.{layer}."
        if inside in MTP:
            return Source(
                prefix + MTP[inside], layer, inputs=hidden_second if inside == "project.kernel" else None
            )
        inside = inside.removeprefix("block.")
        names = " ".join(prefix + name for name in LAYER[inside].split())
        return Source(names, layer, stacked, orders.get(inside) if interleaved else None)

    return source


def moe_source(family: str, layer: int) -> Callable[[str], Source]:
    """The :class:`Source` of every array of one MoE layer of a family of :data:`MOE_LAYERS`."""
    table = MOE_LAYERS[family]

    def source(path: str) -> Source:
        names = " ".join(f"model.layers.{{layer}}.{name}" for name in table[path].split())
        return Source(names, layer)

    return source


def _interleaved(nope: list[int], rope: int) -> np.ndarray:
    """Their place of each of our outputs: for each head, those without position, then even, then odd ones."""
    order, start = [], 0
    for width in nope:
        rotary = np.arange(start + width, start + width + rope)
        order += [np.arange(start, start + width), rotary[::2], rotary[1::2]]
        start += width + rope
    return np.concatenate(order)


def pieces_of(path: str, shape: tuple[int, ...], source: Source) -> Iterator[Piece]:
    """The pieces that make up one of our arrays."""
    is_vector = path.endswith((".scale", ".bias"))
    inner = shape[-1:] if is_vector else shape[-2:]
    leading = shape[: len(shape) - len(inner)]
    names = source.names.split()
    width = inner[-1] // len(names)
    transposed = not is_vector and path != "embedding.table"
    theirs = (width, *inner[:-1]) if transposed else (*inner[:-1], width)
    for at in np.ndindex(*leading):
        layer = source.first_layer + (at[0] if source.stacked else 0)
        for i, name in enumerate(names):
            full = name.format(layer=layer, expert=at[-1] if at else 0)
            yield Piece(full, theirs, at, i * width, width, transposed, source.outputs, source.inputs)


def all_pieces(tree, source_of: Callable[[str], Source]) -> dict[str, list[Piece]]:
    """By path, the pieces of every array of a tree of arrays (or of their shapes)."""
    return {
        path: list(pieces_of(path, leaf.shape, source_of(path)))
        for path, leaf in ((path_of(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree))
    }


def path_of(keys) -> str:
    """A path of ``jax.tree_util`` in the words of the tables above."""
    return ".".join(path_names(keys))
