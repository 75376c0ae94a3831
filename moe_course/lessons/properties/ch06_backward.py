"""Exercise 06.4: the backward pass of one expert's rows. Oracles are float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import close, items
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.properties.ch06 import D, F, d_silu, mlp_gradients, normal, silu, weights_of


def _tile(fn, rows, d_model, d_ff, seed, case, scale=1.0) -> None:
    (gate_up,), (down,) = (w for w in weights_of(seed, 1, d_model, d_ff))
    x, d_y = normal(seed, rows, d_model) * np.float32(scale), normal(seed + 500, rows, d_model)
    hidden = (x.astype(np.float64) @ gate_up).astype(np.float32)
    found = items(fn(x, hidden, gate_up, down, d_y), 3, case=case, names="d_x, d_gate_up, d_down")
    right = mlp_gradients(x, gate_up, down, d_y)
    gate, up = np.split(hidden.astype(np.float64), 2, axis=-1)
    d_act = d_y.astype(np.float64) @ down.T
    swapped = np.concatenate([d_act * silu(gate), d_act * up * d_silu(gate)], axis=-1)
    linear = np.concatenate([d_act * up, d_act * silu(gate)], axis=-1)
    sigmoid = np.concatenate([d_act * up / (1 + np.exp(-gate)), d_act * silu(gate)], axis=-1)
    wrongs = {
        "The gradients of gate and up are swapped.": swapped,
        "The derivative of silu is missing.": linear,
        "silu'(x) is s(x) + x s(x) (1 - s(x)): the second term is missing.": sigmoid,
    }
    lines = {line: x.astype(np.float64).T @ d for line, d in wrongs.items()}
    terms = rows * d_model * d_ff
    close(found[2], right[2], case=case + ", d_down", axes=("hidden", "feature"), terms=terms, what="d_down")
    axes = ("feature", "hidden")
    close(
        found[1],
        right[1],
        case=case + ", d_gate_up",
        axes=axes,
        terms=terms,
        suspects=lines,
        what="d_gate_up",
    )
    close(found[0], right[0], case=case + ", d_x", axes=("row", "feature"), terms=terms, what="d_x")


@holds("three gradients of one expert's rows")
def tile_gradients(fn) -> int:
    for i, (rows, d_model, d_ff) in enumerate(((7, 6, 5), (1, 3, 2), (4, 4, 4), (8, 8, 4))):
        _tile(fn, rows, d_model, d_ff, 100 + i, f"{rows} rows, D = {d_model}, F = {d_ff}")
    return 4


@holds("large hidden values")
def tile_large(fn) -> int:
    _tile(fn, 7, 6, 5, 110, "7 rows of size 40, D = 6, F = 5", scale=40.0)
    return 1


@holds("no rows: gradients of 0")
def tile_empty(fn) -> int:
    _tile(fn, 0, 6, 5, 120, "no rows, D = 6, F = 5")
    return 1


@holds("four matrix products, since hidden was saved")
def four_products(fn) -> int:
    (gate_up,), (down,) = (w for w in weights_of(130, 1))
    args = normal(130, 7, D), normal(131, 7, 2 * F), gate_up, down, normal(132, 7, D)
    case = "7 rows, D = 6, F = 5, the program that JAX makes of it"
    try:
        program = str(jax.make_jaxpr(fn)(*(jnp.asarray(a) for a in args)))
    except Exception as error:
        name = type(error.__cause__ or error).__name__
        raise Broken(case, name, "a program that compiles") from error
    count = program.count("dot_general[")
    if count > 4:
        why = "The gate-up product is there already, as hidden: the backward pass need not compute it again."
        raise Broken(case, f"{count} products", "4", why)
    return 1
