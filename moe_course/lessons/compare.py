"""Comparing a learner's arrays with the expected ones, in words: first wrong token, expert, and why.

Each function returns the learner's array as NumPy, or raises :class:`Broken`. Close means what rounding
explains: ``4 eps sqrt(terms)`` of the largest expected value in the same row, eps being the format's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from moe_course.lessons.exercise import Broken

Suspects = Mapping[str, Any]
"""Explanation -> the wrong array it explains. The first that fits what the learner returned is shown."""


def show(value, limit: int = 10) -> str:
    """A value in at most four significant digits and about one line."""
    if isinstance(value, tuple | list):
        return "(" + ", ".join(show(item, limit) for item in value) + ")"
    try:
        array = np.asarray(value)
    except Exception:
        return type(value).__name__
    if array.dtype == object or array.dtype.kind in "SU":
        return "None" if value is None else type(value).__name__
    if array.ndim == 0:
        return _number(array.item() if array.dtype.kind in "biu" else float(array))
    if array.ndim > 1:
        return f"{array.dtype} array of shape {array.shape}"
    shown = ", ".join(show(item) for item in array[:limit])
    return f"[{shown}{', ...' if len(array) > limit else ''}]"


def _number(value) -> str:
    if isinstance(value, bool | int):
        return str(value)
    if abs(value) < 1e-37:  # below float32; the float64 oracle knows smaller ones
        value = 0.0
    text = f"{value:.4g}"
    # 0.7 reads as 0.70: two digits after the point, where that loses nothing.
    return f"{value:.2f}" if float(text) == round(value, 2) and abs(value) < 100 else text


def rounded(value, digits: int = 2):
    """An array as nested lists of short numbers, to print: 0.4, not 0.3999999761581421."""
    array = np.asarray(value)
    return (
        np.round(array.astype(np.float64), digits) + 0.0 if array.dtype.kind not in "biu" else array
    ).tolist()


def items(value, count: int, *, case: str, names: str, why: str = "") -> Sequence:
    """The ``count`` results of a function that returns several (a tuple, list or named tuple)."""
    if isinstance(value, tuple | list) and len(value) == count:
        return value
    got = f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else show(value)
    raise Broken(case, got, f"a tuple ({names})", why or f"Return {names}, in this order.")


def array_of(value, *, case: str, shape: tuple[int, ...], kind: str, dtype=None, what: str = "result"):
    """``value`` as NumPy, after checking that it is an array of this shape and kind (``f``, ``i`` or ``b``).

    ``dtype`` asks for one dtype exactly. Kind ``i`` takes signed and unsigned integers.
    """
    if value is None:
        raise Broken(
            case, "None", f"an array of shape {shape}", "The function returned nothing: is a return missing?"
        )
    if isinstance(value, tuple):
        raise Broken(case, show(value), f"one array of shape {shape}", "Return the array alone, not a tuple.")
    if not hasattr(value, "dtype") and not (shape == () and isinstance(value, int | float)):
        raise Broken(
            case, type(value).__name__, f"an array of shape {shape}", f"The {what} should be a JAX array."
        )
    array = np.asarray(value)
    if array.shape != shape:
        raise Broken(case, f"shape {array.shape}", f"shape {shape}", f"The {what} has the wrong shape.")
    wanted = {"f": "floating point", "i": "integer", "b": "boolean"}[kind]
    if not _is_kind(array.dtype, kind):
        raise Broken(case, f"dtype {array.dtype}", f"a {wanted} dtype", f"The {what} should be {wanted}.")
    if dtype is not None and hasattr(value, "dtype") and array.dtype != jnp.dtype(dtype):
        why = f"The {what} should be {jnp.dtype(dtype).name}, whatever came in."
        raise Broken(case, f"dtype {array.dtype}", f"dtype {jnp.dtype(dtype).name}", why)
    return array


def _is_kind(dtype, kind: str) -> bool:
    parents = {"f": jnp.floating, "i": jnp.integer, "b": jnp.bool_}
    return jnp.issubdtype(dtype, parents[kind])


def same(
    value,
    expected,
    *,
    case: str,
    axes: Sequence[str] = (),
    why: str = "",
    suspects: Suspects | None = None,
    experts=None,
    what="result",
):
    """Equal element by element: ids, counts, masks. ``axes`` names the dimensions (``("token", "pick")``);
    ``experts``, of the same shape, says whose number each is."""
    expected = np.asarray(expected)
    kind = "b" if expected.dtype == bool else "i" if expected.dtype.kind in "iu" else "f"
    yours = array_of(value, case=case, shape=expected.shape, kind=kind, what=what)
    _compare(yours, expected, yours != expected, case, axes, why, suspects, experts, tolerance=0.0)
    return yours


def close(
    value,
    expected,
    *,
    case: str,
    axes: Sequence[str] = (),
    why: str = "",
    suspects: Suspects | None = None,
    dtype=jnp.float32,
    terms: int = 1,
    exact_dtype: bool = True,
    experts=None,
    what="result",
):
    """Equal up to rounding: ``expected`` in float64, the learner's in ``dtype`` after sums of ``terms`` terms.

    Where ``expected`` is NaN the learner's must be NaN. ``exact_dtype=False`` takes any floating dtype.
    """
    expected = np.asarray(expected, np.float64)
    yours = array_of(
        value, case=case, shape=expected.shape, kind="f", dtype=dtype if exact_dtype else None, what=what
    ).astype(np.float64)
    tolerance = 4.0 * float(jnp.finfo(dtype).eps) * math.sqrt(max(terms, 1))
    _compare(
        yours, expected, differs(yours, expected, tolerance), case, axes, why, suspects, experts, tolerance
    )
    return yours


def differs(yours: np.ndarray, expected: np.ndarray, tolerance: float) -> np.ndarray:
    """True where rounding does not explain the difference; the scale is the largest value of the row."""
    if expected.size == 0:
        return np.zeros(expected.shape, bool)
    finite = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    scale = finite.max(axis=-1, keepdims=True) if expected.ndim else finite
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(yours - expected) <= tolerance * scale)
    matching = (yours == expected) | (np.isnan(yours) & np.isnan(expected))
    return wrong & ~matching


def _compare(yours, expected, wrong, case, axes, why, suspects, experts, tolerance) -> None:
    if not wrong.any():
        return
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = ", ".join(f"{name} {i}" for name, i in zip(axes, index, strict=False))
    where += "" if experts is None else f", expert {int(np.asarray(experts)[index])}"
    row = index[:-1] if expected.ndim > 1 or expected.size <= 10 else index
    why = next((line for line, twin in (suspects or {}).items() if _fits(yours, twin, tolerance)), why)
    raise Broken(case, show(yours[row]), show(expected[row]), why, where)


def _fits(yours, twin, tolerance) -> bool:
    twin = np.asarray(twin, np.float64)
    return twin.shape == yours.shape and not differs(np.asarray(yours, np.float64), twin, tolerance * 4).any()
