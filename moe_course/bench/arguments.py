"""Named shapes and group sizes for grouped GEMMs: one list for tests and benches."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Sizes = Literal["uniform", "zipf", "one", "empties", "off-tile"]


def make_group_sizes(kind: Sizes, num_rows: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """int32 [E] group sizes of sum at most ``num_rows`` (equal to it, except where noted).

    uniform: equal, the first groups one larger where E does not divide. zipf: size of the r-th largest
    group proportional to 1/r, experts shuffled. one: one expert takes every row. empties: every other group
    is empty, the rest uniform. off-tile: sizes next to the tile edges of the kernels (0, 1, 7, 8, 31, 33,
    127, 129, ...), as many as fit, so the sum may be less than ``num_rows``.
    """
    rng = np.random.default_rng(seed)
    sizes = np.zeros(num_experts, np.int64)
    if kind == "uniform":
        sizes += num_rows // num_experts
        sizes[: num_rows % num_experts] += 1
    elif kind == "zipf":
        share = 1 / np.arange(1, num_experts + 1)
        sizes = np.floor(num_rows * share / share.sum()).astype(np.int64)
        sizes[0] += num_rows - sizes.sum()
        sizes = rng.permutation(sizes)
    elif kind == "one":
        sizes[num_experts // 3] = num_rows
    elif kind == "empties":
        filled = sizes[1::2] if num_experts > 1 else sizes
        filled += make_group_sizes("uniform", num_rows, len(filled))
    elif kind == "off-tile":
        left = num_rows
        for e, size in enumerate(rng.permutation(np.resize(OFF_TILE, num_experts))):
            sizes[e] = min(size, left)
            left -= sizes[e]
    else:
        raise ValueError(f"unknown kind of group sizes {kind!r}")
    return sizes.astype(np.int32)


OFF_TILE = (0, 1, 7, 8, 31, 33, 127, 129, 15, 17, 63, 65, 255, 257, 513)


@dataclass(frozen=True)
class GroupedGemmArguments:
    """One named problem: shapes, sizes, and rows that belong to no group."""

    name: str
    rows: int
    d_model: int
    d_ff: int
    experts: int
    sizes: Sizes
    tail: int = 0
    """Rows past the last group, on top of ``rows``."""

    def group_sizes(self) -> np.ndarray:
        return make_group_sizes(self.sizes, self.rows, self.experts)

    def make(self, seed: int = 0, dtype=np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``(rows [M, D], kernels [E, D, F], group_sizes [E])`` with unit-variance products."""
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((self.rows + self.tail, self.d_model), np.float32)
        kernels = rng.standard_normal((self.experts, self.d_model, self.d_ff), np.float32)
        kernels /= np.sqrt(np.float32(self.d_model))
        return rows.astype(dtype), kernels.astype(dtype), self.group_sizes()


SMALL = (
    GroupedGemmArguments("uniform", 96, 32, 48, 6, "uniform"),
    GroupedGemmArguments("zipf", 200, 24, 40, 8, "zipf", tail=5),
    GroupedGemmArguments("one-takes-all", 70, 16, 16, 4, "one"),
    GroupedGemmArguments("one-expert", 33, 16, 8, 1, "one", tail=3),
    GroupedGemmArguments("empties", 65, 17, 31, 7, "empties", tail=1),
    GroupedGemmArguments("off-tile", 300, 33, 65, 8, "off-tile"),
    GroupedGemmArguments("maxtext-1183", 32, 96, 96, 32, "uniform"),
    GroupedGemmArguments("fewer-rows-than-experts", 5, 8, 8, 16, "uniform"),
)
"""Small enough for an interpreted kernel."""

LARGE = tuple(
    GroupedGemmArguments(name, 16_384, 512, 1024, 32, sizes)
    for name, sizes in (("equal", "uniform"), ("zipf", "zipf"), ("one-takes-all", "one"))
)
"""What ``moe-course bench grouped-gemm`` measures."""
