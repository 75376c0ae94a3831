"""``DeepseekV3ForCausalLM`` checkpoints in and out, tensor by tensor, MTP modules and FP8 weights included.

No process holds more than its own part of the model: a model larger than one machine's memory loads on many.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from moe_course.interop import names
from moe_course.interop.hf_config import CONFIG, config_from_hf, config_to_hf, fp8_block, read_config
from moe_course.interop.load import check, fetch, load
from moe_course.interop.safetensors import Checkpoint, Spec, write_checkpoint
from moe_course.models import deepseek
from moe_course.models.config import ModelConfig
from moe_course.models.deepseek import DeepSeekLM


class Imported(NamedTuple):
    config: ModelConfig
    params: dict
    bias: dict
    """``params`` and ``bias`` as :func:`deepseek.split` gives them: float32, stacked, sharded."""


def import_model(folder: Path, mesh: Mesh | None = None) -> Imported:
    """A folder as our model, laid out for ``mesh`` (None: on the first device).

    Every process reads the parts that its devices hold and no others. On the host there is one tensor at a time, or
    the part of it that one device needs; the arrays are filled on the devices. bfloat16, float16 and block-scaled
    FP8 weights become float32. Raises one :class:`RunError` that lists every missing, unexpected or wrong tensor.

    transformers drops MTP modules and still counts them in the config that it saves; without any tensor of theirs
    the model has none.
    """
    theirs = read_config(folder)
    checkpoint = Checkpoint(folder)
    config = config_from_hf(theirs)
    if not any(name.startswith(f"model.layers.{config.num_layers}.") for name in checkpoint.entries):
        config = replace(config, mtp_depth=0)
    source = names.model_source(config, interleaved=theirs.get("rope_interleave") is not False)
    trees = _abstract(config)
    pieces = {path: part for tree in trees for path, part in names.all_pieces(tree, source).items()}
    check(checkpoint, pieces, dict(_copies(config)), fp8_block(theirs))
    return Imported(config, *(load(tree, pieces, checkpoint, fp8_block(theirs), mesh) for tree in trees))


def _abstract(config: ModelConfig) -> tuple[dict, dict]:
    """Shapes of parameters and biases."""
    return jax.eval_shape(lambda: deepseek.split(DeepSeekLM(config, rngs=nnx.Rngs(params=0)))[1:])


def _copies(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(tensor of an MTP module, tensor of the model that it repeats)."""
    for depth in range(config.mtp_depth):
        for copy, original in names.COPIES.items():
            yield f"model.layers.{config.num_layers + depth}.{copy}", original


def export_model(
    folder: Path,
    config: ModelConfig,
    params: dict,
    bias: dict,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    context: int = 4096,
) -> list[Path]:
    """Write a folder that ``DeepseekV3ForCausalLM.from_pretrained`` reads; returns the files with weights.

    ``dtype`` float32 loses nothing; nor does bfloat16, if that is what was imported. The expert bias stays float32.
    One tensor at a time is on the host; of several processes the first one writes. ``context`` is the longest
    sequence, where YaRN does not say it. Raises :class:`RunError` for a model that is none of theirs.
    """
    theirs = config_to_hf(config, context) | {"torch_dtype": dtype}
    source = names.model_source(config, interleaved=True)
    places: dict[str, tuple[jax.Array, names.Piece]] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params) + jax.tree_util.tree_leaves_with_path(bias):
        path = names.path_of(keys)
        places |= {piece.name: (leaf, piece) for piece in names.pieces_of(path, leaf.shape, source(path))}
    places |= {copy: places[original] for copy, original in _copies(config)}
    specs = {
        name: Spec(
            np.dtype(np.float32 if name.endswith("_bias") else jnp.dtype(dtype)), places[name][1].shape
        )
        for name in sorted(places, key=_published_order)
    }
    tensors = ((name, fetch(*places[name]).astype(spec.dtype)) for name, spec in specs.items())
    if jax.process_index():
        for _ in tensors:  # the others take part in gathering
            pass
        return []
    folder.mkdir(parents=True, exist_ok=True)
    files = write_checkpoint(folder, specs, tensors, max_shard_bytes)
    (folder / CONFIG).write_text(json.dumps(theirs, indent=1) + "\n")
    return files


def _published_order(name: str) -> tuple[int, str]:
    """Embedding, layers by number, last norm and head."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    last = name.startswith(("lm_head", "model.norm"))
    return (2**30 if last else numbers[0] if numbers else -1, name)
