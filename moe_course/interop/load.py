"""Filling arrays, sharded or not, from the tensors of a checkpoint, piece by piece; and cutting them up again."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from moe_course.errors import RunError
from moe_course.interop.names import Piece, path_of
from moe_course.interop.safetensors import DTYPES, Checkpoint
from moe_course.parallel import tree_shardings

SCALE = "_scale_inv"
"""After the name of an FP8 tensor: what its blocks are multiplied by."""
LISTED = 20
"""Names in an error message, of each kind."""


def check(
    checkpoint: Checkpoint, pieces: dict[str, list[Piece]], copies: dict[str, str], block: tuple[int, int]
) -> None:
    """One :class:`RunError` for all tensors that are not as the model needs them.

    ``copies``: tensors that may be there, and the one that each must equal.
    """
    entries = checkpoint.entries
    wanted = {piece.name: piece.shape for part in pieces.values() for piece in part}
    scales = {
        name + SCALE: tuple(-(-n // b) for n, b in zip(shape, block, strict=False))
        for name, shape in wanted.items()
        if name in entries and entries[name].code == "F8_E4M3"
    }
    needed = wanted | scales
    allowed = {*needed, *copies}
    missing = [name for name in needed if name not in entries]
    derived = "rotary_emb.inv_freq"  # older files store it, and nobody reads it
    unexpected = [name for name in entries if name not in allowed and not name.endswith(derived)]
    wrong = []
    for name, shape in needed.items():
        if name not in entries:
            continue
        if entries[name].shape != shape:
            wrong.append(f"{name} {list(entries[name].shape)} instead of {list(shape)}")
        elif entries[name].code not in DTYPES:
            wrong.append(f"{name} of dtype {entries[name].code}")
    if not wrong and not missing:
        wrong += [
            f"{copy}, which is not {original}"
            for copy, original in copies.items()
            if copy in entries and not _same(checkpoint, copy, original)
        ]
    found = {"missing": missing, "unexpected": unexpected, "wrong": wrong}
    if any(found.values()):
        told = "; ".join(f"{kind}: {_listing(what)}" for kind, what in found.items() if what)
        raise RunError(f"the tensors in {checkpoint.folder} are not those of its config.json: {told}.")


def _listing(what: list[str]) -> str:
    more = f" and {len(what) - LISTED} more" if len(what) > LISTED else ""
    return ", ".join(what[:LISTED]) + more


def _same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two tensors hold the same numbers; compared some rows at a time."""
    x, y = checkpoint.read(a), checkpoint.read(b)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    rows = max(1, 2**24 // max(1, x[:1].nbytes))
    return all(np.array_equal(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows))


def load(
    tree, pieces: dict[str, list[Piece]], checkpoint: Checkpoint, block: tuple[int, int], mesh: Mesh | None
):
    """The arrays of ``tree`` (of shapes), float32, filled from the files and cut as ``mesh`` wants it.

    ``block``: what one scale of an FP8 tensor stands for, (rows, columns).
    """
    one_device = SingleDeviceSharding(jax.devices()[0])
    shardings = tree_shardings(tree, mesh) if mesh else jax.tree.map(lambda _: one_device, tree)

    def of_leaf(keys, leaf, sharding):
        return _load_array(leaf.shape, sharding, pieces[path_of(keys)], checkpoint, block)

    return jax.tree_util.tree_map_with_path(of_leaf, tree, shardings)


def _load_array(
    shape: tuple[int, ...], sharding: Sharding, pieces: list[Piece], checkpoint: Checkpoint, block
) -> jax.Array:
    """One array, each device's part filled piece by piece.

    ``jax.make_array_from_callback`` would want a device's whole part, all layers and experts, on the host at once,
    and those of all devices before the first is sent.
    """
    parts = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        cut = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        part = jnp.zeros([end - first for first, end in cut], jnp.float32, device=device)
        for piece in pieces:
            found = _overlap(piece, cut)
            if found is not None:
                values = _read(checkpoint, piece, *found[1:], block)
                values = values.reshape((1,) * len(piece.at) + values.shape)
                part = _fill(part, jax.device_put(values, device), found[0])
                part.block_until_ready()  # or tensors queue up on the host
        parts.append(part)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _overlap(piece: Piece, cut: list[tuple[int, int]]):
    """(where in the cut, input range, output range of the piece) of what a piece gives to a cut; or None."""
    leading, (*inputs, outputs) = cut[: len(piece.at)], cut[len(piece.at) :]
    if not all(first <= i < end for i, (first, end) in zip(piece.at, leading, strict=True)):
        return None
    first, end = max(outputs[0], piece.start), min(outputs[1], piece.start + piece.width)
    if first >= end:
        return None
    start = [i - begin for i, (begin, _) in zip(piece.at, leading, strict=True)]
    start += [0] * len(inputs) + [first - outputs[0]]
    taken = (inputs[0] if inputs else None), (first - piece.start, end - piece.start)
    return tuple(map(np.int32, start)), *taken


@partial(jax.jit, donate_argnums=0)
def _fill(part, values, start):
    return lax.dynamic_update_slice(part, values, start)


def _read(checkpoint: Checkpoint, piece: Piece, inputs, outputs, block) -> np.ndarray:
    """Inputs x outputs of a tensor as float32, in our order; of a vector, ``inputs`` is None."""
    stored = checkpoint.read(piece.name)
    take_out = _places(piece.outputs, outputs)
    if inputs is None:
        return np.array(stored[take_out], np.float32)
    take_in = _places(piece.inputs, inputs)
    take = (take_out, take_in) if piece.transposed else (take_in, take_out)
    values = stored[take[0]][:, take[1]]
    values = np.array(values.T if piece.transposed else values, np.float32, order="C")
    if stored.dtype == DTYPES["F8_E4M3"]:
        scale = checkpoint.read(piece.name + SCALE).astype(np.float32)
        rows, columns = (
            np.arange(n)[places] // size for n, places, size in zip(stored.shape, take, block, strict=True)
        )
        scale = scale[rows][:, columns]
        values *= scale.T if piece.transposed else scale
    return values


def _places(order: np.ndarray | None, span: tuple[int, int]):
    return slice(*span) if order is None else order[slice(*span)]


def fetch(leaf: jax.Array, piece: Piece) -> np.ndarray:
    """One Hugging Face tensor from our array, float32, on every host."""
    sharding = leaf.sharding
    whole = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
    at = tuple(map(np.int32, piece.at))
    ours = np.asarray(_taker(whole)(leaf, at, piece.start, piece.width))
    for axis, order in ((-1, piece.outputs), (-2, piece.inputs)):
        if order is not None:
            ours = np.take(ours, np.argsort(order), axis=axis)
    return np.ascontiguousarray(ours.T) if piece.transposed else ours


@cache
def _taker(sharding: Sharding) -> Callable:
    return jax.jit(_take, static_argnums=(2, 3), out_shardings=sharding)


def _take(leaf, at, start, width):
    for i in at:
        leaf = lax.dynamic_index_in_dim(leaf, i, keepdims=False)
    return lax.slice_in_dim(leaf, start, start + width, axis=-1)
