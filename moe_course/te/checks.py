"""Checks that TE leaves to the kernel: shapes, dtypes, the GPU. Wrong calls of TE's grouped ops trace and compile."""

import jax.numpy as jnp
from jax import Array

from moe_course.errors import SettingError
from moe_course.te import capability, native


def require(op: str) -> None:
    """SettingError unless the GPU that TE sees can run ``op``."""
    if reason := capability.too_old_or_new(op, native.compute_capability()):
        raise SettingError(reason)


def require_shape(what: str, x: Array, *shape: int | None) -> None:
    """ValueError unless ``x`` has this shape; None stands for any size."""
    fits = x.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(x.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{what} must be [{wanted}], got {list(x.shape)}")


def require_dtype(what: str, x: Array, *dtypes) -> None:
    """TypeError unless ``x`` has one of these dtypes."""
    if not any(x.dtype == dtype for dtype in dtypes):
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{what} must be {names} for Transformer Engine, got {x.dtype}")


def require_integers(what: str, x: Array) -> None:
    """TypeError unless ``x`` holds integers: TE reads a float's bits as an integer without a word."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{what} must be integers, got {x.dtype}")


def require_multiple(what: str, size: int, of: int, why: str) -> None:
    """SettingError unless ``of`` divides ``size``."""
    if size % of:
        raise SettingError(f"{what} is {size}, which {why} needs to be a multiple of {of}.")
