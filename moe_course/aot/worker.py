"""``python -m moe_course.aot.worker FOLDER``: compile one training step for GPUs that are not here.

Reads ``request.json`` in the folder; leaves ``program.txt.gz``, the optimised program of one device, and
``measured.json``. A process of its own, because XLA reads its flags once, and because its memory is given back.
Nothing of the model is ever allocated: state and batch are shapes with shardings.
"""

import gzip
import json
import math
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from moe_course.aot.request import MEASURED, PROGRAM, REQUEST, train_config
from moe_course.aot.targets import description, get_target, memory_bytes
from moe_course.parallel import batch_sharding, make_mesh
from moe_course.te import without_gpu
from moe_course.train.config import TrainConfig
from moe_course.train.step import abstract_state, make_train_step, state_shardings


def gpu_mesh(config: TrainConfig, hardware: str, gpus: int):
    """(mesh of GPUs to compile for, bytes of memory of each)."""
    target = get_target(hardware)
    text = description(target, jax.__version__)
    topology = topologies.get_topology_desc(
        "", platform="cuda", topology=target.topology(gpus), target_config=text
    )
    return make_mesh(config.mesh, list(topology.devices)), memory_bytes(text)


def arguments(config: TrainConfig, mesh):
    """(state, batch) of a step: shapes with shardings."""
    state = jax.tree.map(_sharded, abstract_state(config), state_shardings(config, mesh))
    shape = (config.batch_size, config.seq_len + 1)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    domain = jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=batch_sharding(mesh))
    return state, {"tokens": ids, "segments": ids, "domain": domain}


def _sharded(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def bytes_per_device(tree) -> int:
    """Exact bytes of a tree of sharded shapes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def compile_step(config: TrainConfig, mesh):
    """(executable, seconds of tracing, lowering and compiling)."""
    started = time.perf_counter()
    step = make_train_step(config, mesh, bucket=0).jitted
    with jax.set_mesh(mesh):
        traced = step.trace(*arguments(config, mesh))
        at_trace = time.perf_counter()
        lowered = traced.lower()
        at_lower = time.perf_counter()
        compiled = lowered.compile()
    done = time.perf_counter()
    return compiled, {
        "trace": at_trace - started,
        "lower": at_lower - at_trace,
        "compile": done - at_lower,
    }


def memory(compiled) -> dict[str, int]:
    """What XLA planned, in bytes per device, under XLA's names."""
    found = compiled.memory_analysis()
    names = (name for name in dir(found) if name.endswith("_in_bytes"))
    return {name.removesuffix("_in_bytes"): int(getattr(found, name)) for name in names}


def main(folder: Path) -> None:
    request = json.loads((folder / REQUEST).read_text())
    config = train_config(request["config"])
    # The grouped GEMM asks which platform it is for; here that is not the one that this process runs on.
    jax.default_backend = lambda: "gpu"
    if config.backend == "te":
        without_gpu.load(get_target(request["hardware"]).capability)
    mesh, device_bytes = gpu_mesh(config, request["hardware"], request["gpus"])
    compiled, seconds = compile_step(config, mesh)
    with gzip.open(folder / PROGRAM, "wt", compresslevel=5) as file:
        file.write(compiled.as_text())
    state, batch = arguments(config, mesh)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    measured = {
        "state_bytes": bytes_per_device(state),
        "batch_bytes": bytes_per_device(batch),
        "parameters": sum(math.prod(p.shape) for p in jax.tree.leaves(state.params)),
        "device_bytes": device_bytes,
        "memory": memory(compiled),
        "seconds": seconds,
        "cpu_s": sum(u.ru_utime + u.ru_stime for u in usage),
        "peak_rss_bytes": sum(u.ru_maxrss for u in usage) * (1 if sys.platform == "darwin" else 1024),
        "mesh": dict(mesh.shape),
    }
    (folder / MEASURED).write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
