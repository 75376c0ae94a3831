"""How large the receive buffers are, and who owns which expert."""

import math
from dataclasses import dataclass

from moe_course.errors import SettingError


@dataclass(frozen=True)
class DispatchPlan:
    """Static facts of one dispatch. Hashable: a new plan is a new compilation, so plans come in buckets."""

    num_experts: int
    ranks: int = 1
    """Devices along the expert axis (R). Rank r owns experts [r E/R, (r+1) E/R)."""
    capacity: int = 0
    """Receive rows per rank (C), a multiple of ``ranks``; for ``te``, of 128 (``te.receive_capacity``). Unused when
    ``ranks`` is 1."""
    dispatcher: str = "all_to_all"
    waves: int = 1
    """Parts in which a layer sends its tokens (``dispatch.waves`` cuts them); they share the capacity equally."""

    def __post_init__(self):
        if self.num_experts % self.ranks:
            raise SettingError(
                f"{self.num_experts} experts do not divide over {self.ranks} ranks. "
                f"Use a divisor of {self.num_experts} as the size of the expert axis (--mesh.expert)."
            )
        if self.capacity % self.ranks and self.dispatcher != "te":
            raise SettingError(
                f"capacity {self.capacity} is not a multiple of {self.ranks} ranks; every pair gets an equal share."
            )

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.ranks


def worst_case_capacity(tokens_per_rank: int, top_k: int, num_experts: int, ranks: int) -> int:
    """Receive rows per rank that nothing can exceed: every copy that may go to one rank goes there."""
    return ranks * tokens_per_rank * min(top_k, num_experts // ranks)


def bucket_capacity(
    bucket: int, factor: float, tokens_per_rank: int, top_k: int, num_experts: int, ranks: int
) -> int:
    """Receive rows per rank in bucket 0, 1, 2, ...: ``factor * 2**bucket`` times the balanced need.

    The balanced need is tokens_per_rank * top_k rows. Never above :func:`worst_case_capacity`, where no
    routing can overflow, and always a multiple of ``ranks``.
    """
    balanced = tokens_per_rank * top_k
    rows = ranks * math.ceil(factor * 2**bucket * balanced / ranks)
    return min(rows, worst_case_capacity(tokens_per_rank, top_k, num_experts, ranks))


def largest_bucket(factor: float, tokens_per_rank: int, top_k: int, num_experts: int, ranks: int) -> int:
    """The first bucket that holds the worst case; the dropless loop never needs another."""
    worst = worst_case_capacity(tokens_per_rank, top_k, num_experts, ranks)
    bucket = 0
    while bucket_capacity(bucket, factor, tokens_per_rank, top_k, num_experts, ranks) < worst:
        bucket += 1
    return bucket
