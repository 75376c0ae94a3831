"""Chapter 06, the MoE layer: the text of its exercises and questions. What they check: ``properties/ch06*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch06 as p
from moe_course.lessons.properties import ch06_backward as b
from moe_course.lessons.properties import ch06_checkpoint as c

EXERCISES = (
    Exercise(
        id="06.1",
        title="SwiGLU",
        goal="Turn the gate-up product into the activation, in float32.",
        difficulty=1,
        minutes=5,
        used_again=("08", "11"),
        hints=(
            "One half decides how much of the other half passes. Which half goes through the nonlinearity, and how often "
            "should a bfloat16 number be rounded on the way?",
            "hidden [M, 2F] -> gate [M, F], up [M, F] -> [M, F], dtype of hidden.",
            "gate, up = halves of hidden as float32, along the last axis\n"
            "return (silu of ... times ...) in the dtype of hidden",
            """
def activate(hidden):
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)
""",
        ),
        properties=(p.gate_first, p.keeps_dtype, p.rounded_once, p.large_hidden),
    ),
    Exercise(
        id="06.2",
        title="the experts",
        goal="Put two grouped products and an activation together, and keep the tail out.",
        difficulty=2,
        minutes=15,
        used_again=("07", "08", "11"),
        hints=(
            "A grouped product promises nothing about the rows past the groups. On a GPU they hold what was in memory. "
            "Which of them would the next layer see, and can a multiplication by 0 remove an inf?",
            "rows [M, D] -> hidden [M, 2F] -> act [M, F] -> [M, D]; live [M, 1] booleans: row < sum of the sizes.",
            "hidden = gemm(rows, gate_up, group_sizes)\nact = the activation of 06.1\n"
            "out = gemm(act, down, group_sizes)\n0 where not live, selected, not multiplied",
            """
def expert_mlp(rows, gate_up, down, group_sizes, gemm):
    live = (jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None]
    hidden = jnp.where(live, gemm(rows, gate_up, group_sizes), 0)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jnp.where(live, gemm(jax.nn.silu(gate) * up, down, group_sizes), 0)
""",
        ),
        properties=(p.own_expert, p.expert_sizes, p.expert_gradients),
    ),
    Exercise(
        id="06.3",
        title="the layer",
        goal="From tokens and a routing to the weighted sum of the experts' answers, dropping nothing.",
        difficulty=3,
        minutes=15,
        used_again=("07", "11", "12"),
        hints=(
            "You have all the pieces from 04 and 06.2. In which order do they come, and on which side of the experts does "
            "the weight of a pick belong?",
            "x [T, D] -> rows [M, D] -> rows [M, D] -> [T, D]. groups come from ids [T, K]; weights [T, K] enter last.",
            "groups = group_by_expert(...)\nrows = permute(x, groups)\nrows = the experts of 06.2, with "
            "groups.group_sizes\nreturn unpermute(rows, groups, weights)",
            """
def moe(x, expert_ids, weights, gate_up, down):
    from moe_course.experts import swiglu_experts
    from moe_course.grouping import group_by_expert, permute, unpermute

    groups = group_by_expert(expert_ids, gate_up.shape[0])
    rows = swiglu_experts(permute(x, groups), gate_up, down, groups.group_sizes)
    return unpermute(rows, groups, weights)
""",
        ),
        properties=(p.weighted_answers, p.masked_tokens, p.one_takes_all, p.layer_gradients),
    ),
    Exercise(
        id="06.4",
        title="backward of one tile",
        goal="Differentiate an expert by hand: four products, nothing computed twice.",
        difficulty=4,
        minutes=25,
        used_again=("08", "09"),
        hints=(
            "Walk backwards: y = act @ down, act = silu(gate) * up, hidden = x @ gate_up. Which two gradients does each "
            "product give, and what does the product rule say of the activation?",
            "d_act [n, F] = d_y @ down.T; d_hidden [n, 2F]; d_x [n, D]; d_gate_up [D, 2F]; d_down [F, D].",
            "act, pull_back = jax.vjp(activation, hidden)\nd_down = act.T @ d_y\n(d_hidden,) = pull_back(d_y @ down.T)\n"
            "d_gate_up = x.T @ d_hidden\nd_x = ...",
            """
def tile_backward(x, hidden, gate_up, down, d_y):
    def activation(hidden):
        gate, up = jnp.split(hidden, 2, axis=-1)
        return jax.nn.silu(gate) * up

    act, pull_back = jax.vjp(activation, hidden)
    (d_hidden,) = pull_back(d_y @ down.T)
    return d_hidden @ gate_up.T, x.T @ d_hidden, act.T @ d_y
""",
        ),
        properties=(b.tile_gradients, b.tile_large, b.tile_empty, b.four_products),
    ),
    Exercise(
        id="06.5",
        title="from a checkpoint",
        goal="Stack a DeepSeek checkpoint's experts into two arrays.",
        difficulty=2,
        minutes=10,
        used_again=("11", "12", "13"),
        hints=(
            "torch's Linear keeps its weight as [out, in]. What does it compute with it? And in which order does a file "
            "list experts 0 to 11?",
            "gate_proj, up_proj [F, D], down_proj [D, F] for each expert -> gate_up [E, D, 2F], down [E, F, D].",
            "for e in range(num_experts): the three weights by name, transposed\ngate and up joined along the last axis\n"
            "stack over experts",
            """
def stack_experts(state, num_experts):
    def bank(part):
        return jnp.stack([state[f"experts.{e}.{part}_proj.weight"].T for e in range(num_experts)])

    return jnp.concatenate([bank("gate"), bank("up")], axis=-1), bank("down")
""",
        ),
        properties=(c.stacked, c.stacked_square, c.many_experts),
    ),
)

QUIZZES = (
    Quiz(
        "06.q1",
        "c",
        {
            "a": "The numbers are the same to rounding, fused or not.",
            "b": "The gate-up and down products are as large as before.",
            "c": "A tile's activation goes from one product to the next while it is in cache; the whole array is never "
            "written, nor read again. On a GPU that array is the traffic.",
        },
    ),
    Quiz(
        "06.q2",
        "a",
        {
            "a": "All experts give the same answer, and the weights sum to 1: the output does not depend on the router, so "
            "no gradient reaches it. Upcycling adds noise, or drops part of each copy, so that experts differ.",
            "b": "The weights do depend on the router, but their sum does not, and nothing else counts here.",
            "c": "Its sign is that of a rounding error.",
        },
    ),
    Quiz(
        "06.q3",
        "b",
        {
            "a": "With D different from 2 F a missing transposition is a shape error. That is the friendly case.",
            "b": "Square weights pass every shape check either way round. Compare numbers with the library they come from, "
            "on shapes where no two dimensions are alike, and once where they are.",
            "c": "The names tell you which tensor it is, not which way round.",
        },
    ),
    Quiz(
        "06.q4",
        "c",
        {
            "a": "Softmax weights are never above 1, and the fault is there for each of them below 1.",
            "b": "The experts of the exhibit are SwiGLU, which is neither linear nor symmetric.",
            "c": "A weight of 1 in front of an expert or behind it is the same. For any other weight, w f(x) is not f(w x): "
            "with SwiGLU it is roughly w squared, so less popular picks fade.",
        },
    ),
)
