"""The safetensors file format: a folder of files read slice by slice, and written tensor by tensor.

A file is 8 bytes with the length of a JSON header, the header (name -> dtype, shape, place), then the numbers
(https://github.com/huggingface/safetensors, "Format"). Its own library gives FP8 tensors to PyTorch alone, and writes
a file only from tensors that are all in memory at once (0.8.0); our tests hold these two functions against it.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moe_course.errors import RunError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Dtypes of weights that become float32 without loss."""
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """One tensor of a file, as its header says."""

    file: Path
    code: str
    """Its dtype, in the format's words."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    end: int


class Checkpoint:
    """The tensors of a folder: of ``model.safetensors``, or of the shards that its index names.

    Opening reads headers only. A read maps the file, so that only the bytes asked for are read. Raises
    :class:`RunError` for a folder that holds no such checkpoint, and for a file that is cut short.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._maps: dict[Path, np.memmap] = {}
        for file in _files(folder):
            self.entries |= _read_header(file)

    def read(self, name: str) -> np.ndarray:
        """A tensor as it is stored, not yet read: index it, and copy what you keep."""
        entry = self.entries[name]
        if entry.start == entry.end:
            return np.zeros(entry.shape, DTYPES[entry.code])
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        stored = self._maps[entry.file][entry.start : entry.end]
        return stored.view(DTYPES[entry.code]).reshape(entry.shape)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in names if not (folder / name).exists()]
        if absent:
            raise RunError(f"{index} names files that are not there: {', '.join(absent)}. Copy them too.")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise RunError(f"there is neither {SINGLE} nor {INDEX} in {folder}. Give a folder with safetensors.")


def _read_header(file: Path) -> dict[str, Entry]:
    size = file.stat().st_size
    damaged = RunError(f"{file} is cut short or is no safetensors file. Copy it again.")
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8 or 8 + (length := struct.unpack("<Q", start)[0]) > size:
            raise damaged
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise damaged from error
    header.pop("__metadata__", None)
    entries = {}
    for name, told in header.items():
        first, last = (8 + length + offset for offset in told["data_offsets"])
        entries[name] = Entry(file, told["dtype"], tuple(told["shape"]), first, last)
        if last > size:
            raise damaged
    return entries


class Spec(NamedTuple):
    """A tensor to be written."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_checkpoint(
    folder: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int
) -> list[Path]:
    """Write ``tensors``, which come in the order of ``specs``, one by one; the files, each at most so large.

    A shard holds at least one tensor. More than one shard have an index. Only one tensor is in memory at a time.
    """
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= spec.nbytes
    files = [folder / SINGLE]
    if len(shards) > 1:
        total = len(shards)
        files = [folder / f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    source = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        _write_file(file, {name: specs[name] for name in names}, source)
    if len(shards) > 1:
        weight_map = {name: file.name for file, names in zip(files, shards, strict=True) for name in names}
        size = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return files


def _write_file(file: Path, specs: Mapping[str, Spec], source: Iterable[tuple[str, np.ndarray]]) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.nbytes
        header[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8 bytes
    beside = file.with_name(file.name + ".new")
    with beside.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for expected, spec in specs.items():
            name, array = next(source)
            assert (name, array.dtype, array.shape) == (expected, *spec), f"{name} in place of {expected}"
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    beside.replace(file)
