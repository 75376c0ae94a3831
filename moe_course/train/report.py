"""One page per run, ``report.md``, from what the run itself wrote: loss, expert load, speed, token ledger.

A run that broke off, or whose files hold only half of what they should, gets a page too, and the page says
what is missing. The same files give the same page, byte by byte.
"""

from pathlib import Path

import numpy as np

from moe_course.errors import SettingError
from moe_course.train.costs import costs_section, speed_section
from moe_course.train.findings import experts_section, loss_section
from moe_course.train.markdown import counted, table
from moe_course.train.records import COPIES, Run, against_baselines

FOLDER = "report"
"""Folder of the plots, beside the page."""


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.md`` and its plots in ``run_dir/report/``; return the page's path.

    Works on any run folder, finished or not; reads ``config.json``, ``metrics.jsonl`` and ``summary.json``
    where they are there. Needs no accelerator and no checkpoint. Raises :class:`SettingError` if there is no
    such folder.
    """
    if not run_dir.is_dir():
        raise SettingError(f"there is no run in {run_dir}. Give the folder of a run, such as runs/tiny.")
    run = Run.read(run_dir)
    plots = run_dir / FOLDER
    plots.mkdir(exist_ok=True)
    for old in plots.glob("*.png"):  # of a former report, which may have had more to show
        old.unlink()
    sections = [
        head(run),
        loss_section(run, plots),
        experts_section(run, plots),
        speed_section(run, plots),
        costs_section(run),
        ledger_section(run),
        origin_section(run),
    ]
    page = run_dir / "report.md"
    page.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")
    return page


def head(run: Run) -> str:
    """The verdict: what was trained, how well it predicts, whether every token copy was computed."""
    lines = [
        f"# {run.name}: report of a training run",
        trained_line(run),
        held_out_line(run),
        ledger_line(run),
    ]
    if absent := missing(run):
        lines.append("**Missing here.** " + "; ".join(absent) + ".")
    return "\n\n".join(lines)


def trained_line(run: Run) -> str:
    """What was trained, for how long, on what."""
    model, parts = run.model, []
    if preset := run.summary.get("preset") or run.config.get("preset"):
        parts.append(f"preset `{preset}`")
    if model and model.num_moe_layers:
        shared = f" and {model.num_shared_experts} shared" if model.num_shared_experts else ""
        experts = (
            f"{model.num_moe_layers} of them with {model.num_experts} experts, top {model.top_k}{shared}"
        )
        parts.append(f"{counted(model.num_layers, 'layer')}, {experts}")
    elif model:
        parts.append(f"{counted(model.num_layers, 'layer')}, all dense")
    planned, done = run.config.get("steps"), int(run.step[-1]) if run.steps else 0
    parts.append(
        f"stopped at step {done:,} of {planned:,}" if planned and done < planned else f"{done:,} steps"
    )
    if run.steps and run.bytes_seen[-1]:
        parts.append(f"{run.bytes_seen[-1] / 1e6:.3g} MB predicted")
    if seconds := run.summary.get("seconds"):
        parts.append(f"{seconds / 60:.1f} minutes of steps")
    return f"**Trained.** {'; '.join(parts)}; {machine(run)}."


def machine(run: Run) -> str:
    """The devices, in words; simulated ones are called that."""
    devices, host = run.summary.get("devices") or {}, run.summary.get("machine") or {}
    count = run.num_devices
    if count is None:
        return "devices not recorded"
    if devices.get("simulated"):
        return (
            f"{counted(count, 'simulated device')} on {host.get('cores', 'an unknown number of')} CPU cores"
        )
    return f"{counted(count, 'device')} ({devices.get('kind', 'kind not recorded')})"


def held_out_line(run: Run) -> str:
    """The last held-out figure of every domain, judged by the n-gram orders it is below."""
    last = {domain: bits[-1] for domain in run.domains if len(bits := run.held_out(domain)[1])}
    if not last:
        return "**Held out.** No evaluation was recorded."
    verdicts = [
        f"{domain} {bits:.3f}, {against_baselines(bits, run.baselines(domain))}"
        for domain, bits in last.items()
    ]
    return f"**Held out, bits per byte at step {int(run.evals[-1]['step']):,}.** {'; '.join(verdicts)}."


def ledger_line(run: Run) -> str:
    """Whether the run was dropless, how full the buffers were, what was compiled."""
    ledger, bad = run.ledger, run.first_unbalanced()
    if not ledger:
        return f"**Token ledger.** {no_ledger(run)}"
    if bad is None:
        text = (
            f"**Dropless.** {ledger['dropped']} of {ledger['made']:,} token copies dropped: made, sent, "
            f"received, computed and combined agree at every one of {counted(len(run.steps), 'step')}."
        )
    else:
        totals = ", ".join(f"{ledger[name]:,} {name}" for name in COPIES)
        text = (
            f"**NOT dropless.** The books of step {bad:,}, the first of them, do not balance. Over the run: "
            f"{totals}, {ledger['dropped']:,} dropped. Do not trust this run's loss."
        )
    for sentence in (demand_text(run), compilations_text(run)):
        text += f" {sentence}" if sentence else ""
    return text


def no_ledger(run: Run) -> str:
    """Why there is none."""
    if run.model and run.model.num_moe_layers + run.model.mtp_depth == 0:
        return "None: the model has no MoE layer."
    return "None was recorded."


def demand_text(run: Run) -> str:
    """The fullest that a receive buffer was."""
    demand, capacity = run.column("demand"), run.column("capacity")
    used = np.divide(demand, capacity, out=np.full(demand.shape, np.nan), where=capacity > 0)
    if not np.isfinite(used).any():
        return ""
    worst = int(np.nanargmax(used))
    rows = f"{int(demand[worst]):,} of {int(capacity[worst]):,} receive rows per rank"
    return f"The largest demand was {rows} ({used[worst]:.0%}, at step {int(run.step[worst]):,})."


def compilations_text(run: Run) -> str:
    """Compilations and what happened on the way."""
    count = run.summary.get("compilations")
    parts = [] if count is None else [counted(count, "compilation")]
    kinds = [event.get("event") for event in run.events]
    names = {"bucket": "change of bucket", "resume": "resume", "interrupt": "interrupt"}
    parts += [counted(kinds.count(kind), name) for kind, name in names.items() if kind in kinds]
    return f"{', '.join(parts)}." if parts else ""


def missing(run: Run) -> list[str]:
    """What a finished run would have written and this one did not, in words."""
    absent = [] if run.config else ["the configuration (no config.json)"]
    if not run.steps:
        absent.append("every step (none in metrics.jsonl)")
    if not run.evals:
        absent.append("every evaluation")
    elif run.steps and run.evals[-1]["step"] != run.steps[-1]["step"]:
        reached, last = int(run.step[-1]), run.evals[-1]["step"]
        absent.append(
            f"an evaluation at the end (the run reached step {reached:,}, the last is of step {last:,})"
        )
    if not run.summary:
        return [*absent, "the summary (no summary.json): baselines, peak, latencies, sources, versions"]
    names = {
        "baselines": "n-gram baselines",
        "peak": "the peak of a device, so no MFU",
        "latency_ms": "latencies of dispatch, combine and grouped GEMM",
        "sources": "the sources of the data",
        "versions": "versions",
        "machine": "the machine",
    }
    return absent + [text for key, text in names.items() if not run.summary.get(key)]


def ledger_section(run: Run) -> str:
    """Totals of the token ledger, and the events of the run."""
    parts = ["## Token ledger"]
    if run.ledger:
        rows = [[name, f"{count:,}"] for name, count in run.ledger.items()]
        parts.append(table(["token copies, all steps and MoE layers", "count"], rows))
        parts.append(
            "Each line is counted at another place: by the router, in the send buffers, from the exchanged "
            "sizes, in the groups the experts walk, and where a token adds up its copies. Equal counts mean "
            "that nothing was dropped."
        )
    else:
        parts.append(no_ledger(run))
    told = [event for event in run.events if event.get("event") != "checkpoint"]
    if told:
        parts.append(
            "\n".join(
                f"- step {event.get('step')}, {event.get('event')}: {event.get('text', '')}" for event in told
            )
        )
    return "\n\n".join(parts)


def origin_section(run: Run) -> str:
    """Data, machine and versions: what it takes to repeat the run."""
    summary, parts = run.summary, ["## Data, machine, versions"]
    if sources := summary.get("sources"):
        rows = [
            [
                name,
                source.get("description", ""),
                megabytes(source, "train_bytes"),
                megabytes(source, "held_out_bytes"),
            ]
            for name, source in sources.items()
        ]
        parts.append(table(["domain", "source", "train (MB)", "held out (MB)"], rows, words=(0, 1)))
        notes = [f"- {note}" for source in sources.values() for note in source.get("notes") or []]
        parts += ["\n".join(notes)] if notes else []
    mesh = run.config.get("mesh") or {}
    facts = {
        "started": summary.get("started"),
        "seed": run.config.get("seed"),
        "devices": machine(run),
        "mesh": " × ".join(f"{axis} {size}" for axis, size in mesh.items()),
        "batch": batch_text(run),
        "platform": (summary.get("versions") or {}).get("platform"),
        "processor": (summary.get("machine") or {}).get("cpu"),
        "memory": f"{memory:.1f} GB" if (memory := (summary.get("machine") or {}).get("memory_gb")) else None,
    }
    others = {"cpu", "cores", "platform"}  # not versions, and told above
    versions = {name: text for name, text in (summary.get("versions") or {}).items() if name not in others}
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows = [[name, value] for name, value in facts.items() if value not in (None, "")]
    return "\n\n".join([*parts, table(["", "value"], rows, words=(0, 1))])


def batch_text(run: Run) -> str | None:
    """Sequences and their length."""
    batch, length = run.config.get("batch_size"), run.config.get("seq_len")
    return f"{batch} sequences of {length} bytes" if batch and length else None


def megabytes(source: dict, key: str) -> str:
    """A byte count in MB, or a dash."""
    return f"{source[key] / 1e6:.2f}" if source.get(key) is not None else "-"
