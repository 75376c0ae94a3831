"""Chapter 10, scaling: the text of its exercises and questions. What they check: ``properties/ch10*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch10 as p
from moe_course.lessons.properties import ch10_plans as c
from moe_course.lessons.properties import ch10_traffic as t

EXERCISES = (
    Exercise(
        id="10.1",
        title="a layer of MLA",
        goal="Count one layer of multi-head latent attention.",
        difficulty=2,
        minutes=10,
        used_again=("11",),
        hints=(
            "Which of the five matrices does the rotary key come out of, and for how many heads? In which of the two "
            "attention products does it take part?",
            "[d_model, q_rank], [q_rank, heads (nope + rope)], [d_model, kv_rank + rope], [kv_rank, heads (nope + v_dim)], "
            "[heads v_dim, d_model]. Looking back: heads (nope + rope) and heads v_dim, seq_len / 2 times.",
            "query = the first two, or one [d_model, heads (nope + rope)]\nweights = query + the other three\n"
            "core = seq_len / 2 * heads * (nope + rope + v_dim)\n2 FLOPs each",
            """
def mla_layer(d_model, heads, q_rank, kv_rank, nope, rope, v_dim, seq_len):
    queries = heads * (nope + rope)
    weights = d_model * q_rank + q_rank * queries if q_rank else d_model * queries
    weights += d_model * (kv_rank + rope) + kv_rank * heads * (nope + v_dim) + heads * v_dim * d_model
    return 2 * weights + seq_len * (queries + heads * v_dim)
""",
        ),
        properties=(p.projections, p.straight_queries, p.core_of_half, p.v3_layer),
    ),
    Exercise(
        id="10.2",
        title="rows to compute",
        goal="Find the rows at which an expert's arithmetic takes as long as its traffic.",
        difficulty=3,
        minutes=15,
        used_again=("11", "12"),
        hints=(
            "In 01.4 only the weights were read. What does one more row cost in traffic, and what in arithmetic? And if "
            "the first is more than the second?",
            "Seconds: a row's arithmetic 2 d_in d_out / peak, its traffic (d_in bytes_in + d_out bytes_out) / bandwidth, "
            "the weights' d_in d_out bytes_weight / bandwidth. All numbers.",
            "gain = a row's arithmetic - a row's traffic\nrows = the weights' seconds / gain\nmath.inf if there is no gain",
            """
def rows_to_compute(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    gain = 2 * d_in * d_out / peak - (d_in * bytes_in + d_out * bytes_out) / bandwidth
    return d_in * d_out * bytes_weight / bandwidth / gain if gain > 0 else float("inf")
""",
        ),
        properties=(p.equally_long, p.all_bytes, p.never),
    ),
    Exercise(
        id="10.3",
        title="alpha and beta",
        goal="Fit a start-up time and a bandwidth to measured messages.",
        difficulty=3,
        minutes=20,
        used_again=("12",),
        hints=(
            "The largest message takes a thousand times as long as the smallest. If you add up squared microseconds, whose "
            "error counts? What would you have to divide by?",
            "Model / measured: (alpha + kilobytes slope) / microseconds [n], to be near 1 [n]. Two columns [n, 2], two "
            "unknowns; beta = 1 / slope.",
            "columns = stack([1 / microseconds, kilobytes / microseconds], axis=1)\n"
            "alpha, slope = lstsq(columns, ones)\nif alpha < 0: alpha is 0; slope by the second column alone",
            """
def alpha_beta(kilobytes, microseconds):
    ratio = kilobytes / microseconds
    columns = jnp.stack([1 / microseconds, ratio], axis=1)
    scale = columns.max(axis=0)
    alpha, slope = jnp.linalg.lstsq(columns / scale, jnp.ones_like(ratio))[0] / scale
    if alpha < 0:
        alpha, slope = 0.0, ratio.sum() / (ratio**2).sum()
    return float(alpha), float(1 / slope)
""",
        ),
        properties=(p.recovers, p.least, p.not_negative),
    ),
    Exercise(
        id="10.4",
        title="rows across",
        goal="Count the rows that leave the NVLink domain, three ways.",
        difficulty=3,
        minutes=15,
        used_again=("12",),
        hints=(
            "A place owns E/P experts. In how many of the ways to pick K experts does a token miss it altogether? And in "
            "which of the domains does the token live itself?",
            "domains N = ranks / domain, at least 1. Places visited: P (1 - C(E - E/P, K) / C(E, K)), for P = ranks or N. "
            "All numbers.",
            "visited(places) = places * (1 - comb(E - E // places, K) / comb(E, K))\n"
            "rows = K, visited(ranks) or visited(domains)\ntimes (domains - 1) / domains",
            """
import math

def rows_across(experts, top_k, ranks, domain, way):
    def visited(places):
        return places * (1 - math.comb(experts - experts // places, top_k) / math.comb(experts, top_k))

    domains = max(1, ranks // domain)
    rows = {"pick": top_k, "rank": visited(ranks), "domain": visited(domains)}[way]
    return rows * (domains - 1) / domains
""",
        ),
        properties=(t.by_pick, t.by_rank, t.by_domain, t.inside, t.v3_rows),
    ),
    Exercise(
        id="10.5",
        title="whose rack",
        goal="Find the share of an exchange that leaves its rack.",
        difficulty=2,
        minutes=15,
        used_again=("12",),
        hints=(
            "GPU 70 is in rack 0 and GPU 72 in rack 1. In which group of 64 neighbours are they? Does that group fit in one "
            "rack?",
            "members [groups, ep]: GPU numbers. Their domains [groups, ep]. Pairs [groups, ep, ep]: does the domain differ?",
            "members = arange(gpus).reshape(gpus // (ep * stride), ep, stride), with ep as the last axis\n"
            "domains = members // domain\nthe mean of domains[..., :, None] != domains[..., None, :]",
            """
def share_leaving(gpus, ep, domain, stride):
    members = jnp.arange(gpus).reshape(-1, ep, stride).swapaxes(1, 2)
    rack = members // domain
    return float((rack[..., :, None] != rack[..., None, :]).mean())
""",
        ),
        properties=(t.neighbours, t.skipping, t.aligned, t.racks),
    ),
    Exercise(
        id="10.6",
        title="the memory wall",
        goal="Say what one GPU keeps from step to step.",
        difficulty=3,
        minutes=15,
        used_again=("12",),
        hints=(
            "Two GPUs hold the same expert. And the same dense matrix? ZeRO divides among those who hold the same: "
            "is that one number or two?",
            "Parameters here: dense / (PP TP) and routed / (PP EP). Copies of them: GPUs / (PP TP) and GPUs / (PP EP).",
            "for (size, copies) of dense and routed:\n  8 bytes / copies from ZeRO 1 on\n  4 bytes / copies from ZeRO 2 on\n"
            "  2 bytes / copies from ZeRO 3 on",
            """
def state_bytes(dense, routed, gpus, tp, pp, ep, zero):
    total = 0
    for parameters, ways in ((dense, pp * tp), (routed, pp * ep)):
        copies = gpus // ways
        for stage, width in ((1, 8), (2, 4), (3, 2)):
            total += parameters / ways * width / (copies if zero >= stage else 1)
    return total
""",
        ),
        properties=(c.nothing_sharded, c.zero_stages, c.expert_copies, c.v3_state),
    ),
    Exercise(
        id="10.7",
        title="one forward, one backward",
        goal="Write down what a pipeline stage does, in order.",
        difficulty=3,
        minutes=15,
        used_again=("12",),
        hints=(
            "The last stage can go back as soon as it has gone forward once. How many micro-batches have to be under way "
            "before the first stage hears of that?",
            "2 m names. First min(p - s - 1, m) forwards, then pairs of a forward and a backward, then the backwards left.",
            'warm = min(stages - stage - 1, micro_batches)\n["F0", ... warm of them]\n'
            'then for each other micro-batch its "F", and the oldest "B"\nthen the last "B"s',
            """
def stage_order(stage, stages, micro_batches):
    warm = min(stages - stage - 1, micro_batches)
    order = [f"F{m}" for m in range(warm)]
    for m in range(micro_batches):
        if m + warm < micro_batches:
            order.append(f"F{m + warm}")
        order.append(f"B{m}")
    return order
""",
        ),
        properties=(c.complete, c.no_longer, c.bounded, c.in_order),
    ),
    Exercise(
        id="10.8",
        title="two meshes",
        goal="Lay attention and experts over the same GPUs, each in its own way.",
        difficulty=2,
        minutes=10,
        used_again=("11", "12"),
        hints=(
            "What must both meshes agree on, and what need they not? Which axis changes slowest as GPU numbers count up?",
            "arange(gpus) -> [pp, dp, cp, tp] and [pp, expert dp, ep, etp]; dp and expert dp are what is left.",
            "None if pp tp cp or pp ep etp does not divide gpus\nelse arange(gpus), reshaped twice, -1 for the copies",
            """
def fold(gpus, pp, tp, cp, ep, etp):
    if gpus % (pp * tp * cp) or gpus % (pp * ep * etp):
        return None
    numbers = jnp.arange(gpus)
    return numbers.reshape(pp, -1, cp, tp), numbers.reshape(pp, -1, ep, etp)
""",
        ),
        properties=(c.each_once, c.same_stage, c.larger_than_dp, c.illegal),
    ),
    Exercise(
        id="10.9",
        title="the choice",
        goal="Choose a plan with a model that is wrong by a known amount.",
        difficulty=2,
        minutes=10,
        used_again=("12",),
        hints=(
            "Two plans are predicted 3 % apart by a model that is 11 % off. What do you know about which is faster? What do "
            "you know about which is leaner?",
            "fits [n], tied [n], and one index. The pace is set by the fastest of those that fit.",
            "fits = memory <= capacity\nbest = the largest speed among them\ntied = fits and speed * (1 + error) >= best\n"
            "the least memory among tied; -1 if none fits",
            """
def choose(speed, memory, capacity, error):
    fits = memory <= capacity
    tied = fits & (speed * (1 + error) >= jnp.where(fits, speed, 0).max())
    index = jnp.where(tied, memory, jnp.inf).argmin()
    return (int(index) if tied.any() else -1), tied
""",
        ),
        properties=(c.leanest, c.must_fit, c.no_error, c.nothing_fits),
    ),
)

QUIZZES = (
    Quiz(
        "10.q1",
        "c",
        {
            "a": "All three were computed from one and the same number of tokens per second.",
            "b": "One peak or another makes another MFU. These are TFLOPS.",
            "c": "The same tokens per second, three counts of the work: without MTP, with MTP, and with the half of the "
            "scores that a causal mask throws away. Compare speeds of one model in tokens per second.",
        },
    ),
    Quiz(
        "10.q2",
        "b",
        {
            "a": "A rank has an eighth of the experts, but the tokens of eight times as many GPUs come to it.",
            "b": "Each expert now serves the tokens of 64 GPUs instead of 8. So does the traffic: that is the trade of this "
            "chapter.",
            "c": "They would, if every GPU kept its tokens to itself.",
        },
    ),
    Quiz(
        "10.q3",
        "a",
        {
            "a": "The bytes are the same in every row. What grows is the share that takes the slow way, from 0 to nearly "
            "all, and there it ends.",
            "b": "128 tokens, 8 copies each, at every size: a rank sends as much with 8 ranks as with 256.",
            "c": "Then each doubling would add the same again, and the curve would not bend.",
        },
    ),
    Quiz(
        "10.q4",
        "b",
        {
            "a": "256 experts do not divide by 72.",
            "b": "Groups then end where racks end. The eight GPUs that are left in each rack do something else, or nothing: "
            "a ninth of the machine is the price.",
            "c": "With another axis inside, members are farther apart: they straddle all the more. Exercise 10.5 can tell.",
        },
    ),
    Quiz(
        "10.q5",
        "c",
        {
            "a": "Those are what ZeRO 1 shards: they shrink with every copy that is added.",
            "b": "Activations depend on tokens and recompute; this is about what stays from step to step.",
            "c": "Six bytes for every parameter that EP and PP leave on a GPU, however many GPUs there are. A larger EP or "
            "PP cuts them, or ZeRO 3, which pays in traffic.",
        },
    ),
    Quiz(
        "10.q6",
        16,
        {
            16: "Attention takes them as 2 copies of TP 4 CP 2, experts as one group of 16. Both cut the same 16 GPUs.",
            128: "That is TP CP EP: what it takes if experts may only be spread over the copies of attention, so that EP "
            "must divide DP. Folding lifts this.",
            8: "Attention fits in 8, but 16 expert ranks do not.",
        },
        otherwise="Both meshes cover the same GPUs: a common multiple of TP CP and of EP.",
    ),
    Quiz(
        "10.q7",
        "b",
        {
            "a": "A source repeats itself: one model, one machine, release after release. A random row's twin stays behind "
            "and gives it away.",
            "b": "What you will ask about is a run that nobody has published. So a source is left out whole, with every row "
            "of its lineage.",
            "c": "The constants have seen the answers: that error is smaller, and says little.",
        },
    ),
    Quiz(
        "10.q8",
        "b",
        {
            "a": "The count of Mixtral is 3.5 times too large, and a modest run stays below 100 % with it.",
            "b": "Experts that nobody picks do no work. A property of the formula alone: no run, no reference.",
            "c": "Attention's core doubles per token; the rest does not. Both counts pass.",
        },
    ),
    Quiz(
        "10.q9",
        "c",
        {
            "a": "Every expert in use gets the same: apart from the zeros the loads look as planned.",
            "b": "There a rank owns 32 experts or more, and one in 32 is picked: no rank is idle.",
            "c": "Picks are 32 apart and a rank owns 16: every second rank owns none of them, in every batch whose tokens "
            "start alike. Test with more ranks than picks.",
        },
    ),
    Quiz(
        "10.q10",
        "a",
        {
            "a": "Its GEMMs take FP8 operands. Against the BF16 peak the same seconds read as twice the use.",
            "b": "That peak is not what the run's GEMMs could reach.",
            "c": "Sparse peaks count products with zeros that nobody computes: half of any honest MFU, or twice the peak.",
        },
    ),
)
