"""Our reader and writer of safetensors files against the format's own library."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moe_course.errors import RunError
from moe_course.interop.safetensors import Checkpoint, Spec, write_checkpoint

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)


def some_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"vector": (5,), "matrix": (3, 7), "nothing": (0, 4), "one": (1, 1)}
    return {
        f"{name}.{np.dtype(dtype).name}": rng.standard_normal(shape).astype(dtype)
        for name, shape in shapes.items()
        for dtype in DTYPES
    }


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def write(folder, tensors, limit=10**9):
    specs = {name: Spec(array.dtype, array.shape) for name, array in tensors.items()}
    return write_checkpoint(folder, specs, tensors.items(), limit)


def test_reads_what_the_library_writes(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entries.keys() == tensors.keys()
    for name, array in tensors.items():
        assert same(np.array(checkpoint.read(name)), array), name
    assert same(np.array(checkpoint.read("matrix.bfloat16")[1:, 2:5]), tensors["matrix.bfloat16"][1:, 2:5])


def test_the_library_reads_what_we_write(tmp_path):
    tensors = {name: array for name, array in some_tensors().items() if "float8" not in name}
    (file,) = write(tmp_path, tensors)
    read = load_file(file)
    assert read.keys() == tensors.keys()
    assert all(same(read[name], array) for name, array in tensors.items())


@pytest.mark.parametrize("limit", [1, 60, 100, 10**9])
def test_shards_are_no_larger_than_asked_and_hold_every_tensor_once(tmp_path, limit):
    tensors = some_tensors()
    files = write(tmp_path, tensors, limit)
    checkpoint = Checkpoint(tmp_path)
    assert all(same(np.array(checkpoint.read(name)), array) for name, array in tensors.items())
    by_file = [[name for name, entry in checkpoint.entries.items() if entry.file == file] for file in files]
    sizes = [sum(tensors[name].nbytes for name in names) for names in by_file]
    # A larger one holds a single tensor, beside empty ones.
    assert all(
        size <= limit or sum(tensors[name].nbytes > 0 for name in names) == 1
        for size, names in zip(sizes, by_file, strict=True)
    )
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
        assert {name: entry.file.name for name, entry in checkpoint.entries.items()} == index["weight_map"]
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    else:
        assert limit == 10**9


def test_writing_takes_one_tensor_at_a_time(tmp_path):
    alive = []

    def tensors():
        for i in range(5):
            alive.append(i)
            yield f"t{i}", np.full((4,), i, np.float32)
            assert (tmp_path / "model.safetensors.new").exists()
            assert len(alive) == i + 1

    write_checkpoint(tmp_path, {f"t{i}": Spec(np.dtype("float32"), (4,)) for i in range(5)}, tensors(), 10**9)
    assert not (tmp_path / "model.safetensors.new").exists()
    with pytest.raises(AssertionError, match="in place of"):
        write_checkpoint(
            tmp_path, {"a": Spec(np.dtype("float32"), (4,))}, [("b", np.zeros(4, np.float32))], 10
        )


def test_damaged_and_absent_files_are_named(tmp_path):
    with pytest.raises(RunError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)
    files = write(tmp_path, some_tensors(), 100)
    whole = files[1].read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"\xff" * 100, whole[:8] + b"{" * 50 + whole[58:]):
        files[1].write_bytes(damaged)
        with pytest.raises(RunError, match=f"{files[1].name} is cut short"):
            Checkpoint(tmp_path)
    files[1].unlink()
    with pytest.raises(RunError, match=f"names files that are not there: {files[1].name}"):
        Checkpoint(tmp_path)
