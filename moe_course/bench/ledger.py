"""``moe-course bench ledger``: what the token ledger costs a training step.

The same compiled step twice, of the ``tiny`` preset on 8 devices, once with the ledger's sums replaced by a constant,
so that XLA leaves out all that only they need. A call of each per round, in turn. Both sides of a pair share the
machine's mood, but not to a percent, so the ratio is of CPU seconds, which a neighbour's load moves less.
"""

import statistics
import time
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.dispatch.ledger import Ledger
from moe_course.layers import moe
from moe_course.parallel import MeshConfig, batch_sharding, make_mesh
from moe_course.train.presets import TINY
from moe_course.train.step import init_state, make_train_step

DEVICES = 8


@dataclass(frozen=True)
class Options:
    """Settings of ``moe-course bench ledger``."""

    dispatcher: str = "all_to_all"
    rounds: int = 40


def run(options: Options = Options()) -> dict:
    """``{"cost": c, "standard_error": s, "rounds": n}``: CPU time of a step with the ledger, over without, minus 1.

    ``cost`` is the median over the rounds, ``standard_error`` that of a median, from the ratios' middle half. It knows
    nothing of a bias that lasts: two compilations of one step may differ by a percent.
    """
    nodes = 2 if options.dispatcher == "hierarchical" else 1
    mesh = MeshConfig(data=1, fsdp=2, expert=4, nodes=nodes)
    config = replace(TINY, mesh=mesh, dispatcher=options.dispatcher)
    with_ledger = _step(config)
    with mock.patch.object(moe, "count", _constant):
        without = _step(config)
    ratios = []
    for turn in range(options.rounds):
        pair = (with_ledger, without) if turn % 2 else (without, with_ledger)
        seconds = {step: _cpu_seconds(step) for step in pair}
        ratios.append(seconds[with_ledger] / seconds[without])
    lower, median, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return {
        "cost": round(median - 1, 4),
        "standard_error": round(1.25 * (upper - lower) / 1.35 / len(ratios) ** 0.5, 4),
        "rounds": options.rounds,
    }


def _constant(dispatched) -> Ledger:
    return Ledger(*(jnp.int32(0) for _ in range(5)))


def _step(config):
    """A call takes one step; compiled, and called once."""
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh, 0), init_state(config, mesh)
    shape = config.batch_size, config.seq_len + 1
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    batch = {"tokens": tokens, "segments": np.zeros_like(tokens), "domain": np.zeros_like(tokens[:, 0])}
    batch = jax.device_put(batch, batch_sharding(mesh))

    def call():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    call()
    return call


def _cpu_seconds(step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start
