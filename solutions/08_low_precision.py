# %% [markdown]
# # 08 Low precision
#
# Thirty-two numbers share one scale, a power of two. The standard that defines this format also says how to choose it:
# the exponent of the largest number, less 8. In how many of a hundred blocks does that rule cut off the block's own
# largest number, by up to an eighth? Write a percentage down; you will count after exercise 08.3.
#
# A tensor core of a B200 multiplies FP8 at twice the peak rate of bfloat16, and FP4 at four times. What you pay for it
# is the subject here, to the last bit. Everything in this chapter is **emulated**: operands are rounded exactly as the
# formats say and multiplied in float32 on your CPU. The numbers are those of the formats; no time here is that of a
# GPU, and nothing was run on one.
#
# You will be able to
#
# - read and write FP8 and FP4 by hand, with casts that never make NaN of a number,
# - choose a block's scale by either rule, and say where one of them clips,
# - say why every tensor of a layer is quantised twice, and keep experts out of each other's blocks,
# - name what FP4 needs on top, and what delayed scaling remembers,
# - weigh accuracy against bytes and modelled time, and pick a recipe for a GPU.
#
# Nine exercises, about two and a quarter hours. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe_course import quant
from moe_course.bench import recorded
from moe_course.grouped_gemm import grouped_gemm
from moe_course.grouped_gemm.quantized import QUANTIZED_ROWS, count_quantized_gemms
from moe_course.lessons import check, plots, predict, quiz, rounded, yours
from moe_course.lessons.widgets import explore
from moe_course.quant.blocks import scale_values
from moe_course.quant.formats import cast, decode, encode, format_of, shared_exponent, to_bits, to_codes
from moe_course.quant.fp8 import update_delayed_state
from moe_course.quant.groups import align_groups, take_rows
from moe_course.quant.recipes import STAYS_HIGH
from moe_course.train.latency import published_peak

# %% [markdown]
# ## Eight bits, or four
#
# E4M3 has a sign, four bits of exponent and three of mantissa; E5M2 has five and two; E2M1, the FP4 of this chapter,
# has two and one. A mantissa bit halves the error, an exponent bit squares the range. Below is the largest relative
# error of each format, octave by octave.

# %%
octaves = np.arange(-20, 18)
fig, ax = plots.figure(7.2, 2.8)
for color, (name, label) in enumerate({"e5m2": "E5M2", "e4m3": "E4M3", "e2m1": "E2M1"}.items()):
    f = format_of(name)
    x = np.exp2(octaves[:, None] + np.linspace(0, 1, 200, endpoint=False)).astype(np.float32)
    back = np.clip(x, 0, f.max).astype(f.dtype).astype(np.float32)
    error = 100 * np.where(x <= f.max, np.abs(back / x - 1), 0).max(axis=1)
    there = (error < 99) & (octaves <= np.floor(np.log2(f.max)))
    edges = np.append(octaves[there], np.log2(f.max))
    ax.stairs(error[there], edges, baseline=None, color=plots.expert_color(color), lw=2.5, label=label)
ax.set(xlabel="size of the number, as a power of 2", ylabel="largest error, %", yscale="log", ylim=(4, 70))
ax.set_yticks([6.25, 12.5, 25, 50], ["6.25", "12.5", "25", "50"])
ax.minorticks_off()
ax.legend(frameon=False, ncols=3, loc="upper center")
plots.show(fig, "E5M2 reaches farther, E4M3 is twice as fine, and E2M1 has hardly three octaves")

# %% [markdown]
# ## Exercise 08.1: E4M3 by hand
#
# Say what each of the 256 bytes means. · difficulty ●● · 10 minutes · used again in 09, 11
#
# A byte is `s eeee mmm`. With an exponent field e from 1 to 15 it means ±(1 + m/8) · 2^(e - 7). Field 0 means ±m · 2⁻⁹:
# the subnormal numbers, evenly spaced down to 0. There is no infinity, and one code for NaN, 127 with either sign. By
# hand: 0x38 is 0 0111 000, (1 + 0) · 2⁰ = 1; 0x7e is 0 1111 110, 1.75 · 2⁸ = 448, the largest; 0x01 is 2⁻⁹.

# %%
for code in (0x38, 0xC4, 0x7E, 0x01):
    value = jax.lax.bitcast_convert_type(jnp.uint8(code), jnp.float8_e4m3fn).astype(jnp.float32)
    print(f"{code:#04x}  {code >> 7} {code >> 3 & 15:04b} {code & 7:03b}  {float(value):g}")


# %%
def e4m3_values(codes):
    """What bytes of E4M3 mean.

    Args:
      codes: [...] uint8.

    Returns: [...] float32, exactly; NaN for 0x7f and 0xff. By arithmetic: the dtype float8_e4m3fn would know.
    """
    ### BEGIN SOLUTION
    codes = codes.astype(jnp.int32)
    field, mantissa = (codes >> 3) & 15, codes & 7
    eighths = jnp.where(field > 0, 8 + mantissa, mantissa).astype(jnp.float32)
    value = jnp.ldexp(eighths, jnp.maximum(field, 1) - 10)
    value = jnp.where(codes >= 128, -value, value)
    return jnp.where((codes & 127) == 127, jnp.nan, value)
    ### END SOLUTION


check("08.1", e4m3_values)  # stuck? hint("08.1"), up to four times

# %% [markdown]
# ### Question 08.q1
#
# What is `jnp.float32(480).astype(jnp.float8_e4m3fn)`?
#
# **a** 448 · **b** 480 · **c** NaN

# %%
quiz(
    "08.q1",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 08.2: a cast that saturates
#
# What is too large becomes the largest. · difficulty ● · 5 minutes · used again in 09
#
# Not all E4M3 are alike: `float8_e4m3fn` ends at 448, AMD's older `float8_e4m3fnuz` at 240, and code with a 448 in it
# is wrong there. Ask the dtype. NaN stays NaN: it is not a large number, it is a message. By hand, from the package:

# %%
sizes = jnp.array([17.0, 464.0, 480.0, -jnp.inf, jnp.nan])
package_cast = jax.jit(cast, static_argnums=1)
print("plain cast   ", rounded(sizes.astype(jnp.float8_e4m3fn).astype(jnp.float32)))
print("saturating   ", rounded(package_cast(sizes, "e4m3").astype(jnp.float32)))


# %%
def saturate(x, dtype):
    """A cast that saturates.

    Args:
      x: [...], float32 or bfloat16.
      dtype: an FP8 dtype, such as jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz.

    Returns: [...] of dtype: the nearest value, the largest for what is larger (infinity too), NaN for NaN.
    """
    ### BEGIN SOLUTION
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)
    ### END SOLUTION


check("08.2", saturate)  # stuck? hint("08.2")

# %% [markdown]
# ## One scale for how many?
#
# The range of a format is fixed, that of your tensor is not, so a tensor is divided by a **scale** first: its largest
# number then just fits. One outlier sets the scale for all that share it. Take 16,384 normal numbers, make a single one
# larger and larger, and measure the error of all *others*: with one scale for the tensor (FP8), with one for each 32
# (MXFP8), with one for each 16 and four-bit elements (NVFP4).

# %%
crowd = np.random.default_rng(8).normal(size=(64, 256)).astype(jnp.bfloat16).astype(np.float32)
others = np.ones(crowd.shape, bool)
others[20, 100] = False
quantisers = {
    "FP8, one scale": lambda x: quant.dequantize(quant.quantize_fp8(x)),
    "MXFP8, a scale for 32": lambda x: quant.dequantize(quant.quantize_mxfp8(x)),
    "NVFP4, a scale for 16": lambda x: quant.dequantize(quant.quantize_nvfp4(x)),
}
outliers = np.arange(2, 27)
fig, ax = plots.figure(7.2, 2.8)
for color, (name, quantise) in enumerate(quantisers.items()):
    quantise = jax.jit(quantise)
    errors = []
    for power in outliers:
        x = crowd.copy()
        x[20, 100] = 2.0**power
        off = (np.asarray(quantise(x)) - x)[others]
        errors.append(100 * np.linalg.norm(off) / np.linalg.norm(x[others]))
    ax.plot(outliers, errors, color=plots.expert_color(color), lw=2.2, label=name)
ax.set(xlabel="size of the one outlier, as a power of 2", ylabel="error of all others, %", yscale="log")
ax.set_yticks([3, 10, 30, 100], ["3", "10", "30", "100"])
ax.minorticks_off()
ax.legend(frameon=False, loc="upper left")
plots.show(fig, "An outlier costs its block; without blocks, in the end, it costs everything")

# %% [markdown]
# Two things to read off. Up to an outlier of 2¹³, blocks buy nothing: E4M3 is a float, it has octaves to spare. And
# NVFP4 has two levels of scale, of which the outlier owns the upper one: beyond 2¹⁹ the others' block scales underflow.
# You will build both levels in 08.7.
#
# ## Exercise 08.3: the scale byte
#
# Choose a block's power of two. · difficulty ●●● · 15 minutes · used again in 09
#
# An MX scale is one byte b and means 2^(b - 127) (E8M0: eight bits of exponent, nothing else; 255 is NaN, 0 does not
# exist). Let the block's largest magnitude be m · 2^e with m from 1 to 2. 448 is 1.75 · 2⁸, so
#
# - **FLOOR** (the sample algorithm of the OCP MX specification, section 6.3) takes 2^(e - 8),
# - **RCEIL** (Transformer Engine, cuBLAS, cuDNN) takes the smallest power of two by which nothing exceeds 448: the same,
#   or one more if m > 1.75.
#
# Take both from the bits of the float32: `bits >> 23` is e + 127, and `bits & 0x7fffff` the fraction of m, 0x600000 for
# 1.75. A float `log2` is wrong next to powers of two, and a cast to `float8_e8m0fnu` rounds to nearest and makes NaN of
# 0. By hand, four blocks:


# %%
@partial(jax.jit, static_argnums=1)
def package_byte(amax, round_up):
    return shared_exponent(to_bits(amax), format_of("e4m3"), "rceil" if round_up else "floor")


largest = jnp.array([448.0, 449.0, 500.0, 512.0])
for name, round_up in (("FLOOR", False), ("RCEIL", True)):
    print(f"largest {rounded(largest, 0)}, {name}: bytes {package_byte(largest, round_up).tolist()}")


# %%
def scale_byte(amax, round_up):
    """The E8M0 scale byte of blocks, for E4M3 elements.

    Args:
      amax: [...] float32, the largest magnitude of each block, 0 or more; inf or NaN if the block holds one.
      round_up: a Python bool, RCEIL if true, else FLOOR.

    Returns: [...] uint8: b for 2^(b - 127), from 0 to 254 (0 for a block of zeros); 255 where amax is not finite.
    """
    ### BEGIN SOLUTION
    bits = jax.lax.bitcast_convert_type(amax, jnp.uint32)
    byte = (bits >> 23).astype(jnp.int32) - 8
    if round_up:
        byte = byte + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    return jnp.where(bits >= 0x7F800000, 255, jnp.clip(byte, 0, 254)).astype(jnp.uint8)
    ### END SOLUTION


check("08.3", scale_byte)  # stuck? hint("08.3")

# %% [markdown]
# Now the number from the top. FLOOR clips where m is in (1.75, 2). If blocks come in every size, m is spread evenly on a
# logarithmic scale, as first digits are.

# %%
byte_of = jax.jit(yours("08.3", package_byte), static_argnums=1)
rng = np.random.default_rng(80)
blocks = (rng.normal(size=(20_000, 32)) * np.exp2(rng.uniform(-6, 6, (20_000, 1)))).astype(np.float32)
amax = jnp.abs(blocks).max(axis=1)
predict(
    "blocks whose largest number FLOOR clips, %",
    ### BEGIN ANSWER
    100 * np.log2(2 / 1.75),
    ### END ANSWER
    measured=round(100 * float((byte_of(amax, True) != byte_of(amax, False)).mean()), 1),
    within=0.05,
)

# %%
m = np.linspace(1, 2, 400, endpoint=False).astype(np.float32)
fig, ax = plots.figure(7.2, 2.5)
for color, (round_up, label) in enumerate(((True, "RCEIL"), (False, "FLOOR"))):
    scale = np.exp2(np.asarray(byte_of(jnp.asarray(m), round_up)).astype(np.float64) - 127)
    back = np.clip(m / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64) * scale
    ax.plot(m, 100 * (back / m - 1), color=plots.expert_color(color), lw=2.2, label=label)
ax.axhline(0, color=plots.INK, lw=0.8)
ax.set(xlabel="significand of the block's largest number", ylabel="its error, %", ylim=(-14, 8))
ax.legend(frameon=False, loc="lower left")
plots.show(fig, "Both rules round alike up to 1.75; beyond, FLOOR cuts off, by up to 12.5 %")

# %% [markdown]
# It is the largest number of its block that is cut, each time in the same direction. The MXFP8 paper (arXiv 2506.08027)
# reports that training with the suggested rounding can diverge, and that rounding the exponent up follows bfloat16, up
# to 8 billion parameters and 15 trillion tokens.
#
# ### Question 08.q2
#
# A block's largest number is 500. With RCEIL, which number comes back?

# %%
quiz(
    "08.q2",
    ### BEGIN ANSWER
    512,
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 08.4: blocks of 32
#
# MXFP8, whole. · difficulty ●●●● · 25 minutes · used again in 09, 11
#
# Divide each block by its scale and cast. The trap is the block of zeros, and MoE is full of them: padding. Its byte is
# 0, which means 2⁻¹²⁷. That is a subnormal float32, XLA on a CPU takes it for 0, and 0 / 0 is NaN. So never form the
# scale: multiply by 2^(127 - b), and let `jnp.ldexp` do it without forming 2¹²⁸ either. The other decision is yours by
# contract: a block that holds NaN or infinity is NaN as a whole. (Transformer Engine's kernel leaves the neighbours
# finite.) By hand, one block of 500, -500, 31, 1 and 28 zeros:

# %%
hand = jnp.zeros((1, 32)).at[0, :4].set(jnp.array([500.0, -500.0, 31.0, 1.0]))


@partial(jax.jit, static_argnames=("axis", "rounding"))
def mxfp8(x, axis=1, rounding="rceil"):
    """(scale bytes, codes, values) by the package."""
    q = quant.quantize_mxfp8(x, axis=axis, rounding=rounding)
    return q.scale, to_codes(q.data), quant.dequantize(q)


for rule in ("floor", "rceil"):
    scale, codes, values = mxfp8(hand, rounding=rule)
    in_hex = [f"{c:02x}" for c in codes[0, :4].tolist()]
    print(rule, "scale byte", int(scale[0, 0]), "codes", *in_hex, "are", rounded(values[0, :4]))


# %%
def mx_blocks(x):
    """MXFP8: blocks of 32 along the rows, scales rounded up, E4M3 elements.

    Args:
      x: [R, 32 n] float32, any finite numbers or not.

    Returns: (scale [R, n] uint8, as in 08.3; codes [R, 32 n] float8_e4m3fn). A block of zeros has scale 0 and codes 0; one
      that holds NaN or inf has scale 255 and codes NaN, and its neighbours do not know.
    """
    ### BEGIN SOLUTION
    blocks = x.reshape(x.shape[0], -1, 32)
    byte = scale_byte(jnp.abs(blocks).max(axis=-1), True)
    scaled = jnp.ldexp(blocks, 127 - byte[..., None].astype(jnp.int32))
    scaled = jnp.where(byte[..., None] == 255, jnp.nan, scaled)
    return byte, saturate(scaled.reshape(x.shape), jnp.float8_e4m3fn)
    ### END SOLUTION


check("08.4", mx_blocks)  # stuck? hint("08.4")

# %% [markdown]
# ## Playground: a block under the microscope
#
# Thirty-two numbers, grey, and what each becomes; red is what was clipped or became 0 (crosses). Change FLOOR to RCEIL:
# what happens to the largest? Raise the outlier: when do the small ones go? Then four bits: E2M1 with one power of two
# for 32 (MXFP4), and NVFP4, whose finer scale serves 16.


# %%
@partial(jax.jit, static_argnums=(1, 2))
def under_the_microscope(x, fmt, rule):
    q = quant.quantize_nvfp4(x) if fmt == "nvfp4" else quant.quantize_mx(x, fmt=fmt, rounding=rule)
    return quant.dequantize(q), scale_values(q)


def microscope(numbers, outlier, elements, rule):
    fmt = {"E4M3": "e4m3", "E5M2": "e5m2", "E2M1 (MXFP4)": "e2m1", "NVFP4": "nvfp4"}[elements]
    x = np.random.default_rng(90 + numbers).normal(size=(1, 32)).astype(np.float32)
    x[0, 11] = np.float32(2.0**outlier)
    back, scale = (np.asarray(a)[0] for a in under_the_microscope(x, fmt, rule.lower()))
    x, error = x[0], 100 * np.abs(back / x[0] - 1)
    fig, (top, bottom) = plots.figure(8.0, 3.6, rows=2)
    limit = format_of("e2m1" if fmt == "nvfp4" else fmt).max * np.repeat(scale, 32 // len(scale))
    lost, clipped = back == 0, np.abs(x) > limit
    top.bar(range(32), x, color=plots.FAINT, edgecolor=plots.INK, lw=0.6, width=0.8)
    red, blue = plots.expert_color(1), plots.expert_color(0)
    for which, mark, color in ((~lost & ~clipped, "o", blue), (clipped, "o", red), (lost, "x", red)):
        top.plot(np.flatnonzero(which), back[which], mark, color=color, ms=6, mew=2)
    top.axhline(0, color=plots.INK, lw=0.8)
    top.margins(y=0.12)
    top.set(ylabel="value", xticks=[], xlim=(-1, 32), yscale="symlog" if abs(x).max() > 8 else "linear")
    bottom.bar(range(32), error, color=[red if bad else blue for bad in lost | clipped], width=0.8)
    bottom.set(ylabel="error, %", xlabel="place in the block", xlim=(-1, 32), xticks=range(0, 32, 4))
    largest, place = np.abs(x).max(), int(np.abs(x).argmax())
    scales = " and ".join(f"{s:.4g}" for s in scale)
    caption = (
        f"{elements}, {'scales' if fmt == 'nvfp4' else rule + ', scale'} {scales}: the largest, {largest:.4g}, becomes "
        f"{abs(back[place]):.4g}; {int(clipped.sum())} clipped, {int(lost.sum())} of 32 become 0"
    )
    return fig, caption


explore(
    microscope,
    numbers=(0, 9, 0),
    outlier=(0.05, 19.05, 2.9),
    elements=["E4M3", "E5M2", "E2M1 (MXFP4)", "NVFP4"],
    rule=["FLOOR", "RCEIL"],
)

# %% [markdown]
# ## The transposed operand is quantised again
#
# A layer's forward product and its two gradients are three matrix products, and each sums over another axis:
#
# | product | sums over | left operand | right operand |
# |---|---|---|---|
# | fprop: y [M, N] = x w | K | x [M, K], blocks along its rows | w [K, N], down its columns |
# | dgrad: d_x [M, K] = d_y wᵀ | N | d_y [M, N], along its rows | w, along its rows |
# | wgrad: d_w [K, N] = xᵀ d_y | M | x, down its columns | d_y, down its columns |
#
# A tensor core multiplies 32 pairs, adds them up, and applies the two scales once. So the 32 must share them: blocks run
# **along the axis that is summed**, in both operands. x is needed along its rows in fprop and down its columns in
# wgrad, and these are different roundings of the same numbers. How different? A 32 × 32 matrix of 0.0001 with a single
# 448 in it: in how many of the 1,024 places do the two copies differ?


# %%
def package_blocks(x):
    q = quant.quantize_mxfp8(x)
    return q.scale, q.data


to_blocks = yours("08.4", package_blocks)


@jax.jit
def values_of(x):
    scale, codes = to_blocks(x)
    return decode(to_codes(codes), format_of("e4m3"), jnp.repeat(scale.astype(jnp.int32), 32, axis=1) - 127)


spike = jnp.full((32, 32), 1e-4).at[3, 5].set(448.0)
along, down = values_of(spike), values_of(spike.T).T
predict(
    "places of 1,024 in which the row-wise and the column-wise copy differ",
    ### BEGIN ANSWER
    31 + 31,
    ### END ANSWER
    measured=int((along != down).sum()),
)

# %% [markdown]
# ## Exercise 08.5: three products, six copies
#
# Quantise each operand along the axis that is summed. · difficulty ●●● · 15 minutes · used again in 09, 11
#
# Each copy is made from the source. Quantising a quantised copy along its other axis rounds twice, and transposing its
# bytes leaves you with scales along the wrong axis; the museum has that one. The quantiser is an argument: `q(a, axis)`
# returns the *values* of a after quantisation in blocks along that axis, in the shape of a. By hand, M, K, N =
# 2, 3, 4: y sums over 3 numbers, d_x over 4 and d_w over 2, so the blocks of x [2, 3] run along the 3 for y and along
# the 2 for d_w.


# %%
def three_products(x, w, d_y, q):
    """A layer's three products with quantised operands.

    Args:
      x: [M, K], w: [K, N], d_y: [M, N], float32. y = x @ w, and d_y is the gradient of y.
      q: q(a, axis) -> the values of matrix a, quantised in blocks along axis (0: down the columns, 1: along the rows).

    Returns: (y [M, N], d_x [M, K], d_w [K, N]).
    """
    ### BEGIN SOLUTION
    y = q(x, 1) @ q(w, 0)
    d_x = q(d_y, 1) @ q(w, 1).T
    d_w = q(x, 0).T @ q(d_y, 0)
    return y, d_x, d_w
    ### END SOLUTION


check("08.5", three_products)  # stuck? hint("08.5")

# %% [markdown]
# ### Question 08.q3
#
# Why can wgrad not use the row-wise copy of x, transposed?
#
# **a** it has another number of scales · **b** down a column, each element has another scale · **c** a transposition
# is too slow

# %%
quiz(
    "08.q3",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Blocks of one expert
#
# In wgrad blocks run down the rows, and the rows of a MoE layer are sorted by expert. Sizes [5, 0, 33, 26] with blocks
# of 32 rows wherever they fall: the first block holds five rows of expert 0 and 27 of expert 2. If expert 0 sees large
# gradients, expert 2's are rounded coarsely; and what expert 2 learns now depends on who sits next to it. So each
# expert gets whole blocks, filled up with zeros, which change no maximum and no product.

# %%
plots.show(
    plots.group_bar([5, 0, 33, 26], rows=160, align=32),
    "64 rows of three experts take four blocks of 32: no block has rows of two",
)

# %% [markdown]
# ## Exercise 08.6: blocks of one expert
#
# Move the rows so that every expert begins a block. · difficulty ●●● · 15 minutes · used again in 09, 11
#
# Sizes are data, so the result has a fixed number of places, enough for every split. Rows past the groups hold anything
# and may reach nothing. By hand, sizes [2, 0, 3], block 4, 12 places, rows 1 to 6 of which the sixth is nobody's:


# %%
@partial(jax.jit, static_argnums=(2, 3))
def package_align(rows, group_sizes, block, num_places):
    _, source = align_groups(group_sizes, jnp.cumsum(group_sizes), rows.shape[0], block)
    return take_rows(rows, source)[:num_places]


print(rounded(package_align(jnp.arange(1.0, 7.0)[:, None], jnp.array([2, 0, 3], jnp.int32), 4, 12)[:, 0]))


# %%
def align_rows(rows, group_sizes, block, num_places):
    """Rows sorted by expert, each expert's from a whole block on.

    Args:
      rows: [M, d] float32, group after group; rows past sum(group_sizes) may hold anything, NaN included.
      group_sizes: [E] int32, on the device.
      block: rows of a block, a Python int. An expert takes as few whole blocks as it can, one without rows none.
      num_places: P, a Python int: enough.

    Returns: [P, d] float32; 0 in every place that holds no expert's row.
    """
    ### BEGIN SOLUTION
    whole = -(-group_sizes // block) * block
    whole_ends = jnp.cumsum(whole)
    place = jnp.arange(num_places)
    expert = jnp.minimum((place[:, None] >= whole_ends).sum(axis=1), len(group_sizes) - 1)
    rank = place - (whole_ends - whole)[expert]
    first = (jnp.cumsum(group_sizes) - group_sizes)[expert]
    source = jnp.where(rank < group_sizes[expert], first + rank, rows.shape[0])
    return rows.at[source].get(mode="fill", fill_value=0)
    ### END SOLUTION


check("08.6", align_rows)  # stuck? hint("08.6")

# %% [markdown]
# Does it matter? Four experts of 20 rows; those of experts 1 and 3 are 30 times smaller. Quantise down the rows to NVFP4
# (blocks of 16), packed and aligned, and measure each expert's error.

# %%
align = jax.jit(yours("08.6", package_align), static_argnums=(2, 3))
owner = np.repeat(np.arange(4), 20)
small = np.random.default_rng(86).normal(size=(80, 64)).astype(np.float32)
small *= np.where(owner % 2, np.float32(1 / 30), np.float32(1))[:, None]
down_the_rows = jax.jit(lambda x: quant.dequantize(quant.quantize_nvfp4(x, axis=0)))
aligned = np.asarray(align(jnp.asarray(small), jnp.full(4, 20, jnp.int32), 16, 128))
layouts = {
    "blocks where they fall": (small, owner, np.asarray(down_the_rows(small))),
    "blocks of one expert": (aligned, np.repeat(np.arange(4), 32), np.asarray(down_the_rows(aligned))),
}
fig, ax = plots.figure(7.2, 2.4)
for i, (label, (x, whose, back)) in enumerate(layouts.items()):
    error = [100 * np.linalg.norm((back - x)[whose == e]) / np.linalg.norm(x[whose == e]) for e in range(4)]
    colors = [plots.expert_color(e) for e in range(4)]
    style = {"alpha": 0.45, "hatch": "////"} if i == 0 else {}
    ax.bar(np.arange(4) + 0.4 * i - 0.2, error, width=0.38, color=colors, label=label, **style)
ax.set(xticks=range(4), xlabel="expert (1 and 3 have small numbers)", ylabel="error, %", ylim=(0, 125))
ax.legend(frameon=False, ncols=2, loc="upper center")
plots.show(fig, "A small expert pays for sharing blocks with a large one")

# %% [markdown]
# E4M3 would hardly mind a factor of 30, it has the octaves; but it would still change its bits when the neighbour
# changes, and a run could not be reproduced with other neighbours.
#
# ## Four bits: two levels of scale
#
# E2M1 has eight magnitudes: 0, 0.5, 1, 1.5, 2, 3, 4, 6. A power-of-two scale can leave the upper half of that range
# empty, so **NVFP4** (arXiv 2509.25149) uses blocks of 16 with an E4M3 scale, which has steps of an eighth. E4M3 ends at
# 448, so a second, float32 scale for the tensor brings the largest block there: 448 · 6 = 2,688 of its units. 4 bits and
# a sixteenth of 8 are 4.5 bits a number; MXFP8 needs 8.25.
#
# ## Exercise 08.7: two levels of scale
#
# NVFP4, block by block. · difficulty ●●●● · 20 minutes · used again in 11
#
# The block scale is *rounded* to E4M3, and the elements are divided by what it was rounded to, since that is what is
# stored. By hand, tensor scale 1 (the largest of all is 2,688) and a block whose largest is 5: 5 / 6 rounds to 0.8125,
# 5 / 0.8125 = 6.15 is clamped to 6, and 6 · 0.8125 = 4.875 comes back. RCEIL's promise does not hold here, and does not
# need to: the loss is 2.5 %. A block far below the tensor's largest has scale 0; then its elements are 0 too.

# %%
scale = np.float32(5 / 6).astype(jnp.float8_e4m3fn)
code = np.float32(min(5 / float(scale), 6)).astype(jnp.float4_e2m1fn)
print(
    f"5 / 6 = {5 / 6:.4f}, rounded to {scale}; 5 / {scale} = {5 / float(scale):.3f}, rounded to {code}",
    end="",
)
print(f"; {code} * {scale} = {float(code) * float(scale):g}")


# %%
def two_levels(x):
    """NVFP4 of blocks of 16, one in each row.

    Args:
      x: [n, 16] float32, finite.

    Returns: (tensor_scale: float32 scalar, the largest magnitude / 2688, or 1 for zeros;
      scale: [n] float8_e4m3fn, the block's largest / 6, in units of tensor_scale;
      codes: [n, 16] float4_e2m1fn, saturated, 0 where the scale is 0).
      The values are codes * scale * tensor_scale.
    """
    ### BEGIN SOLUTION
    amax = jnp.abs(x).max(axis=-1)
    tensor_scale = jnp.where(amax.max() > 0, amax.max() / (6 * 448), 1.0)
    scale = saturate(amax / 6 / tensor_scale, jnp.float8_e4m3fn)
    step = (scale.astype(jnp.float32) * tensor_scale)[:, None]
    scaled = jnp.where(step > 0, x / jnp.where(step > 0, step, 1.0), 0.0)
    return tensor_scale, scale, jnp.clip(scaled, -6, 6).astype(jnp.float4_e2m1fn)
    ### END SOLUTION


check("08.7", two_levels)  # stuck? hint("08.7")

# %% [markdown]
# ## Four bits: stochastic rounding
#
# Round 2.3 to E2M1 a thousand times and add up: 2,000, since the nearest is 2. Gradients are sums of many small numbers,
# and what rounds to nearest the same way each time does not average out. Round *up with probability 0.3* instead, and
# the sum is right on average, at the price of noise. NVFP4 training does this for gradients, and only for them.
#
# ## Exercise 08.8: stochastic rounding
#
# Right on average. · difficulty ●●● · 15 minutes · used again in 11
#
# The probability of going up is the distance from the lower neighbour, in units of the step, and the step is 0.5, 1 or
# 2. By hand: 2.3 goes to 3 with probability 0.3, 4.4 to 6 with 0.2, -0.1 to -0.5 with 0.2, 1.5 stays.


# %%
def stochastic_round(x, key):
    """E2M1 by stochastic rounding.

    Args:
      x: [...] float32, finite.
      key: a JAX random key. Every number has a draw of its own.

    Returns: [...] float32, values of E2M1: one of the two neighbours, x itself if E2M1 has it, 6 beyond 6.
    """
    ### BEGIN SOLUTION
    grid = jnp.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], jnp.float32)
    size = jnp.minimum(jnp.abs(x), 6.0)
    index = jnp.searchsorted(grid, size)  # the first that is not below
    above, below = grid[index], grid[jnp.maximum(index - 1, 0)]
    chance = (size - below) / jnp.where(above > below, above - below, 1.0)
    return jnp.sign(x) * jnp.where(jax.random.uniform(key, x.shape) < chance, above, below)
    ### END SOLUTION


check("08.8", stochastic_round)  # stuck? hint("08.8")


# %%
def package_round(x, key):
    return decode(encode(x, format_of("e2m1"), key=key), format_of("e2m1"))


ramp = jnp.linspace(0, 6.6, 133)
draws = jax.jit(yours("08.8", package_round))(jnp.tile(ramp, (400, 1)), jax.random.key(8))
to_nearest = np.clip(np.asarray(ramp), 0, 6).astype(format_of("e2m1").dtype).astype(np.float32)
fig, ax = plots.figure(7.2, 2.6)
ax.plot(ramp, to_nearest, color=plots.expert_color(1), lw=2.2, label="to nearest")
ax.plot(ramp, draws.mean(axis=0), color=plots.expert_color(0), lw=2.2, label="stochastic, mean of 400")
ax.plot(ramp, ramp, color=plots.INK, lw=0.8, ls="--", label="exact")
ax.set(xlabel="number", ylabel="what it becomes", xlim=(0, 6.6))
ax.legend(frameon=False, loc="upper left")
plots.show(fig, "Rounding to nearest is a staircase; stochastic rounding is right on average")

# %% [markdown]
# ## Four bits: the Hadamard transform, and square blocks
#
# An outlier makes its block's 15 others coarse. Multiply 16 numbers by a **random Hadamard transform**, an orthogonal
# matrix of ±1/4, and each becomes a mixture of all. Both operands of wgrad are mixed along the rows, the axis that is
# summed, and the mixing cancels: (H x)ᵀ (H d_y) = xᵀ d_y. A block of 16 zeros but for one 16: how large is the largest
# number after the transform?

# %%
mix = jax.jit(quant.hadamard, static_argnums=1)
alone = jnp.zeros((16, 1)).at[5, 0].set(16.0)
predict(
    "largest number of the block after the transform",
    ### BEGIN ANSWER
    16 / 4,
    ### END ANSWER
    measured=float(jnp.abs(mix(alone, 0)).max()),
)

# %%
rng = np.random.default_rng(87)
left, right = (rng.normal(size=(512, 64)).astype(np.float32) for _ in range(2))
loud = (np.arange(512) % 16 == 5)[:, None]  # one token of 16: large activations, small gradients
with_loud = np.where(loud, 12 * left, left), np.where(loud, right / 100, right)
for name, (x, d_y) in {"bell curves": (left, right), "a loud token in 16": with_loud}.items():
    exact = x.T.astype(np.float64) @ d_y
    for way, turn in (("plain", lambda a: a), ("mixed", lambda a: mix(a, 0))):
        a, b = (np.asarray(down_the_rows(turn(jnp.asarray(v)))) for v in (x, d_y))
        error = 100 * np.linalg.norm(a.T @ b - exact) / np.linalg.norm(exact)
        print(f"{name}, {way}: {100 * (a == 0).mean():.0f} % of x became 0, error of wgrad {error:.0f} %")

# %% [markdown]
# Look at both columns. The transform keeps small numbers beside a large one from becoming 0. It does not make this product
# more accurate: each of 16 numbers now carries a share of the outlier, and is rounded in proportion. The NVFP4 paper
# judges the transform by the loss of long runs; nothing that fits into this cell shows that.
#
# The third tool is for the weights: blocks of 16 × 16. Row-wise and column-wise copies then agree, so the forward and
# the backward pass see the same weights, at one scale for 256 numbers.

# %%
weights = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
both = jax.jit(
    lambda w, square: [quant.dequantize(quant.quantize_nvfp4(w, axis=a, square=square)) for a in (0, 1)],
    static_argnums=1,
)
for square in (False, True):
    one, other = both(weights, square)
    print(f"blocks of {'16 x 16' if square else '1 x 16 '}: the copies agree", bool((one == other).all()))

# %% [markdown]
# ### Question 08.q4
#
# Why does the transform not change what wgrad computes?
#
# **a** it is orthogonal, and on both operands · **b** it is undone after the product · **c** it is random, so it averages
# out

# %%
quiz(
    "08.q4",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## Looking back: delayed scaling
#
# Before blocks there was one scale for a tensor, and on Hopper there still is. To know a tensor's largest number you
# must have read it all; then you read it again, to cast. **Delayed scaling** uses the largest of *earlier steps* and
# reads once: each tensor keeps a history of its amax, the state of the recipe, and the next step's scale is 448 over the
# largest of the history.
#
# ## Exercise 08.9: the amax history
#
# One step of the state. · difficulty ●● · 10 minutes · used again in 09, 12
#
# Here each expert has a history of its own. By hand, a history of three, steps with amax 1, 8, 2, 2, 2: the scales for
# the step after each are 448, 56, 56, 56, 224: the 8 is forgotten after three steps. An expert that had no rows in the
# whole history keeps its scale. A scale that float32 cannot hold becomes the largest float32.


# %%
def next_state(history, scale, amax, limit):
    """Delayed scaling: the state after a step.

    Args:
      history: [H, E] float32, amax of the last H steps for each expert, newest first; 0 where it had no rows.
      scale: [E] float32, what this step multiplied by.
      amax: [E] float32, this step's, finite.
      limit: the largest value of the format, a Python float.

    Returns: (history [H, E], scale [E] float32): what the next step multiplies by, limit / the largest of the history.
    """
    ### BEGIN SOLUTION
    history = jnp.concatenate([amax[None], history[:-1]])
    top = history.max(axis=0)
    new = jnp.minimum(limit / jnp.where(top > 0, top, 1.0), float(jnp.finfo(jnp.float32).max))
    return history, jnp.where(top > 0, new, scale)
    ### END SOLUTION


check("08.9", next_state)  # stuck? hint("08.9")

# %% [markdown]
# Watch it work: a gradient whose amax drifts, jumps by 30 for one step (20), and is four times as large from step 45 on.
# At both, numbers are clipped: a scale from the past does not know what is new. And after the spike, for a history of
# 16 steps, the top five octaves of the format lie idle.


# %%
def package_state(history, scale, amax, limit):
    state = update_delayed_state(quant.DelayedState(scale, history), amax, "e4m3")
    return state.amax_history, state.scale


step = jax.jit(yours("08.9", package_state), static_argnums=3)
rng = np.random.default_rng(89)
series = np.exp(0.02 * rng.normal(size=70).cumsum()) * np.where(np.arange(70) < 45, 1, 4)
series[20] *= 30
history, scale, fits = jnp.zeros((16, 1)), jnp.full(1, 300.0), []
for value in series:
    fits.append(448 / float(scale[0]))
    history, scale = step(history, scale, jnp.full(1, value, jnp.float32), 448.0)
clipped = series > np.array(fits) * 1.04  # E4M3 itself rounds up to 464 down to 448
fig, ax = plots.figure(7.2, 2.6)
ax.step(range(70), fits, where="mid", color=plots.expert_color(0), lw=2, label="largest that fits")
ax.plot(series, color=plots.INK, lw=1.2, label="amax of the step")
ax.plot(np.flatnonzero(clipped), series[clipped], "o", color=plots.expert_color(1), ms=7, label="clipped")
ax.set(xlabel="training step", ylabel="largest number", yscale="log", ylim=(0.4, 200))
ax.legend(frameon=False, ncols=3, loc="upper center")
plots.show(fig, "Delayed scaling clips what is new, and stays wide for a whole history after a spike")

# %% [markdown]
# In a jitted training step this state has to come in and go out. Transformer Engine lets it out as the *gradient* of the
# old state, and so does our `grouped_gemm`: take it over, and keep it from the optimizer.
#
# ## Recipes
#
# A recipe says which operand of which product is quantised how. Ours, as in the reports they follow:
#
# | | elements | scales | for |
# |---|---|---|---|
# | FP8, current or delayed | E4M3; gradients E5M2 | one float32 for each tensor and expert | Hopper |
# | FP8 in tiles (DeepSeek-V3, arXiv 2412.19437) | E4M3 | float32 for 1 × 128, weights 128 × 128 | Hopper, own kernels |
# | MXFP8 (arXiv 2506.08027) | E4M3, gradients too | E8M0 for 32, rounded up | Blackwell |
# | NVFP4 (arXiv 2509.25149) | E2M1, gradients stochastic | E4M3 for 16, weights 16 × 16, float32 for all | Blackwell |
#
# One thing emulation does not show: ours are float32 sums. DeepSeek-V3's report found that Hopper's tensor cores keep
# about 14 bits of an FP8 sum, and has its kernels move sums to float32 every 128 products.
#
# A recipe is an argument of the grouped product. A converter that silently converts nothing is a bug with a number
# (pytorch/torchtitan #3199): so count.

# %%
M, D, F, E = 256, 128, 128, 4
rng = np.random.default_rng(88)
rows = jnp.asarray(rng.normal(size=(M, D)), jnp.float32)
kernels = jnp.asarray(rng.normal(size=(E, D, F)) / np.sqrt(D), jnp.float32)
d_out = jnp.asarray(rng.normal(size=(M, F)), jnp.float32)
group_sizes = jnp.array([90, 0, 33, 120], jnp.int32)


def product(rows, kernels, recipe):
    key = jax.random.key(0) if recipe and recipe.needs_key else None
    return grouped_gemm(rows, kernels, group_sizes, backend="ragged_dot", recipe=recipe, key=key)


def loss(rows, kernels, recipe):
    return jnp.vdot(product(rows, kernels, recipe), d_out)


for name, recipe in (("MXFP8", quant.MXFP8()), ("none", None)):
    print(name, count_quantized_gemms(jax.grad(partial(loss, recipe=recipe), (0, 1)), rows, kernels))

# %% [markdown]
# ### Question 08.q5
#
# Gradients vary in size more than activations. Why does MXFP8 give them E4M3, not E5M2 with its larger range?
#
# **a** E5M2 is more accurate anyway · **b** a scale for every 32 provides the range; the mantissa bit is worth more · **c**
# the hardware is slower with E5M2

# %%
quiz(
    "08.q5",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# What no recipe touches, here as in the reports:

# %%
for part, why in STAYS_HIGH.items():
    print(f"{part:<15}{why}")

# %% [markdown]
# ### Question 08.q6
#
# Which of these does the most harm when it is rounded?
#
# **a** an expert's input · **b** an expert's weights · **c** the router's logits

# %%
quiz(
    "08.q6",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## The sweet spot
#
# What does each recipe cost in accuracy, and what could it buy? The **error is measured** here: the worst of output and
# both gradients of the grouped product above, bell curves all, against float32. The **time is modelled**: the experts of
# one layer of DeepSeek-V3's shape (7,168 wide, hidden 2,048) on one B200, eight experts with 2,048 rows each, forward
# and backward. It is operations over the dense peak, plus the bytes that quantising moves (read bfloat16, write two
# copies; read once more to find a tensor's largest) over 7.7 TB/s. Peaks: the package's table; that of FP4 and the
# bandwidth: NVIDIA/dgxc-benchmarking, README, dense column. Communication, attention, launches: not in it.

# %%
peak = {16: published_peak("B200", "bfloat16"), 8: published_peak("B200", "float8"), 4: 9000}  # TFLOP/s
wide, hidden, many = 7168, 2048, 8 * 2048
operations = 3 * 2 * many * wide * 3 * hidden
moved = (
    many * (2 * wide + 3 * hidden) + 8 * 3 * wide * hidden
)  # numbers quantised: activations, gradients, weights
recipes = {
    # recipe, bits of an element, bits with scales, passes that read
    "BF16": (quant.BF16(), 16, 16, 0),
    "FP8 current": (quant.FP8CurrentScaling(), 8, 8, 2),
    "MXFP8 FLOOR": (quant.MXFP8("floor"), 8, 8.25, 1),
    "MXFP8 RCEIL": (quant.MXFP8("rceil"), 8, 8.25, 1),
    "NVFP4": (quant.NVFP4(), 4, 4.5, 2),
}


@partial(jax.jit, static_argnums=0)
def output_and_gradients(recipe, rows, kernels):
    out, pull_back = jax.vjp(lambda rows, kernels: product(rows, kernels, recipe), rows, kernels)
    return out[:243], *pull_back(d_out)  # past the groups the output is unspecified


want = output_and_gradients(None, rows, kernels)
found = {}
for name, (recipe, bits, stored, reads) in recipes.items():
    got = output_and_gradients(recipe, rows, kernels)
    error = max(
        100 * float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(got, want, strict=True)
    )
    seconds = operations / (peak[bits] * 1e12)
    extra = moved * (2 * reads + 2 * stored / 8) / 7.7e12 if reads else 0
    found[name] = error, 1e3 * seconds, 1e3 * (seconds + extra), stored

# %%
fig, ax = plots.figure(7.2, 3.2)
for color, (name, (error, bare, total, stored)) in enumerate(found.items()):
    color = plots.expert_color(color)
    ax.plot([bare, total], [error, error], color=color, lw=2, alpha=0.5)
    ax.plot(total, error, "o", color=color, ms=9, label=f"{name}: {error:.2g} %, {stored:g} bits a number")
ax.set(
    xlabel="modelled time of the layer's experts on a B200, ms (line: quantising)",
    ylabel="measured error, %",
    yscale="log",
    xlim=(0, 2.1),
    ylim=(0.15, 30),
)
ax.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
ax.minorticks_off()
ax.legend(frameon=False, loc="lower left")
plots.show(fig, "Modelled: MXFP8 saves a third of the time, NVFP4 half, at five times the error")

# %% [markdown]
# Read the lines: a peak that doubles does not halve the time, and the faster the product, the more of it is quantising.
# Whole models gain less still. Megatron-Bridge's published summaries have DeepSeek-V3 from bfloat16 to MXFP8 at 1.28
# times the speed on GB200 and 1.13 on GB300 (release 25.11), and Nemotron-3 Super from MXFP8 to NVFP4 at 1.02 and 1.04
# (26.08).
#
# So where is the sweet spot? For training experts on a GPU that has it, MXFP8 with RCEIL: FLOOR costs the same and is
# less accurate, one scale for a tensor must first be found, and NVFP4 buys its time with five times the error and three
# more tools. What an error costs in loss, a single product cannot say.
#
# ### Memory
#
# The backward pass of a quantised layer needs x only as wgrad's copy, so that is what the forward pass may save: a byte
# for each number and a byte for each 32, where bfloat16 saves two. Checkpoint names say so to JAX (chapter 09), and the
# compiled forward program says what it hands over. Predict the quotient. (The buffer has room for the worst split into
# whole blocks, 1.5 % more than the rows; leave that out.)


# %%
def saved_bytes(recipe):
    """Bytes of rows that the compiled forward program hands to the backward pass: codes and scales, or bfloat16."""
    policy = jax.checkpoint_policies.save_only_these_names(QUANTIZED_ROWS)
    sizes = jnp.full(4, 2048, jnp.int32)

    @partial(jax.checkpoint, policy=policy)
    def layer(x, kernels):
        x = jnp.tanh(x)  # so that the rows are no argument, which is kept anyway
        return grouped_gemm(x, kernels, sizes, backend="ragged_dot", recipe=recipe)

    def forward(x, kernels):
        _, pull_back = jax.vjp(layer, x, kernels)
        return [leaf for leaf in jax.tree.leaves(pull_back) if leaf.dtype.itemsize <= 2 and leaf.ndim == 2]

    shapes = jax.ShapeDtypeStruct((8192, 128), jnp.float32), jax.ShapeDtypeStruct((4, 128, 128), jnp.float32)
    return jax.jit(forward).lower(*shapes).compile().memory_analysis().output_size_in_bytes


kept = {recipe.name: saved_bytes(recipe) for recipe in (quant.BF16(), quant.MXFP8())}
predict(
    "bytes saved by MXFP8 over those saved by bfloat16",
    ### BEGIN ANSWER
    (1 + 1 / 32) / 2,
    ### END ANSWER
    measured=kept["MXFP8"] / kept["BF16"],
    within=0.03,
)

# %% [markdown]
# ### What training says
#
# An error of some percent in every product: does the loss notice? `moe-course bench parity-run --json` asks. It trains the
# `tiny` preset in bfloat16 with three seeds; their spread is the noise band, declared before any recipe runs. Then each
# recipe trains on the same data in the same order, and its gap to bfloat16 is divided by the band. Two quantisers that
# are broken on purpose train too: a comparison that cannot find them would find nothing. Below is a recorded run, 400
# steps on two CPU cores, three quarters of an hour. It needs no GPU to repeat.

# %%
run = recorded("parity-run")
declared = run["declared"]
losses, band = np.array(declared["losses"]) - declared["mean"], declared["band"]
judged = {name: values for name, values in run.items() if "inside" in values}
fig, ax = plots.figure(7.5, 3.2)
ax.axvspan(-band, band, color=plots.FAINT)
ax.plot(losses, np.full(3, -1), "o", color=plots.INK, ms=7)
for y, values in enumerate(judged.values()):
    color = plots.expert_color(0 if values["inside"] else 1)
    if values["loss"] is None:
        ax.annotate("no loss: NaN at step 5", (0, y), color=color, va="center", ha="center", fontsize=10)
    else:
        ax.plot(values["gap"], y, "o", color=color, ms=8)
ax.set_yticks(range(-1, len(judged)), ["bf16, three seeds", *judged])
ax.invert_yaxis()
ax.set(xlabel=f"loss less the mean of BF16 ({declared['mean']:.3f} nats); grey: the declared band")
plots.show(fig, "All four recipes end inside the band of BF16, both broken quantisers outside")
about = run["about"]
print(
    f"recorded {about['date']}: {about['preset']}, {about['steps']} steps, JAX {about['jax']}, emulated on a CPU"
)
for name, values in judged.items():
    if values["loss"] is not None:
        print(f"{name:<24}gap {values['gap']:+.3f} nats, {values['gap_over_band']:.2f} of the band")

# %% [markdown]
# Read it for what it is. That FLOOR and NVFP4 do not show is a statement about 400 steps of a model of 1.7 million
# parameters, not about FLOOR and NVFP4: differences that take a trillion tokens to appear cannot appear here. And three
# seeds make a rough band: of BF16 runs with a fourth seed, one in four would fall outside, were losses normal. What the
# run does show is that a scale in the wrong place costs six bands, *and trains*: the loss falls all the same, from 5.9 to
# 2.3. Nobody who looks at one curve would notice.
#
# ### Question 08.q7
#
# Your recipe ends at 0.6 of the band, above BF16. What may you say?
#
# **a** it is worse than BF16 · **b** this experiment cannot tell it from BF16 · **c** it is as good as BF16

# %%
quiz(
    "08.q7",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## The Transformer Engine way
#
# **Not run here**, and it needs the GPU it is for. A grouped layer in MXFP8:
#
# ```python
# from transformer_engine.jax.dense import grouped_dense
# from transformer_engine.jax.quantize import QuantizerFactory, ScalingMode
#
# quantizer_set = QuantizerFactory.create_set(
#     scaling_mode=ScalingMode.MXFP8_1D_SCALING,
#     is_2x2x=True,  # row-wise and column-wise copies: 08.5
#     n_groups=E,
#     fwd_dtype=jnp.float8_e4m3fn,
#     bwd_dtype=jnp.float8_e4m3fn,
# )
# y = grouped_dense(x, kernels, sizes, quantizer_set=quantizer_set)  # each size a multiple of 128: 08.6
# ```
#
# One quantiser alone, and its two copies, each from the source:
#
# ```python
# from transformer_engine.jax.quantize import QuantizeLayout, TensorUsage
#
# quantizer = QuantizerFactory.create(
#     scaling_mode=ScalingMode.MXFP8_1D_SCALING,
#     q_dtype=jnp.float8_e4m3fn,
#     q_layout=QuantizeLayout.ROWWISE_COLWISE,
# )
# both = quantizer.quantize(x)
# row_wise = both.get_tensor(TensorUsage.LHS)
# column_wise = both.get_tensor(TensorUsage.LHS_TRANS)
# ```
#
# Flax modules take the recipe from a context:
#
# ```python
# from transformer_engine.common.recipe import MXFP8BlockScaling
# from transformer_engine.jax import autocast
#
# with autocast(enabled=True, recipe=MXFP8BlockScaling()):  # recipe=None is DelayedScaling()
#     y = model.apply(variables, x)
# ```
#
# What runs where, as of TE 2.20 for JAX:
#
# | ours | recipe in `transformer_engine.common.recipe` | dense | grouped | GPU |
# |---|---|---|---|---|
# | `BF16()` | none | yes | yes | any |
# | `FP8DelayedScaling()` | `DelayedScaling` | yes | yes | Ada, Hopper (SM89) and newer |
# | `FP8CurrentScaling()` | `Float8CurrentScaling` | yes | yes | Ada, Hopper (SM89) and newer |
# | `MXFP8()` | `MXFP8BlockScaling` | yes | yes, and in `moe()` | data-centre Blackwell |
# | `NVFP4()` | `NVFP4BlockScaling` | yes | no | data-centre Blackwell (SM100) |
# | `FP8BlockScaling()` | `Float8BlockScaling` | no, PyTorch only | no | |
#
# And how the options are called:
#
# | ours | Transformer Engine |
# |---|---|
# | `grouped_gemm(..., recipe=MXFP8())`, an argument | `with autocast(enabled=True, recipe=...)`, a context |
# | `MXFP8(gradient="e5m2")` | `MXFP8BlockScaling`, `fp8_format` HYBRID |
# | `MXFP8("floor")` | none: it always rounds up |
# | `NVFP4(hadamard=False)` | `NVFP4BlockScaling`, `disable_rht` |
# | `NVFP4(stochastic_rounding=False)` | `NVFP4BlockScaling`, `disable_stochastic_rounding` |
# | `NVFP4(square_weights=False)` | `NVFP4BlockScaling`, `disable_2d_quantization` |
# | `FP8DelayedScaling(history=..., algorithm=...)` | `DelayedScaling`, `amax_history_len`, `amax_compute_algo` |
#
# DeepSeek-V3's tiles are not in TE for JAX: where this course follows that model on a GPU, MXFP8 stands in for them.
#
# `autocast` asserts that the GPU supports the recipe; `is_quantize_recipe_supported(name)` asks without raising, and
# says why not. With `DelayedScaling` the state is the Flax collection `fp8_metas`, and its successor arrives as its
# gradient. `checkpoint_name` on a quantiser tags the quantised copies, so a policy by name keeps bytes, as above; JAX's
# own `checkpoint_dots` policies do not see TE's GEMMs at all.
#
# ### Question 08.q8
#
# You have H100s. Which recipe do their tensor cores take?
#
# **a** MXFP8 · **b** NVFP4 · **c** FP8 with one scale for each tensor

# %%
quiz(
    "08.q8",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## Bug museum
#
# Three rooms. Each exhibit is modelled on public reports, and each gives the right answer for the tensor that its
# author tried.
#
# ### Room 1: the empty block
#
# Reported for flashinfer (#3448), Model-Optimizer (#1898) and cache-dit (#1097); on a CPU also the quantiser behind
# `jax.nn.scaled_dot_general` and the pure-JAX path of Transformer Engine do it. The exhibit, on 64 rows of which the last
# 32 are padding:


# %%
def museum_blocks(x):
    blocks = x.reshape(-1, 32)
    amax = jnp.abs(blocks).max(axis=1, keepdims=True)  # a
    scale = jnp.exp2(jnp.ceil(jnp.log2(amax / 448)))  # b
    codes = jnp.clip(blocks / scale, -448, 448).astype(jnp.float8_e4m3fn)  # c
    return (codes.astype(jnp.float32) * scale).reshape(x.shape)


full = jnp.asarray(np.random.default_rng(1).normal(size=(64, 32)), jnp.float32)
padded = full.at[32:].set(0.0)
d_w = museum_blocks(padded.T).reshape(32, 64) @ full
museum_blocks = jax.jit(museum_blocks)
print("rows all in use: NaN in", int(jnp.isnan(museum_blocks(full)).sum()), "of 2,048 numbers")
print("32 rows of padding: NaN in", int(jnp.isnan(museum_blocks(padded)).sum()), "of 2,048 numbers")
print("the weight gradient: NaN in", int(jnp.isnan(d_w).sum()), "of", d_w.size)

# %% [markdown]
# ### Question 08.q9
#
# Which line is to blame?
#
# **a** the maximum · **b** the scale · **c** the cast

# %%
quiz(
    "08.q9",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ### Room 2: the transposed scales
#
# wgrad needs xᵀ, and there is a quantised x already. The exhibit transposes its codes and its scales; a square x, so all
# shapes fit (modelled on a fault mended in google/qwix, 2bc7aa5; torchao #3686 forgot the rounding mode of the second copy).


# %%
@jax.jit
def museum_transpose(x):
    q = quant.quantize_mxfp8(x)  # scales [64, 2], of the rows
    codes = decode(to_codes(q.data), format_of("e4m3")).T  # a
    scale = jnp.repeat(scale_values(q), 32, axis=1)  # b
    return codes * scale  # c


rng = np.random.default_rng(2)
square = jnp.asarray(rng.normal(size=(64, 64)) * np.exp(2 * rng.normal(size=(64, 1))), jnp.float32)
for name, copy in (("quantised anew", mxfp8(square, axis=0)[2].T), ("the exhibit", museum_transpose(square))):
    error = jnp.linalg.norm(copy - square.T) / jnp.linalg.norm(square)
    print(f"{name:<15}error {100 * float(error):.0f} %")

# %% [markdown]
# ### Question 08.q10
#
# What is wrong?
#
# **a** the shapes · **b** the codes must not be transposed · **c** scales of a row are applied down a column

# %%
quiz(
    "08.q10",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ### Room 3: statistics over padding
#
# One scale for a tensor, from a buffer whose tail holds what an earlier step left there. sgl-project/sglang #26133 and
# NVIDIA/TransformerEngine #3041 and #1945 are of this kind.


# %%
def museum_scale(buffer):
    amax = jnp.abs(buffer).max()  # a
    codes = package_cast(buffer * (448 / amax), "e4m3")  # b
    return codes.astype(jnp.float32) * (amax / 448)  # c


museum_scale = jax.jit(museum_scale)
fresh = jnp.asarray(np.random.default_rng(4).normal(size=(80, 32)), jnp.float32)
for tail in (0.0, 1e6):
    back = museum_scale(fresh.at[64:].set(tail))[:64]
    print(f"tail of {tail:g}: {100 * float((back == 0).mean()):.0f} % of the real numbers became 0")

# %% [markdown]
# ### Question 08.q11
#
# Which line is to blame?
#
# **a** the maximum · **b** the cast · **c** the one scale

# %%
quiz(
    "08.q11",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## What changed in the package
#
# `moe_course/quant/` and `moe_course/grouped_gemm/quantized.py` are now yours to read.
#
# - `formats.py` rounds by integer arithmetic on float32's bits, also stochastically. So no result depends on what a
#   compiler does with subnormal numbers, and golden vectors hold on every backend.
# - `blocks.py` has one container for all formats, codes and scales together: who moves rows moves both.
# - `nvfp4.py` follows Transformer Engine's reference operation by operation, since a scale beside a tie depends on the
#   order. In a block of scale 0 it leaves codes of 6, as TE does; times 0 they are 0.
# - `groups.py` is 08.6; `recipes.py` a table of six operands for each recipe.
# - The grouped product saves wgrad's copy of the rows in the forward pass, under a name, and not the rows.
#
# `moe-course train --recipe mxfp8` trains a model with it, emulated. `moe-course bench quant-error` compares formats with
# a published table and recipes with float32, `bench parity-run` compares trainings.
#
# ## Further reading
#
# - OCP Microscaling Formats (MX) Specification v1.0; Microscaling Data Formats for Deep Learning, arXiv 2310.10537.
# - FP8 Formats for Deep Learning, arXiv 2209.05433: E4M3, E5M2, scales per tensor.
# - Recipes for Pre-training LLMs with MXFP8, arXiv 2506.08027: rounding up, E4M3 for all.
# - Pretraining Large Language Models with NVFP4, arXiv 2509.25149: two levels, Hadamard, stochastic rounding.
# - DeepSeek-V3, arXiv 2412.19437, section 3.3: FP8 in tiles on Hopper.
#
# Next: 09, where what is saved and what is computed again decides the memory.
