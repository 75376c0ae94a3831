"""Chapter 08, low precision: the text of its exercises and questions. What they check: ``properties/ch08*.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch08 as p
from moe_course.lessons.properties import ch08_gemms as g
from moe_course.lessons.properties import ch08_tools as t

EXERCISES = (
    Exercise(
        id="08.1",
        title="E4M3 by hand",
        goal="Say what each of the 256 bytes means.",
        difficulty=2,
        minutes=10,
        used_again=("09", "11"),
        hints=(
            "A float is a sign, a power of two and a number from 1 to 2. How would you write 0 that way, and what does the "
            "lowest exponent field stand for instead?",
            "codes uint8 -> int32; field and mantissa by shift and mask, [...] each -> [...] float32.",
            "field = bits 3 to 6, mantissa = bits 0 to 2\nfield above 0: (8 + mantissa) 2^(field - 10)\n"
            "field 0: mantissa 2^-9\nthe sign is bit 7; 127 without it is NaN",
            """
def e4m3_values(codes):
    codes = codes.astype(jnp.int32)
    field, mantissa = (codes >> 3) & 15, codes & 7
    eighths = jnp.where(field > 0, 8 + mantissa, mantissa).astype(jnp.float32)
    value = jnp.ldexp(eighths, jnp.maximum(field, 1) - 10)
    value = jnp.where(codes & 128, -value, value)
    return jnp.where((codes & 127) == 127, jnp.nan, value)
""",
        ),
        properties=(p.by_hand, p.all_codes, p.codes_in_any_shape),
    ),
    Exercise(
        id="08.2",
        title="a cast that saturates",
        goal="Cast to a small format so that what is too large becomes the largest value.",
        difficulty=1,
        minutes=5,
        used_again=("09",),
        hints=(
            "The cast goes wrong only beyond the format's largest value. Where do you learn that value, so that E5M2 works "
            "as well as E4M3?",
            "x [...] float32 or bfloat16 -> [...] dtype.",
            "limit = the largest value that finfo knows of dtype\nclip x, then cast",
            """
def saturate(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)
""",
        ),
        properties=(p.in_range, p.saturates, p.nan_stays, p.from_bfloat16),
    ),
    Exercise(
        id="08.3",
        title="the scale byte",
        goal="Choose the power of two that a block is divided by, from the bits of its largest number.",
        difficulty=3,
        minutes=15,
        used_again=("09",),
        hints=(
            "448 is 1.75 times 2^8. If the largest is m times 2^e, which power of two brings it just below 448, and for "
            "which m does that differ between the two rules?",
            "amax [...] float32 -> bits [...] uint32 -> exponent [...] int32 -> byte [...] uint8.",
            "bits of amax: bitcast to uint32\nexponent field = bits >> 23, already with a bias of 127\n"
            "minus 8, plus 1 if rounding up and the significand is above that of 1.75, 0x600000\n"
            "clip to 0 and 254; 255 where amax is not finite",
            """
def scale_byte(amax, round_up):
    bits = jax.lax.bitcast_convert_type(amax, jnp.uint32)
    byte = (bits >> 23).astype(jnp.int32) - 8
    if round_up:
        byte = byte + ((bits & 0x7FFFFF) > 0x600000)
    return jnp.where(bits >= 0x7F800000, 255, jnp.clip(byte, 0, 254)).astype(jnp.uint8)
""",
        ),
        properties=(p.bytes_by_hand, p.every_exponent, p.zero_and_tiny, p.not_finite, p.one_binade),
    ),
    Exercise(
        id="08.4",
        title="blocks of 32",
        goal="Quantise rows to MXFP8: a scale byte and 32 codes for each block, and nothing is NaN that was a number.",
        difficulty=4,
        minutes=25,
        used_again=("09", "11"),
        hints=(
            "Division by the scale is the obvious way. Byte 0 means 2^-127: what is that number on a CPU that takes small "
            "numbers for 0, and what is the way around it?",
            "x [R, 32 n] -> blocks [R, n, 32] -> amax [R, n] -> byte [R, n]; codes [R, n, 32] -> [R, 32 n].",
            "byte = the rule of 08.3, rounding up\nscaled = blocks times 2^(127 - byte), by jnp.ldexp\n"
            "scaled is NaN where byte is 255\ncodes = the cast of 08.2, in the shape of x",
            """
def mx_blocks(x):
    blocks = x.reshape(x.shape[0], -1, 32)
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks).max(axis=-1), jnp.uint32)
    byte = jnp.clip((bits >> 23).astype(jnp.int32) - 8 + ((bits & 0x7FFFFF) > 0x600000), 0, 254)
    byte = jnp.where(bits >= 0x7F800000, 255, byte)
    scaled = jnp.clip(jnp.ldexp(blocks, 127 - byte[..., None]), -448, 448)
    scaled = jnp.where(byte[..., None] == 255, jnp.nan, scaled)
    return byte.astype(jnp.uint8), scaled.reshape(x.shape).astype(jnp.float8_e4m3fn)
""",
        ),
        properties=(p.one_block, p.own_scale, p.zero_blocks, p.not_finite_blocks, p.huge_blocks),
    ),
    Exercise(
        id="08.5",
        title="three products, six copies",
        goal="Quantise each operand of a layer's three products along the axis that the product sums over.",
        difficulty=3,
        minutes=15,
        used_again=("09", "11"),
        hints=(
            "Write the three products with letters. Which letter disappears in each, and along which axis of each operand "
            "does it run?",
            "y [M, N] sums over K; d_x [M, K] sums over N; d_w [K, N] sums over M.",
            "y = q(x, along K) @ q(w, along K)\nd_x = q(d_y, along N) @ q(w, along N), transposed after\n"
            "d_w = q(x, along M), transposed after, @ q(d_y, along M)",
            """
def three_products(x, w, d_y, q):
    y = q(x, 1) @ q(w, 0)
    d_x = q(d_y, 1) @ q(w, 1).T
    d_w = q(x, 0).T @ q(d_y, 0)
    return y, d_x, d_w
""",
        ),
        properties=(g.summed_axis, g.square_shapes, g.six_copies),
    ),
    Exercise(
        id="08.6",
        title="blocks of one expert",
        goal="Give each expert whole blocks of rows, filled up with zeros, so that no scale is shared.",
        difficulty=3,
        minutes=15,
        used_again=("09", "11"),
        hints=(
            "Ask each place in the new array: whose block are you in, and which of its rows do you hold? Chapter 05's tile "
            "map asked almost the same. What tells a place that it holds none?",
            "whole, ends [E]; expert, rank, source [P]; result [P, d] from rows [M, d].",
            "whole = sizes rounded up to blocks; their running sum says whose a place is\nrank = place - first place of the "
            "expert\nsource = first row of the expert + rank where rank is below its size, else M\n"
            "gather with mode='fill'",
            """
def align_rows(rows, group_sizes, block, num_places):
    whole = -(-group_sizes // block) * block
    whole_ends = jnp.cumsum(whole)
    place = jnp.arange(num_places)
    expert = jnp.minimum((place[:, None] >= whole_ends).sum(axis=1), len(group_sizes) - 1)
    rank = place - (whole_ends - whole)[expert]
    first = (jnp.cumsum(group_sizes) - group_sizes)[expert]
    source = jnp.where(rank < group_sizes[expert], first + rank, len(rows))
    return rows.at[source].get(mode="fill", fill_value=0)
""",
        ),
        properties=(g.begins_a_block, g.every_size, g.other_blocks),
    ),
    Exercise(
        id="08.7",
        title="two levels of scale",
        goal="Quantise blocks of 16 to NVFP4: four-bit elements, an E4M3 scale for each block, one float32 for the tensor.",
        difficulty=4,
        minutes=20,
        used_again=("11",),
        hints=(
            "A block scale is an E4M3 number, at most 448, and an element is at most 6. What must one unit of the tensor "
            "scale be worth, so that the tensor's largest just fits?",
            "x [n, 16] -> amax [n] -> tensor_scale [] float32, scale [n] E4M3 -> codes [n, 16] E2M1.",
            "tensor_scale = the largest of all / (6 * 448), or 1\nscale = amax / 6 / tensor_scale, cast to E4M3\n"
            "step = the cast scale, as float32, times tensor_scale\n"
            "codes = x / step where step is above 0, clipped to 6, cast",
            """
def two_levels(x):
    amax = jnp.abs(x).max(axis=-1)
    tensor_scale = jnp.where(amax.max() > 0, amax.max() / (6 * 448), 1.0)
    scale = jnp.minimum(amax / 6 / tensor_scale, 448).astype(jnp.float8_e4m3fn)
    step = (scale.astype(jnp.float32) * tensor_scale)[:, None]
    scaled = jnp.where(step > 0, x / jnp.where(step > 0, step, 1), 0)
    return tensor_scale, scale, jnp.clip(scaled, -6, 6).astype(jnp.float4_e2m1fn)
""",
        ),
        properties=(t.five, t.random_blocks, t.nothing_is_nan),
    ),
    Exercise(
        id="08.8",
        title="stochastic rounding",
        goal="Round to E2M1 at random, so that the average is right.",
        difficulty=3,
        minutes=15,
        used_again=("11",),
        hints=(
            "2.3 lies between 2 and 3. How often must it become 3, so that the average is 2.3? And 4.4, between 4 and 6?",
            "x [...] -> size, below, above, chance [...], a uniform number each [...] -> [...] float32.",
            "size = |x|, at most 6\nabove = the first value of E2M1 that is not below size; below = the one before\n"
            "chance = (size - below) / (above - below)\nabove where a uniform number is below chance, else below\n"
            "the sign of x",
            """
def stochastic_round(x, key):
    grid = jnp.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    size = jnp.minimum(jnp.abs(x), 6)
    index = jnp.searchsorted(grid, size)
    above, below = grid[index], grid[jnp.maximum(index - 1, 0)]
    chance = jnp.where(above > below, (size - below) / jnp.where(above > below, above - below, 1), 1)
    return jnp.sign(x) * jnp.where(jax.random.uniform(key, x.shape) < chance, above, below)
""",
        ),
        properties=(t.to_a_neighbour, t.unbiased, t.grid_stays, t.own_draws),
    ),
    Exercise(
        id="08.9",
        title="the amax history",
        goal="Choose the next step's scale from the largest values of the last steps, one for each expert.",
        difficulty=2,
        minutes=10,
        used_again=("09", "12"),
        hints=(
            "The next step will use the scale before it has seen its own data. Which amaxes does it know, and what do you "
            "do for an expert that had no rows in any of them?",
            "history [H, E], amax [E] -> history [H, E], newest first -> top [E] -> scale [E].",
            "history = amax in front, the last row gone\ntop = the largest of each column\n"
            "scale = limit / top, at most the largest float32; the old one where top is 0",
            """
def next_state(history, scale, amax, limit):
    history = jnp.concatenate([amax[None], history[:-1]])
    top = history.max(axis=0)
    new = jnp.minimum(limit / jnp.where(top > 0, top, 1), jnp.finfo(jnp.float32).max)
    return history, jnp.where(top > 0, new, scale)
""",
        ),
        properties=(t.steps_by_hand, t.each_expert, t.no_rows_yet, t.tiny_amax),
    ),
)

QUIZZES = (
    Quiz(
        "08.q1",
        "c",
        {
            "a": "That is what NVIDIA's convert does when it is asked to saturate. JAX's cast does not.",
            "b": "480 would be code 127. E4M3 gave that code to NaN, which is why its largest value is 448.",
            "c": "E4M3 has no infinity, so the plain cast of anything above 464 is NaN, and one NaN in an operand "
            "is a row of NaN in the product. Clip first.",
        },
    ),
    Quiz(
        "08.q2",
        512,
        {
            512: "500 is 1.95 times 2^8, above 1.75: the byte goes up to 128, and 500 / 2 = 250 lies between 240 and 256, "
            "nearer 256. Rounding up protects from clipping, not from rounding: an error of 2.4 %, against 10.4 % for "
            "FLOOR, which makes it 448.",
        },
        "Round the exponent up, divide by 2, round to the nearest value of E4M3 (steps of 16 there), multiply by 2.",
        0.0,
    ),
    Quiz(
        "08.q3",
        "b",
        {
            "a": "It has the same number of each, for a square matrix even in the same shape. That is the danger.",
            "b": "A block's scale can be taken out of a sum only if the sum runs within the block. Down a column each "
            "element of the row-wise copy has another scale, and the tensor core takes one for 32 products.",
            "c": "A transposed copy costs a pass over memory, but is possible; its scales would be those of the rows.",
        },
    ),
    Quiz(
        "08.q4",
        "a",
        {
            "a": "H^T H = 1: both operands of wgrad are mixed along the axis that is summed, and the mixing cancels in the "
            "product. What is left is that a block had no outlier any more when it was rounded.",
            "b": "Neither product nor gradient knows that it happened, up to rounding.",
            "c": "It is one fixed matrix, applied to both operands; random are the signs, once.",
        },
    ),
    Quiz(
        "08.q5",
        "b",
        {
            "a": "E5M2 has two mantissa bits: steps of a quarter. That is twice E4M3's error.",
            "b": "E5M2 spends a bit on range that a scale for every 32 elements provides anyway. With one scale per tensor "
            "gradients can need the range; with blocks the mantissa bit is worth more (arXiv 2506.08027 trains with E4M3 "
            "alone).",
            "c": "Blackwell multiplies both formats at one rate.",
        },
    ),
    Quiz(
        "08.q6",
        "c",
        {
            "a": "A rounding error there is like any other: it makes one product a little wrong.",
            "b": "Their gradients are sums over many tokens, in float32.",
            "c": "A rounded logit changes who answers: the error of one token is not 1 % but everything (02.5). The router "
            "is a small part of the work, so there is nothing to gain.",
        },
    ),
    Quiz(
        "08.q7",
        "b",
        {
            "a": "Two BF16 runs with other seeds differ by more than that.",
            "b": "A gap inside the band is what another seed does too. To say more you need more seeds or more steps.",
            "c": "Not found is not absent: the band is 0.04 nats wide, and a difference of 0.02 would hide in it.",
        },
    ),
    Quiz(
        "08.q8",
        "c",
        {
            "a": "Hopper's tensor cores multiply FP8, but know no block scales.",
            "b": "Each block would need its own pass outside the tensor core, as DeepSeek-V3 did for tiles of 128 in its "
            "own kernels, which TE's JAX side does not have.",
            "c": "One scale per tensor is what Hopper's FP8 instructions take. MXFP8 and NVFP4 want Blackwell, where the "
            "tensor core reads a scale for each block.",
        },
    ),
    Quiz(
        "08.q9",
        "b",
        {
            "a": "amax is 0 there, a fine number.",
            "b": "log2(0) is -inf, 2^-inf is 0, and 0 / 0 is NaN. The padding of 08.6 makes such blocks in every step: "
            "handle byte 0 without ever forming the scale.",
            "c": "It clips NaN to NaN. By then it is too late.",
        },
    ),
    Quiz(
        "08.q10",
        "c",
        {
            "a": "Reshaping tells no axes apart; it is the pairing of scales with elements that is wrong.",
            "b": "Codes and scales are each transposed correctly. But together they now say: blocks along the other axis.",
            "c": "Scales of the transposed copy are its own: 32 numbers down a column have another largest than 32 along a "
            "row. Quantise the source again, along the axis that is summed.",
        },
    ),
    Quiz(
        "08.q11",
        "a",
        {
            "a": "What lies in the tail of the buffer is anything, here an old 1e6. It enters no product, but it entered "
            "the maximum, and every real number was divided by it. Mask before every statistic.",
            "b": "It saturates, as it should. The numbers that arrive there are already tiny.",
            "c": "One scale for all is what current scaling means. Blocks would have hidden the fault from all but the "
            "last block, and kept it.",
        },
    ),
)
