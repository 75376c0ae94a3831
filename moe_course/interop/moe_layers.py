"""One Mixture-of-Experts layer (router and experts) of Mixtral, Qwen3-MoE or DeepSeek-V3, in and out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_course.errors import RunError
from moe_course.interop import names
from moe_course.interop.hf_config import CONFIG, config_from_hf, fp8_block, read_config
from moe_course.interop.load import SCALE, check, fetch, load
from moe_course.interop.safetensors import Checkpoint
from moe_course.layers.moe import MoE
from moe_course.models.deepseek import router_config
from moe_course.routing import RouterConfig


def import_moe_layer(folder: Path, layer: int) -> MoE:
    """The MoE layer of number ``layer`` of a folder; float32, on one device. The other layers are not read.

    Raises :class:`RunError` for another family, and one that lists every missing or wrong tensor.
    """
    theirs = read_config(folder)
    family = theirs.get("model_type")
    if family not in names.MOE_LAYERS:
        families = ", ".join(names.MOE_LAYERS)
        raise RunError(f"{folder / CONFIG} is of model_type {family!r}. MoE layers come from {families}.")
    shared = theirs.get("n_shared_experts", 0) if family == "deepseek_v3" else 0

    def make() -> MoE:
        return MoE(*_sizes(theirs), num_shared_experts=shared, rngs=nnx.Rngs(params=0))

    graph, state = nnx.split(nnx.eval_shape(make))
    tree = nnx.to_pure_dict(state)
    no_bias = None if family == "deepseek_v3" else tree["router"].pop("bias")
    pieces = names.all_pieces(tree, names.moe_source(family, layer))
    wanted = {piece.name for part in pieces.values() for piece in part}
    checkpoint = Checkpoint(folder)
    entries = checkpoint.entries.items()
    checkpoint.entries = {name: entry for name, entry in entries if name.removesuffix(SCALE) in wanted}
    check(checkpoint, pieces, {}, fp8_block(theirs))
    loaded = load(tree, pieces, checkpoint, fp8_block(theirs), None)
    if no_bias is not None:
        loaded["router"]["bias"] = jnp.zeros(no_bias.shape, no_bias.dtype)
    nnx.replace_by_pure_dict(state, loaded)
    return nnx.merge(graph, state)


def moe_layer_tensors(moe: MoE, family: str, layer: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, float32 tensor), one by one, of an MoE layer in the files of a family: the other way round.

    Raises :class:`RunError` for what the family does not have: a bias that is not zero, a shared expert.
    """
    table, source = names.MOE_LAYERS[family], names.moe_source(family, layer)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(moe))):
        path = names.path_of(keys)
        if path in table:
            for piece in names.pieces_of(path, leaf.shape, source(path)):
                yield piece.name, fetch(leaf, piece)
        elif path != "router.bias" or np.any(leaf):
            raise RunError(f"a layer of {family} has no {path}.")


def _sizes(theirs: dict[str, Any]) -> tuple[int, int, RouterConfig]:
    """(d_model, d_ff, router) of a family's config."""
    family, width = theirs["model_type"], theirs["hidden_size"]
    if family == "deepseek_v3":
        config = config_from_hf(theirs)
        return width, config.d_ff, router_config(config)
    if family == "mixtral":
        router = RouterConfig(theirs["num_local_experts"], theirs["num_experts_per_tok"])
        return width, theirs["intermediate_size"], router
    experts = (
        theirs.get("num_experts") or theirs["num_local_experts"]
    )  # published; as transformers 5 saves it
    router = RouterConfig(
        experts, theirs["num_experts_per_tok"], normalize=theirs.get("norm_topk_prob", False)
    )
    return width, theirs["moe_intermediate_size"], router
