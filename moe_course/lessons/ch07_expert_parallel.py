"""Chapter 07, expert parallelism: the text of its exercises and questions. What they check: ``properties/ch07*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch07 as p
from moe_course.lessons.properties import ch07_buffers as b
from moe_course.lessons.properties import ch07_dedup as d
from moe_course.lessons.properties import ch07_ragged as r

EXERCISES = (
    Exercise(
        id="07.1",
        title="the send matrix",
        goal="Count the token copies that each rank has for each rank.",
        difficulty=2,
        minutes=10,
        used_again=("10", "12"),
        hints=(
            "Rank r owns the experts from r E/R to (r+1) E/R. Which division turns an expert into a rank, and what does it "
            "make of the id E?",
            "ids [R, T, K] -> owner [R, T, K] -> compared with arange(R): [R, T, K, R] -> [R, R].",
            "owner = expert_ids // experts per rank\n"
            "(owner with one more axis == arange(ranks)) summed over tokens and picks",
            """
def send_matrix(expert_ids, num_experts, ranks):
    member = (expert_ids[..., None] == jnp.arange(num_experts)).sum(axis=(1, 2))
    return member.reshape(ranks, ranks, num_experts // ranks).sum(axis=2)
""",
        ),
        properties=(p.counts_copies, p.padding_nowhere, p.matrix_under_jit),
    ),
    Exercise(
        id="07.2",
        title="padded, there",
        goal="Put each copy into its receiver's block and exchange the blocks.",
        difficulty=3,
        minutes=20,
        used_again=("12",),
        hints=(
            "In 04.4 a row was the first row of a group plus a rank within it. Here every group begins at a multiple of "
            "pair. What becomes of the copy that finds its block full?",
            "owner [T, K] -> place [T K] -> send [R pair, D] -> blocks [R, pair, D] -> all_to_all -> [R, pair, D].",
            "nth = how many earlier slots have the same owner\nplace = owner * pair + nth, or ranks * pair\n"
            'send = zeros .at[place].set(each token K times, mode="drop")\n'
            'received = lax.all_to_all(send in blocks, "expert", 0, 0)',
            """
def there(x, owner, ranks, pair):
    flat = owner.reshape(-1)
    earlier = jnp.tril(jnp.ones((flat.size, flat.size), bool), -1)
    nth = ((flat[:, None] == flat[None, :]) & earlier).sum(axis=1)
    place = jnp.where((flat < ranks) & (nth < pair), flat * pair + nth, ranks * pair)
    token = jnp.arange(flat.size) // owner.shape[1]
    send = jnp.zeros((ranks * pair, x.shape[1]), x.dtype).at[place].set(x[token], mode="drop")
    received = jax.lax.all_to_all(send.reshape(ranks, pair, -1), "expert", 0, 0)
    return received, place.reshape(owner.shape)
""",
        ),
        properties=(p.blocks_by_sender, p.full_blocks, p.padding_stays, p.there_gradient),
    ),
    Exercise(
        id="07.3",
        title="padded, back",
        goal="Send the answers home and add up each token's copies.",
        difficulty=2,
        minutes=10,
        used_again=("12",),
        hints=(
            "Block s of your answers belongs to rank s, and block s of what comes home is from rank s. So which exchange "
            "undoes the first one, and where in it is the copy that you put at place p?",
            "answers [R, pair, D] -> all_to_all -> [R pair, D] -> gathered at place [T, K]: [T, K, D] -> [T, D].",
            'home = all_to_all, as rows\ncopies = home.at[place].get(mode="fill", fill_value=0)\nthe sum in float32',
            """
def back(answers, place):
    home = jax.lax.all_to_all(answers, "expert", 0, 0, tiled=True)
    home = home.reshape(-1, answers.shape[-1]).astype(jnp.float32)
    return sum(home.at[column].get(mode="fill", fill_value=0) for column in place.T)
""",
        ),
        properties=(p.sums_copies, p.unsent_add_nothing, p.back_in_float32, p.back_gradient),
    ),
    Exercise(
        id="07.4",
        title="the bucket",
        goal="Say how many rows a receive buffer has, in bucket 0, 1, 2 and so on.",
        difficulty=2,
        minutes=10,
        used_again=("10", "12"),
        hints=(
            "If every rank gets the same, each receives as many copies as its own tokens make. And if all R ranks gang up "
            "on one: how many copies can a single token send it, when it owns E/R experts?",
            "All Python ints: balanced = tokens top_k; worst = ranks tokens min(top_k, E/R).",
            "rows = ranks * ceil(factor * 2**bucket * balanced / ranks)\nat most the worst case",
            """
def receive_rows(bucket, factor, tokens, top_k, num_experts, ranks):
    share = factor * 2**bucket * tokens * top_k / ranks
    rows = (int(share) + (share > int(share))) * ranks
    return min(rows, ranks * tokens * min(top_k, num_experts // ranks))
""",
        ),
        properties=(b.doubles, b.rounded_up, b.at_most_worst, b.holds_every_routing, b.python_int),
    ),
    Exercise(
        id="07.5",
        title="all or none",
        goal="Take the step on all ranks, or on none.",
        difficulty=2,
        minutes=10,
        used_again=("09", "12"),
        hints=(
            "Rank 1's buffer overflowed, so the loss and the gradients of everyone are wrong. How does rank 0 learn of it?",
            "demand [] -> the largest over the axis [] -> overflow [] boolean -> where: state [n].",
            'overflow = lax.pmax(demand, "expert") more than the capacity\nold where overflow, else new',
            """
def all_or_none(state, new_state, demand, capacity):
    overflow = (jax.lax.all_gather(demand, "expert") > capacity).any()
    return jnp.where(overflow, state, new_state), overflow
""",
        ),
        properties=(b.enough, b.one_short, b.nan_is_not_kept),
    ),
    Exercise(
        id="07.6",
        title="ragged, there",
        goal="From the send matrix, the four arguments of ragged_all_to_all.",
        difficulty=4,
        minutes=25,
        used_again=("12",),
        hints=(
            "A chunk is cut out of one rank's rows and pasted into another's buffer. Who says where it is pasted: the rank "
            "that sends it, or the rank that gets it? And what lies before it there?",
            "sizes [R, R]. Along a row: where chunks begin at the sender. Down a column: where they land at the receiver. "
            "Then row `rank` of three matrices, and column `rank` of one.",
            "starts = cumsum along rows, exclusive\nends = cumsum down columns, at most capacity\n"
            "kept = differences of ends\nlands = ends - kept\nreturn starts[rank], kept[rank], lands[rank], kept[:, rank]",
            """
def ragged_there(sizes, rank, capacity):
    starts = jnp.cumsum(sizes, axis=1) - sizes
    lands = jnp.minimum(jnp.cumsum(sizes, axis=0) - sizes, capacity)
    kept = jnp.minimum(sizes, capacity - lands)
    return starts[rank], kept[rank], lands[rank], kept[:, rank]
""",
        ),
        properties=(r.by_hand, r.any_matrix, r.short_of_room),
    ),
    Exercise(
        id="07.7",
        title="ragged, back",
        goal="The arguments of the way back, from those of the way there.",
        difficulty=2,
        minutes=10,
        used_again=("12",),
        hints=(
            "On the way back a rank sends what it received. From where does it take a chunk, and where must it land so that "
            "the sender finds it where it was?",
            "Three [R, R] matrices, row = sender there. Columns `rank` of them are what this rank received; row `rank` of "
            "the sizes is what comes home.",
            "input_offsets: where the chunk landed there\nsend_sizes: a column\noutput_offsets: where it was taken from\n"
            "recv_sizes: a row",
            """
def ragged_back(input_offsets, send_sizes, output_offsets, rank):
    return output_offsets.T[rank], send_sizes.T[rank], input_offsets.T[rank], send_sizes[rank]
""",
        ),
        properties=(r.back_by_hand, r.back_of_any, r.round_trip),
    ),
    Exercise(
        id="07.8",
        title="each rank once",
        goal="List the ranks that a token goes to, each once.",
        difficulty=3,
        minutes=15,
        used_again=("10",),
        hints=(
            "Sorted, equal owners stand side by side. What marks a repeat, and what number sends it to the end when you "
            "sort once more?",
            "owner [T, K] -> a mark for each rank [T, R] -> its number or R [T, R] -> sorted, the first min(K, R) columns.",
            "here = any pick of the token owned by rank 0, 1, ..., R-1\nwhere(here, arange(ranks), ranks), sorted\n"
            "the first min(K, R) columns",
            """
def distinct_ranks(owner, ranks):
    first = jnp.sort(owner, axis=1)
    repeated = jnp.pad(first[:, 1:] == first[:, :-1], ((0, 0), (1, 0)))
    return jnp.sort(jnp.where(repeated, ranks, first), axis=1)[:, : min(owner.shape[1], ranks)]
""",
        ),
        properties=(d.each_once, d.more_picks, d.none_for_padding, d.distinct_under_jit),
    ),
    Exercise(
        id="07.9",
        title="the books",
        goal="Compare what was counted at five places, pair of ranks by pair of ranks.",
        difficulty=2,
        minutes=10,
        used_again=("12",),
        hints=(
            "The receivers write `received`, one row each. Which way round is their matrix? And if one copy goes to the "
            "wrong rank, which totals change?",
            "made, sent, received.T, combined: [R, R] by sender and receiver. computed [R]: the column sums of received.T.",
            "dropped = made - combined\nbalanced = all equal: made and sent, sent and received.T, received.T and combined, "
            "row sums of received and computed",
            """
def audit(made, sent, received, computed, combined):
    pairs = jnp.stack([sent, received.T, combined])
    return made - combined, (pairs == made).all() & (received.sum(axis=1) == computed).all()
""",
        ),
        properties=(d.agree, d.losses_show, d.misplaced_show, d.doubles_show, d.no_cancelling),
    ),
)

QUIZZES = (
    Quiz(
        "07.q1",
        "b",
        {
            "a": "They travel as soon as tokens meet. The weights stay where they are: that is the point.",
            "b": "Weights stay, tokens travel: each copy there, its answer back, and in the backward pass their gradients "
            "likewise. Four exchanges for each layer and step.",
            "c": "Those of experts that one rank owns are added up on that rank: all tokens have come to it.",
        },
    ),
    Quiz(
        "07.q2",
        "c",
        {
            "a": "The mean is what a balanced batch needs. One pair above it, and rows are lost.",
            "b": "That bounds a receiver's rows in one dense buffer. Here each sender has its own block there.",
            "c": "All blocks have one size, so the busiest pair sets it for R squared of them.",
        },
    ),
    Quiz(
        "07.q3",
        "b",
        {
            "a": "The counter counts what was asked for, dropped or not, so an overflow at a checked step is seen.",
            "b": "A look at the counter makes the host wait for the device, so it is rare. Then a run that overflowed "
            "between two looks goes on as if nothing had happened: verified at every 20th step, not proved.",
            "c": "With drop_on_overflow they are dropped; without it the device traps and the run is over.",
        },
    ),
    Quiz(
        "07.q4",
        "c",
        {
            "a": "A copy too few is a copy lost at some station: the pair and the stations are named.",
            "b": "Totals agree, but the books of two pairs do not.",
            "c": "A ledger counts rows and never looks at them. Two rows swapped within a chunk, or weights of another "
            "token, need a comparison of values and gradients with one device.",
        },
    ),
    Quiz(
        "07.q5",
        "b",
        {
            "a": "The send matrix of a balanced batch is symmetric: what a rank sends looks like what it receives, and the "
            "second mistake is none. Forced balance is the usual benchmark.",
            "b": "With sizes[s, r] unlike sizes[r, s], nothing of one side can stand in for the other. And it takes values: "
            "a shape, a loss that falls and a balanced ledger say nothing about which row is which.",
            "c": "All sizes are right, so every count is. The rows are in the wrong places, or lie on one another.",
        },
    ),
    Quiz(
        "07.q6",
        "b",
        {
            "a": "Plain gradient descent takes R times the step for these parameters: the loss says so soon.",
            "b": "Adam divides a gradient by its own size, so a constant factor all but vanishes. Clipping by the global "
            "norm does not forgive it: the wrong part drowns the rest.",
            "c": "Values agree to the last bit; only gradients are wrong. Compare every parameter's, at R = 1, 2 and 4.",
        },
    ),
    Quiz(
        "07.q7",
        "c",
        {
            "a": "One pick is one rank: nothing to count twice.",
            "b": "With an expert per rank distinct experts are distinct ranks.",
            "c": "The two picks share one row, already summed there, and each fetches it. Random routing has such tokens as "
            "soon as a rank owns two experts.",
        },
    ),
)
