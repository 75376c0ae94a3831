"""Wrong answers to the exercises of chapter 00, and right ones unlike the solution."""

import jax
import jax.numpy as jnp

from moe_course.bench.kill_rate import alternative, mutant

# ---------------------------------------------------------------- 00.1 shares


@alternative("00.1", "where")
def _(load):
    total = load.sum().astype(jnp.float32)
    return jnp.where(total > 0, load.astype(jnp.float32) / jnp.where(total > 0, total, 1.0), 0.0)


@mutant("00.1", "0 / 0 without copies")
def _(load):
    return load / load.sum()


@mutant("00.1", "whole-number division")
def _(load):
    return (load // jnp.maximum(load.sum(), 1)).astype(jnp.float32)


@mutant("00.1", "integers")
def _(load):
    return load // jnp.maximum(load.sum(), 1)


@mutant("00.1", "mean instead of the sum")
def _(load):
    return load / jnp.maximum(load.mean(), 1)


@mutant("00.1", "by the busiest")
def _(load):
    return load / jnp.maximum(load.max(), 1)


@mutant("00.1", "by the number of experts")
def _(load):
    return load / load.shape[0]


@mutant("00.1", "percent")
def _(load):
    return 100 * load / jnp.maximum(load.sum(), 1)


@mutant("00.1", "softmax")
def _(load):
    return jax.nn.softmax(load.astype(jnp.float32))


@mutant("00.1", "one more in the sum, against division by zero")
def _(load):
    return load / (load.sum() + 1)


@mutant("00.1", "even shares without copies")
def _(load):
    return jnp.where(load.sum() > 0, load / jnp.maximum(load.sum(), 1), 1 / load.shape[0])


@mutant("00.1", "bfloat16")
def _(load):
    return (load / jnp.maximum(load.sum(), 1)).astype(jnp.bfloat16).astype(jnp.float32)


@mutant("00.1", "the counts")
def _(load):
    return load.astype(jnp.float32)


# ---------------------------------------------------------------- 00.2 audit


@alternative("00.2", "counts the stages that still agree with the first")
def _(ledger):
    agree = jnp.cumprod((ledger == ledger[:, :1]).astype(jnp.int32), axis=1).sum(axis=1)
    return ledger[:, 0] - ledger[:, 4], jnp.where(agree == 5, 0, agree)


@alternative("00.2", "from the last stage to the first")
def _(ledger):
    where = jnp.zeros(len(ledger), jnp.int32)
    for stage in (4, 3, 2, 1):
        where = jnp.where(ledger[:, stage] != ledger[:, stage - 1], stage, where)
    return ledger[:, 0] - ledger[:, 4], where


def dropped(ledger):
    return ledger[:, 0] - ledger[:, -1]


def changes(ledger):
    return ledger[:, 1:] != ledger[:, :-1]


@mutant("00.2", "balanced reads 1")
def _(ledger):
    return dropped(ledger), jnp.argmax(changes(ledger), axis=1) + 1


@mutant("00.2", "the stage before")
def _(ledger):
    return dropped(ledger), jnp.argmax(changes(ledger), axis=1)


@mutant("00.2", "only losses")
def _(ledger):
    fewer = ledger[:, 1:] < ledger[:, :-1]
    return dropped(ledger), jnp.where(fewer.any(1), jnp.argmax(fewer, axis=1) + 1, 0)


@mutant("00.2", "only where something was dropped")
def _(ledger):
    where = jnp.argmax(changes(ledger), axis=1) + 1
    return dropped(ledger), jnp.where(dropped(ledger) != 0, where, 0)


@mutant("00.2", "the last fault")
def _(ledger):
    changed = changes(ledger)
    return dropped(ledger), jnp.where(changed.any(1), 4 - jnp.argmax(changed[:, ::-1], axis=1), 0)


@mutant("00.2", "the largest fault")
def _(ledger):
    size = jnp.abs(ledger[:, 1:] - ledger[:, :-1])
    return dropped(ledger), jnp.where(size.max(1) > 0, jnp.argmax(size, axis=1) + 1, 0)


@mutant("00.2", "the stage with the fewest copies")
def _(ledger):
    return dropped(ledger), jnp.argmin(ledger, axis=1)


@mutant("00.2", "minus 1 for balanced books")
def _(ledger):
    changed = changes(ledger)
    return dropped(ledger), jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, -1)


@mutant("00.2", "number of faults")
def _(ledger):
    return dropped(ledger), changes(ledger).sum(axis=1)


@mutant("00.2", "whether, not where")
def _(ledger):
    return dropped(ledger), changes(ledger).any(axis=1)


@mutant("00.2", "combined less made")
def _(ledger):
    changed = changes(ledger)
    return -dropped(ledger), jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, 0)


@mutant("00.2", "made less the smallest")
def _(ledger):
    changed = changes(ledger)
    lost = ledger[:, 0] - ledger.min(axis=1)
    return lost, jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, 0)


@mutant("00.2", "made less computed")
def _(ledger):
    changed = changes(ledger)
    return ledger[:, 0] - ledger[:, 3], jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, 0)


@mutant("00.2", "along the steps")
def _(ledger):
    changed = ledger[1:] != ledger[:-1]
    return dropped(ledger), jnp.where(changed.any(0), jnp.argmax(changed, axis=0) + 1, 0)


@mutant("00.2", "never below 0")
def _(ledger):
    changed = changes(ledger)
    return jnp.maximum(dropped(ledger), 0), jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, 0)


@mutant("00.2", "the sum over all steps")
def _(ledger):
    changed = changes(ledger)
    return dropped(ledger).sum(), jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, 0)


@mutant("00.2", "first and last stage only")
def _(ledger):
    return dropped(ledger), jnp.where(ledger[:, 0] != ledger[:, -1], 4, 0)


@mutant("00.2", "the other order")
def _(ledger):
    changed = changes(ledger)
    return jnp.where(changed.any(1), jnp.argmax(changed, axis=1) + 1, 0), dropped(ledger)
