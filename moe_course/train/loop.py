"""The training loop: dispatch a step, read the one before, keep every promise of the guarded step.

Dropless in bounded memory: a step whose receive buffers would overflow changes nothing and says so. The
loop re-runs that batch in the smallest power-of-two bucket that holds the demand, and comes back down when
the demand has been small for a while. No token is dropped, and the updates are those of unbounded buffers.
"""

import math
import os
import time
from collections import deque
from dataclasses import dataclass, replace

import jax
import numpy as np
from flax import nnx
from tensorboardX import SummaryWriter

from moe_course.dispatch import ledger
from moe_course.errors import RunError
from moe_course.models import deepseek
from moe_course.parallel import batch_sharding, make_mesh
from moe_course.train.checkpoint import Checkpoints
from moe_course.train.config import TrainConfig
from moe_course.train.data import TrainData
from moe_course.train.interrupt import StopOnSignal
from moe_course.train.progress import TrainProgress
from moe_course.train.readout import non_finite_part, step_record
from moe_course.train.run_dir import RunDir
from moe_course.train.step import abstract_state, dispatch_plan, init_state, make_eval_step, make_train_step
from moe_course.train.together import Vote, put

CALM_STEPS = 64
"""Steps of small demand before the loop returns to a smaller bucket."""


@dataclass(frozen=True)
class InFlight:
    """A step that was started and not yet read."""

    step: int
    metrics: dict


class Trainer:
    """One run on one mesh. ``train`` may be left by an interrupt and continued by a later process."""

    def __init__(self, config: TrainConfig, data: TrainData, run: RunDir, console):
        self.config, self.data, self.run, self.console = config, data, run, console
        self.mesh = make_mesh(config.mesh)
        self.checkpoints = Checkpoints(run.checkpoints, config.keep_checkpoints)
        self.tensorboard = SummaryWriter(str(run.tensorboard))
        self.evaluate_step = make_eval_step(config, self.mesh)
        self.steps_by_bucket: dict[int, object] = {}
        self.bucket = 0
        self.recent_demand: deque[int] = deque(maxlen=CALM_STEPS)
        self.seconds = 0.0

    def start(self, resume: bool) -> int:
        """Fresh or restored state; returns the number of steps already done."""
        if not resume or self.checkpoints.latest() is None:
            self.state = init_state(self.config, self.mesh)
            if resume:  # stopped before its first checkpoint was complete
                self.run.rewind(0)
            return 0
        self.state, meta = self.checkpoints.restore(abstract_state(self.config), self.mesh)
        if meta["data"] != self.data.fingerprint:
            raise RunError(
                "the corpora differ from those this run was started with (another Python, or packages added or "
                "removed). Restore them, or start a new run with another --name."
            )
        self.bucket, self.seconds = meta["bucket"], meta["seconds"]
        done = int(self.state.step)
        self.run.rewind(done)
        self._event(done, "resume", f"resumed after step {done}")
        return done

    def train(self, done: int) -> bool:
        """Run to the end or to an interrupt; True if it reached the end. Leaves a checkpoint either way."""
        in_flight: deque[InFlight] = deque()
        limit = max_in_flight()
        batches = self.data.iterate(done)
        held: dict[int, dict] = {}
        started = done
        self._last_finish = time.perf_counter()
        progress = TrainProgress(self.console, self.config.steps, done)
        any_process, stopping = Vote(), False
        with progress, StopOnSignal(progress.say) as stop:
            self.progress = progress
            while done < self.config.steps and not (stopping := any_process(stop.requested)):
                if started < self.config.steps and len(in_flight) < limit and not self._pause(started, done):
                    batch = held.pop(started, None) or self._next_batch(batches, started)
                    in_flight.append(self._start(started, batch))
                    held[started] = batch
                    started += 1
                    continue
                finished = in_flight.popleft()
                metrics = jax.device_get(finished.metrics)
                self._check_finite(finished.step + 1, metrics)
                if metrics["overflow"]:
                    in_flight.clear()
                    started = finished.step
                    self._grow(finished.step + 1, int(metrics["demand"]))
                    continue
                held.pop(finished.step)
                done = finished.step + 1
                self._record(done, metrics)
                self._boundary(done)
            if stopping:
                done = self._drain(in_flight, done)
            progress.doing("saving")
            if self.checkpoints.latest() != done and done > 0:
                self._save(done)
            self.checkpoints.wait()
        if stopping:
            self._event(done, "interrupt", f"stopped after step {done}")
        return done == self.config.steps

    def _drain(self, in_flight, done: int) -> int:
        """After an interrupt, take in the steps that are already running."""
        for item in in_flight:
            metrics = jax.device_get(item.metrics)
            if metrics["overflow"] or metrics["skipped"]:
                break
            self._check_finite(item.step + 1, metrics)
            done = item.step + 1
            self._record(done, metrics)
        self.state = self._not_halted()
        return done

    def _pause(self, started: int, done: int) -> bool:
        """Evaluation and checkpoints need the state after exactly that step: let it finish first."""
        return started > done and self._is_boundary(started)

    def _is_boundary(self, done: int) -> bool:
        c = self.config
        return done % c.eval_every == 0 or done % c.checkpoint_every == 0 or done == c.steps

    def _next_batch(self, batches, index: int) -> dict:
        got, batch = next(batches)
        assert got == index, f"data gave batch {got} where {index} was due"
        return put(batch, batch_sharding(self.mesh))

    def _start(self, index: int, batch: dict) -> InFlight:
        if self.bucket not in self.steps_by_bucket:
            self.progress.doing("compiling")
            self.steps_by_bucket[self.bucket] = make_train_step(self.config, self.mesh, self.bucket)
        self.state, metrics = self.steps_by_bucket[self.bucket](self.state, batch)
        return InFlight(index, metrics)

    def _grow(self, step: int, demand: int) -> None:
        """Go to the smallest bucket that holds ``demand`` and let the halted state run again."""
        old = dispatch_plan(self.config, self.bucket).capacity
        while dispatch_plan(self.config, self.bucket).capacity < demand:
            self.bucket += 1
        new = dispatch_plan(self.config, self.bucket).capacity
        self.state = self._not_halted()
        text = f"step {step} asked for {demand} receive rows of {old}; re-run with {new}, nothing dropped"
        self._event(step - 1, "bucket", text)
        self.progress.say(f"  {text}")

    def _not_halted(self):
        """The state with its flag cleared. No computation: several processes would have to make it together."""
        clear = jax.make_array_from_callback((), self.state.halted.sharding, lambda _: np.zeros((), bool))
        return replace(self.state, halted=clear)

    def _shrink_when_calm(self) -> None:
        if self.bucket and len(self.recent_demand) == CALM_STEPS:
            smaller = dispatch_plan(self.config, self.bucket - 1).capacity
            if max(self.recent_demand) <= smaller:
                self.bucket -= 1

    def _record(self, step: int, metrics: dict) -> None:
        """One metrics line, TensorBoard scalars and the bar, from the arrays of one finished step."""
        now = time.perf_counter()
        seconds, self._last_finish = now - self._last_finish, now
        self.seconds += seconds
        record = step_record(
            step, metrics, seconds, self.config, dispatch_plan(self.config, self.bucket).capacity
        )
        record["bucket"] = self.bucket
        self.run.append(record)
        self.recent_demand.append(record["demand"])
        self._shrink_when_calm()
        for name in ("loss", "bits_per_byte", "gradient_norm", "learning_rate", "seconds", "demand"):
            self.tensorboard.add_scalar(name, record[name], step)
        balance = max(record["max_over_mean"], default=1.0)
        self.tensorboard.add_scalar("load_max_over_mean", balance, step)
        self.progress.step(step, record["bits_per_byte"], self.config.tokens_per_step / seconds, balance)
        if record["ledger"] and (
            fault := ledger.check(**{k: v for k, v in record["ledger"].items() if k != "dropped"})
        ):
            raise RunError(
                f"step {step}: the token ledger does not balance: {fault}. Please report this as a bug."
            )

    def _boundary(self, done: int) -> None:
        c = self.config
        if done % c.eval_every == 0 and done < c.steps:
            self.evaluate(done, c.eval_bytes)
        if done % c.checkpoint_every == 0 or done == c.steps:
            self.progress.doing("saving")
            self._save(done)
        self._last_finish = time.perf_counter()

    def _save(self, done: int) -> None:
        meta = {"bucket": self.bucket, "seconds": self.seconds, "data": self.data.fingerprint}
        self.checkpoints.save(done, self.state, meta)

    def evaluate(self, step: int, max_bytes: int) -> dict:
        """Held-out bits per byte and expert load per domain; appended to the metrics."""
        bits, load, counted = {}, {}, {}
        for domain in self.data.domains:
            sums = None
            for batch in self.data.eval_batches(domain, self.config.batch_size, max_bytes):
                on_device = put(batch, batch_sharding(self.mesh))
                out = jax.device_get(self.evaluate_step(self.state.params, self.state.bias, on_device))
                sums = out if sums is None else jax.tree.map(np.add, sums, out)
            bits[domain] = float(sums["nats"]) / int(sums["targets"]) / math.log(2)
            counted[domain] = int(sums["targets"])
            load[domain] = [] if sums["load"] is None else sums["load"].tolist()
            self.tensorboard.add_scalar(f"held_out/{domain}", bits[domain], step)
        record = {
            "kind": "eval",
            "step": step,
            "bits_per_byte_by_domain": bits,
            "load_by_domain": load,
            "bytes_by_domain": counted,
        }
        self.run.append(record)
        return record

    def _check_finite(self, step: int, metrics: dict) -> None:
        if metrics["finite"] or metrics["skipped"]:
            return
        self.checkpoints.wait()
        last = self.checkpoints.latest()
        good = (
            f"the last good checkpoint is step {last} in {self.run.checkpoints}"
            if last
            else "no checkpoint yet"
        )
        raise RunError(
            f"step {step}: {non_finite_part(metrics, self.config.model.num_layers)} is not finite (loss "
            f"{float(metrics['loss']):.4g}); {good}. Lower --optimizer.learning-rate, or lengthen "
            f"--optimizer.warmup-steps, in a new run."
        )

    def _event(self, step: int, event: str, text: str) -> None:
        self.run.append({"kind": "event", "step": step, "event": event, "text": text})

    @property
    def alone(self) -> bool:
        """Whether this process has all devices of the run; latencies are measured only then."""
        return jax.process_count() == 1

    @property
    def compilations(self) -> int:
        """Train-step programs compiled by this process."""
        return sum(step.jitted._cache_size() for step in self.steps_by_bucket.values())

    @property
    def capacity(self) -> int:
        """Receive rows per rank of the bucket in use."""
        return dispatch_plan(self.config, self.bucket).capacity

    def trained_moe(self):
        """(first MoE layer, the state that enters it for one held-out batch); (None, None) without experts."""
        c = self.config
        if not c.model.num_moe_layers:
            return None, None
        model = deepseek.merger(c.model)(self.state.params, self.state.bias)
        batch = self.data.eval_batches(self.data.domains[0], c.batch_size, c.tokens_per_step)[0]
        graph, state = nnx.split(model)
        tokens, segments = (
            jax.device_put(batch[name][:, :-1], batch_sharding(self.mesh)) for name in ("tokens", "segments")
        )
        with jax.set_mesh(self.mesh):
            enter = jax.jit(lambda state, *args: nnx.merge(graph, state).first_moe_input(*args))
            hidden = enter(state, tokens, segments)
        return model.layer(c.model.num_dense_layers).feed_forward, hidden

    def close(self) -> None:
        """Finish writing."""
        self.tensorboard.close()
        self.checkpoints.close()


def max_in_flight() -> int:
    """Steps that may run before the host reads one: 2, or 1 where two could deadlock.

    On JAX 0.10 simulated devices share a pool of as many threads as cores, and collectives of two steps
    can starve each other. ``NPROC`` set before JAX is imported (``environment.setup`` does) widens the pool.
    """
    return 2 if os.environ.get("NPROC") or jax.default_backend() != "cpu" else 1
