"""What a person sees while a run trains: a bar on a terminal, a line now and then in a log file."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG_EVERY_SECONDS = 15.0


class TrainProgress:
    """Context manager around the loop. ``console`` decides between bar and lines."""

    def __init__(self, console: Console, steps: int, done: int):
        self.console, self.steps = console, steps
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=done, figures="")

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def doing(self, what: str) -> None:
        """Change the word before the bar."""
        self._bar.update(self._task, description=what)

    def step(self, step: int, bits_per_byte: float, tokens_per_second: float, max_over_mean: float) -> None:
        """Show one finished step."""
        figures = f"{bits_per_byte:.3f} bits/byte  {tokens_per_second:,.0f} tok/s  load max/mean {max_over_mean:.2f}"
        self._bar.update(self._task, completed=step, description="training", figures=figures)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last_line > LOG_EVERY_SECONDS:
            self._last_line = now
            self.console.print(f"step {step}/{self.steps}  {figures}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text)
