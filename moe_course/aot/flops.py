"""Matrix-product FLOPs of a compiled step: what the model needs, and what comes on top, by formula; and what is there.

Model FLOPs are those of ``moe_course.scaling.flops`` (3 forwards; causal attention counts half of the scores). On top:

- *masked*: scores that attention computes and throws away. Ours walks blocks of queries, each against the keys up to
  its own end;
- *recompute*: what the backward pass does again (``remat``);
- *padding*: rows of receive buffers that hold no token, where the grouped GEMM multiplies them too;
- *fallback*: products of rows with experts that are not theirs. ``ragged_dot`` is a dense product for a GPU.
"""

from collections import Counter
from dataclasses import replace

from moe_course.aot.hlo import Product
from moe_course.layers.causal_attention import _blocks
from moe_course.scaling.flops import forward_flops
from moe_course.train.config import TrainConfig
from moe_course.train.step import dispatch_plan

READS_SIZES = ("pallas", "auto", "tiled", "tokamax", "te")
"""Grouped GEMMs that walk the rows that are there, and not the buffer."""
CLOSED = ("pallas", "auto", "tokamax", "te")
"""Those whose products the text does not show: they are kernels of their own."""
_CORE = ("attention scores", "attention values")
_LAYER = (
    "query projections",
    "key-value projections",
    *_CORE,
    "attention output",
    "dense feed-forward",
    "router",
    "routed experts",
    "shared experts",
    "MTP projection",
)


def split(products: list[Product], config: TrainConfig) -> dict:
    """FLOPs of one GPU and step. The first five parts add up to ``total``, all by formula.

    ``compiled`` is what the program's text holds, and ``in_kernels`` what is in calls that the text does not show (by
    formula): together they should be ``total``. ``compiled_by_phase`` is ``compiled`` by forward, recompute, backward.
    """
    parts = predicted(config)
    phases: Counter = Counter()
    for product in products:
        phases[product.phase] += product.flops * product.count
    return {
        **parts,
        "total": sum(parts.values()),
        "compiled": sum(phases.values()),
        "in_kernels": in_kernels(config),
        "compiled_by_phase": dict(phases),
    }


def predicted(config: TrainConfig) -> dict[str, int]:
    """``model, masked, recompute, padding, fallback`` by formula."""
    model = _forward(config)
    again = _again(config)
    masked = core_ratio(config.seq_len) - 1
    computed = sum(again.values()) + masked * sum(again[name] for name in _CORE)
    routed = 3 * model["routed experts"] + again["routed experts"] if "routed experts" in model else 0
    padding, fallback = _surplus(config)
    return {
        "model": 3 * sum(model.values()),
        "masked": round(3 * masked * sum(model[name] for name in _CORE)),
        "recompute": round(computed),
        "padding": round(padding * routed),
        "fallback": round(fallback * routed),
    }


def in_kernels(config: TrainConfig) -> int:
    """FLOPs of grouped GEMMs that are kernels of their own, by formula."""
    if config.backend not in CLOSED or not config.model.num_moe_layers:
        return 0
    return 3 * _forward(config)["routed experts"] + round(_again(config)["routed experts"])


def core_ratio(seq_len: int) -> float:
    """Query-key pairs that our attention computes, over the seq_len² / 2 that count as model work."""
    pairs = sum((end - first) * end for first, end in _blocks(seq_len))
    return pairs / (seq_len**2 / 2)


def _forward(config: TrainConfig) -> Counter:
    """Forward model FLOPs of one GPU by term, those of MTP modules among the others'."""
    m, tokens = config.model, config.tokens_per_device
    depth = m.mtp_depth
    terms = forward_flops(replace(m, num_layers=m.num_layers + depth, mtp_depth=0), config.seq_len)
    if depth:  # its layer is one more of the others
        terms |= {
            k: v for k, v in forward_flops(m, config.seq_len).items() if k in ("MTP projection", "MTP head")
        }
    return Counter({name: tokens * flops for name, flops in terms.items()})


def _again(config: TrainConfig) -> Counter:
    """Forward model FLOPs that the backward pass computes once more, by term.

    A layer's last products are not among them: nothing in its backward pass reads their result.
    """
    if config.remat == "none":
        return Counter()
    forward = _forward(config)
    again = Counter({name: forward[name] for name in _LAYER if name in forward})
    if config.remat != "full":  # attention's output is kept, here or on the host
        again["attention output"] = 0
    for name in ("dense feed-forward", "routed experts", "shared experts"):
        again[name] = again[name] * 2 // 3  # gate and up; not down
    if config.remat == "experts":
        again["routed experts"] = 0
    return again


def _surplus(config: TrainConfig) -> tuple[float, float]:
    """(padding, fallback) as multiples of the products of the rows that hold a token."""
    plan = dispatch_plan(config, 0)
    if config.backend in READS_SIZES or not config.model.num_moe_layers:
        return 0.0, 0.0
    copies = config.tokens_per_device * config.model.top_k
    rows = plan.capacity if plan.ranks > 1 else copies
    return rows / copies - 1, rows / copies * (plan.experts_per_rank - 1)
