"""The report's sections on what the model learned: loss by domain, and what its experts do."""

from itertools import pairwise
from pathlib import Path

import numpy as np

from moe_course.balance import load_report
from moe_course.train import figures
from moe_course.train.markdown import counted, picture, table
from moe_course.train.records import Run, against_baselines, entropy, mutual_information

NARROW = 0.15
"""Bits between order 0 and the best n-gram below which short contexts have next to nothing to teach."""


def loss_section(run: Run, plots: Path) -> str:
    """Bits per byte of every domain: the curve, what it says, the last figures beside the baselines."""
    if not run.domains:
        return "## Loss\n\nNo loss was recorded."
    figures.loss_figure(run, plots / "loss.png")
    parts = [
        "## Loss",
        picture(f"{plots.name}/loss.png", "bits per byte by domain", loss_caption(run)),
        loss_table(run),
        loss_limits(run),
    ]
    return "\n\n".join(parts)


def loss_caption(run: Run) -> str:
    """How low the held-out curves came, and whether they still move (between equal evaluations only)."""
    held_out = {domain: bits for domain in run.domains if len(bits := run.held_out(domain)[1])}
    if not held_out:
        return "Training bits per byte; nothing was held out."
    parts = [
        f"{domain} {against_baselines(bits[-1], run.baselines(domain))}" for domain, bits in held_out.items()
    ]
    text = f"Held out: {'; '.join(parts)}."
    return " ".join([text, *movement(run), *uneven_evaluations(run)])


def movement(run: Run) -> list[str]:
    """How far held-out bits moved between the last two evaluations of the same bytes."""
    for before, after in reversed(list(pairwise(run.evals))):
        if before.get("bytes_by_domain") == after.get("bytes_by_domain"):
            old, new = (record.get("bits_per_byte_by_domain") or {} for record in (before, after))
            both = [name for name in new if None not in (new[name], old.get(name))]
            moved = ", ".join(f"{name} {new[name] - old[name]:+.3f}" for name in both)
            return [f"Between steps {before['step']:,} and {after['step']:,}: {moved} bits."]
    return []


def uneven_evaluations(run: Run) -> list[str]:
    """A warning where the last point stands on another sample than the others."""
    totals = [sum((record.get("bytes_by_domain") or {}).values()) for record in run.evals]
    if len(totals) > 1 and totals[-1] != totals[-2]:
        return [f"The last point is of {totals[-1]:,} held-out bytes, those before of {totals[-2]:,}."]
    return []


def loss_table(run: Run) -> str:
    """Held-out and training figures per domain, and the ladder of n-grams."""
    orders = max((len(run.baselines(domain)) for domain in run.domains), default=0)
    rows = []
    for domain in run.domains:
        _, bits = run.held_out(domain)
        evaluated = (run.evals[-1].get("bytes_by_domain") or {}).get(domain) if run.evals else None
        recent = run.training_bits(domain)[-run.window :]
        recent = recent[np.isfinite(recent)]
        ladder = [f"{value:.3f}" for value in run.baselines(domain)]
        rows.append(
            [
                domain,
                f"{bits[-1]:.3f}" if len(bits) else "none",
                f"{evaluated:,}" if evaluated else "-",
                f"{recent.mean():.3f}" if len(recent) else "none",
                *ladder,
                *["-"] * (orders - len(ladder)),
            ]
        )
    training = f"training, last {counted(run.window, 'step')}"
    ladder_names = [f"order {n}" for n in range(orders)]
    return table(["bits per byte", "held out, last", "on bytes", training, *ladder_names], rows)


def loss_limits(run: Run) -> str:
    """What the curve shows, and what it does not."""
    length = run.config.get("seq_len")
    context = f"from at most {length:,} bytes of context" if length else "from a short context"
    shows = (
        f"What the curve shows: how well the next byte of held-out documents is predicted, {context}. "
        "What it does not show: the spread between seeds (this is one run), or what more steps or a longer "
        "context would bring."
    )
    if any(map(run.baselines, run.domains)):
        shows += " The first fall lies above the axis. Order n is an n-gram model that "
        shows += "sees n bytes (interpolated Witten-Bell)."
    paragraphs = [shows]
    for domain in run.domains:
        ladder = run.baselines(domain)
        if ladder and (worth := ladder[0] - min(ladder)) < NARROW:
            paragraphs.append(
                f"{domain}: byte frequencies alone (order 0) give {ladder[0]:.3f}, the best n-gram "
                f"{min(ladder):.3f} (order {int(np.argmin(ladder))}). An honest split leaves a short-context "
                f"model about {worth:.3f} bits to gain, so a curve that goes flat near order 0 is the "
                "expected one, not a failed run."
            )
    return "\n\n".join(paragraphs)


def experts_section(run: Run, plots: Path) -> str:
    """Load of every expert over time, its evenness at the end, which domain uses which expert."""
    steps, _ = run.load_steps
    domains, _ = run.domain_load
    parts = ["## Experts"]
    if len(steps):
        figures.load_figure(run, plots / "load.png")
        parts += [
            picture(f"{plots.name}/load.png", "expert load over the steps", load_caption(run)),
            load_table(run),
        ]
    else:
        is_dense = run.model and run.model.num_moe_layers + run.model.mtp_depth == 0
        parts.append("The model has no MoE layer." if is_dense else "No expert load was recorded.")
    if len(domains) > 1:
        figures.domain_figure(run, plots / "domains.png")
        parts += [
            picture(f"{plots.name}/domains.png", "experts by domain", domain_caption(run)),
            information_table(run),
        ]
    elif domains:
        parts.append("One domain: there is nothing for an expert to tell apart.")
    elif len(steps):
        parts.append("No evaluation recorded which domain uses which expert.")
    return "\n\n".join(parts)


def load_caption(run: Run) -> str:
    """How even the load became."""
    steps, load = run.load_steps
    window = min(run.window, len(steps))
    first, last = (figures.over_even_share(part.sum(0)) for part in (load[:window], load[-window:]))
    text = (
        f"Over the last {counted(window, 'step')} the busiest expert of any layer took {np.nanmax(last):.2f} "
        f"times the even share and the idlest {np.nanmin(last):.2f}"
    )
    if len(steps) >= 2 * window:
        text += f"; over the first {window} it was {np.nanmax(first):.2f} and {np.nanmin(first):.2f}"
    dead = int((load[-window:].sum(0) == 0).sum())
    text += f". {dead} of {load[0].size} experts got nothing in the end." if dead else ". No expert was dead."
    hidden = load.shape[1] - len(figures.shown_layers(load.shape[1]))
    return text + (f" {hidden} of {load.shape[1]} layers are not drawn." if hidden else "")


def load_table(run: Run) -> str:
    """Evenness of each layer's load at the end of the run."""
    _, load = run.load_steps
    window = min(run.window, len(load))
    report = load_report(load[-window:].sum(0).astype(np.int32))
    single = load_report(load[-window:].astype(np.int32).reshape(-1, load.shape[2]))
    of_step = np.asarray(single.max_over_mean).reshape(window, -1).mean(0)
    last = next(record for record in reversed(run.steps) if record.get("load"))
    bias = last.get("bias_range") or ["-"] * load.shape[1]
    rows = [
        [
            name,
            f"{report.cv[i]:.3f}",
            f"{report.max_over_mean[i]:.2f}",
            f"{of_step[i]:.2f}",
            f"{report.entropy[i]:.4f}",
            int(report.dead[i]),
            bias[i] if isinstance(bias[i], str) else f"{bias[i]:.3f}",
        ]
        for i, name in enumerate(run.layer_names(load.shape[1]))
    ]
    header = [
        "layer",
        "CV",
        "max / mean",
        "max / mean of a step",
        "entropy / ln E",
        "dead experts",
        "bias range",
    ]
    note = (
        f"Load summed over the last {counted(window, 'step')}, except in the fourth column: that is the mean "
        "of each step's own max / mean, the imbalance that a step pays for. Bias range: largest minus "
        "smallest expert bias at the last step."
    )
    return f"{table(header, rows)}\n\n{note}"


def domain_caption(run: Run) -> str:
    """Where experts specialised most."""
    domains, counts = run.domain_load
    ratio = figures.over_even_share(counts)
    names = run.layer_names(counts.shape[1])
    domain, layer, expert = np.unravel_index(np.nanargmax(ratio), ratio.shape)
    text = (
        f"The strongest taste: {domains[domain]} sends {ratio[domain, layer, expert]:.1f} times the even "
        f"share of its token copies to expert {expert} of {names[layer]}."
    )
    bits = [mutual_information(counts[:, i].astype(float)) for i in range(len(names))]
    best = int(np.nanargmax(bits))
    text += f" An expert tells most about the domain in {names[best]}: {bits[best]:.3f} bits."
    return text + " Last evaluation; 1 is even."


def information_table(run: Run) -> str:
    """Mutual information of domain and expert, per layer."""
    _, counts = run.domain_load
    rows = []
    for i, name in enumerate(run.layer_names(counts.shape[1])):
        joint = counts[:, i].astype(float)
        bias = (joint.shape[0] - 1) * (joint.shape[1] - 1) / (2 * np.log(2) * max(joint.sum(), 1))
        information, most = mutual_information(joint), entropy(joint.sum(1))
        rows.append([name, f"{information:.4f}", f"{most:.3f}", f"{information / most:.1%}", f"{bias:.1e}"])
    header = ["layer", "I(domain; expert), bits", "H(domain), bits", "share", "bias of the estimate, bits"]
    note = (
        "Plug-in estimate from the counts of the last evaluation: 0 if all domains use the experts alike, "
        "H(domain) if the expert gives the domain away. It is too high by about (domains − 1)(experts − 1) / "
        "(2 ln 2 × copies), the last column, and by more than that because the copies of one token, and of "
        "its neighbours, are not independent."
    )
    return f"{table(header, rows)}\n\n{note}"
