"""What to compile: a training configuration for so many GPUs of a kind. Its identity, and its file."""

import dataclasses
import hashlib
import json
import typing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import moe_course
from moe_course.aot.targets import compiler_versions, get_target
from moe_course.errors import SettingError
from moe_course.parallel import MeshConfig
from moe_course.train.config import TrainConfig

REQUEST, MEASURED, PROGRAM, LOG = "request.json", "measured.json", "program.txt.gz", "log.txt"
"""Files of one compilation in its folder of the cache."""
XLA_FLAGS = (
    "--xla_gpu_enable_cub_radix_sort=false",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_gpu_disable_gpuasm_optimizations=true",
)
"""Without the first, XLA asks the GPU that is not here how much memory a sort wants. The second compiles fewer
kernels, and leaves matrix products visible as library calls. The last two spare a quarter of the CPU time: they make
slow machine code, which nobody runs, and change nothing that is read here."""
_NOT_COMPILED = ("lessons", "bench", "aot", "scaling", "cli.py", "doctor.py")


@dataclass(frozen=True)
class Request:
    """One compilation. ``config`` must be for as many devices as there are GPUs: see :func:`fit_to`."""

    config: TrainConfig
    hardware: str = "gb200"
    gpus: int = 64

    def validate(self) -> None:
        """Raise :class:`SettingError` for what cannot be compiled."""
        get_target(self.hardware).topology(self.gpus)
        if self.config.devices != self.gpus:
            raise SettingError(
                f"the configuration is for {self.config.devices} devices, not for {self.gpus} GPUs. "
                "Use moe_course.aot.fit_to(config, gpus)."
            )
        self.config.validate()

    def as_json(self) -> dict:
        """What decides the compiled program: settings, versions, flags, and the code that is traced."""
        return {
            "config": json.loads(json.dumps(asdict(self.config))),
            "hardware": self.hardware,
            "gpus": self.gpus,
            "versions": compiler_versions(),
            "flags": XLA_FLAGS,
            "code": code_hash(),
        }

    def key(self) -> str:
        """The name of this compilation in the cache."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:20]


def fit_to(config: TrainConfig, gpus: int, *, ep: int | None = None) -> TrainConfig:
    """``config`` for so many GPUs: one sequence each, experts over ``ep`` of them, weights cut over the rest.

    Layers of a kind become one loop, however few they are: compiling takes as long as there are distinct kernels.
    ``ep`` is by default at most that of ``config``, and at most a quarter of the GPUs or eight: what is no expert is
    cut over the rest alone. It divides the GPUs and the experts.
    """
    if ep is None:
        experts, most = config.model.num_experts, min(config.mesh.expert, gpus, max(8, gpus // 4))
        ep = max(n for n in range(1, most + 1) if not (gpus % n or experts % n))
    if ep < 1 or gpus % ep:
        raise SettingError(
            f"{gpus} GPUs do not divide into groups of {ep} expert ranks. Set --ep to a divisor of {gpus}."
        )
    mesh = MeshConfig(data=1, fsdp=gpus // ep, expert=ep)
    return replace(config, mesh=mesh, devices=gpus, batch_size=gpus, scan_from=1)


def code_hash() -> str:
    """A hash of the sources that decide what is traced."""
    root = Path(moe_course.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] not in _NOT_COMPILED or relative.name in ("worker.py",):
            digest.update(str(relative).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def train_config(saved: dict) -> TrainConfig:
    """The configuration that ``dataclasses.asdict`` made ``saved`` of."""
    return _restore(TrainConfig, saved)


def _restore(kind, value):
    if dataclasses.is_dataclass(kind):
        types_of = typing.get_type_hints(kind)
        return kind(**{name: _restore(types_of[name], v) for name, v in value.items()})
    if isinstance(value, list):
        return tuple(value)
    return value
