"""Mesh axes that an array varies over inside ``jax.shard_map`` (none outside of it)."""

import jax
from jax import Array


def varying_axes(x: Array) -> frozenset[str]:
    """The manual mesh axes along which ``x`` may differ from device to device."""
    return jax.typeof(x).mat.varying


def vary_over(x: Array, axes: frozenset[str]) -> Array:
    """``x``, typed as varying over ``axes`` too. Moves nothing; its transpose is a psum over the new ones."""
    new = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(new)), to="varying") if new else x


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """All arrays, typed as varying over every axis that any of them varies over.

    A loop inside ``shard_map`` needs one type for all it carries, and a custom gradient must have the type
    of its primal. The psum in the transpose is what a replicated argument's gradient needs.
    """
    axes = frozenset().union(*map(varying_axes, arrays))
    return tuple(vary_over(x, axes) for x in arrays)
