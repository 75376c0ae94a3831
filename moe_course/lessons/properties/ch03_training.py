"""Chapter 03: a language model small enough to train a dozen times in a cell.

It reads six bytes and predicts the seventh; between them is one MoE layer, which the notebook brings. The text
is the source code of optax, the optimizer library: installed with the course, and pinned.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

EXPERTS, TOP_K, TOKENS = 8, 2, 256
"""Experts, picks per token, tokens per step."""
CONTEXT, VOCAB, D_MODEL, D_FF = 6, 128, 32, 64
PASSAGES = 8
"""A batch is so many passages of consecutive bytes: neighbours resemble each other, as in real batches."""


@dataclass(frozen=True)
class Runs:
    """What came of R settings times S seeds."""

    held_out: np.ndarray
    """[R, S] nats per byte of text not trained on, no copy dropped while measuring."""
    load: np.ndarray
    """[R, S, steps, E] copies that chose each expert."""
    dropped: np.ndarray
    """[R, S, steps] share of copies that were dropped."""


def text() -> np.ndarray:
    """The source code of optax, without its tests, as bytes below 128."""
    folder = Path(optax.__file__).parent
    files = sorted(f for f in folder.rglob("*.py") if not f.name.endswith("_test.py"))
    return np.minimum(np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8), 127)


def keep_first(ids, num_experts, capacity):
    """The first ``capacity`` copies of each expert, in the order token, pick: [T, K] bool."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[None, :] == jnp.arange(num_experts + 1)[:, None]).sum(axis=1)
    first = jnp.cumsum(sizes) - sizes
    place = jnp.argsort(order) - first[flat]
    return ((place < capacity) & (flat < num_experts)).reshape(ids.shape)


def train(layer, update, *, capacity, bias_rate, balance_coefficient, seeds=3, steps=150) -> Runs:
    """Train R x S models at once.

    Args:
      layer: ``(x [T, D], weights, bias [E], capacity) -> (y [T, D], ids [T, K], kept [T, K], balance loss)``;
        ``weights`` has "router" [D, E], "up" [E, D, F] and "down" [E, F, D].
      update: ``(bias [1, E], load [1, E], rate) -> bias [1, E]``, called after each step.
      capacity, bias_rate, balance_coefficient: R numbers each.
    """
    data = text().astype(np.int32)
    border = len(data) * 9 // 10
    starts = np.stack([_starts(np.random.default_rng(seed), steps, border) for seed in range(seeds)])
    held_out = np.random.default_rng(99).integers(border, len(data) - CONTEXT - 1, 1024)
    # Everything random is drawn by NumPy: compiling JAX's generator takes longer than these runs.
    weights = jax.tree.map(
        lambda *w: np.stack(w), *[_weights(np.random.default_rng(seed)) for seed in range(seeds)]
    )
    run = partial(_one_run, layer, update, jnp.asarray(data))
    by_seed = jax.vmap(run, in_axes=(0, 0, None, None, None, None))
    by_setting = jax.jit(jax.vmap(by_seed, in_axes=(None, None, None, 0, 0, 0)))
    settings = (jnp.asarray(x, jnp.float32) for x in (capacity, bias_rate, balance_coefficient))
    return Runs(*(np.asarray(x) for x in by_setting(weights, starts, held_out, *settings)))


def _starts(rng, steps: int, border: int) -> np.ndarray:
    """[steps, T] where each token's context begins."""
    passages = rng.integers(0, border - TOKENS, (steps, PASSAGES, 1))
    return (passages + np.arange(TOKENS // PASSAGES)).reshape(steps, TOKENS).astype(np.int32)


def _one_run(layer, update, data, weights, starts, held_out, capacity, bias_rate, balance_coefficient):
    def loss(weights, bias, starts, capacity):
        windows = data[starts[:, None] + jnp.arange(CONTEXT + 1)[None]]
        h = weights["embed"][windows[:, :CONTEXT]].reshape(len(starts), -1) @ weights["mix"]
        y, ids, kept, balance = layer(_norm(h), weights, bias, capacity)
        logits = _norm(h + y) @ weights["head"]
        picked = jnp.take_along_axis(logits, windows[:, CONTEXT:], axis=1)[:, 0]
        nats = (jax.nn.logsumexp(logits, axis=1) - picked).mean()
        load = (ids[..., None] == jnp.arange(EXPERTS)).sum((0, 1), dtype=jnp.int32)
        return nats + balance_coefficient * balance, (nats, load, 1.0 - kept.mean(dtype=jnp.float32))

    def step(state, batch):
        weights, mean, square, bias = state
        i, starts = batch
        grads, (_, load, dropped) = jax.grad(loss, has_aux=True)(weights, bias, starts, capacity)
        # Adam (arXiv 1412.6980) with warm-up and a linear way down.
        t = i.astype(jnp.float32) + 1.0
        rate = 0.01 * jnp.minimum(1.0, t / 20.0) * (1.0 - t / (len(all_starts) + 1))
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.98 * s + 0.02 * g * g, square, grads)
        weights = jax.tree.map(
            lambda w, m, s: w - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(s / (1 - 0.98**t)) + 1e-8),
            weights,
            mean,
            square,
        )
        bias = update(bias[None], load[None], bias_rate)[0]
        return (weights, mean, square, bias), (load, dropped)

    all_starts = starts
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, zeros, jnp.zeros(EXPERTS))
    (weights, _, _, bias), (load, dropped) = jax.lax.scan(step, state, (jnp.arange(len(starts)), starts))
    nats = loss(weights, bias, held_out, jnp.float32(held_out.size * TOP_K))[1][0]
    return nats, load, dropped


def _weights(rng) -> dict:
    """Fresh weights, float32."""

    def normal(*shape, scale=1.0):
        return (scale * rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "embed": normal(VOCAB, D_MODEL, scale=0.5 * np.sqrt(VOCAB)),
        "mix": normal(CONTEXT * D_MODEL, D_MODEL),
        "router": normal(D_MODEL, EXPERTS),
        "up": normal(EXPERTS, D_MODEL, D_FF),
        "down": normal(EXPERTS, D_FF, D_MODEL),
        "head": normal(D_MODEL, VOCAB, scale=0.5),
    }


def _norm(x):
    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
