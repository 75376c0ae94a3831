"""Chapter 04, ragged grouping: the text of its exercises and questions. What they check: ``properties/ch04*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch04 as p
from moe_course.lessons.properties import ch04_moves as m

EXERCISES = (
    Exercise(
        id="04.1",
        title="load",
        goal="Count the token copies of each expert, on the device.",
        difficulty=1,
        minutes=5,
        used_again=("05", "07"),
        hints=(
            "How long is the result if the last two experts got nobody? And which expert may count a pick whose id is E?",
            "ids [T, K] -> load [E], integers. Compare every id with every expert: [T K, E] booleans, summed over slots.",
            "flat = expert_ids.reshape(-1)\n(flat[:, None] == experts 0 to E - 1).sum(axis=...)",
            """
def load_of(expert_ids, num_experts):
    flat = expert_ids.reshape(-1)
    return (flat[:, None] == jnp.arange(num_experts)).sum(axis=0)
""",
        ),
        properties=(p.counts, p.idle_experts, p.sentinel, p.strays, p.load_jit),
    ),
    Exercise(
        id="04.2",
        title="expert order",
        goal="List the slots expert by expert, each expert's in the order they had.",
        difficulty=2,
        minutes=10,
        used_again=("05", "06", "07"),
        hints=(
            "What does a sort return that tells you where each element came from? What must it promise about equal ids?",
            "ids [T, K] -> flat [T K], slot t K + k -> order [T K]. Slots without an expert sort behind expert E - 1.",
            "flat, with every id outside 0 to E - 1 replaced by E\norder = jnp.argsort(flat, stable=...)\n"
            "where the id at a place is E, write T K",
            """
def slots_in_expert_order(expert_ids, num_experts):
    flat = expert_ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = jnp.argsort(flat, stable=True)
    return jnp.where(flat[order] < num_experts, order, flat.size)
""",
        ),
        properties=(p.ordered, p.stable, p.strays_last, p.large, p.order_jit),
    ),
    Exercise(
        id="04.3",
        title="rows of the buffer",
        goal="Say how many rows any routing fits in, before there is a routing.",
        difficulty=3,
        minutes=10,
        used_again=("05", "07", "10"),
        hints=(
            "You are the adversary and hold the slots. How do you spread them to waste the most? When is an expert's next "
            "slot free of charge, when does it cost a whole tile?",
            "Three Python ints -> a Python int. No array: it is the shape of one.",
            "groups = how many experts can have a slot at all\nthe first slot of each costs a tile; of the slots that are "
            "left, every align-th costs one more",
            """
def buffer_rows(num_slots, num_experts, align):
    groups = min(num_experts, num_slots)
    tiles = groups + (num_slots - groups) // align
    return tiles * align
""",
        ),
        properties=(p.unaligned, p.worst_of_all, p.large_rows),
    ),
    Exercise(
        id="04.4",
        title="a row for each slot",
        goal="Give every slot its row, with each group padded to a multiple of align.",
        difficulty=3,
        minutes=20,
        used_again=("05", "06", "07", "08"),
        hints=(
            "A row number is two numbers added: where the group begins, and how many of the group came before. Which of "
            "the two does the padding change?",
            "load [E] -> padded [E] -> starts [E]; rank [T K]: how many earlier slots have the same id; rows [T, K].",
            "member = one-hot of the ids, [T K, E] integers\nrank = (running sum over slots - member), picked at the own "
            "id\npadded = load rounded up to a multiple of align\nstart = running sum of padded, minus padded",
            """
def row_of_slots(expert_ids, num_experts, align, num_rows):
    flat = expert_ids.reshape(-1)
    member = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
    rank = ((jnp.cumsum(member, axis=0) - member) * member).sum(axis=1)
    padded = -(-member.sum(axis=0) // align) * align
    start = jnp.cumsum(padded) - padded
    row = (member * start).sum(axis=1) + rank
    return jnp.where(member.any(axis=1), row, num_rows).reshape(expert_ids.shape)
""",
        ),
        properties=(p.packed, p.aligned, p.full_or_empty, p.nowhere, p.places_stable, p.places_jit),
    ),
    Exercise(
        id="04.5",
        title="the gradient of permute",
        goal="Bring the gradients of all copies of a token together, by gathers alone.",
        difficulty=2,
        minutes=10,
        used_again=("06", "07"),
        hints=(
            "A token was copied into K rows. Nudge the token: how many rows move? What does that make of its gradient?",
            "d_rows [M, D], row_of_slot [T, K] -> [T, K, D] gathered, float32 -> [T, D]. A row number of M reads zeros.",
            'd_rows.at[row_of_slot].get(mode="fill", fill_value=0)\nto float32\nsum over axis ...',
            """
def permute_gradient(d_rows, row_of_slot):
    copies = d_rows.at[row_of_slot].get(mode="fill", fill_value=0)
    return copies.astype(jnp.float32).sum(axis=1)
""",
        ),
        properties=(m.sums_copies, m.nothing_from_nowhere, m.padding_unread, m.float32_sum, m.gathers),
    ),
    Exercise(
        id="04.6",
        title="combine",
        goal="Bring the experts' answers back to their tokens, each weighed as the router said.",
        difficulty=2,
        minutes=10,
        used_again=("06", "07", "12"),
        hints=(
            "This is the last exercise's gather, with one more factor. Which numbers may be multiplied by a weight, and "
            "which may not even be read?",
            "rows [M, D], row_of_slot [T, K], weights [T, K] -> copies [T, K, D], weights [T, K, 1] -> [T, D] float32.",
            'copies = rows.at[row_of_slot].get(mode="fill", fill_value=0), as float32\n'
            "(copies * weights with one more axis) summed over the picks",
            """
def combine(rows, row_of_slot, weights):
    copies = rows.at[row_of_slot].get(mode="fill", fill_value=0).astype(jnp.float32)
    return (copies * weights[:, :, None]).sum(axis=1)
""",
        ),
        properties=(
            m.weighted_sum,
            m.no_weight_for_nowhere,
            m.combine_padding,
            m.combine_float32,
            m.combine_gradients,
            m.combine_gathers,
        ),
    ),
)

QUIZZES = (
    Quiz(
        "04.q1",
        5,
        {
            5: "Five earlier slots go to experts 0 to 2, and none to expert 3: row 5.",
            6: "Rows count from 0: the first slot of expert 3 sits right behind five others.",
            4: "Count the rows of experts 0, 1 and 2 again: a token may appear in several groups.",
        },
        otherwise="Add up the sizes of the groups in front of expert 3.",
    ),
    Quiz(
        "04.q2",
        "c",
        {
            "a": "Shapes that follow the routing are shapes that change at every step, and each new shape is compiled.",
            "b": "That is a capacity: whatever exceeds it is dropped. Here nothing is.",
            "c": "One shape for all routings, one compilation. What changes from step to step are numbers in group_sizes.",
        },
    ),
    Quiz(
        "04.q3",
        "b",
        {
            "a": "It does, and then the padding is read as the last row's neighbour: no error, a wrong number.",
            "b": "Negative numbers count from the end before anything is dropped, so the last row gets a stranger's data. E "
            "and M are past the end, where fill and drop do what they say.",
            "c": "JAX raises nothing for an index out of bounds, negative or not.",
        },
    ),
    Quiz(
        "04.q4",
        "b",
        {
            "a": "The sizes of the groups do not enter the rule. What enters is that index holds each token K times.",
            "b": "At K = 1 each token has one copy, so order // K is a permutation and its inverse is right. From K = 2 "
            "on, a token's gradient needs K rows and this rule gives it one.",
            "c": "It was written for permutations, and there is a case where order // K is one.",
        },
    ),
)
