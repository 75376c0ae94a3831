"""``moe-course train``: from settings to a finished run with its report."""

import datetime
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from moe_course.environment import memory_bytes, setup, versions, visible_gpus
from moe_course.errors import RunError, SettingError
from moe_course.scaling.flops import parameter_counts
from moe_course.train import together
from moe_course.train.config import TrainConfig
from moe_course.train.corpora import DOMAINS
from moe_course.train.data import FIRST_DOMAIN_TOKEN, TrainData
from moe_course.train.run_dir import SUMMARY, RunDir, choose_run_dir

BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and the two moments of AdamW."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run lives and how it starts."""

    name: str | None = None
    """Folder under --runs-dir. Default: the preset's name, with a number if that is taken."""
    runs_dir: Path = field(default_factory=lambda: Path("runs"))
    resume: bool = False
    """Continue from the newest checkpoint of the run."""
    coordinator: str = ""
    """host:port of process 0, where there are several processes."""
    processes: int = 1
    """Processes of this run, on one machine or many, each with its share of --devices."""
    process: int = 0
    """Which of them this is."""


def train(config: TrainConfig, preset: str, options: RunOptions, console: Console) -> bool:
    """Train, evaluate, report. True if the run reached its end, False after an interrupt.

    Every setting is checked before the run's folder is made.
    """
    config.validate()
    _check_vocabulary(config)
    _check_memory(config)
    with together.join(options.coordinator, options.processes, options.process, config.devices):
        path, resume = _choose_run(config, preset, options)
        options = replace(options, resume=resume)
        own = together.run_dir(path) if options.processes > 1 else nullcontext(RunDir(path))
        with own as run:
            said = Console(quiet=True) if options.process else console
            return _train(config, preset, options, path, run, said)


def _choose_run(config: TrainConfig, preset: str, options: RunOptions) -> tuple[Path, bool]:
    """The run's folder and whether to resume it: what process 0 finds, for all."""
    chosen = None
    if options.process == 0:
        path = choose_run_dir(options.runs_dir, options.name, preset, options.resume)
        if options.resume:
            RunDir(path).check_same_run(config)
        chosen = [str(path), options.resume]
    if options.processes > 1:
        chosen = together.told_by_first(chosen)
    return Path(chosen[0]), chosen[1]


def _train(
    config: TrainConfig, preset: str, options: RunOptions, path: Path, run: RunDir, console: Console
) -> bool:
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    data = TrainData(config.data, config.seq_len, config.batch_size, config.seed)
    status = setup(config.devices // options.processes, quiet=True)
    _check_devices(config, status.num_devices)

    console.print(str(status), highlight=False, soft_wrap=True)
    counts = parameter_counts(config.model)
    console.print(
        f"model     {counts.total / 1e6:.2f}M parameters, {counts.active / 1e6:.2f}M active per token; "
        f"{config.model.num_experts} experts, top {config.model.top_k}\n"
        f"mesh      data {config.mesh.data} x fsdp {config.mesh.fsdp} x expert {config.mesh.expert}",
        highlight=False,
        soft_wrap=True,
    )
    for line in data.summary():
        console.print(line, highlight=False, soft_wrap=True)

    if not options.resume:
        run.create(config, preset)
    from moe_course.train.loop import Trainer  # needs JAX started

    trainer = Trainer(config, data, run, console)
    try:
        done = trainer.start(options.resume)
        if options.resume:
            console.print(
                f"resuming {path} after step {done} of {config.steps}", highlight=False, soft_wrap=True
            )
        finished = trainer.train(done)
        summary = _summary(run, config, preset, data, trainer, counts, finished, started)
        if finished:
            _finish(config, data, trainer, summary, console)
        run.write_json(SUMMARY, summary)
    finally:
        trainer.close()
    if not finished:
        console.print(
            f"stopped, checkpoint written. Continue with:\n"
            f"  moe-course train --preset {preset} --name {path.name} --runs-dir {options.runs_dir} --resume",
            highlight=False,
            soft_wrap=True,
        )
        return False
    if options.process:
        return True
    from moe_course.train.report import write_report

    report = write_report(path)
    console.print(
        f"report    {report}\nnext      open it; TensorBoard events are in {run.tensorboard} "
        f"(pip install tensorboard shows them)",
        soft_wrap=True,
    )
    return True


def _finish(config: TrainConfig, data: TrainData, trainer, summary: dict, console: Console) -> None:
    """What is measured once, at the end: held-out bits, n-gram baselines, latencies, this machine's peak."""
    from moe_course.train.latency import measure_latency, measure_peak
    from moe_course.train.ngram import baselines

    with console.status("final evaluation"):
        final = trainer.evaluate(config.steps, config.final_eval_bytes)
    if not together.is_first():
        return
    with console.status("n-gram baselines"):
        summary["baselines"] = baselines(data, held_out_bytes=config.final_eval_bytes)
    with console.status("latencies"):
        summary["peak"] = measure_peak(config.model.compute_dtype, devices=config.devices)
        if trainer.alone:
            layer, hidden = trainer.trained_moe()
            summary["latency_ms"] = measure_latency(
                config.model,
                trainer.mesh,
                tokens_per_step=config.tokens_per_step,
                capacity=trainer.capacity,
                hidden=hidden,
                dispatcher=config.dispatcher,
                layer=layer,
                backend=config.backend,
            )
    for domain, bits in final["bits_per_byte_by_domain"].items():
        orders = "  ".join(f"order {n} {value:.2f}" for n, value in enumerate(summary["baselines"][domain]))
        console.print(
            f"{domain:<8}  {bits:.3f} bits/byte held out    n-grams: {orders}",
            highlight=False,
            soft_wrap=True,
        )


def _summary(run, config, preset, data, trainer, counts, finished, started) -> dict:
    import jax

    device, v = jax.devices()[0], versions()
    earlier = run.read_json(SUMMARY)
    steps = [record for record in run.records() if record["kind"] == "step"]
    return {
        "name": run.path.name,
        "preset": preset,
        "started": earlier.get("started", started),
        "seconds": trainer.seconds,
        "finished": finished,
        "versions": v,
        "machine": {"cpu": v["cpu"], "cores": v["cores"], "memory_gb": round(memory_bytes() / 1e9, 1)},
        "devices": {
            "count": config.devices,
            "kind": device.device_kind if device.platform != "cpu" else "cpu",
            "simulated": device.platform == "cpu",
        },
        "parameters": {"total": counts.total, "active": counts.active},
        "sources": data.describe(),
        "compilations": trainer.compilations,
        "tokens_seen": sum(record["tokens"] for record in steps),
    }


def _check_vocabulary(config: TrainConfig) -> None:
    need = FIRST_DOMAIN_TOKEN + len(DOMAINS)
    if config.model.vocab_size < need:
        raise SettingError(
            f"vocab_size is {config.model.vocab_size} but bytes and domain tokens need {need}. "
            f"Set --model.vocab-size to {need} or more."
        )


def _check_memory(config: TrainConfig) -> None:
    """Refuse what cannot fit before anything is made: the state alone, cut over the mesh's copies."""
    total = parameter_counts(config.model).total
    need, have = BYTES_PER_PARAMETER * total * config.mesh.data, memory_bytes()
    if have and need > 0.9 * have and not visible_gpus():
        raise SettingError(
            f"{total / 1e9:.1f}B parameters need {need / 1e9:,.0f} GB for weights, gradients and AdamW moments; this "
            f"machine has {have / 1e9:.0f} GB. Choose --preset tiny or small, or make the model smaller."
        )


def _check_devices(config: TrainConfig, found: int) -> None:
    if found != config.devices:
        raise RunError(
            f"--devices is {config.devices} but {found} GPUs are here. Set --devices {found} with a mesh of "
            f"that size, or JAX_PLATFORMS=cpu to simulate {config.devices}."
        )
