"""Chapter 09, reading programs: donated buffers, equations of a jaxpr, names that a policy lost."""

import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.properties.ch09 import plain

# ---------------------------------------------------------------- 09.4 which buffers are reused


def _text(step, donate, *args) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of buffers that are donated and not usable: some here are
        return jax.jit(step, donate_argnums=donate).lower(*args).compile().as_text()


def header(pairs, single=False, kind="may-alias") -> str:
    inside = ", ".join(f"{{{'' if single else out}}}: ({arg}, {{}}, {kind})" for out, arg in pairs.items())
    alias = f"input_output_alias={{ {inside} }}, " if pairs else ""
    layout = "entry_computation_layout={(f32[4,4]{1,0}, f32[8]{0})->(f32[4,4]{1,0}, f32[8]{0})}"
    body = "ENTRY %main {\n  %f = f32[8]{0} fusion(%a, %b), calls=%c, output_to_operand_aliasing={{1}: (1, {})}\n}"
    return f"HloModule jit_step, is_scheduled=true, {alias}{layout}, num_partitions=8\n\n{body}\n"


def _aliases(fn, text, right, case, why="") -> None:
    lines = {
        "Swapped: the output comes first, then the parameter whose buffer it takes.": {
            p: o for o, p in right.items()
        },
        "Only one pair was read. The braces hold them all.": dict(list(right.items())[:1]),
        "A number is an int, not its text.": {str(o): str(p) for o, p in right.items()},
    }
    lines = {line: wrong for line, wrong in lines.items() if wrong != right}
    plain(fn(text), right, case=case, why=why, suspects=lines)


@holds("the program of a step whose state is donated")
def donated_state(fn) -> int:
    a, b = np.ones((4, 4), np.float32), np.ones(8, np.float32)
    text = _text(lambda a, b, x: (a + x, b * x), (0, 1), a, b, np.float32(2))
    _aliases(fn, text, {0: 0, 1: 1}, "(a, b, x) -> (a + x, b x), a and b donated")
    text = _text(lambda x, b, a: (a + x, b * x), (1, 2), np.float32(2), b, a)
    _aliases(fn, text, {0: 2, 1: 1}, "(x, b, a) -> (a + x, b x), a and b donated")
    return 2


@holds("a function with one output has no number for it")
def one_output(fn) -> int:
    text = _text(lambda x, y: y + x, (1,), np.float32(1), np.ones(8, np.float32))
    why = "A result that is no tuple is written {}: it is output 0."
    _aliases(fn, text, {0: 1}, "(x, y) -> y + x, y donated", why)
    _aliases(fn, header({0: 13}, single=True), {0: 13}, "{}: (13, {}, may-alias)", why)
    return 2


@holds("nothing donated, or nothing usable: nothing aliased")
def none_aliased(fn) -> int:
    a = np.ones((4, 4), np.float32)
    _aliases(fn, _text(lambda a: (a + 1, a * 2), (), a), {}, "nothing donated")
    text = _text(lambda a: a.astype(jnp.bfloat16), (0,), a)
    _aliases(
        fn,
        text,
        {},
        "a float32 donated, a bfloat16 returned",
        "Only the same shape and dtype can take it over.",
    )
    _aliases(fn, header({}), {}, "a program without input_output_alias")
    return 3


@holds("many pairs, two digits, either kind, and not what the body says of its fusions")
def many_pairs(fn) -> int:
    pairs = {n: n for n in range(12)} | {12: 23, 13: 40, 20: 12}
    why = "input_output_alias stands in the first line. output_to_operand_aliasing, further down, is about one instruction."
    _aliases(fn, header(pairs), pairs, "15 pairs", why)
    _aliases(fn, header({0: 7, 3: 1}, kind="must-alias"), {0: 7, 3: 1}, "two pairs, must-alias", why)
    return 2


# ---------------------------------------------------------------- 09.5 every equation


def equations_of(fn, *args) -> list:
    """(equation, those around it, outermost first), all levels."""
    found = []

    def within(jaxpr, inside):
        for equation in jaxpr.eqns:
            found.append((equation, inside))
            for value in jax.tree.leaves(list(equation.params.values())):
                if hasattr(value, "eqns"):
                    within(value, (*inside, equation))

    within(jax.make_jaxpr(fn)(*args), ())
    return found


def named(found) -> Counter:
    return Counter(
        " in ".join([e.primitive.name, *(o.primitive.name for o in reversed(inside))]) for e, inside in found
    )


def _equations(fn, program, *args, case, why="") -> None:
    result, right = fn(program, *args), named(equations_of(program, *args))
    if not isinstance(result, list) or any(not isinstance(item, tuple) or len(item) != 2 for item in result):
        raise Broken(
            case, type(result).__name__, "a list of pairs (equation, inside)", "Return a list of pairs."
        )
    yours = named([(equation, tuple(inside)) for equation, inside in result])
    for name in sorted(set(yours) | set(right), key=lambda name: name.count(" in ")):
        if yours[name] != right[name]:
            raise Broken(case, f"{yours[name]} times {name}", f"{right[name]}", why)


@holds("by hand: equations of one level")
def one_level(fn) -> int:
    _equations(fn, lambda x: jnp.sin(x) * 2, np.ones(3, np.float32), case="sin(x) * 2")
    _equations(fn, lambda x: x, np.ones(3, np.float32), case="x: no equation at all")
    return 2


@holds("one program inside another: jit, scan, checkpoint")
def nested(fn) -> int:
    x = np.ones(3, np.float32)
    _equations(fn, jax.jit(lambda x: jnp.tanh(x)), x, case="jit(tanh)")

    def looped(x):
        return jax.lax.scan(
            lambda c, _: (jax.checkpoint(lambda c: jnp.exp(c) * 2)(c), None), x, None, length=3
        )[0]

    why = (
        "Under which name a program stands differs from one primitive to the next. Whatever has .eqns is one."
    )
    _equations(fn, looped, x, case="checkpoint in scan", why=why)
    return 2


@holds("programs in a tuple, and more than one for an equation: cond, while")
def several_programs(fn) -> int:
    x = np.ones(3, np.float32)
    why = "A parameter may be a tuple of programs: the branches of a cond."
    _equations(
        fn, lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: jnp.cos(x) * 2, x), x, case="cond", why=why
    )
    why = "A while has two programs, its condition and its body."
    _equations(
        fn, lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), x, case="while", why=why
    )
    return 2


@holds("deep down: a callback in a cond in a scan in a jit, and custom gradients")
def deep(fn) -> int:
    def report(c):
        jax.debug.callback(lambda v: None, c)
        return c

    def program(x):
        return jax.lax.scan(
            lambda c, _: (jax.lax.cond(c > 1, report, lambda c: c + 1, c), c), x, None, length=3
        )

    _equations(fn, jax.jit(program), np.float32(0), case="a callback in cond in scan in jit")
    _equations(
        fn, lambda x: jax.nn.relu(x) + jax.nn.silu(x), np.ones(3, np.float32), case="relu(x) + silu(x)"
    )
    grad = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())
    _equations(fn, grad, np.ones(3, np.float32), case="the gradient of checkpoint(sin(sin(x)))")
    return 3


# ---------------------------------------------------------------- 09.6 lost names


def lost_of(loss, names, *args) -> list[str]:
    carried, again = set(), set()
    for equation, inside in equations_of(jax.value_and_grad(loss), *args):
        if equation.primitive.name == "name":
            recomputed = any(outer.params.get("differentiated") for outer in inside)
            (again if recomputed else carried).add(equation.params["name"])
    return sorted(name for name in names if name in again or name not in carried)


def tagged(w, x):
    hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
    return x + jnp.cos(checkpoint_name(hidden @ w.T, "out"))


def kept(*names):
    return jax.checkpoint_policies.save_only_these_names(*names)


def stacked(policy):
    def loss(w, x):
        layer = tagged if policy is None else jax.checkpoint(tagged, policy=policy)
        return jnp.sin(jax.lax.scan(lambda c, w: (layer(w, c), None), x, w)[0]).sum()

    return loss


def single(policy):
    return lambda w, x: jnp.sin(jax.checkpoint(tagged, policy=policy)(w[0], x)).sum()


_rng = np.random.default_rng(96)
WEIGHTS = (_rng.normal(size=(3, 4, 6)) / 2).astype(np.float32)
TOKENS = _rng.normal(size=(5, 4)).astype(np.float32)


def _lost(fn, loss, names, case, why="", right=None) -> None:
    oracle = lost_of(loss, names, WEIGHTS, TOKENS)
    assert right is None or right == oracle, (case, oracle)
    result = fn(loss, names, WEIGHTS, TOKENS)
    lines = {
        "These are the names that are kept.": sorted(set(names) - set(oracle)),
        "The forward pass has every name, whether it is kept or not: look into the recomputation.": sorted(
            names
        ),
        "A name that nothing carries is lost too: it was misspelt.": [],
    }
    result = sorted(result) if isinstance(result, set | tuple) else result
    plain(
        result,
        oracle,
        case=case,
        why=why,
        suspects={line: twin for line, twin in lines.items() if twin != oracle},
    )


@holds("names that the policy keeps are not lost")
def kept_names(fn) -> int:
    _lost(fn, single(kept("hidden")), ["hidden"], "a policy that keeps hidden, asked for hidden", right=[])
    _lost(fn, single(kept("hidden", "out")), ["hidden", "out"], "keeps both, asked for both", right=[])
    _lost(fn, single(kept("out")), [], "asked for nothing", right=[])
    return 3


@holds("a misspelt name is lost")
def misspelt(fn) -> int:
    why = "Nothing carries that name, so nothing was kept for it."
    _lost(fn, single(kept("hiden")), ["hiden"], "a policy that keeps hiden", why, right=["hiden"])
    _lost(fn, single(kept("out", "hiden")), ["out", "hiden"], "keeps out and hiden", why, right=["hiden"])
    _lost(
        fn,
        single(kept("hidden", "router")),
        ["hidden", "router"],
        "keeps hidden and router",
        why,
        right=["router"],
    )
    return 3


@holds("a name that is carried, and computed again all the same, is lost")
def recomputed(fn) -> int:
    why = "The equation name is there a second time, inside the checkpoint equation that is differentiated."
    nothing = jax.checkpoint_policies.nothing_saveable
    _lost(
        fn,
        single(nothing),
        ["hidden", "out"],
        "a policy that keeps nothing, asked for both",
        why,
        right=["hidden", "out"],
    )
    _lost(fn, single(kept("out")), ["hidden", "out"], "keeps out, asked for both", why, right=["hidden"])
    dots = jax.checkpoint_policies.dots_saveable
    _lost(
        fn,
        single(dots),
        ["hidden"],
        "keeps what matrix products return, asked for hidden",
        why,
        right=["hidden"],
    )
    return 3


@holds("in a scan over layers")
def in_a_scan(fn) -> int:
    _lost(
        fn, stacked(kept("hidden")), ["hidden", "out"], "three layers in a scan, keeps hidden", right=["out"]
    )
    _lost(
        fn, stacked(kept("hidden", "out")), ["hidden", "out"], "three layers in a scan, keeps both", right=[]
    )
    _lost(
        fn,
        jax.jit(stacked(kept("nope"))),
        ["nope", "out"],
        "in a scan in a jit, keeps nope",
        right=["nope", "out"],
    )
    return 3


@holds("without checkpoint nothing is lost, and what goes to the host is not lost either")
def other_policies(fn) -> int:
    _lost(
        fn, stacked(None), ["hidden", "out"], "no checkpoint at all", "Nothing is computed again.", right=[]
    )
    host = {"offload_src": "device", "offload_dst": "pinned_host"}
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["out"], names_which_can_be_offloaded=["hidden"], **host
    )
    _lost(fn, single(offload), ["hidden", "out"], "out kept, hidden offloaded to the host", right=[])
    return 2
