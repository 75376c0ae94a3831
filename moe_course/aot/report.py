"""A compiled step as a page to read: on the terminal, as Markdown, as HTML; the program's text beside it."""

import html
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe_course.aot.compiled import Compiled

ABOVE = 1e9
"""Collectives above this many bytes get a row of their own, and a formula that must hold."""


@dataclass(frozen=True)
class Section:
    """A heading, a table, and what to know about it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    remarks: tuple[str, ...] = ()


def title(c: Compiled) -> str:
    """One line that says what was compiled, and that it never ran."""
    return f"One training step for {c.gpus} {c.hardware.upper()} GPUs: {c.statement}"


def summary(c: Compiled) -> str:
    """What was compiled, in a sentence, and whether it fits."""
    model, mesh = c.config["model"], " x ".join(f"{axis} {size}" for axis, size in c.mesh.items())
    verdict = "fits" if c.fits else "does not fit"
    room = "left" if c.margin_bytes >= 0 else "missing"
    return (
        f"{c.parameters / 1e9:,.1f}B parameters, {model['num_layers']} layers, {c.tokens_per_gpu:,} tokens per GPU, "
        f"mesh {mesh}, remat {c.config['remat']}, capacity factor {c.config['capacity_factor']:g}, "
        f"backend {c.config['backend']}, recipe {c.config['recipe']}. It {verdict}: "
        f"{_gb(abs(c.margin_bytes))} GB {room} of {_gb(c.device_bytes)} GB after {_gb(c.reserved_bytes)} GB kept free."
    )


def sections(c: Compiled) -> list[Section]:
    """The tables of the page."""
    return [_memory(c), _collectives(c), _flops(c), _compiler(c)]


def _memory(c: Compiled) -> Section:
    rows = [
        ("train state: weights, moments (exact)", _gb(c.state_bytes_per_gpu)),
        ("temporary, as XLA plans it", _gb(c.temp_bytes_per_gpu)),
        ("needed at once", _gb(c.needed_bytes_per_gpu)),
        ("kept free for what the compiler does not count", _gb(c.reserved_bytes)),
        ("memory of the GPU", _gb(c.device_bytes)),
        ("margin", _gb(c.margin_bytes)),
    ]
    if c.host_bytes_per_gpu:
        rows.insert(2, ("in the host's memory (offload)", _gb(c.host_bytes_per_gpu)))
    remark = (
        "Compiling is not fitting: XLA compiles what no GPU can hold. NCCL's buffers, the CUDA context and "
        "fragmentation are not in its plan, and the plan itself moves by 10 GB with choices of layout."
    )
    return Section("Memory of one GPU", ("what", "GB"), rows, (remark,))


def _collectives(c: Compiled) -> Section:
    rows, small = [], [0, 0.0]
    for entry in c.collectives:
        if max(entry["bytes"], entry["predicted"] or 0) < ABOVE:
            small[0] += entry["count"]
            small[1] += entry["bytes"]
            continue
        by_hand = "none" if entry["predicted"] is None else _gb(entry["predicted"])
        rows.append((entry["kind"], entry["axis"], f"{entry['count']:,}", _gb(entry["bytes"]), by_hand))
    if small[0]:
        rows.append(("all others, each below 1 GB", "", f"{small[0]:,}", _gb(small[1]), ""))
    remark = "Bytes that one GPU sends in a step. Start and end of a collective apart: overlap is allowed, not shown."
    return Section("Collectives", ("kind", "mesh axis", "runs", "GB compiled", "GB by hand"), rows, (remark,))


def _flops(c: Compiled) -> Section:
    f = c.flops
    named = {
        "model": "the model's: 3 forwards, causal attention half",
        "masked": "masked: scores computed and thrown away",
        "recompute": f"recompute (remat {c.config['remat']})",
        "padding": "padding: rows of buffers that hold no token",
        "fallback": "fallback: rows times experts that are not theirs",
        "total": "all of these",
    }
    rows = [(text, _tflop(f[name])) for name, text in named.items()]
    rows.append(("in the compiled text", _tflop(f["compiled"])))
    rows.append(("in kernels that the text does not show, by formula", _tflop(f["in_kernels"])))
    return Section("Matrix products of one GPU", ("what", "TFLOP"), rows)


def _compiler(c: Compiled) -> Section:
    rows = [
        ("compile", f"{c.compile_s:.0f} s, of it {c.trace_s:.0f} s of tracing; {c.cpu_s:.0f} s of CPU"),
        ("memory of the compiler", f"{c.peak_rss_bytes / 1e9:.2f} GB"),
        ("on", c.compiled_on),
        ("versions", ", ".join(f"{name} {version}" for name, version in c.versions.items())),
    ]
    rows += [("kernels", ", ".join(f"{count:,} x {name}" for name, count in c.kernels.items()))]
    return Section("Compiler", ("what", ""), rows, tuple(c.notes))


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f}" if abs(size) < 10e9 else f"{size / 1e9:,.2f}"


def _tflop(flops: float) -> str:
    return f"{flops / 1e12:,.2f}"


def print_report(c: Compiled, console: Console) -> None:
    """The page on a terminal."""
    console.print(f"[bold]{title(c)}[/bold]\n{summary(c)}\n")
    for section in sections(c):
        table = Table(title=f"{section.title} ({c.statement})", title_justify="left")
        for i, column in enumerate(section.columns):
            table.add_column(column, justify="left" if i == 0 or section.title == "Compiler" else "right")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        for remark in section.remarks:
            console.print(remark, style="dim")


def markdown(c: Compiled, program: str) -> str:
    """The page as Markdown; ``program`` is where the program's text lies, from the page."""
    lines = [
        f"# {title(c)}",
        "",
        summary(c),
        "",
        f"The optimised program of one GPU: [{program}]({program}).",
    ]
    for section in sections(c):
        lines += ["", f"## {section.title} ({c.statement})", ""]
        lines += [_row(section.columns), _row(["---"] * len(section.columns)), *map(_row, section.rows)]
        for remark in section.remarks:
            lines += ["", remark]
    return "\n".join(lines) + "\n"


def _row(cells) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


_STYLE = """body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:.5em 0}td,th{border-bottom:1px solid #ccc;padding:.25em .8em;text-align:left}
p.never{background:#fff3cd;padding:.5em 1em}small{color:#555}"""


def page(c: Compiled, program: str) -> str:
    """The page as HTML, with nothing from elsewhere."""
    e = html.escape
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{e(title(c))}</title><style>{_STYLE}</style>",
        f"<h1>{e(title(c))}</h1><p class=never>Every figure here is a compiler's: {e(c.statement)}.</p>",
        f"<p>{e(summary(c))}</p><p>The optimised program of one GPU: <a href='{e(program)}'>{e(program)}</a></p>",
    ]
    for section in sections(c):
        head = "".join(f"<th>{e(column)}</th>" for column in section.columns)
        body = "".join("<tr>" + "".join(f"<td>{e(x)}</td>" for x in row) + "</tr>" for row in section.rows)
        parts.append(f"<h2>{e(section.title)} ({e(c.statement)})</h2><table><tr>{head}</tr>{body}</table>")
        parts += [f"<p><small>{e(remark)}</small></p>" for remark in section.remarks]
    return "\n".join(parts) + "</html>\n"


def write(c: Compiled, path: Path) -> Path:
    """Write the page (``.md`` is Markdown, all else HTML) and the program beside it; returns the program's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program = path.with_suffix(".hlo.txt")
    program.write_text(c.text())
    render = markdown if path.suffix == ".md" else page
    path.write_text(render(c, program.name))
    return program
