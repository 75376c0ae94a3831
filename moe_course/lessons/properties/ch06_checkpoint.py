"""Exercise 06.5: a checkpoint's experts as two arrays."""

import numpy as np

from moe_course.lessons.compare import close, items
from moe_course.lessons.exercise import holds


def checkpoint(experts, d_model, d_ff, seed) -> dict:
    """Weights of one layer under the names of a DeepSeek-V3 checkpoint, in the order a file lists them."""
    rng = np.random.default_rng([63, seed])
    shapes = {"down_proj": (d_model, d_ff), "gate_proj": (d_ff, d_model), "up_proj": (d_ff, d_model)}
    names = sorted(f"experts.{e}.{part}.weight" for e in range(experts) for part in shapes)
    state = {n: rng.normal(size=shapes[n.split(".")[2]]).astype(np.float32) for n in names}
    state["gate.weight"] = rng.normal(size=(experts, d_model)).astype(np.float32)
    for part, shape in shapes.items():
        state[f"shared_experts.{part}.weight"] = rng.normal(size=shape).astype(np.float32)
    return state


def _stack(fn, experts, d_model, d_ff, seed, why="") -> None:
    state = checkpoint(experts, d_model, d_ff, seed)
    case = f"{experts} experts, D = {d_model}, F = {d_ff}"
    gate_up, down = items(fn(state, experts), 2, case=case, names="gate_up, down")
    banks = {
        part: np.stack([state[f"experts.{e}.{part}_proj.weight"].T for e in range(experts)])
        for part in ("gate", "up", "down")
    }
    gate, up = banks["gate"], banks["up"]
    by_text = sorted(range(experts), key=str)
    lines = {"Up comes first here. The gate is the first half.": np.concatenate([up, gate], axis=-1)}
    if by_text != list(range(experts)):
        lines["Experts are sorted as text: 10 came before 2."] = np.concatenate([gate, up], axis=-1)[by_text]
    lines["Gate and up are interleaved."] = np.stack([gate, up], axis=-1).reshape(experts, d_model, 2 * d_ff)
    axes = ("expert", "in", "out")
    right = np.concatenate([gate, up], axis=-1)
    close(gate_up, right, case=case + ", gate_up", axes=axes, why=why, suspects=lines, what="gate_up")
    lines = (
        {"Experts are sorted as text: 10 came before 2.": banks["down"][by_text]} if experts > 10 else None
    )
    close(down, banks["down"], case=case + ", down", axes=axes, why=why, suspects=lines, what="down")


@holds("gate and up side by side, all transposed")
def stacked(fn) -> int:
    why = "torch keeps [out, in] and computes x @ w.T; here kernels are [in, out]."
    for i, (experts, d_model, d_ff) in enumerate(((4, 6, 5), (1, 3, 2), (3, 2, 7))):
        _stack(fn, experts, d_model, d_ff, i, why)
    return 3


@holds("square weights: shapes cannot tell a transposition")
def stacked_square(fn) -> int:
    why = "D = F hides a missing transposition from every shape check: torch keeps [out, in]."
    _stack(fn, 3, 4, 4, 10, why)
    _stack(fn, 2, 8, 4, 11, why)
    return 2


@holds("more than ten experts, in the order of their numbers")
def many_experts(fn) -> int:
    _stack(fn, 12, 3, 2, 20)
    _stack(fn, 23, 2, 3, 21)
    return 2
