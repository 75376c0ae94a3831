"""The golden vectors of ``golden.json`` as arrays; the file names its sources."""

import json
from pathlib import Path

import numpy as np

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
ROUNDINGS = ("floor", "rceil", "ceil", "even")


def floats(bits: str) -> np.ndarray:
    """float32 from bit patterns in hex."""
    return np.frombuffer(bytes.fromhex(bits), ">u4").astype(np.uint32).view(np.float32)


def digits(codes: str) -> np.ndarray:
    """One code per hex digit."""
    return np.array([int(digit, 16) for digit in codes], np.uint8)


def matrix(name: str) -> np.ndarray:
    """The inputs of a set of vectors as float32 [vectors, 32]."""
    return np.stack([floats(vector["x"]) for vector in GOLDEN[name]])


def expected(name: str, rounding: str, per_byte: bool = True):
    """(scale bytes [vectors], codes [vectors, 32]) for one rounding."""
    wanted = [vector[rounding] for vector in GOLDEN[name]]
    scales = np.array([w["scale"] for w in wanted], np.uint8)
    read = (lambda q: np.frombuffer(bytes.fromhex(q), np.uint8)) if per_byte else digits
    return scales, np.stack([read(w["q"]) for w in wanted])


def is_subnormal(x: np.ndarray) -> np.ndarray:
    """Where float32 values are subnormal."""
    bits = x.view(np.uint32) & 0x7FFFFFFF
    return (bits > 0) & (bits < 1 << 23)
