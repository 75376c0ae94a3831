"""Quantising rows that are sorted by expert: no block spans two experts, padding enters no statistic."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_course.quant.formats import INF_BITS, from_bits, magnitude_bits


class Groups(NamedTuple):
    """Where the experts' rows are in a buffer."""

    sizes: Int[Array, "experts"]
    """Rows per expert, whole blocks in an aligned buffer."""
    expert: Int[Array, "rows"]
    """The expert of each row; E for a row past the last one."""

    @property
    def valid(self):
        """Rows that belong to an expert, as a column [rows, 1]."""
        return (self.expert < self.sizes.shape[0])[:, None]


def make_groups(sizes: Int[Array, "experts"], ends: Int[Array, "experts"], num_rows: int) -> Groups:
    """Groups of ``sizes`` rows that end at ``ends`` in a buffer of ``num_rows``."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    return Groups(sizes, jnp.sum(row[:, None] >= ends[None, :], axis=1, dtype=jnp.int32))


def aligned_rows(num_rows: int, num_experts: int, block: int) -> int:
    """Rows that any ``num_experts`` groups of ``num_rows`` rows together need in whole blocks."""
    return -(-(num_rows + num_experts * (block - 1)) // block) * block


def align_groups(
    sizes: Int[Array, "experts"], ends: Int[Array, "experts"], num_rows: int, block: int
) -> tuple[Groups, Int[Array, "aligned"]]:
    """The groups, each in whole blocks, and for each aligned row the row it comes from (``num_rows``: none).

    The sizes are data, the aligned buffer has the static length :func:`aligned_rows`.
    """
    whole = -(-sizes // block) * block
    whole_ends = jnp.cumsum(whole, dtype=jnp.int32)
    groups = make_groups(whole, whole_ends, aligned_rows(num_rows, sizes.shape[0], block))
    place = jnp.arange(groups.expert.shape[0], dtype=jnp.int32)
    expert = jnp.minimum(groups.expert, sizes.shape[0] - 1)
    within = place - (whole_ends - whole)[expert]
    real = (within < sizes[expert]) & (groups.expert < sizes.shape[0])
    return groups, jnp.where(real, (ends - sizes)[expert] + within, num_rows)


def take_rows(x: Float[Array, "rows d"], source: Int[Array, "aligned"]) -> Float[Array, "aligned d"]:
    """Rows of ``x`` in aligned order, zeros where there is none."""
    if not x.shape[0]:
        return jnp.zeros((source.shape[0], x.shape[1]), x.dtype)
    return x.at[source].get(mode="fill", fill_value=0)


def group_amax(x: Float[Array, "rows d"], groups: Groups) -> Float[Array, "experts"]:
    """Each expert's largest finite magnitude; 0 for one without rows. Rows past the last expert do not count."""
    bits = magnitude_bits(x)
    per_row = jnp.max(jnp.where(bits < INF_BITS, bits, jnp.uint32(0)), axis=1, initial=jnp.uint32(0))
    num_experts = groups.sizes.shape[0]
    return from_bits(jax.ops.segment_max(per_row, groups.expert, num_experts))


def of_row(per_expert: Float[Array, "experts"], groups: Groups, fill: float = 0.0) -> Float[Array, "rows 1"]:
    """Each row's value of its expert; ``fill`` past the last expert."""
    return per_expert.at[groups.expert].get(mode="fill", fill_value=fill)[:, None]
