"""Chapter 09, compile once: the text of its exercises and questions. What they check: ``properties/ch09*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch09 as p
from moe_course.lessons.properties import ch09_hlo as h
from moe_course.lessons.properties import ch09_programs as g

WALKER = """
def equations(fn, *args):
    pairs, waiting = [], [(jax.make_jaxpr(fn)(*args), ())]
    while waiting:
        jaxpr, inside = waiting.pop()
        for equation in jaxpr.eqns:
            pairs.append((equation, inside))
            values = jax.tree.leaves(list(equation.params.values()))
            waiting += [(value, (*inside, equation)) for value in values if hasattr(value, "eqns")]
    return pairs
"""

EXERCISES = (
    Exercise(
        id="09.1",
        title="who traces",
        goal="Say for each call of a jitted function whether JAX traces it.",
        difficulty=2,
        minutes=10,
        used_again=("12",),
        hints=(
            "Under jit, Python runs a function only while it is traced. What can it do then that you notice?",
            "A list with one bool for each call. One jax.jit for all calls, of a function that counts.",
            "def counting(*args): note that it ran, then fn(*args)\nstep = jax.jit(counting, static_argnums=static)\n"
            "for each call: how often it ran before, call step, whether it ran more often after",
            """
def traced(fn, calls, static=()):
    def noting(*args):
        ran.append(True)
        return fn(*args)

    step, ran, answer = jax.jit(noting, static_argnums=static), [], []
    for args in calls:
        ran.clear()
        step(*args)
        answer.append(bool(ran))
    return answer
""",
        ),
        properties=(p.shapes, p.dtypes, p.weak_types, p.statics, p.trees),
    ),
    Exercise(
        id="09.2",
        title="the bucket for a batch",
        goal="Say how many rows a batch is padded to, so that few programs serve all.",
        difficulty=1,
        minutes=5,
        used_again=("12", "14"),
        hints=(
            "If a bucket is twice the one before, how many are there between 64 rows and 4,096? And what is padded at most?",
            "Python ints: rows -> the first of unit, 2 unit, 4 unit, ... that is not less, at most `most`.",
            "size = unit\nwhile it is too small: double it\nat most `most`",
            """
def bucket_for(rows, unit, most):
    units = max(-(-rows // unit), 1)
    return min(unit * 2 ** (units - 1).bit_length(), most)
""",
        ),
        properties=(p.edges, p.other_units, p.capped, p.few_programs),
    ),
    Exercise(
        id="09.3",
        title="sizes as data",
        goal="A softmax within each group of rows, one program for every split into groups.",
        difficulty=3,
        minutes=20,
        used_again=("14",),
        hints=(
            "A slice of length group_sizes[e] has a shape that only the device knows. Which array of a fixed shape says the "
            "same thing, row by row?",
            "group [M] from group_sizes [E] -> largest score of each group [E + 1] -> exp [M] -> sum of each group [E + 1] "
            "-> [M].",
            "group = searchsorted(cumsum(group_sizes), row number, side='right'): E for the tail\n"
            "scores = 0 in the tail\nsegment_max and segment_sum with E + 1 segments, each gathered at group",
            """
def group_softmax(scores, group_sizes):
    ends, row = jnp.cumsum(group_sizes), jnp.arange(scores.shape[0])
    member = (row < ends[:, None]) & (row >= (ends - group_sizes)[:, None])  # [E, M]
    live = member.any(axis=0)
    clean = jnp.where(live, scores, 0.0)
    top = jnp.where(member, clean, -jnp.inf).max(axis=1)
    shift = jnp.where(member, top[:, None], 0.0).sum(axis=0)
    weight = jnp.where(live, jnp.exp(clean - jax.lax.stop_gradient(shift)), 0.0)
    total = jnp.where(member, jnp.where(member, weight, 0.0).sum(axis=1, keepdims=True), 0.0).sum(axis=0)
    return jnp.where(live, weight / jnp.where(live, total, 1.0), 0.0)
""",
        ),
        properties=(p.softmax_by_hand, p.any_split, p.large_scores, p.tail_is_dead, p.softmax_gradient),
    ),
    Exercise(
        id="09.4",
        title="reused buffers",
        goal="Read from a compiled program which output takes over the buffer of which argument.",
        difficulty=2,
        minutes=10,
        used_again=("12",),
        hints=(
            "The first line of the text has input_output_alias={ ... }. What stands there for a function of one output?",
            "text -> its first line -> a dict, output number to parameter number, ints.",
            r're.findall(r"\{(\d*)\}: \((\d+), \{\}, ", first line)' + "\nan empty output number means 0",
            r"""
def aliases(text):
    import re

    inside = re.search(r"input_output_alias=\{ (.*?) \}, ", text.split("\n")[0])
    found = re.findall(r"\{(\d*)\}: \((\d+)", inside[1]) if inside else []
    return {int(output) if output else 0: int(parameter) for output, parameter in found}
""",
        ),
        properties=(g.donated_state, g.one_output, g.none_aliased, g.many_pairs),
    ),
    Exercise(
        id="09.5",
        title="every equation",
        goal="List every equation of a program, however deep, and those that it lies within.",
        difficulty=3,
        minutes=15,
        used_again=("12",),
        hints=(
            "jax.make_jaxpr(fn)(*args) has .eqns. A scan is one of them: where does it keep the program of its body?",
            "A list of pairs (equation, inside); inside is a tuple of equations, outermost first, () at the top. Programs "
            "are among equation.params.values(), alone or in a tuple; each has .eqns.",
            "def within(jaxpr, inside): for each equation: append the pair; for each value of its params,\n"
            "    jax.tree.leaves makes one list of tuples and single values:\n"
            "    where it has eqns: within(value, (*inside, equation))",
            WALKER,
        ),
        properties=(g.one_level, g.nested, g.several_programs, g.deep),
    ),
    Exercise(
        id="09.6",
        title="lost names",
        goal="Say which of the names that a policy should keep are not kept.",
        difficulty=3,
        minutes=15,
        used_again=("12",),
        hints=(
            "What is kept is not computed again. Where in the program of the gradient does what is computed again stand?",
            "jax.value_and_grad(loss) -> 09.5's pairs -> the equations called name -> the sets of names outside and inside "
            "of recomputation -> a sorted list.",
            'equation.primitive.name == "name", equation.params["name"]\n'
            'recomputed: any(outer.params.get("differentiated") for outer in inside)\n'
            "lost: recomputed, or carried by nothing",
            WALKER
            + """

def lost_names(loss, names, *args):
    found = [(e.params["name"], inside) for e, inside in equations(jax.value_and_grad(loss), *args)
             if e.primitive.name == "name"]
    again = {name for name, inside in found if any(outer.params.get("differentiated") for outer in inside)}
    kept = {name for name, _ in found} - again
    return sorted(set(names) - kept)
""",
        ),
        properties=(g.kept_names, g.misspelt, g.recomputed, g.in_a_scan, g.other_policies),
    ),
    Exercise(
        id="09.7",
        title="collectives",
        goal="Count the collectives among lines of a compiled program, and their bytes.",
        difficulty=3,
        minutes=20,
        used_again=("10", "12"),
        hints=(
            "A line reads: name = type operation(operands), attributes. Which part says how much, and which part only "
            "mentions a collective that stands elsewhere?",
            "lines -> a dict, kind to (count, bytes). Bytes of dtype[a,b]: the first number in the dtype / 8, times a b; "
            "pred has no number and takes one byte.",
            r'call = re.search(r" = (\(.*?\)|\S+) (all-gather|...)(?:-done)?\(", line)'
            + "\ncall[2] is the kind, call[1] the type\n"
            + r're.findall(r"(\w+)\[([\d,]*)\]", call[1]) gives dtype and dimensions',
            r"""
def collectives_of(lines):
    import math
    import re

    counts, sizes = {}, {}
    for line in lines:
        for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
            call = re.search(rf" = (\(.*?\)|\S+) {kind}(-done)?\(", line)
            if not call:
                continue
            counts[kind] = counts.get(kind, 0) + 1
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", call[1]):
                bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
                numbers = math.prod(int(n) for n in dims.split(",")) if dims else 1
                sizes[kind] = sizes.get(kind, 0) + numbers * bits // 8
    return {kind: (counts[kind], sizes[kind]) for kind in counts}
""",
        ),
        properties=(h.each_kind, h.widths, h.tuples, h.adds_up, h.pairs, h.mentions),
    ),
    Exercise(
        id="09.8",
        title="how often it runs",
        goal="Say how often each computation of a program runs.",
        difficulty=2,
        minutes=10,
        used_again=("10",),
        hints=(
            "The entry runs once. If a body runs 58 times and calls a chunk 8 times, how often does the chunk run?",
            "A dict, name to int, 0 for what nothing reaches.",
            "def visit(name, n): add n to times[name]; visit each callee with n times its trips\nvisit(entry, 1)",
            """
def times_run(calls, entry):
    def runs(name):
        above = ((caller, trips) for caller in calls for callee, trips in calls[caller] if callee == name)
        return int(name == entry) + sum(runs(caller) * trips for caller, trips in above)

    return {name: runs(name) for name in calls}
""",
        ),
        properties=(h.one_loop, h.nested_loops, h.shared, h.unreached, h.random_programs),
    ),
    Exercise(
        id="09.9",
        title="bytes by hand",
        goal="Predict what one device receives in the forward pass of a MoE layer.",
        difficulty=3,
        minutes=15,
        used_again=("10", "12"),
        hints=(
            "Four arrays are exchanged: sizes, rows, weights of the rows, answers. How many rows has each, used or not?",
            "rows C = R ceil(factor T K / R). Exchanged: C D numbers twice, C float32, E int32. Gathered: 3 D F numbers for "
            "each of E/R experts and the shared one.",
            "rows = ranks * ceil(factor * tokens * top_k / ranks)\n"
            "all-to-all: 2 rows d_model width + 4 rows + 4 num_experts\n"
            "all-gather: 3 d_model d_ff width (num_experts / ranks + 1), or 0 if fsdp is 1",
            """
def layer_bytes(tokens, d_model, d_ff, num_experts, top_k, ranks, fsdp, factor, width):
    import math

    pair = math.ceil(factor * tokens * top_k / ranks)
    row = 2 * d_model * width + 4
    expert = 3 * d_model * d_ff * width
    gathered = expert * (num_experts // ranks) + expert
    return {"all-to-all": ranks * pair * row + 4 * num_experts, "all-gather": gathered * (fsdp > 1)}
""",
        ),
        properties=(h.two_ranks, h.exchange_bytes, h.padded_rows, h.gathered_bytes, h.at_scale),
    ),
)

QUIZZES = (
    Quiz(
        "09.q1",
        2,
        {
            2: "What a function reads besides its arguments is read while it is traced, and is a constant from then on. No "
            "warning, no new trace: the old value is used until some other call is traced. Pass what changes.",
            3: "It would, without jit. The call has the shapes of the first one, so the compiled program runs, and in it "
            "stands a 2.",
        },
    ),
    Quiz(
        "09.q2",
        12,
        {
            12: "9 + 8 - 8 + 3: the state is an argument and an output, and has one buffer. Without donation it is 20.",
            20: "That is without donation: the state would be there twice.",
        },
        within=0.001,
    ),
    Quiz(
        "09.q3",
        "b",
        {
            "a": "They are numbers in a buffer. A replayed graph reads whatever the buffer holds.",
            "b": "The host waits for a number of the device to learn a shape. A recording has no host in it: capture fails, "
            "or the graph ends there and a new one begins.",
            "c": "A kernel that reads its loop bound from memory is one launch all the same.",
        },
    ),
    Quiz(
        "09.q4",
        "a",
        {
            "a": "The derivative of silu reads its input. With the input kept, silu is computed again, which costs little, "
            "and the product is not.",
            "b": "That is kept and used by the next product, and yet the derivative of silu asks for its input: the product "
            "before it runs again.",
            "c": "It decides whether the largest product of the layer runs twice or three times in a step.",
        },
    ),
    Quiz(
        "09.q5",
        "b",
        {
            "a": "The compiler plans memory and does not refuse. Plans of 309 GB for a GPU of 198 GB were compiled.",
            "b": "Compiling is not fitting. Compare the plan with the device yourself, and leave room for what is not in "
            "it: communication buffers, workspaces, fragmentation.",
            "c": "Nothing ran. On a GPU the allocation would fail, at the first step.",
        },
    ),
    Quiz(
        "09.q6",
        "c",
        {
            "a": "No policy looks for its names. A name that nothing carries matches nothing, and that is allowed.",
            "b": "Numbers are the same to the last bit or nearly: recomputation computes the same.",
            "c": "Less memory and more FLOPs than planned, and a slow step. Only a check that compares what was asked for "
            "with what the program keeps finds it at the start.",
        },
    ),
    Quiz(
        "09.q7",
        "a",
        {
            "a": "The state comes in weakly typed, once, and goes out as a float32 array: the second call differs from the "
            "first, the third does not. jnp.float32(0) at the start cures it.",
            "b": "The learning rate is an argument, a float32 array in each call.",
            "c": "A number that changes is data. Only shapes, dtypes, weak types, trees, shardings and static values count.",
        },
    ),
)
