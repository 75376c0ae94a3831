"""The few pieces of Markdown that a report is made of."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, words: Sequence[int] = (0,)) -> str:
    """A Markdown table: columns ``words`` to the left, the others, numbers, to the right."""
    lines = [header, [":--" if i in words else "--:" for i in range(len(header))], *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def picture(path: str, subject: str, conclusion: str) -> str:
    """An image with what it is of as alternative text, and under it the conclusion that it shows."""
    return f"![{subject}]({path})\n\n*{conclusion}*"


def counted(count: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
