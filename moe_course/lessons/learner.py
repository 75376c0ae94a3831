"""The learner's function, as properties see it: called with fresh inputs, watched, never trusted."""

import contextlib
import copy
import functools
import inspect
import io
import os
import traceback
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.exercise import Broken, Exercise, Property


class NotAttempted(Exception):
    """The function is still the stub."""


class Crashed(Exception):
    """The learner's function raised; the cause is ``__cause__``."""


class Learner:
    """Wraps a function so that no call can disturb the next one or the check.

    NumPy arguments arrive as new JAX arrays, lists and dicts as copies. What it prints is kept, not shown.
    Promotion and warnings are JAX's defaults, whatever the caller has set, so that a check gives one verdict
    everywhere.
    """

    def __init__(self, fn: Callable):
        self.fn = fn
        self.calls = 0
        self.printed = ""
        self._first = None

    def __call__(self, *args, **kwargs):
        given = _fresh((args, kwargs))
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), _default_numerics():
                result = self.fn(*given[0], **given[1])
                jax.block_until_ready(result)
        except KeyboardInterrupt:
            raise
        except NotImplementedError as error:
            if self.calls == 0 and _raised_by_hand(error):
                raise NotAttempted from error
            raise Crashed from error
        except (Exception, SystemExit) as error:
            raise Crashed from error
        finally:
            self.printed = out.getvalue()
        self.calls += 1
        if self._first is None and not _traced((given, result)):
            self._first = (copy.deepcopy((args, kwargs)), _leaves(result))
        return result

    def same_again(self) -> int:
        """Call it again with the very first arguments: the answer must be what it was."""
        if self._first is None:
            return 0
        (args, kwargs), before = self._first
        if not _equal(_leaves(self(*args, **kwargs)), before):
            raise Broken(
                "the first case again, after all others",
                "another answer than the first time",
                "the same answer",
                "Something is kept between calls: a global, a cache, a random generator. Compute from the "
                "arguments alone.",
            )
        return 1


def compiled(program: Callable, *args, case: str, why: str):
    """``program(*args)``, a jitted function, with NumPy arguments as data on the device.

    Where it does not compile the property is broken; ``why`` says what a program may not do with such data.
    """
    try:
        return program(*(jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args))
    except (NotAttempted, Broken):
        raise
    except Exception as error:
        name = type(error.__cause__ or error).__name__
        raise Broken(case, name, "a program that compiles", why) from error


SAME_AGAIN = Property("the same input gives the same answer", lambda fn: fn.same_again())
"""Checked for every exercise, after its own properties."""


class Failure:
    """A property that does not hold, as lines of text."""

    def __init__(self, name: str, lines: list[str]):
        self.name, self.lines = name, lines


class Outcome:
    """What :func:`examine` found."""

    def __init__(self, attempted: bool, properties: int, cases: int, failures: list[Failure]):
        self.attempted, self.properties, self.cases, self.failures = attempted, properties, cases, failures

    @property
    def held(self) -> int:
        return self.properties - len(self.failures) if self.attempted else 0

    @property
    def passed(self) -> bool:
        return self.attempted and not self.failures


def examine(exercise: Exercise, fn, *, first_failure: bool = False) -> Outcome:
    """Run every property on ``fn``, or up to the first that fails. Prints nothing; lets only KeyboardInterrupt
    through."""
    properties = (*exercise.properties, SAME_AGAIN)  # the last, because it needs a case that worked
    if not callable(fn):
        lines = [f"{type(fn).__name__} is not a function. Give the function itself, without calling it."]
        return Outcome(True, len(properties), 0, [Failure(p.name, lines) for p in properties])
    learner, cases, failures = Learner(fn), 0, []
    for claim in properties:
        if failures and first_failure:
            break
        try:
            cases += claim.check(learner)
        except NotAttempted:
            return Outcome(False, len(properties), 0, [])
        except Broken as broken:
            failures.append(Failure(claim.name, _lines_of_broken(broken) + _printed(learner)))
        except Crashed as crash:
            failures.append(Failure(claim.name, _lines_of_crash(crash.__cause__, fn) + _printed(learner)))
        except Exception as error:
            lines = [
                f"The check could not read what you returned ({type(error).__name__}: {_first_line(error)})."
            ]
            failures.append(Failure(claim.name, lines))
        if len(failures) == len(exercise.properties):  # nothing works: being repeatable is no merit
            failures.append(Failure(SAME_AGAIN.name, []))
            break
    return Outcome(True, len(properties), cases, failures)


def _lines_of_broken(broken: Broken) -> list[str]:
    where = f"   ({broken.where})" if broken.where else ""
    lines = [f"case  {broken.case}"]
    if len(broken.yours) + len(broken.expected) < 70:
        lines.append(f"yours {broken.yours}   expected {broken.expected}{where}")
    else:
        lines += [f"yours    {broken.yours}{where}", f"expected {broken.expected}"]
    return lines + ([broken.why] if broken.why else [])


def _lines_of_crash(error: BaseException, fn) -> list[str]:
    return [f"{type(error).__name__}: {_first_line(error)}", *(_place(f) for f in _own_frames(error, fn))]


def _place(frame: traceback.FrameSummary) -> str:
    file = "your cell" if _is_cell(frame) else os.path.basename(frame.filename)
    return f"line {frame.lineno} of {file}, in {frame.name}: {frame.line or ''}".rstrip(": ")


def _first_line(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    return text if len(text) <= 160 else text[:157] + "..."


def _own_frames(error: BaseException, fn) -> list[traceback.FrameSummary]:
    """Where it happened: the innermost line of the function's own cell or file, and of any other cell."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    own = [f for f in frames if code is not None and f.filename == code.co_filename][-1:]
    cells = [f for f in frames if _is_cell(f)][-1:]
    return own + [f for f in cells if f not in own]


def _is_cell(frame: traceback.FrameSummary) -> bool:
    return "ipykernel" in frame.filename


def _printed(learner: Learner, limit: int = 5) -> list[str]:
    lines = learner.printed.rstrip().splitlines()
    more = [f"... and {len(lines) - limit} more lines"] if len(lines) > limit else []
    return [f"your function printed: {line}" for line in lines[:limit]] + more


def _raised_by_hand(error: NotImplementedError) -> bool:
    """Whether a stub raised it, not JAX or another library from inside."""
    return "site-packages" not in traceback.extract_tb(error.__traceback__)[-1].filename


@contextlib.contextmanager
def _default_numerics():
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


def _fresh(tree):
    if isinstance(tree, np.ndarray):
        return jnp.array(tree)
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_fresh(item) for item in tree)
    if isinstance(tree, list):
        return [_fresh(item) for item in tree]
    if isinstance(tree, dict):
        return {key: _fresh(item) for key, item in tree.items()}
    return tree


def _traced(tree) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _leaves(result) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(result) if hasattr(x, "dtype") or isinstance(x, int | float)]


def _equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and bool(np.all((x == y) | ((x != x) & (y != y))))
        for x, y in zip(a, b, strict=True)
    )
