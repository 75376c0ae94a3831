"""Checkpoint policies that see TE's GEMMs. JAX's own ``dots_saveable`` do not: they would recompute every one."""

from collections.abc import Callable

import jax

from moe_course.errors import SettingError
from moe_course.te import native

POLICIES = ("gemms", "gemms_and_dots", "gemms_and_dots_with_no_batch_dims")


def remat_policy(name: str) -> Callable[..., bool]:
    """A policy for ``jax.checkpoint``: save the outputs of TE's GEMMs, alone or with those of JAX's dots.

    To save *quantised* operands instead, use the names that recipes' tensors carry
    (``jax.checkpoint_policies.save_only_these_names``). Raises :class:`SettingError` for another name.
    """
    if name not in POLICIES:
        raise SettingError(f"unknown policy {name!r}. Choose one of {', '.join(POLICIES)}.")
    gemms = native.api().te_gemms_saveable
    policies = jax.checkpoint_policies
    if name == "gemms":
        return gemms
    dots = (
        policies.checkpoint_dots if name == "gemms_and_dots" else policies.checkpoint_dots_with_no_batch_dims
    )
    return policies.save_from_both_policies(dots, gemms)
