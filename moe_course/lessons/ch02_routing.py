"""Chapter 02, routing: the text of its exercises and questions. What they check: ``properties/ch02*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch02 as p
from moe_course.lessons.properties import ch02_router as r

EXERCISES = (
    Exercise(
        id="02.1",
        title="scores",
        goal="Turn router logits into scores, by softmax or by sigmoid, in float32.",
        difficulty=1,
        minutes=5,
        used_again=("03", "06", "11"),
        hints=(
            "Which experts compete with which? Softmax makes the experts of a token share a probability of 1; sigmoid "
            "asks each expert alone. And in which precision do you want to compare two scores that are close?",
            "logits [T, E], any floating dtype -> scores [T, E] float32. Softmax sums over E, the last axis.",
            'logits = logits.astype(...)\nreturn jax.nn.softmax(logits, axis=...) if score_fn == "softmax" else ...',
            """
def scores_of(logits, score_fn):
    logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)
""",
        ),
        properties=(p.softmax_scores, p.sigmoid_scores, p.large_logits, p.float32_inside),
    ),
    Exercise(
        id="02.2",
        title="top-k",
        goal="Pick the k experts with the largest keys, with a rule for ties.",
        difficulty=1,
        minutes=5,
        used_again=("04", "07"),
        hints=(
            "If two experts tie on one device and the next device holds the same logits, must both pick the same one? "
            "Which sorts keep the order of equal elements?",
            "keys [T, E] -> ids [T, k], integers. The work is along E; tokens do not meet.",
            "A stable sort of -keys along the last axis, then the first k columns. Or jax.lax.top_k, which has the rule.",
            """
def top_k(keys, k):
    return jax.lax.top_k(keys, k)[1]
""",
        ),
        properties=(p.largest_first, p.all_or_one, p.ties, p.negative, p.close_keys),
    ),
    Exercise(
        id="02.3",
        title="combine weights",
        goal="Choose with the bias, weigh without it: DeepSeek-V3's combine weights.",
        difficulty=2,
        minutes=15,
        used_again=("03", "06", "07", "12"),
        hints=(
            "The bias is there to move tokens away from busy experts. If it also entered the weights, what would it do "
            "to the output of a token whose experts did not change?",
            "ids [T, k] from scores + bias; weights [T, k] gathered from scores [T, E] at ids; their sum has shape [T, 1].",
            "ids = top-k of (scores + bias)\npicked = jnp.take_along_axis(scores, ids, axis=...)\n"
            "if k > 1: divide picked by its sum along the last axis\nmultiply by the scaling factor",
            """
def combine_weights(scores, bias, k, scaling_factor):
    ids = jax.lax.top_k(scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if k > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, scaling_factor * weights
""",
        ),
        properties=(p.bias_picks, p.single_pick, p.every_expert, p.shifted_bias, p.gradients),
    ),
    Exercise(
        id="02.4",
        title="group limit",
        goal="Say which experts a token may use when it may visit only its best groups.",
        difficulty=3,
        minutes=15,
        used_again=("07", "10"),
        hints=(
            "A group stands for a machine, and a token may travel to a few machines only. What is a machine worth to a "
            "token: its best expert, or the best few that the token would use there?",
            "keys [T, E] -> [T, G, E/G]; group scores [T, G]; kept groups [T, G] bool; repeat to [T, E].",
            "grouped = keys.reshape(T, G, E // G)\ngroup_scores = (largest group_best along the last axis).sum(-1)\n"
            "kept = one-hot of the top_groups best groups, any over the picks\njnp.repeat(kept, E // G, axis=...)",
            """
def allowed_experts(keys, num_groups, top_groups, group_best):
    tokens, experts = keys.shape
    size = experts // num_groups
    grouped = keys.reshape(tokens, num_groups, size)
    group_scores = jax.lax.top_k(grouped, group_best)[0].sum(axis=-1)
    groups = jax.lax.top_k(group_scores, top_groups)[1]
    kept = jax.nn.one_hot(groups, num_groups, dtype=jnp.int32).sum(axis=1) > 0
    return jnp.repeat(kept, size, axis=1)
""",
        ),
        properties=(r.best_groups, r.negative_groups, r.tied_groups, r.extreme_groups),
    ),
    Exercise(
        id="02.5",
        title="precision flips",
        goal="Find the tokens that go elsewhere when the logits are rounded to bfloat16.",
        difficulty=2,
        minutes=10,
        used_again=("08",),
        hints=(
            "bfloat16 keeps 8 significant bits. How far apart must two logits near 3 be to stay apart? And does a token "
            "care about the order in which its experts are listed?",
            "logits [T, E] -> bool [T]. Two choices of ids [T, k]; compare them as sets.",
            "rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)\nsort the ids of both choices along the last "
            "axis; a token flips where any differs",
            """
def flipped_tokens(logits, k):
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    before, after = (jnp.sort(jax.lax.top_k(x, k)[1], axis=-1) for x in (logits, rounded))
    return (before != after).any(axis=-1)
""",
        ),
        properties=(r.rounding_ties, r.sets_not_orders, r.random_flips, r.no_flips),
    ),
    Exercise(
        id="02.6",
        title="the whole router",
        goal="Put the parts together: DeepSeek-V3's router, with padding tokens masked out.",
        difficulty=4,
        minutes=20,
        used_again=("03", "06", "07", "11", "12"),
        hints=(
            "A batch has padding. What could the logits of a padding token hold, and which operations would carry that "
            "into the gradient of the router even if its weight is 0?",
            "logits [T, E], bias [E], mask [T] -> ids [T, k] integer, weights [T, k] float32. Masked rows: id E, weight 0.",
            "logits to float32, then 0 where masked, before anything else\nscores = sigmoid\nkeys = scores + bias, "
            "-inf where the group limit forbids\nids, then weights from scores at ids\njnp.where(mask[:, None], ..., E), "
            "and 0 for the weights",
            """
def group_limit(keys, num_groups, top_groups, group_best):
    tokens, experts = keys.shape
    grouped = keys.reshape(tokens, num_groups, experts // num_groups)
    group_scores = jax.lax.top_k(grouped, group_best)[0].sum(axis=-1)
    groups = jax.lax.top_k(group_scores, top_groups)[1]
    kept = jax.nn.one_hot(groups, num_groups, dtype=jnp.int32).sum(axis=1) > 0
    return jnp.repeat(kept, experts // num_groups, axis=1)

def router(logits, bias, mask, k, num_groups, top_groups, scaling_factor):
    real = mask[:, None]
    scores = jax.nn.sigmoid(jnp.where(real, logits.astype(jnp.float32), 0.0))
    keys = scores + bias
    keys = jnp.where(group_limit(keys, num_groups, top_groups, max(1, k // top_groups)), keys, -jnp.inf)
    ids = jax.lax.top_k(keys, k)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if k > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.where(real, ids, logits.shape[-1]), jnp.where(real, scaling_factor * weights, 0.0)
""",
        ),
        properties=(
            r.whole_router,
            r.masked_nan,
            r.sunken_bias,
            r.half_precision,
            r.mask_extremes,
            r.under_jit,
        ),
    ),
)

QUIZZES = (
    Quiz(
        "02.q1",
        "a",
        {
            "a": "Softmax shares a probability of 1, so one expert's gain is the others' loss. Sigmoid scores each alone, "
            "which is why DeepSeek-V3 can move experts by a bias without touching the others' scores.",
            "b": "Sigmoid looks at one logit at a time: no other score can move.",
            "c": "Softmax divides by a sum that contains expert 5, so all its scores move.",
        },
    ),
    Quiz(
        "02.q2",
        0.4,
        {
            0.4: "0.4 / (0.4 + 0.6): the bias brought expert 3 in, and its weight is what its own score says.",
            0.7: "That is (0.4 + 1) / (0.4 + 1 + 0.6), the biased score. Three public code bases did this.",
            0.36: "That divides by the sum of the two largest scores, but expert 2 was not picked.",
        },
        otherwise="Which two experts have the largest score + bias? Gather their scores and divide by the sum.",
        within=0.01,
    ),
    Quiz(
        "02.q3",
        "c",
        {
            "a": "A constant has no gradient, large or small.",
            "b": "Softmax over a single number is 1 whatever the number is, so nothing flows back to it.",
            "c": "w / w is 1, a constant: the router never learns. Skip the division at k = 1, as Switch Transformer's "
            "router does by keeping the probability.",
        },
    ),
    Quiz(
        "02.q4",
        "b",
        {
            "a": "The inputs of the product are activations, bfloat16 anyway. Their rounding moves logits a little; it does "
            "not make two of them equal.",
            "b": "Products of bfloat16 inputs are summed in float32 by the hardware. Rounding that sum to bfloat16 is what "
            "makes 3.001 and 3.004 one number; asking for a float32 output costs next to nothing.",
            "c": "By then the choice is made.",
        },
    ),
    Quiz(
        "02.q5",
        "b",
        {
            "a": "The group scores are right: both groups that were kept are the best two.",
            "b": "0 beats every negative key, so an expert of a forbidden group wins. Minus infinity loses to all.",
            "c": "top_k did its work: 0 is the largest number it was given.",
        },
    ),
)
