"""Ctrl-C and SIGTERM: finish the step, save, and leave."""

import signal
from collections.abc import Callable


class StopOnSignal:
    """Context in which the first Ctrl-C or SIGTERM sets ``requested``; a second one stops at once."""

    def __init__(self, say: Callable[[str], None]):
        self.requested = False
        self._say = say

    def __enter__(self):
        self._previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread (a notebook's worker): no handler, no harm
                break
        return self

    def _on_signal(self, number, frame):
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("  finishing this step, then saving (Ctrl-C again stops at once)")

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
