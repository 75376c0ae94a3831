"""Where each group begins and ends."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def group_bounds(
    group_sizes: Int[Array, "experts"], num_rows: int
) -> tuple[Int[Array, "experts"], Int[Array, "experts"]]:
    """Size and end row of each group, cut off at the end of the buffer.

    In rows, not elements: 524,288 rows of 7,168 would overflow 32 bits. The running sum saturates at
    ``num_rows``, so that no sizes, however wrong, make it wrap around to a negative row.
    """
    limit = jnp.int32(num_rows)
    sizes = jnp.clip(group_sizes, 0, min(num_rows, jnp.iinfo(group_sizes.dtype).max)).astype(jnp.int32)
    ends = lax.associative_scan(lambda a, b: jnp.where(b > limit - a, limit, a + b), sizes)
    return jnp.diff(ends, prepend=jnp.zeros_like(ends, shape=(1,))), ends
