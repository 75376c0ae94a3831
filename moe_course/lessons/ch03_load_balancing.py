"""Chapter 03, load balancing: the text of its exercises and questions. What they check: ``properties/ch03*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch03 as p
from moe_course.lessons.properties import ch03_control as c

EXERCISES = (
    Exercise(
        id="03.1",
        title="load",
        goal="Count the copies each expert gets, and say how uneven the counts are.",
        difficulty=1,
        minutes=10,
        used_again=("04", "07", "12"),
        hints=(
            "Which number would tell you, without a picture, that one expert does all the work? And which ids must not "
            "be counted at all?",
            "ids [T, K] -> load [E] integer; cv and dead are scalars. Compare ids [T, K, 1] with the E experts.",
            "load = (ids[..., None] == jnp.arange(num_experts)).sum(axis=...)\nmean = load.mean()\n"
            "cv = jnp.where(mean > 0, load.std() / a divisor that is never 0, 0.0)\ndead = (load == 0).sum()",
            """
def load_and_spread(ids, num_experts):
    load = (ids[..., None] == jnp.arange(num_experts)).sum(axis=(0, 1))
    cv = load.std() / jnp.maximum(load.mean(), 1e-9)
    return load, cv, (load == 0).sum()
""",
        ),
        properties=(p.random_load, p.idle_experts, p.padding_counts_nowhere, p.nothing),
    ),
    Exercise(
        id="03.2",
        title="balance loss",
        goal="The auxiliary loss E sum f P: 1 in balance, and a gradient through P alone.",
        difficulty=2,
        minutes=15,
        used_again=("06", "11", "12"),
        hints=(
            "Counts have no gradient. Which part of f P can teach the router, and in which direction does it push the "
            "score of an expert that is busy?",
            "f [E] is load over all picks; P [E] is the mean over real tokens of scores / (their sum over E). The loss "
            "is a scalar.",
            "totals = scores.sum(-1, keepdims=True); real = totals > 0\nprobs = scores / jnp.where(real, totals, 1.0)\n"
            "f = load / (all picks, at least 1)\nP = probs.sum(0) / (real tokens, at least 1)\nE * (f * P).sum()",
            """
def balance_loss(scores, ids):
    experts = scores.shape[-1]
    totals = scores.sum(axis=-1, keepdims=True)
    real = totals > 0
    probs = scores / jnp.where(real, totals, 1.0)
    load = (ids[..., None] == jnp.arange(experts)).sum(axis=(0, 1)).astype(jnp.float32)
    f = load / jnp.maximum(load.sum(), 1.0)
    return experts * (f * probs.sum(axis=0)).sum() / jnp.maximum(real.sum(), 1)
""",
        ),
        properties=(
            p.balanced_is_one,
            p.skewed,
            p.random_losses,
            p.padded_losses,
            p.loss_gradients,
            p.loss_under_jit,
        ),
    ),
    Exercise(
        id="03.3",
        title="any split",
        goal="One part's share of the loss of the whole batch, so that the parts add up however it is cut.",
        difficulty=3,
        minutes=15,
        used_again=("07", "12"),
        hints=(
            "f P is a product of two means. Which of the two may each part take over its own tokens without changing "
            "the sum, and which one must be the same number everywhere?",
            "scores [t, E] are this part's; load [E] is everybody's. All real tokens together: load.sum() / top_k.",
            "f = load / load.sum()\nprobs = scores divided by their sum over experts, as in 03.2\n"
            "E * (f * probs.sum(0)).sum() / (all real tokens, not those here)",
            """
def part_of_loss(scores, load, top_k):
    experts = scores.shape[-1]
    totals = scores.sum(axis=-1, keepdims=True)
    probs = scores / jnp.where(totals > 0, totals, 1.0)
    picks = jnp.maximum(load.sum(), 1).astype(jnp.float32)
    f = load / picks
    return experts * (f * probs.sum(axis=0)).sum() / (picks / top_k)
""",
        ),
        properties=(p.parts_add_up, p.padded_parts, p.gradient_of_parts),
    ),
    Exercise(
        id="03.4",
        title="z-loss",
        goal="The mean square of the router's log-sum-exp, padding left out.",
        difficulty=2,
        minutes=10,
        used_again=("06", "12"),
        hints=(
            "Adding 100 to all logits of a token changes no probability. What does it change in float32, and which "
            "function of the logits would notice?",
            "logits [T, E], mask [T] bool -> scalar. logsumexp runs over E; the mean over real tokens.",
            "logits = jnp.where(mask[:, None], logits.astype(jnp.float32), 0.0)   # before any arithmetic\n"
            "squares = jax.nn.logsumexp(logits, axis=-1) ** 2\nsum where mask / real tokens, at least 1",
            """
def z_loss(logits, mask):
    logits = jnp.where(mask[:, None], logits.astype(jnp.float32), 0.0)
    squares = jnp.where(mask, jax.nn.logsumexp(logits, axis=-1) ** 2, 0.0)
    return squares.sum() / jnp.maximum(mask.sum(), 1)
""",
        ),
        properties=(c.flat_logits, c.random_z, c.large_z, c.masked_z, c.half_z, c.gradient_z),
    ),
    Exercise(
        id="03.5",
        title="bias rule",
        goal="Balance without a loss: move each expert's bias one step against its load.",
        difficulty=1,
        minutes=10,
        used_again=("06", "12"),
        hints=(
            "A thermostat does not ask how cold it is, only on which side of the setting. What is the setting here, and "
            "on which side must the bias rise?",
            "bias [L, E] float32, load [L, E] int32 -> [L, E] float32. The mean load has shape [L, 1].",
            "mean = load.mean(axis=-1, keepdims=True)\nbias + rate * jnp.sign(...)",
            """
def update_bias(bias, load, rate):
    mean = load.mean(axis=-1, keepdims=True)
    return bias + rate * jnp.sign(mean - load)
""",
        ),
        properties=(c.by_hand, c.random_bias, c.stacked_layers, c.at_rest, c.bias_under_jit),
    ),
    Exercise(
        id="03.6",
        title="capacity",
        goal="Say which copies are kept when every expert has room for a fixed number.",
        difficulty=3,
        minutes=15,
        used_again=("04", "07"),
        hints=(
            "A copy is kept if fewer than `capacity` copies for the same expert come before it. How do you count, for "
            "every copy at once, those before it?",
            "flat ids [T K] in the order token, then pick; one-hot [T K, E]; a running count along axis 0; back to [T, K].",
            "hot = flat[:, None] == jnp.arange(num_experts)\nplace = running count of hot along the copies, read at the "
            "copy's own expert, less itself\nkept = (place < capacity) & (flat < num_experts)",
            """
def kept_copies(ids, num_experts, capacity):
    flat = ids.reshape(-1)
    hot = (flat[:, None] == jnp.arange(num_experts)).astype(jnp.int32)
    place = ((jnp.cumsum(hot, axis=0) - hot) * hot).sum(axis=-1)
    return ((place < capacity) & (flat < num_experts)).reshape(ids.shape)
""",
        ),
        properties=(
            c.first_come,
            c.one_takes_all,
            c.extreme_capacity,
            c.padded_capacity,
            c.the_ledger,
            c.capacity_under_jit,
        ),
    ),
)

QUIZZES = (
    Quiz(
        "03.q1",
        "b",
        {
            "a": "They are counts: a small change of the weights changes none of them, so their gradient is 0.",
            "b": "f says how busy an expert is and P carries the gradient: raising the score of expert e costs f_e, so "
            "the router is pushed away from busy experts in proportion to their load.",
            "c": "Then the loss would only compare probabilities, and a router whose top-k ignores half of the experts "
            "could still look balanced.",
        },
    ),
    Quiz(
        "03.q2",
        2,
        {
            2: "Each sequence alone: 4 (0.5 * 0.5 + 0.5 * 0.5) = 2. Together both halves look even, and the global loss "
            "is 1. Global lets a sequence be about one thing; per-sequence forbids it.",
            1: "That is the loss of both sequences together. Each alone uses half of the experts.",
            4: "E / K is the worst when K experts take all: 4 / 2.",
        },
        otherwise="For one sequence f = P = [0.5, 0.5, 0, 0].",
    ),
    Quiz(
        "03.q3",
        "a",
        {
            "a": "The sum [7, 3, 2, 4] has mean 4: down, up, up, stay. Signs of partial counts add up to [-2, 0, 1, 0], "
            "another step altogether, which even misses expert 1. Sum the counts first.",
            "b": "A sign forgets how far off each micro-batch was, so two of them cannot be added.",
            "c": "The last micro-batch alone is half of the evidence.",
        },
    ),
    Quiz(
        "03.q4",
        313,
        {
            313: "1.25 * 1000 * 2 / 8 = 312.5, rounded up.",
            312: "Rounded down, the buffer holds less than was asked for.",
            250: "That is the balanced need, factor 1.0.",
            157: "A token makes two copies: K belongs in the product.",
        },
        otherwise="factor * tokens * picks / experts, rounded up.",
    ),
    Quiz(
        "03.q5",
        "b",
        {
            "a": "Both are there. Each layer alone reads 2.",
            "b": "Concatenated, the layers fill each other's gaps: f and P are even over the union. Take the loss of each "
            "layer, then average.",
            "c": "The probabilities are right, layer by layer.",
        },
    ),
)
