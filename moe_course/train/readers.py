"""Parsers of what the corpora are stored as: Python source trees, docstrings, FASTA."""

import ast
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path


def parse_fasta(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name (the header's first word) and upper-case sequence of each record.

    A record starts at a *line* that starts with ``>``; headers may hold more of that sign ("3'->5'").
    Any line ending, blank lines, a trailing stop ``*`` and empty records are accepted. Raises
    ``ValueError`` where sequence comes before the first header.
    """
    name, lines = "", []
    for line in (*data.splitlines(), b">"):
        if line.startswith(b">"):
            if name:
                yield name, b"".join(lines).upper().rstrip(b"*")
            words = line[1:].split(maxsplit=1)
            name, lines = (words[0].decode("utf-8", "replace") if words else "unnamed"), []
        elif line.strip():
            if not name:
                raise ValueError("not FASTA: there is sequence before the first line that starts with '>'")
            lines.append(b"".join(line.split()))


_DROPPED_DIRECTORIES = {
    "site-packages", "dist-packages", "__pycache__",  # not of the library
    "encodings", "pydoc_data", "lib2to3", "idle_test",  # tables, and text that the fallback for English uses
}  # fmt: skip


def python_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Relative POSIX path and content of the Python sources under ``root``, in path order, without tests.

    Tables (``encodings``), foreign packages and what the build of this Python generated (``_sysconfigdata``,
    ``config-*``: full of local paths) are left out. Line ends become ``\\n``.
    """
    paths = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not _is_dropped(name)]
        paths += [Path(directory, name) for name in files if name.endswith(".py") and not _is_dropped(name)]
    for path in sorted(paths):
        yield path.relative_to(root).as_posix(), path.read_bytes().replace(b"\r\n", b"\n")


def _is_dropped(name: str) -> bool:
    return name in _DROPPED_DIRECTORIES or name.startswith(("test", "_sysconfigdata", "config-"))


def docstrings(source: bytes) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in order: parsed, never run.

    None where the source does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
    pending: list[ast.AST] = [tree]
    while pending:  # statements only: five times less than ast.walk visits, and in the order of the file
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)
        blocks = (getattr(node, field, ()) for field in ("body", "handlers", "orelse", "finalbody"))
        pending.extend(reversed([child for block in blocks for child in block]))


_TRIPLE_QUOTED = re.compile(rb"""^[ \t]*[rRuU]?(\"{3}|'{3})(.*?)\1""", re.S | re.M)


def documentation_share(source: bytes) -> float:
    """Roughly how much of a Python source is docstrings, 0 to 1, without parsing it."""
    return sum(len(match[2]) for match in _TRIPLE_QUOTED.finditer(source)) / max(1, len(source))


def pydoc_topics(root: Path) -> Iterator[tuple[str, bytes]]:
    """The language reference that ``help()`` shows, one document per topic; none without its source file."""
    try:
        tree = ast.parse((root / "pydoc_data" / "topics.py").read_bytes())
    except (OSError, SyntaxError):
        return
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in ast.literal_eval(node.value).items():
                yield f"pydoc_data/topics.py:{topic}", text.encode()
