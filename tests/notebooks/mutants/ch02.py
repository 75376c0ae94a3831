"""Wrong answers to the exercises of chapter 02, and right ones unlike the solution."""

import jax
import jax.numpy as jnp

from moe_course.bench.kill_rate import alternative, mutant

# ---------------------------------------------------------------- 02.1 scores


@alternative("02.1", "written out")
def _(logits, score_fn):
    z = jnp.asarray(logits, jnp.float32)
    if score_fn == "sigmoid":
        return 0.5 * (1 + jnp.tanh(0.5 * z))
    z = jnp.exp(z - z.max(axis=-1, keepdims=True))
    return z / z.sum(axis=-1, keepdims=True)


@mutant("02.1", "softmax over tokens")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.softmax(z, axis=0) if score_fn == "softmax" else jax.nn.sigmoid(z)


@mutant("02.1", "softmax over everything")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.softmax(z, axis=None) if score_fn == "softmax" else jax.nn.sigmoid(z)


@mutant("02.1", "overflows")
def _(logits, score_fn):
    z = jnp.exp(logits.astype(jnp.float32))
    return z / z.sum(axis=-1, keepdims=True) if score_fn == "softmax" else z / (1 + z)


@mutant("02.1", "cast after the function")
def _(logits, score_fn):
    s = jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)
    return s.astype(jnp.float32)


@mutant("02.1", "keeps the dtype that came in")
def _(logits, score_fn):
    return jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)


@mutant("02.1", "sigmoid normalised")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    s = jax.nn.sigmoid(z)
    return jax.nn.softmax(z, axis=-1) if score_fn == "softmax" else s / s.sum(-1, keepdims=True)


@mutant("02.1", "swapped")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.sigmoid(z) if score_fn == "softmax" else jax.nn.softmax(z, axis=-1)


@mutant("02.1", "log of the softmax")
def _(logits, score_fn):
    z = logits.astype(jnp.float32)
    return jax.nn.log_softmax(z, axis=-1) if score_fn == "softmax" else jax.nn.log_sigmoid(z)
