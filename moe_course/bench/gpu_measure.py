"""What the parts of ``moe-course bench gpu`` share: failures as data, times of programs that take turns, compilations."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.monitoring

from moe_course.errors import SettingError

ROUNDS = 5
SECONDS_PER_CANDIDATE = 0.5
MAX_CALLS = 50


def attempt(measure: Callable[[], dict]) -> dict:
    """What ``measure`` returns; ``refused`` or ``error`` in words if it cannot or fails."""
    try:
        return measure()
    except SettingError as error:
        return {"refused": str(error)}
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        return {"error": f"{type(error).__name__}: {text.splitlines()[0][:300]}"}


def take_turns(
    candidates: Mapping[str, Callable], seconds: float = SECONDS_PER_CANDIDATE
) -> dict[str, float]:
    """Seconds per call of each candidate: median of :data:`ROUNDS` rounds in which they take turns.

    A round makes as many calls, one after the other without waiting, as fit its share of ``seconds``, and waits for
    the last. Compiles and warms up first.
    """
    calls = {}
    for name, call in candidates.items():
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        once = time.perf_counter() - start
        calls[name] = max(1, min(MAX_CALLS, int(seconds / ROUNDS / max(once, 1e-6))))
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, call in candidates.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                out = call()
            jax.block_until_ready(out)
            taken[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(times) for name, times in taken.items()}


def tflops(flops: float, seconds: float) -> float:
    """TFLOP/s to four digits."""
    return float(f"{flops / seconds / 1e12:.4g}")


class Compilations:
    """Counts XLA's compilations while it is open, of any program, not of one jitted function alone."""

    _open: "Compilations | None" = None
    _listens = False

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Compilations":
        if not Compilations._listens:
            jax.monitoring.register_event_duration_secs_listener(Compilations._hear)
            Compilations._listens = True
        Compilations._open = self
        return self

    def __exit__(self, *_) -> None:
        Compilations._open = None

    @staticmethod
    def _hear(event: str, duration: float, **_) -> None:
        if Compilations._open is not None and event.endswith("backend_compile_duration"):
            Compilations._open.count += 1
