# %% [markdown]
# # 10 Scaling
#
# A rack joins 72 GPUs by NVLink. You spread the experts of each layer over groups of 64 GPUs, numbered as they come out
# of the machine room. Sixty-four is less than seventy-two, so no token leaves its rack. What share of the dispatch
# traffic does? Write a percentage down; you will compute it in exercise 10.5.
#
# "Which parallelism, how fast, how much memory?" is a question that one wants answered before buying an hour of GPUs.
# This chapter builds the answer from parts that fit on paper: FLOPs, bytes, start-up times, a pipeline's order. Then it
# asks the parts to predict three hundred published runs, and keeps the error.
#
# Nothing here runs on a GPU. **Every speed below is published, or predicted, and a prediction carries the error that
# such predictions made on runs the model had not seen.**
#
# You will be able to
#
# - count a model's FLOPs by hand, and say by which formula a published figure was counted,
# - say at how many rows an expert stops waiting for memory, and what a message costs before its first byte,
# - count the bytes that leave an NVLink domain, and find those that leave it by accident,
# - say which memory more GPUs take away, and which they do not,
# - lay attention and experts over the same GPUs in two ways, fill a pipeline, choose a plan, and defend it,
# - say what the model cannot see.
#
# Nine exercises, about two and a quarter hours. Everything runs on the CPU.

# %%
from moe_course.environment import setup

status = setup()

# %%
import math
import textwrap
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from moe_course.bench import recorded
from moe_course.errors import SettingError
from moe_course.lessons import check, plots, predict, quiz, yours
from moe_course.lessons.widgets import explore
from moe_course.models.config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from moe_course.scaling import calibrate, comm, flops, ladder, memory, plan, published, simulate
from moe_course.scaling.hardware import machine
from moe_course.scaling.layout import Layout
from moe_course.scaling.shape import from_config

v3 = from_config(DEEPSEEK_V3, "DeepSeek-V3")
model = calibrate.shipped()

# %% [markdown]
# ## One run, many formulas
#
# Chapter 01 counted a step from the active parameters. Published figures need the terms, for sources leave some out.
# The term that costs most care is multi-head latent attention (MLA, arXiv 2405.04434): five matrices, two of them in
# low rank, and a rotary key that all heads share.
#
# ## Exercise 10.1: a layer of MLA
#
# Count one layer. · difficulty ●● · 10 minutes · used again in 11
#
# Queries go down to `q_rank` numbers and up to `nope + rope` for each head (or straight there, if `q_rank` is 0). Keys
# and values share a latent of `kv_rank`, which goes up to `nope` key numbers and `v_dim` values for each head; `rope`
# more key numbers come straight from the token, once for all heads. Then each head compares its query with the earlier
# half of the positions, on average, and sums their values; the heads' outputs go back to `d_model`. By hand, four
# tokens, d_model 4, two heads, ranks 3 and 2, widths 2, 2 and 2:
#
# | | entries |
# |---|---|
# | queries, down and up | 4 · 3 + 3 · 8 = 36 |
# | latent and rotary key, down | 4 · (2 + 2) = 16 |
# | keys and values, up | 2 · 2 · (2 + 2) = 16 |
# | output | 2 · 2 · 4 = 16 |
#
# 84 entries, 168 FLOPs; looking back, 4 / 2 positions times two heads times (4 + 2), at 2 FLOPs: 48. In all 216.


# %%
def package_layer(d_model, heads, q_rank, kv_rank, nope, rope, v_dim, seq_len):
    names = ("d_model", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    sizes = dict(zip(names, (d_model, heads, q_rank, kv_rank, nope, rope), strict=True), v_head_dim=v_dim)
    return sum(flops.mla_flops(replace(DEEPSEEK_V3, **sizes), seq_len).values())


print("four tokens, by the package:", package_layer(4, 2, 3, 2, 2, 2, 2, 4))


# %%
def mla_layer(d_model, heads, q_rank, kv_rank, nope, rope, v_dim, seq_len):
    """Forward FLOPs per token of one layer of multi-head latent attention, causal, matrix products alone.

    Args:
      d_model, heads: width of the residual stream, attention heads.
      q_rank: of the queries' compression; 0 projects them straight from d_model.
      kv_rank: of the keys' and values' latent.
      nope, rope: widths of a head's query and key without and with rotary embedding.
      v_dim: width of a head's value.
      seq_len: tokens of a sequence; a token sees half of them on average. 0: the matrices alone.

    Returns: FLOPs, a number; a multiply-add is 2.
    """
    ### BEGIN SOLUTION
    query = heads * (nope + rope)
    weights = q_rank * (d_model + query) if q_rank else d_model * query
    weights += d_model * (kv_rank + rope)
    weights += kv_rank * heads * (nope + v_dim)
    weights += heads * v_dim * d_model
    core = seq_len / 2 * heads * (nope + rope + v_dim)
    return 2 * (weights + core)
    ### END SOLUTION


check("10.1", mla_layer)  # stuck? hint("10.1"), up to four times

# %% [markdown]
# Now all terms of DeepSeek-V3, for longer and longer sequences. Everything grows with the tokens; attention's core
# grows with the tokens that each token sees.

# %%
layer = yours("10.1", package_layer)
v3_sizes = (7168, 128, 1536, 512, 128, 64, 128)
lengths = 2 ** np.arange(12, 18)
counted = [flops.published_flops(v3, int(n)) for n in lengths]
rest = {
    "attention, matrices": np.array([3 * 62 * layer(*v3_sizes, 0)] * len(lengths)),
    "attention, looking back": np.array(
        [3 * 62 * (layer(*v3_sizes, int(n)) - layer(*v3_sizes, 0)) for n in lengths]
    ),
    "routed experts": np.array([c["routed experts"] for c in counted]),
    "shared experts, dense layers": np.array(
        [c["shared experts"] + c["dense feed-forward"] for c in counted]
    ),
    "heads, MTP projection": np.array([c["head"] + c["MTP projection"] for c in counted]),
}
total = sum(rest.values())
fig, ax = plots.figure(7.6, 3.0)
bottom = np.zeros(len(lengths))
for color, (name, part) in enumerate(rest.items()):
    ax.bar(
        range(len(lengths)), 100 * part / total, bottom=bottom, color=plots.expert_color(color), label=name
    )
    bottom = bottom + 100 * part / total
ax.set(xticks=range(len(lengths)), xticklabels=[f"{n:,}" for n in lengths], xlabel="tokens of a sequence")
ax.set(ylabel="share of a step's FLOPs, %")
ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
share = 100 * rest["attention, looking back"] / total
plots.show(
    fig,
    f"Looking back takes {share[0]:.0f} % of DeepSeek-V3's FLOPs at {lengths[0]:,} tokens and {share[-1]:.0f} % at "
    f"{lengths[-1]:,}",
)

# %% [markdown]
# DeepSeek-V3 also predicts the token after next (MTP): one more MoE layer, a second use of the head, and a matrix of 2
# D² entries that joins two tokens. One layer after sixty-one: predict by how much a step of 4,096 tokens grows.

# %%
without = sum(flops.published_flops(v3, 4096, "deepseek").values())
predict(
    "FLOPs that MTP adds to a step, %",
    ### BEGIN ANSWER
    100 * (1 / 61 + 6 * (7168 * 129_280 + 2 * 7168**2) / 250e9),
    ### END ANSWER
    measured=round(100 * (sum(flops.published_flops(v3, 4096).values()) / without - 1), 2),
    within=0.05,
)

# %% [markdown]
# More than twice what a layer is: the head is counted twice. Now take one published run, DeepSeek's own (arXiv
# 2412.19437: so many GPU hours for a trillion tokens), and read its speed by each source's formula.

# %%
own = next(run for run in published.training_runs() if run.publisher == "deepseek")
print(f"{own.tokens_per_second:,.0f} tokens/s per H800, {own.row['seq_len']:,} tokens a sequence, is")
for name in ("deepseek", "megatron", "deepseek-noncausal", "torchtitan"):
    counted = sum(flops.published_flops(v3, own.row["seq_len"], name).values())
    print(f"  {own.tokens_per_second * counted / 1e12:.0f} TFLOPS per GPU by {flops.CONVENTIONS[name].who}")

# %% [markdown]
# ### Question 10.q1
#
# What differs between the first three lines?
#
# **a** the speed of the run · **b** the peak · **c** what counts as work

# %%
quiz(
    "10.q1",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ## The roofline of an expert
#
# A grouped GEMM multiplies each expert's rows with that expert's matrix. With few rows it waits for the matrix to
# arrive. In exercise 01.4 the matrix alone was read; now count what the rows cost, too.
#
# ## Exercise 10.2: rows to compute
#
# At how many rows does arithmetic take as long as traffic? · difficulty ●●● · 15 minutes · used again in 11, 12
#
# Rows are read, weights are read once, results are written, each in its own number of bytes. By hand: d_in = d_out =
# 10, one byte each, 10 bytes/s, 50 FLOP/s. A row's arithmetic takes 2 · 100 / 50 = 4 s, its traffic 20 / 10 = 2 s, so
# each row gains 2 s on the weights' 10 s: 5 rows. At 100 FLOP/s a row's arithmetic takes 2 s, its traffic 2 s: no
# number of rows is enough.


# %%
def rows_to_compute(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    """Rows at which a product [rows, d_in] x [d_in, d_out] computes as long as it moves bytes.

    Args:
      d_in, d_out: of the matrix.
      peak: FLOP/s; a multiply-add is 2.
      bandwidth: bytes/s of memory.
      bytes_in, bytes_weight, bytes_out: per number of the rows, the matrix, the result.

    Returns: rows, a number (not rounded); math.inf if arithmetic never takes as long.
    """
    ### BEGIN SOLUTION
    arithmetic = 2 * d_in * d_out / peak
    traffic = (d_in * bytes_in + d_out * bytes_out) / bandwidth
    weights = d_in * d_out * bytes_weight / bandwidth
    return weights / (arithmetic - traffic) if arithmetic > traffic else math.inf
    ### END SOLUTION


check("10.2", rows_to_compute)  # stuck? hint("10.2")

# %% [markdown]
# The first product of a DeepSeek-V3 expert is [7168, 4096] (gate and up side by side), that of Qwen3-30B-A3B [2048,
# 1536]. Peaks and memory speeds are those of the data sheets; MXFP8 takes 33/32 bytes a number (chapter 08) and returns
# bfloat16.


# %%
def package_rows(d_in, d_out, peak, bandwidth, bytes_in, bytes_weight, bytes_out):
    gain = 2 * d_in * d_out / peak - (d_in * bytes_in + d_out * bytes_out) / bandwidth
    return d_in * d_out * bytes_weight / bandwidth / gain if gain > 0 else math.inf


to_compute = yours("10.2", package_rows)
formats = {"bf16": ("bfloat16", 2.0), "mxfp8": ("MXFP8", 33 / 32)}
print(f"{'rows to compute':<20}{'':<10}{'V3 expert':>10}{'Qwen3-30B':>11}")
for name in ("h100", "h200", "b200", "gb300"):
    gpu = machine(name)
    for precision, (label, width) in formats.items():
        found = [
            to_compute(d, f, 1e12 * gpu.peak(precision), gpu.hbm, width, width, 2.0)
            for d, f in ((7168, 4096), (2048, 1536))
        ]
        print(f"{gpu.name:<20}{label:<10}{found[0]:>10,.0f}{found[1]:>11,.0f}")

# %% [markdown]
# Faster arithmetic needs more rows, narrow experts many more. How many are there? A GPU that holds T tokens brings T K
# rows to a layer, and an expert gets the rows of all EP ranks: T · EP · K / E. DeepSeek-V3 with one sequence of 4,096
# tokens a GPU:

# %%
gb200 = machine("gb200")
rows = np.exp2(np.linspace(4, 15, 200))
at = {ep: 4096 * ep * 8 // 256 for ep in (1, 8, 64)}
fig, axes = plots.figure(8.6, 2.9, columns=2)
for color, (gpu, precision) in enumerate(((machine("h100"), "bf16"), (gb200, "bf16"), (gb200, "mxfp8"))):
    label, width = formats[precision]
    peak = gpu.peak(precision)
    moved = rows * (7168 * width + 4096 * 2) + 7168 * 4096 * width
    reached = np.minimum(peak, 2e-12 * rows * 7168 * 4096 / (moved / gpu.hbm))
    axes[0].plot(
        rows, reached, color=plots.expert_color(color), lw=2.2, label=f"{gpu.name.split()[0]}, {label}"
    )
    if (gpu, precision) == (gb200, "mxfp8"):
        axes[1].plot(rows, 100 * reached / peak, color=plots.expert_color(color), lw=2.2, label="roofline")
half = model.constants.expert_rows_half
axes[1].plot(rows, 100 * rows / (rows + half), color=plots.INK, lw=2.0, ls="--", label="fitted to runs")
for ax in axes:
    for ep, n in at.items():
        ax.axvline(n, ymax=0.86, color=plots.FAINT, lw=1.2, zorder=0)
        ax.annotate(
            f"EP {ep}", (n, 1.0), xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=9
        )
    ax.set(xscale="log", xlabel="rows per expert")
axes[0].legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.62), fontsize=9)
axes[1].legend(frameon=False, loc="lower right", fontsize=9)
axes[0].set(ylabel="TFLOPS at most", ylim=(0, 5900))
axes[1].set(ylabel="GB200, MXFP8: % of its best", ylim=(0, 118))
plots.show(
    fig,
    f"An expert of EP 1 gets {at[1]} rows and starves. By the roofline {at[8]:,} are enough; grouped GEMMs of published "
    f"runs reach half of their best at {half:.0f}",
)

# %% [markdown]
# The dashed curve is r / (r + h) with one constant h, fitted to published runs together with all others of this
# chapter. A roofline knows bytes and FLOPs. It does not know tiles that are half empty, or a wave of thread blocks that
# is.
#
# ### Question 10.q2
#
# EP grows from 8 to 64, and every GPU keeps its 4,096 tokens. What becomes of the rows per expert?
#
# **a** an eighth, as each rank has fewer experts · **b** eight times as many · **c** the same

# %%
quiz(
    "10.q2",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Alpha and beta
#
# More rows come by moving them. A message of n bytes takes alpha + n / beta (Hockney, 1994): a start-up time, and a
# bandwidth. Neither is in a data sheet. DeepEP's public table has the time of one dispatch and one combine of 128
# tokens per rank, from 8 to 256 H800s in nodes of eight.

# %%
deepep = {
    op: [row for row in published.communication_rows() if row["op"] == f"{op} (low latency)"]
    for op in ("dispatch", "combine")
}
ranks_of = np.array([row["hardware"]["ranks"] for row in deepep["dispatch"]])
measured_us = {op: np.array([float(row["time_us"]) for row in rows]) for op, rows in deepep.items()}
sent_kb = {op: rows[0]["bytes"] / 1e3 for op, rows in deepep.items()}
print("ranks".ljust(22), *(f"{n:>6}" for n in ranks_of))
for op in deepep:
    print(f"{op}, {sent_kb[op] / 1e3:.2f} MB".ljust(22), *(f"{t:>4.0f}µs" for t in measured_us[op]))

# %% [markdown]
# ### Question 10.q3
#
# A rank sends the same bytes at every size. Why does the time grow, and then stop?
#
# **a** a growing share leaves the node · **b** each rank has more bytes · **c** each doubling adds a start-up time

# %%
quiz(
    "10.q3",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# ## Exercise 10.3: alpha and beta
#
# Fit both to measured messages. · difficulty ●●● · 20 minutes · used again in 12
#
# Sizes span decades, so the error that matters is relative: find alpha and beta with the least sum of ((alpha + n /
# beta) / t - 1)². It is linear in alpha and 1 / beta. A start-up time below 0 is none: then alpha is 0, and beta is
# fitted alone by the same rule. In kilobytes and microseconds, so that beta comes out in GB/s. By hand, four messages
# of alpha 10 µs and beta 50 GB/s: 100 kB in 12 µs, 500 in 20, 1,000 in 30, 5,000 in 110.

# %%
alpha, beta = comm.fit_alpha_beta([100.0, 500.0, 1000.0, 5000.0], [12.0, 20.0, 30.0, 110.0])
print(f"alpha {alpha:.1f} µs, beta {beta:.1f} GB/s")


# %%
def alpha_beta(kilobytes, microseconds):
    """The start-up time and bandwidth that fit measured messages best, by squared relative error.

    Args:
      kilobytes, microseconds: [n] float32 each, positive, two or more different sizes.

    Returns: (alpha, beta), two numbers: µs, at least 0, and GB/s (kB/µs).
    """
    ### BEGIN SOLUTION
    k, t = np.asarray(kilobytes, np.float64), np.asarray(microseconds, np.float64)
    columns = np.stack([1 / t, k / t], axis=1)
    alpha, slope = np.linalg.lstsq(columns, np.ones(len(t)))[0]
    if alpha < 0:
        alpha, slope = 0.0, (k / t).sum() / ((k / t) ** 2).sum()
    return alpha, 1 / slope
    ### END SOLUTION


check("10.3", alpha_beta)  # stuck? hint("10.3")

# %% [markdown]
# With R ranks in nodes of eight, 8 / R of the bytes stay inside. DeepEP states 160 GB/s for those; take their time off,
# and the rest is yours to fit: alpha, and the bandwidth of what leaves the node.

# %%
fit = yours("10.3", comm.fit_alpha_beta)


def inside_us(op, ranks):
    return sent_kb[op] * np.minimum(8 / ranks, 1) / 160


def outside_kb(op, ranks):
    return sent_kb[op] * np.maximum(1 - 8 / ranks, 0)


fig, ax = plots.figure(7.0, 2.8)
for color, op in enumerate(deepep):
    alpha, beta = fit(outside_kb(op, ranks_of), measured_us[op] - inside_us(op, ranks_of))
    fitted = alpha + inside_us(op, ranks_of) + outside_kb(op, ranks_of) / beta
    off = 100 * (fitted / measured_us[op] - 1)
    print(f"{op}: alpha {alpha:.0f} µs, beta {beta:.0f} GB/s; off by", *(f"{x:+.0f}" for x in off), "%")
    ax.plot(ranks_of, measured_us[op], "o", color=plots.expert_color(color), label=f"{op}, published")
    ax.plot(
        ranks_of,
        fitted,
        color=plots.expert_color(color),
        lw=2,
        label=f"fit, {np.abs(off).max():.0f} % off at most",
    )
ax.set_xscale("log", base=2)
ax.set(xticks=ranks_of, xticklabels=ranks_of, xlabel="ranks", ylabel="microseconds", ylim=(0, 430))
ax.minorticks_off()
ax.legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
plots.show(fig, "The same bytes at every size: time follows the share of them that leaves the node")

# %% [markdown]
# The line rate of an H800's network port is 50 GB/s, and neither fit was told so. A fit is worth what it says about a
# row that it has not seen: leave out the largest size, and predict it from the other five.

# %%
seen, rest_us = ranks_of[:-1], (measured_us["dispatch"] - inside_us("dispatch", ranks_of))[:-1]
predict(
    "a dispatch over 256 ranks, from the other five rows",
    ### BEGIN ANSWER
    inside_us("dispatch", 256)
    + fit(outside_kb("dispatch", seen), rest_us)[0]
    + outside_kb("dispatch", 256) / fit(outside_kb("dispatch", seen), rest_us)[1],
    ### END ANSWER
    measured=float(measured_us["dispatch"][-1]),
    unit="µs",
    within=0.1,
)

# %% [markdown]
# The package fits every published series of three or more sizes and keeps the residuals. Look at the last column before
# you believe the others: where it is large, time is not alpha + n / beta, and no constants will make it so.

# %%
print(f"{'':<72}{'alpha':>7}{'beta':>10}{'worst':>7}")
for fitted in comm.link_fits():
    if "all-reduce" in fitted.name or "24 SMs" in fitted.name or "32 SMs, kernel" in fitted.name:
        alpha, beta = 1e6 * fitted.link.alpha, fitted.link.beta / 1e9
        print(f"{fitted.name:<72}{alpha:>4.0f} µs{beta:>5.0f} GB/s{100 * fitted.worst_error:>5.0f} %")

# %% [markdown]
# ## What leaves the domain
#
# Inside an **NVLink domain** a GPU sends at several hundred GB/s, to other domains at 50 or 100. So a dispatch has two
# prices, and the expensive bytes are those that leave. Chapter 07 showed three ways to send: a row for each pick; each
# rank once, the copies for its experts made there; each domain once, the copies for its ranks made there.
#
# ## Exercise 10.4: rows across
#
# Count the rows that leave. · difficulty ●●● · 15 minutes · used again in 12
#
# Picks are distinct and uniform; P places own E/P experts each. A place is missed in C(E - E/P, K) of C(E, K) choices,
# so a token visits P (1 - C(E - E/P, K) / C(E, K)) places. One domain of the N is its own. By hand, 8 experts, 2 picks,
# 4 ranks in domains of 2: for each pick, 2 rows, half of which leave: 1. Ranks: 15 of 28 choices miss one, 4 · 13/28
# visited, half of which are elsewhere: 0.929. Domains: 6 of 28 miss one, 2 · 22/28, half elsewhere: 0.786.


# %%
def package_across(experts, top_k, ranks, domain, way):
    domains = max(1, ranks // domain)
    places = {"rank": ranks, "domain": domains}
    rows = top_k if way == "pick" else comm.copies_per_token(experts, top_k, places[way])
    return rows * (domains - 1) / domains


print([round(package_across(8, 2, 4, 2, way), 3) for way in ("pick", "rank", "domain")])


# %%
def rows_across(experts, top_k, ranks, domain, way):
    """Rows per token that leave the sender's NVLink domain, one way, on average.

    Args:
      experts, top_k: E and K; picks are distinct and uniform.
      ranks: of the expert-parallel group; each owns E / ranks neighbouring experts.
      domain: GPUs of an NVLink domain, neighbouring ranks. Divides ranks, or is not smaller.
      way: "pick", a row for each pick; "rank", one for each rank visited; "domain", one for each domain visited.

    Returns: rows, a number.
    """
    ### BEGIN SOLUTION
    domains = max(1, ranks // domain)
    if way == "pick":
        visited = top_k
    else:
        places = ranks if way == "rank" else domains
        missed = math.comb(experts - experts // places, top_k) / math.comb(experts, top_k)
        visited = places * (1 - missed)
    return visited * (domains - 1) / domains
    ### END SOLUTION


check("10.4", rows_across)  # stuck? hint("10.4")

# %%
across = yours("10.4", package_across)
fig, axes = plots.figure(8.2, 2.7, columns=2)
ways = {"pick": "a row for each pick", "rank": "each rank once", "domain": "each domain once"}
for ax, domain, title in zip(
    axes, (8, 64), ("domains of 8 (H100, B200)", "64 of an NVL72 rack"), strict=True
):
    groups = (8, 16, 32, 64, 128, 256)
    for color, (way, label) in enumerate(ways.items()):
        sent = [across(256, 8, n, domain, way) for n in groups]
        ax.plot(range(len(groups)), sent, "o-", color=plots.expert_color(color), lw=2, ms=5, label=label)
    ax.set(xticks=range(len(groups)), xticklabels=groups, xlabel="expert-parallel ranks", ylim=(-0.2, 8.4))
    ax.annotate(title, (0.03, 0.93), xycoords="axes fraction", fontsize=9.5)
axes[0].set_ylabel("rows per token that leave")
axes[1].legend(frameon=False, loc="center left", fontsize=9)
plots.show(
    fig,
    "Nothing leaves a domain that holds the whole group; between domains, a row for each domain is cheapest",
)

# %% [markdown]
# Predict the bytes: 4,096 tokens on each of 64 GPUs in nodes of eight, DeepSeek-V3's 7,168 numbers a row in bfloat16,
# each node once. How many megabytes does a GPU send over its network port, per layer and way? The measurement draws the
# picks.

# %%
drawn = (
    np.random.default_rng(10).random((4096, 256)).argpartition(8, axis=1)[:, :8] // 32
)  # nodes of the picks
home = np.arange(4096) % 8
reached = (drawn[:, :, None] == np.arange(8)).any(axis=1)
reached[np.arange(4096), home] = False
predict(
    "megabytes over the network port",
    ### BEGIN ANSWER
    4096 * across(256, 8, 64, 8, "domain") * 2 * 7168 / 1e6,
    ### END ANSWER
    measured=round(float(reached.sum()) * 2 * 7168 / 1e6, 1),
    unit="MB",
    within=0.01,
)

# %% [markdown]
# Is that much? Set it beside the arithmetic of the same layer's experts, forward, each at the limit of the hardware
# (limits, not predictions). A row that comes over the network lands on one GPU of the domain and goes on by NVLink; of
# 64 ranks, those that are not the sender and not such a landing place get theirs by NVLink.

# %%
work = 2 * 3 * 7168 * 2048 * 8 * 4096
for name, domain in (("h100", 8), ("b200", 8), ("gb200", 64)):
    gpu = machine(name)
    nvlink, nic = comm.links(gpu)
    leaves = 2 * 4096 * 2 * 7168 * across(256, 8, 64, domain, "domain")
    domains = 64 // domain
    stays = 2 * 4096 * 2 * 7168 * comm.copies_per_token(256, 8, 64) * (64 - domains) / 64
    seconds = {
        "network": leaves / nic.beta,
        "NVLink": stays / nvlink.beta,
        "experts": work / (1e12 * gpu.peak("bf16")),
    }
    print(f"{gpu.name:<14} EP 64: " + ", ".join(f"{what} {1e3 * t:.1f} ms" for what, t in seconds.items()))

# %% [markdown]
# In nodes of eight, there and back over the network takes longer than the experts compute. That is why DeepSeek limits
# a token to four nodes, why overlap matters, and why racks of 72 were built.
#
# ## Exercise 10.5: whose rack
#
# Find the share of an exchange that leaves its rack. · difficulty ●● · 15 minutes · used again in 12
#
# GPU g is in domain g // domain. Ranks of a group are `stride` apart: 1 if the expert axis is the innermost of the
# mesh, more if another axis lies inside it. Every rank sends as much to every rank of its group, itself included. By
# hand, 6 GPUs in domains of 3, EP 2, stride 1: groups (0, 1), (2, 3), (4, 5). GPU 2 is in domain 0 and GPU 3 in domain
# 1, so 2 of the second group's 4 pairs leave, and 2 of all 12: 1/6.


# %%
def share_leaving(gpus, ep, domain, stride):
    """The share of expert-parallel traffic that leaves its domain.

    Args:
      gpus: numbered from 0; ep * stride divides it.
      ep: ranks of a group.
      domain: GPUs of a domain; the last may be incomplete.
      stride: distance between neighbouring ranks of a group.

    Returns: 0 to 1, a number: pairs (sender, receiver) in different domains, of all pairs of all groups.
    """
    ### BEGIN SOLUTION
    members = np.arange(gpus).reshape(-1, ep, stride).swapaxes(1, 2)
    domains = members // domain
    return float((domains[..., :, None] != domains[..., None, :]).mean())
    ### END SOLUTION


check("10.5", share_leaving)  # stuck? hint("10.5")


# %% [markdown]
# Now your percentage: eight racks of 72, nine groups of 64. Group i has 8 i of its GPUs in one rack and the rest in the
# next.


# %%
def package_share(gpus, ep, domain, stride):
    members = np.arange(gpus).reshape(-1, ep, stride).swapaxes(1, 2) // domain
    return float((members[..., :, None] != members[..., None, :]).mean())


leaving = yours("10.5", package_share)
predict(
    "dispatch that leaves its rack, %",
    ### BEGIN ANSWER
    100 * np.mean([1 - (i / 8) ** 2 - (1 - i / 8) ** 2 for i in range(9)]),
    ### END ANSWER
    measured=round(100 * leaving(576, 64, 72, 1), 2),
    within=0.01,
)


# %%
def ink_on(color):  # dark text on light colours
    return plots.INK if np.dot(color, (0.3, 0.59, 0.11)) > 0.6 else "white"


fig, ax = plots.figure(8.2, 2.5)
for rack in range(8):
    ax.axvspan(
        72 * rack, 72 * (rack + 1), ymax=0.42, color=plots.FAINT if rack % 2 else plots.PAPER, zorder=0
    )
    ax.text(72 * rack + 36, 0.35, f"rack {rack}", ha="center", va="center", fontsize=9)
for group in range(9):
    first, color = 64 * group, plots.expert_color(group)
    in_racks = np.bincount(np.arange(first, first + 64) // 72, minlength=8) / 64
    ax.barh(1.15, 64, left=first, height=0.5, color=color, edgecolor=plots.PAPER)
    ax.text(first + 32, 1.15, f"group {group}", ha="center", va="center", color=ink_on(color), fontsize=8.5)
    ax.text(
        first + 32, 1.62, f"{100 * (1 - (in_racks**2).sum()):.0f} %", ha="center", va="center", fontsize=9.5
    )
ax.set(xlim=(0, 576), ylim=(0, 1.95), yticks=[], xticks=range(0, 577, 72), xlabel="GPU")
ax.spines["left"].set_visible(False)
plots.show(
    fig,
    "Groups of 64 on racks of 72: seven of nine straddle two racks, the middle one with half of its traffic",
)

# %% [markdown]
# ### Question 10.q4
#
# What keeps the traffic in the racks, with EP 64?
#
# **a** groups of 72 · **b** 64 GPUs of each rack, and no others · **c** another mesh axis inside the expert axis

# %%
quiz(
    "10.q4",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Memory walls
#
# Compute follows the active parameters, memory all of them. In bfloat16 with a float32 master copy, a parameter takes 2
# bytes for the weight, 4 for its gradient, 8 for the optimizer (master 4, two bfloat16 moments 4).
#
# ## Exercise 10.6: the memory wall
#
# What does one GPU keep from step to step? · difficulty ●●● · 15 minutes · used again in 12
#
# Dense weights are cut by PP and TP, experts by PP and EP. **ZeRO** (arXiv 1910.02054) shards among those who hold the
# same pieces: stage 1 the optimizer's 8 bytes, stage 2 also the gradient, stage 3 also the weight. An expert has fewer
# twins than a dense weight. By hand, 16 dense and 64 routed parameters, 8 GPUs, TP 2, PP 1, EP 4: 8 dense here, in 4
# copies, and 16 routed, in 2. ZeRO 0: 14 · 24 = 336. ZeRO 1: 8 · (6 + 8/4) + 16 · (6 + 8/2) = 224.


# %%
def state_bytes(dense, routed, gpus, tp, pp, ep, zero):
    """Bytes of weights, gradients and optimizer state on one GPU.

    Args:
      dense, routed: parameters outside of routed experts, and in them, spread evenly over layers.
      gpus: all of them.
      tp, pp, ep: parallel sizes; experts are not cut by TP.
      zero: 0 to 3.

    Returns: bytes, a number.
    """
    ### BEGIN SOLUTION
    total = 0.0
    for here, copies in ((dense / (pp * tp), gpus // (pp * tp)), (routed / (pp * ep), gpus // (pp * ep))):
        optimizer = 8 / (copies if zero >= 1 else 1)
        gradient = 4 / (copies if zero >= 2 else 1)
        weight = 2 / (copies if zero >= 3 else 1)
        total += here * (optimizer + gradient + weight)
    return total
    ### END SOLUTION


check("10.6", state_bytes)  # stuck? hint("10.6")


# %%
def package_state(dense, routed, gpus, tp, pp, ep, zero):
    per = memory.StateDtypes(zero=zero).bytes_per_parameter
    here = dense / (pp * tp), routed / (pp * ep)
    return here[0] * per(gpus // (pp * tp)) + here[1] * per(gpus // (pp * ep))


state = yours("10.6", package_state)
counts = 64 * 2 ** np.arange(6)
fig, ax = plots.figure(7.6, 3.2)
for color, (pp, zero) in enumerate(((1, 1), (4, 1), (16, 1), (1, 3))):
    there = [n for n in counts if n % (64 * pp) == 0]
    kept = [state(v3.dense_parameters, v3.routed_parameters, int(n), 1, pp, 64, zero) / 1e9 for n in there]
    label = f"EP 64, PP {pp}, ZeRO {zero}"
    ax.plot(there, kept, "o-", color=plots.expert_color(color), lw=2, ms=5, label=label)
for name in ("h100", "gb200", "gb300"):
    size = machine(name).memory / 1e9
    ax.axhline(size, color=plots.INK, lw=0.8, ls="--")
    ax.annotate(f"{machine(name).name.split()[0]}, {size:.0f} GB", (56, size + 3), va="bottom", fontsize=9)
ax.set_xscale("log", base=2)
ax.set(
    xticks=counts,
    xticklabels=counts,
    xlabel="GPUs",
    ylabel="GB per GPU, state alone",
    ylim=(0, 380),
    xlim=(54, 2300),
)
ax.minorticks_off()
ax.legend(frameon=False, loc="upper right", ncols=2, fontsize=9)
plots.show(
    fig,
    "ZeRO 1 stops at 6 bytes a parameter: beyond it only PP, EP or ZeRO 3 help",
)

# %% [markdown]
# ### Question 10.q5
#
# EP 64, PP 1, ZeRO 1: from 64 GPUs to 2,048. What does not shrink?
#
# **a** the optimizer's states · **b** the activations · **c** weights and gradients

# %%
quiz(
    "10.q5",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# Is such arithmetic true? XLA says exactly what a compiled program keeps. The package has its figures for a step of
# DeepSeek-V3 without MTP, compiled for 256 GPUs and never run: float32 weights and two bfloat16 moments, sharded over
# all GPUs, gradients among the temporaries. How many gigabytes are the program's arguments, on each GPU?

# %%
compiled = next(row for row in memory.compiled_rows() if row["name"] == "256 GB200")
predict(
    "state on each of 256 GPUs, as compiled",
    ### BEGIN ANSWER
    (4 + 2 + 2) * v3.without_mtp().parameters / 256 / 1e9,
    ### END ANSWER
    measured=compiled["arguments_gb"],
    unit="GB",
    within=0.001,
)

# %% [markdown]
# State is exact arithmetic. Temporaries are the compiler's plan and have no closed form: the package's formula for them
# is off by a median of a few per cent on programs it was fitted to, and activations of real runs are harder still.

# %%
used = next(run for run in published.training_runs() if run.id == "mbcard-dsv3-gb200-256-mxfp8-forced")
kept = memory.layout_memory(used.shape, published.layout_of(used))
print(f"A published layout: {published.layout_of(used).describe()}, {used.row['hardware']['gpus']} GB200.")
for part, size in kept.parts.items():
    print(f"  {part:<34}{size / 1e9:>6.0f} GB")
print(
    f"  {'together':<34}{kept.total / 1e9:>6.0f} GB ± {kept.error:.0%} (median error on published memory figures)"
)
print(
    f"Compiled programs: median error {memory.compiled_error():.1%} over {len(memory.compiled_errors())}, in sample."
)

# %% [markdown]
# ## Pipelines
#
# PP cuts the layers into p stages. A micro-batch goes forward through all, then backward; with m micro-batches under
# way, every stage has work most of the time. In which order should a stage take them? All forwards first (GPipe) is
# simple, and keeps m activations. **1F1B** (arXiv 2104.04473) keeps p at most, in the same time.
#
# ## Exercise 10.7: one forward, one backward
#
# Write down what a stage does. · difficulty ●●● · 15 minutes · used again in 12
#
# A stage first takes as many forwards as there are stages after it. Then it alternates: one forward, one backward. At
# the end the backwards that are left. By hand, three stages and four micro-batches:
#
# | stage | order |
# |---|---|
# | 0 | F0 F1 F2 B0 F3 B1 B2 B3 |
# | 1 | F0 F1 B0 F2 B1 F3 B2 B3 |
# | 2 | F0 B0 F1 B1 F2 B2 F3 B3 |
#
# (F0 F1 F2 B0: two forwards ahead, then the first pair is F2 B0.)


# %%
def stage_order(stage, stages, micro_batches):
    """What a pipeline stage does, in order, under 1F1B.

    Args:
      stage: s, from 0.
      stages: p.
      micro_batches: m, perhaps fewer than p.

    Returns: a list of 2 m names: "F0" for the forward of micro-batch 0, "B0" for its backward.
    """
    ### BEGIN SOLUTION
    warm = min(stages - stage - 1, micro_batches)
    order = [f"F{i}" for i in range(warm)]
    for i in range(micro_batches - warm):
        order += [f"F{warm + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(micro_batches - warm, micro_batches)]
    ### END SOLUTION


check("10.7", stage_order)  # stuck? hint("10.7")

# %% [markdown]
# Run it. Below, each stage is a queue, a task starts when its stage is free and its neighbour has delivered, and a
# backward takes twice as long as a forward. Simulated: no time is that of a GPU.


# %%
def package_order(stage, stages, micro_batches):
    warm = min(stages - stage - 1, micro_batches)
    pairs = [name for i in range(micro_batches - warm) for name in (f"F{warm + i}", f"B{i}")]
    return (
        [f"F{i}" for i in range(warm)] + pairs + [f"B{i}" for i in range(micro_batches - warm, micro_batches)]
    )


order_of = yours("10.7", package_order)


def timeline_of(stages, micro_batches, forward=1.0, backward=2.0):
    tasks = []
    for s in range(stages):
        for name in order_of(s, stages, micro_batches):
            kind, m = name[0], name[1:]
            if kind == "F":
                seconds, word, after = forward, "forward", [f"F{s - 1}.{m}"] * (s > 0)
            else:
                seconds, word = backward, "backward"
                after = [f"F{s}.{m}" if s == stages - 1 else f"B{s + 1}.{m}"]
            tasks.append(simulate.Task(f"{kind}{s}.{m}", f"stage {s}", seconds, tuple(after), word))
    return simulate.run(tasks)


def draw_timeline(ax, timeline, title):
    names = sorted(timeline.resources())
    for event in timeline.events:
        place = int("".join(c for c in event.name.split(".")[0] if c.isdigit())) // len(names)
        color = plots.expert_color((0 if event.kind == "forward" else 1) + 3 * place)
        place = (names.index(event.resource), event.end - event.start)
        ax.barh(place[0], place[1], left=event.start, color=color, edgecolor=plots.PAPER, lw=0.6, height=0.86)
    ax.set(
        yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5), xlabel="time, in forwards"
    )
    ax.set_title(f"{title}: idle {100 * timeline.idle_share('stage 0'):.0f} %", fontsize=9.5, loc="left")


fig, axes = plots.figure(8.6, 2.5, columns=2)
draw_timeline(axes[0], timeline_of(4, 8), "your order")
draw_timeline(axes[1], simulate.pipeline(4, 8, 1.0, 2.0, chunks=2), "two chunks a stage, interleaved")
for ax in axes:
    ax.set_xlim(0, 34)
plots.show(fig, "Filling and draining is the bubble; two separate chunks a stage (other colours) halve it")

# %% [markdown]
# The step takes m + p - 1 turns of forward and backward, m of which a stage works. With v chunks a stage the pipeline
# fills in smaller steps: m + (p - 1) / v. Predict what share of the step stage 0 of 4 idles, with 16 micro-batches and
# one chunk.

# %%
predict(
    "stage 0 idles, % of the step",
    ### BEGIN ANSWER
    100 * 3 / (16 + 3),
    ### END ANSWER
    measured=round(100 * timeline_of(4, 16).idle_share("stage 0"), 2),
    within=0.001,
)

# %% [markdown]
# Chunks are not free. A stage has v times the messages, and the first stage keeps p + (p - 1) / v micro-batches instead
# of p.
#
# ## Parallel folding
#
# Attention wants TP and CP inside the NVLink domain; experts want EP there, and TP only if they must. If experts can
# only be spread over copies of attention, EP must divide DP, and GPUs multiply: TP · CP · EP at least. **Parallel
# folding** (arXiv 2504.14960) gives the same GPUs two meshes, one for each part of a layer. Only the pipeline axis is
# shared.
#
# ## Exercise 10.8: two meshes
#
# Lay both parts over the same GPUs. · difficulty ●● · 10 minutes · used again in 11, 12
#
# Both meshes start with the stage, then come the copies, then the groups that talk most, so that they are neighbours.
# By hand, 8 GPUs, PP 1, TP 2 CP 1, EP 4 ETP 1: attention is [[[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]], four copies of
# TP 2; experts are [[[[0], [1], [2], [3]], [[4], [5], [6], [7]]]], two copies of EP 4.


# %%
def fold(gpus, pp, tp, cp, ep, etp):
    """The GPU numbers of two meshes over the same GPUs.

    Args:
      gpus: numbered from 0, a stage being a run of neighbours.
      pp: pipeline stages, the same in both.
      tp, cp: tensor and context parallel sizes of attention.
      ep, etp: expert and expert-tensor parallel sizes.

    Returns: (attention [pp, dp, cp, tp], experts [pp, expert dp, ep, etp]), integer arrays, the last axis innermost; None if
      the sizes do not divide the GPUs.
    """
    ### BEGIN SOLUTION
    if gpus % (pp * tp * cp) or gpus % (pp * ep * etp):
        return None
    numbers = jnp.arange(gpus)
    return numbers.reshape(pp, -1, cp, tp), numbers.reshape(pp, -1, ep, etp)
    ### END SOLUTION


check("10.8", fold)  # stuck? hint("10.8")


# %%
def package_fold(gpus, pp, tp, cp, ep, etp):
    if gpus % (pp * tp * cp) or gpus % (pp * ep * etp):
        return None
    return np.arange(gpus).reshape(pp, -1, cp, tp), np.arange(gpus).reshape(pp, -1, ep, etp)


attention, experts = (np.asarray(mesh) for mesh in yours("10.8", package_fold)(32, 2, 4, 1, 8, 1))
fig, ax = plots.figure(8.4, 2.2)
rows_of = {"stage (PP 2)": attention.reshape(2, -1), "attention (TP 4)": attention.reshape(-1, 4)}
rows_of["experts (EP 8)"] = experts.reshape(-1, 8)
for y, groups in enumerate(rows_of.values()):
    for i, members in enumerate(groups):
        for g in members:
            color = plots.expert_color(i)
            ax.barh(y, 0.94, left=g - 0.47, height=0.8, color=color)
            ax.text(g, y, str(g), ha="center", va="center", color=ink_on(color), fontsize=7.5)
ax.set(yticks=range(3), yticklabels=rows_of, ylim=(2.5, -0.5), xlim=(-0.7, 31.7), xlabel="GPU", xticks=[])
ax.spines[["left", "bottom"]].set_visible(False)
plots.show(
    fig,
    "One colour is one group: an expert group covers two tensor-parallel groups, and none leaves its stage",
)

# %% [markdown]
# ### Question 10.q6
#
# TP 4, CP 2, EP 16, ETP 1, PP 1. How many GPUs does it take at least, folded?

# %%
quiz(
    "10.q6",
    ### BEGIN ANSWER
    16,
    ### END ANSWER
)

# %% [markdown]
# ## A model, and its error
#
# Add up what you have counted: products at a fraction of peak, experts by their rows, bytes by link, bubbles, launches.
# That is the package's step-time model. The fractions are some thirty constants that no data sheet has, so they are
# fitted, on published runs. A fit describes what it has seen. To know what it says of the rest, leave a **source** out,
# with every row of its lineage (the same model, machine and size over releases), fit on the others, and predict it.
# Then the next source.

# %%
held_out = calibrate.held_out()
summary = calibrate.summary(held_out)
fig, axes = plots.figure(8.6, 3.1, columns=2)
nvidia = np.array([row.source.startswith("megatron") for row in held_out])
spoken = np.array([row.measured for row in held_out]), np.array([row.predicted for row in held_out])
for color, (mask, label) in enumerate(((nvidia, "Megatron's pages"), (~nvidia, "all others"))):
    axes[0].plot(
        spoken[0][mask], spoken[1][mask], "o", ms=3.5, alpha=0.7, color=plots.expert_color(color), label=label
    )
ends = np.array([spoken[0].min() / 1.5, spoken[0].max() * 1.5])
axes[0].plot(ends, ends, color=plots.INK, lw=1)
band = summary["p90_abs_error"]
axes[0].fill_between(ends, ends / (1 + band), ends * (1 + band), color=plots.FAINT, zorder=0)
axes[0].set(
    xscale="log", yscale="log", xlabel="published tokens/s per GPU", ylabel="predicted, source unseen"
)
axes[0].legend(frameon=False, loc="upper left", fontsize=9)
for color, (mask, label) in enumerate(((nvidia, "Megatron's pages"), (~nvidia, "all others"))):
    off = np.sort(100 * np.abs(spoken[1][mask] / spoken[0][mask] - 1))
    axes[1].plot(
        off,
        np.linspace(0, 100, len(off)),
        color=plots.expert_color(color),
        lw=2.2,
        label=f"{label}: {len(off)}",
    )
axes[1].set(xlabel="error, %", ylabel="% of runs with less", xlim=(0, 100), ylim=(0, 102))
axes[1].legend(frameon=False, loc="lower right", fontsize=9)
plots.show(
    fig,
    f"{summary['rows']} runs, each predicted without its source: half are within {summary['median_abs_error']:.0%}, nine of "
    f"ten within {band:.0%} (grey); stacks with few rows fare worse",
)

# %% [markdown]
# ### Question 10.q7
#
# Which split says most about the run that you want to plan?
#
# **a** ten per cent of the rows, at random · **b** a whole source, with its lineage · **c** none: the error of the fit

# %%
quiz(
    "10.q7",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ## Choosing a plan
#
# For a GPU count the planner predicts *every* legal layout, step time and memory. DeepSeek-V3 on eight GPUs is a short
# story:

# %%
try:
    plan.search(v3, gb200, 8)
except SettingError as error:
    print(textwrap.fill(str(error), 100))

# %% [markdown]
# So eight H100s get DeepSeek-V2-Lite, and GB200s get V3. A learned router's imbalance is assumed, MXFP8 on Blackwell
# and FP8 on Hopper. (From here on ± is the median error of held-out predictions; nine of ten are within the second
# number.)

# %%
v2_lite = from_config(DEEPSEEK_V2_LITE, "DeepSeek-V2-Lite")
questions = (
    (v2_lite, "h100", 8, "fp8"),
    (v3, "gb200", 64, "mxfp8"),
    (v3, "gb200", 256, "mxfp8"),
    (v3, "gb200", 1024, "mxfp8"),
)
found = {
    n: plan.search(shape, machine(name), n, precision=precision) for shape, name, n, precision in questions
}
print(f"tokens/s per GPU, ± {model.median_abs_error:.0%}, nine of ten within {model.p90_abs_error:.0%}")
for n, answer in found.items():
    best = answer.best
    print(f"{n:>5} {answer.machine.name.split()[0]}, {answer.shape.name}: {best.layout.describe()}")
    print(
        f"{'':>6}{best.tokens_per_second:,.0f} tokens/s, {best.tflops:.0f} TFLOPS, {best.memory.total / 1e9:.0f} GB ± "
        f"{best.memory.error:.0%}, {best.communication_share:.0%} exposed communication"
    )
    print(f"{'':>6}the fastest of {len(answer.fitting):,} that fit, of {len(answer.every):,} legal ones")

# %% [markdown]
# "The fastest of thousands" is a claim that a model with errors cannot make. One hopes that two layouts of one model
# and machine share what the model gets wrong, so that their ratio is better known than either. That can be measured, on
# pairs of published runs that differ in layout or format, by constants that saw neither:

# %%
ratios = calibrate.ratio_summary()
print(
    f"one run: off by {model.median_abs_error:.0%} in the median, {model.p90_abs_error:.0%} or less in nine of ten"
)
print(
    f"the ratio of two: off by {ratios['median_abs_error']:.0%} in the median of {ratios['questions']} questions "
    f"(one source, model, machine and size; {ratios['pairs']} pairs)"
)
parallel = ratios["parallel_pairs"], ratios["parallel_median_abs_error"]
print(f"pairs that differ in parallel sizes alone: {parallel[0]}, off by {parallel[1]:.0%} in the median")

# %% [markdown]
# The hope was wrong: a ratio is known no better than a run. And pairs that differ in parallel sizes alone, which is
# what a planner chooses, are too few to say anything kinder: hardly anybody publishes the layouts that lost. Below, two
# plans are called tied if they are closer than the second line's figure.
#
# ## Exercise 10.9: the choice
#
# Choose with a model that is wrong by a known amount. · difficulty ●● · 10 minutes · used again in 12
#
# Drop what does not fit. Of the rest, those predicted so close to the fastest that the error covers the difference are
# tied. Of the tied take the leanest: memory is predicted with an error, too, and what is left free pays for it. By
# hand, four plans, 100 GB, error 10 %:
#
# | tokens/s | GB | fits | tied |
# |---|---|---|---|
# | 1,200 | 120 | no | no |
# | 1,000 | 95 | yes | yes, the fastest that fits |
# | 950 | 60 | yes | yes: 950 · 1.1 is over 1,000 |
# | 800 | 40 | yes | no |
#
# The choice is the third.


# %%
def choose(speed, memory, capacity, error):
    """A plan, by a model that is wrong by a known amount.

    Args:
      speed: [n] float32, predicted tokens/s.
      memory: [n] float32, GB.
      capacity: GB that a plan may take.
      error: relative. A plan is tied with the fastest that fits if speed * (1 + error) is at least that one's.

    Returns: (index of the leanest tied plan, -1 if none fits; tied [n] boolean).
    """
    ### BEGIN SOLUTION
    fits = memory <= capacity
    best = jnp.where(fits, speed, 0.0).max()
    tied = fits & (speed * (1 + error) >= best)
    index = int(jnp.where(tied, memory, jnp.inf).argmin()) if bool(tied.any()) else -1
    return index, tied
    ### END SOLUTION


check("10.9", choose)  # stuck? hint("10.9")


# %%
def package_choice(speed, memory, capacity, error):
    fits = memory <= capacity
    tied = fits & (speed * (1 + error) >= jnp.where(fits, speed, 0.0).max())
    return (int(jnp.where(tied, memory, jnp.inf).argmin()) if bool(tied.any()) else -1), tied


answer = found[256]
speed = jnp.array([p.tokens_per_second for p in answer.every], jnp.float32)
size = jnp.array([p.memory.total / 1e9 for p in answer.every], jnp.float32)
capacity = (answer.machine.memory - memory.RESERVE) / 1e9
index, tied = yours("10.9", package_choice)(speed, size, capacity, model.ratio_median_abs_error)
mine = answer.every[index]
fig, ax = plots.figure(7.6, 3.2)
ax.plot(size, speed, "o", ms=2.5, color="#C8C8C0", label="legal")
ax.plot(
    size[tied], speed[tied], "o", ms=3, color=plots.expert_color(0), label="tied with the fastest that fits"
)
front = answer.pareto()
ax.step(
    [p.memory.total / 1e9 for p in front],
    [p.tokens_per_second for p in front],
    where="post",
    color=plots.INK,
    lw=1,
)
ax.plot(size[index], speed[index], "*", ms=17, color=plots.expert_color(1), label="the choice")
ax.axvline(capacity, color=plots.INK, lw=0.9, ls="--")
ax.annotate("what a GB200 has", (capacity, 200), xytext=(4, 0), textcoords="offset points", fontsize=9)
ax.set(
    xscale="log",
    xlabel=f"GB per GPU, ± {mine.memory.error:.0%}",
    ylabel=f"tokens/s per GPU, ± {model.median_abs_error:.0%}",
)
ax.set_xticks([50, 100, 200, 400, 800], ["50", "100", "200", "400", "800"])
ax.minorticks_off()
ax.set(xlim=(40, 1000), ylim=(0, None))
ax.legend(frameon=False, loc="lower right", fontsize=9)
plots.show(
    fig,
    f"256 GB200: {int(tied.sum())} plans cannot be told from the fastest; the leanest of them takes "
    f"{mine.memory.total / 1e9:.0f} GB, the fastest {answer.best.memory.total / 1e9:.0f}",
)

# %%
fastest, mine_speed = answer.best, mine.tokens_per_second / answer.best.tokens_per_second
print(f"the fastest:  {fastest.memory.total / 1e9:.0f} of {capacity:.0f} GB ± {fastest.memory.error:.0%}")
print(
    f"the choice:   {mine.memory.total / 1e9:.0f} GB, {mine_speed:.0%} ± {model.ratio_median_abs_error:.0%} of its speed"
)
print(f"              {mine.layout.describe()}, recompute {' '.join(mine.layout.recompute) or 'nothing'}")

# %% [markdown]
# The fastest fills what there is, by a memory model with an error much larger than the gap: whether it runs at all is
# open. The choice has room for that.
#
# To defend a plan is to say what every other choice would have cost. The planner changes one choice at a time and names
# the part of the step that grows, here for the fastest on 1,024. A sentence that rests on less than the error is no
# argument; one about memory, or about which part of the step grows, is.

# %%
print(f"{found[1024].best.layout.describe()}; ratios ± {model.ratio_median_abs_error:.0%}")
for sentence in plan.why(found[1024]):
    print(textwrap.fill(f"- {sentence}", 108, subsequent_indent="  "))

# %% [markdown]
# ## Plan explorer
#
# One layout at a time. On 256 GB200, find what EP does to the experts and to the network; then take H100s. Which walls
# can recompute move, and at what price? What does PP do that EP does not? When does a step stop being arithmetic?


# %%
def explorer(hardware, gpus, ep, pp, tp, micro_batch, recompute):
    gpu = machine(hardware.lower())
    names = {
        "experts' activation and norms": ("moe_act", "layernorm", "mla_up_proj"),
        "nothing": (),
        "everything": ("full",),
    }
    base = Layout(
        gpus, ep=ep, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=16 * gpus, recompute=names[recompute]
    )
    base = replace(
        base, precision="mxfp8" if gpu.peak_tflops["fp4"] else "fp8", dispatcher="hierarchical", overlap=True
    )
    base = replace(base, graphs="full", real_routing=True)
    chunks = [v for v in (8, 4, 2, 1) if not replace(base, vpp=v).problem(v3)]
    fig, axes = plots.figure(8.8, 3.1, columns=2)
    if not chunks:
        for ax in axes:
            ax.set_axis_off()
        return fig, f"Impossible: {base.problem(v3)}"
    one = plan.predict(v3, replace(base, vpp=chunks[0]), gpu)[0]
    parts = {name: 1e3 * t for name, t in one.parts.items() if t > 0.002 * one.step_seconds}
    colors = [
        plots.expert_color(5 if name in plan.COMMUNICATION else 1 if "bubble" in name else 0)
        for name in parts
    ]
    axes[0].barh(list(parts), list(parts.values()), color=colors)
    axes[0].set(xlabel="milliseconds of the step", ylim=(len(parts) - 0.5, -0.5))
    left = 0.0
    for color, (name, size) in enumerate(one.memory.parts.items()):
        axes[1].barh(0, size / 1e9, left=left, height=0.5, color=plots.expert_color(color + 8), label=name)
        left += size / 1e9
    axes[1].axvline((gpu.memory - memory.RESERVE) / 1e9, ymax=0.55, color=plots.INK, ls="--", lw=1.2)
    axes[1].set(yticks=[], ylim=(-0.4, 1.6), xlim=(0, max(1.1 * left, 1.1 * gpu.memory / 1e9)))
    axes[1].set_xlabel(f"GB per GPU ± {one.memory.error:.0%} (dashed: what there is)")
    axes[1].legend(frameon=False, loc="upper left", fontsize=8.5, ncols=2)
    axes[1].spines["left"].set_visible(False)
    verdict = "fits" if one.memory.fits(gpu.memory) else "does not fit"
    low, high = one.interval()
    caption = (
        f"{gpus} {hardware}, {one.layout.describe()}: {one.tokens_per_second:,.0f} tokens/s per GPU (nine of ten such "
        f"predictions: {low:,.0f} to {high:,.0f}), {one.tflops:.0f} TFLOPS, {one.communication_share:.0%} exposed "
        f"communication, {one.memory.total / 1e9:.0f} GB, {verdict}"
    )
    return fig, caption


explore(
    explorer,
    hardware=["GB200", "H100", "B200", "GB300"],
    gpus=[256, 64, 1024, 8192],
    ep=[64, 8, 16, 32, 128, 256],
    pp=[4, 1, 2, 8, 16],
    tp=[1, 2, 4, 8],
    micro_batch=[1, 2, 4, 8],
    recompute=["experts' activation and norms", "nothing", "everything"],
)

# %% [markdown]
# ## The ladder
#
# Two teams published how a DeepSeek-V3 became fast. The first names every step: Megatron on 256 GB200s, thirteen of
# them. The model knows a cause for some, such as a dispatcher or recompute; for fused kernels or CPU binding it
# predicts nothing. (In sample: these rows are among those that it was fitted to.)


# %%
def draw_ladder(steps, title):
    fig, ax = plots.figure(8.4, 0.42 + 0.29 * len(steps))
    y = np.arange(len(steps))
    predicted = np.array([step.predicted for step in steps])
    band = predicted / (1 + model.p90_abs_error), predicted * (1 + model.p90_abs_error)
    ax.barh(
        y, band[1] - band[0], left=band[0], height=0.7, color=plots.FAINT, label="nine of ten predictions"
    )
    known = [i for i, step in enumerate(steps) if "finer" not in step.cause]
    ax.plot(predicted, y, "|", ms=11, mew=2, color=plots.expert_color(0), label="predicted")
    ax.plot(
        predicted[known], y[known], "o", ms=5, color=plots.expert_color(0), label="with a cause in the model"
    )
    there = [(step.published, i) for i, step in enumerate(steps) if step.published]
    ax.plot(*zip(*there, strict=True), "D", ms=6, color=plots.expert_color(1), label="published")
    ax.set(yticks=y, yticklabels=[step.name for step in steps], ylim=(len(steps) - 0.4, -0.6), xlim=(0, 1650))
    ax.set_xlabel("TFLOPS per GPU")
    ax.legend(frameon=False, loc="upper right", fontsize=8.5)
    plots.show(fig, title)


steps = ladder.megatron_gb200()
climbed = steps[-1].published / steps[0].published
model_climb = steps[-1].predicted / steps[0].predicted
draw_ladder(
    steps,
    f"Published, a factor of {climbed:.2f}, of which the model has causes for {model_climb:.2f}: too fast by "
    f"{steps[0].residual:.0%} at first, too slow by {-steps[-1].residual:.0%} at last: it does not see the details between",
)

# %% [markdown]
# The second is closer to this course: JAX with Transformer Engine ("Accelerating Dropless MoE Training in JAX with
# NVIDIA Transformer Engine", NVIDIA, September 2026), 128 GPUs. Two ends are published and the order of the story. The
# steps between are the model's, and nobody has confirmed them.

# %%
steps = ladder.jax_te()
draw_ladder(
    steps,
    f"From {ladder.FIRST:.0f} to {ladder.LAST:,.0f} TFLOPS published; the model, in the story's order, misses "
    f"the first by {steps[0].residual:+.0%} and the last by {steps[-1].residual:+.0%}",
)

# %%
print(
    f"cause, by the model: the part of the step that shrinks most (a step ± {model.median_abs_error:.0%}, a part unknown)"
)
for step in steps[1:]:
    print(f"  {step.name:<52}{step.cause}")
print(textwrap.fill(ladder.discrepancy(), 108))

# %% [markdown]
# The largest step is chapter 05's: a ragged product that the compiler turned into a dense one does as many times the
# work as a GPU has experts. But the profile of that start does not fit the model. The page also says how much of its
# kernels' time was communication, and no reading of the start has both:

# %%
print(f"{'published':<60}{ladder.FIRST:>6.0f} TFLOPS {ladder.PROFILE:>5.0%} communication")
for name, tflops, share in ladder.start_readings():
    print(f"{name:<60}{tflops:>6.0f} TFLOPS {share:>5.0%}   (± {model.median_abs_error:.0%})")

# %% [markdown]
# ### Your own ladder
#
# The same climb, without a rack: `moe-course bench ladder` runs one MoE layer forward on eight simulated devices in
# seven ways, each compared with float64. Four are timed in turn, as ratios; the devices share the cores of one machine,
# so a ratio says what the work costs there and nothing about a network. The last three are judged by bytes: a CPU has
# no ragged all-to-all to time. Where a rung is slower than the one before, ask what it pads, and to what. Recorded
# once, with nothing else running. The digits belong to that JAX: under 0.12, on the same machine, the tiled rung was 7 to
# 8 times as fast as the loop. Take the order from it, and run your own.

# %%
own_ladder = recorded("ladder")
about = own_ladder.pop("about")
print(
    f"load average before: {about['load_average_before']:g} on {about['cores']} cores; a busy machine blurs ratios"
)
print(f"{about['devices']}, JAX {about['jax']}, {about['date']}")
print(
    f"{about['tokens_per_rank']} tokens a device, {about['experts']} experts, {about['top_k']} picks, D {about['d_model']}"
)
print(f"{'':<22}{'over first':>11}{'over before':>12}{'bytes/token':>13}{'of first':>9}{'error':>9}")
for name, rung in own_ladder.items():
    times = [
        f"{rung[key]:.1f}x" if rung[key] else ""
        for key in ("times_faster_than_first", "times_faster_than_before")
    ]
    size = f"{rung['bytes_per_token']:>13,.0f}{rung['bytes_of_first']:>9.2f}{rung['error']:>9.0e}"
    print(f"{name:<22}{times[0]:>11}{times[1]:>12}{size}")

# %% [markdown]
# A row of the deduplicated exchange carries, beside its D numbers there and D back, 64 bytes of weights and expert
# numbers. By how much does MXFP8 there shrink the bytes of bfloat16 there and back? Predict the ratio in per cent, for
# this D.

# %%
predict(
    "bytes of MXFP8 there over those of bfloat16, %",
    ### BEGIN ANSWER
    100 * (256 * 33 / 32 + 64 + 2 * 256) / (2 * 256 + 64 + 2 * 256),
    ### END ANSWER
    measured=round(100 * own_ladder["MXFP8 on the wire"]["bytes_of_before"], 1),
    within=0.01,
)

# %%
fig, axes = plots.figure(8.8, 2.8, columns=2)
names = list(own_ladder)
y = np.arange(len(names))
speed_up = [own_ladder[name]["times_faster_than_first"] or 0 for name in names]
bytes_per_token = [own_ladder[name]["bytes_per_token"] / 1e3 for name in names]
axes[0].barh(y, speed_up, color=plots.expert_color(0))
for place, value in zip(y, speed_up, strict=True):
    axes[0].text(value + 0.4, place, f"{value:.1f}" if value else "not timed", va="center", fontsize=9)
axes[1].barh(y, bytes_per_token, color=plots.expert_color(1))
axes[0].set(
    yticks=y,
    yticklabels=names,
    ylim=(6.6, -0.6),
    xlim=(0, 1.2 * max(speed_up)),
    xlabel="times faster than the loop",
)
axes[1].set(yticks=[], ylim=(6.6, -0.6), xlabel="kB sent per token, both ways")
fastest = max(names, key=lambda name: own_ladder[name]["times_faster_than_first"] or 0)
plots.show(
    fig,
    f"Work first, then bytes: {fastest} is {max(speed_up):.0f} times the loop's speed on simulated devices; dispatch and "
    f"formats leave {bytes_per_token[-1] / bytes_per_token[0]:.0%} of its bytes",
)

# %% [markdown]
# ### To 1,024 GPUs, and beyond
#
# The same page reports 97 % of the speed per GPU at 1,024 GPUs: **weak scaling**, six sequences for each GPU. The model
# knows bytes, and those hide; what was lost is stragglers, jitter, latency. Carried on, a per cent or so is lost with
# each doubling. But the batch grows with the GPUs, and a model has a batch that it learns well from. DeepSeek-V3's was
# 15,360 sequences.

# %%
weak, strong = ladder.beyond(), ladder.strong_scaling()
wall = ladder.end_of_weak_scaling()
carried_at_wall = float(np.interp(np.log2(wall), np.log2([n for n, *_ in weak]), [c for *_, c in weak]))
fig, ax = plots.figure(7.6, 2.9)
ax.plot([n for n, *_ in weak], [100 * c for *_, c in weak], "o--", color=plots.expert_color(0), ms=5)
ax.annotate("published loss carried on", (weak[1][0], 101.5), fontsize=9)
ax.plot(
    [128, 1024], [100, 100 * ladder.SCALED / ladder.LAST], "D", ms=7, color=plots.expert_color(1), zorder=3
)
ax.annotate("published", (1024, 100 * ladder.SCALED / ladder.LAST - 4), ha="center", va="top", fontsize=9)
fixed = [n for n, _ in strong], [100 * carried_at_wall * v for _, v in strong]
ax.plot(*fixed, "o-", color=plots.expert_color(2), ms=5)
ax.annotate("batch fixed, the model", (fixed[0][-1], fixed[1][-1] - 3), ha="right", va="top", fontsize=9)
ax.axvline(wall, color=plots.INK, lw=0.9, ls="--")
ax.annotate(
    f"{wall:,} GPUs: 15,360 sequences\nare 6 for each",
    (wall, 56),
    xytext=(-6, 0),
    textcoords="offset points",
    ha="right",
    fontsize=9,
)
ax.set_xscale("log", base=2)
ticks = [128, 512, 2048, 8192, 32768]
ax.set(
    xticks=ticks,
    xticklabels=[f"{n:,}" for n in ticks],
    xlabel="GPUs",
    ylabel="speed per GPU, %",
    ylim=(50, 106),
)
ax.minorticks_off()
plots.show(
    fig,
    f"Weak scaling ends where the batch does, at {wall:,} GPUs. With the batch fixed, {strong[-1][0] // wall} times as many "
    f"have {strong[-1][1]:.0%} of that speed each, by the model (± {model.ratio_median_abs_error:.0%})",
)

# %% [markdown]
# ## What the model cannot see
#
# - **Details.** The published ladder above: between its steps lie kernels, launches and CPU work, which the model knows
#   as one constant each.
# - **Where ranks lie.** It takes groups of 64 to be inside a rack of 72. You know by now that numbering decides.
# - **Balance.** Published pairs of forced balance and a learned router differ by little or by half, with capacity and
#   graphs. The model has one factor for that, or the skew that you measured (`Layout(skew=...)`, chapter 03).
# - **Age.** The first ladder is one model on one machine, and months of work. The model has two constants for that, and
#   a date.
# - **Other machines, other stacks.** Most rows are one vendor's software. Where rows are few, the error is larger, as
#   you saw.
# - **Whether it learns.** Tokens per second say nothing about a loss.
#
# A skew, for instance. Let the popularity of DeepSeek-V3's experts fall off like rank to the power -0.5 and see what
# the busiest of 64 ranks has to do, and what becomes of the step. No published run gives its skew, so the last line's ±
# is that of runs without one: it has not been checked against anything.

# %%
popular = np.random.default_rng(12).permutation(np.arange(1, 257) ** -0.5)
skew = comm.busiest_rank(popular / popular.sum(), 64)
base = found[256].best.layout
for name, layout in (
    ("forced balance", replace(base, real_routing=False, ep=64)),
    ("a learned router, as published pairs have it", replace(base, ep=64)),
    (f"the busiest rank has {skew:.2f} times the mean", replace(base, ep=64, skew=skew)),
):
    one = plan.predict(v3, layout, gb200)[0]
    print(f"{name:<46}{one.tokens_per_second:>7,.0f} tokens/s ± {model.median_abs_error:.0%}")

# %% [markdown]
# ## The Transformer Engine way
#
# TE does not plan; it obeys. What a layout says goes into the mesh, and TE is told which axis means what. **Not run
# here**: the calls, as text.
#
# | a layout has | in JAX with TE |
# |---|---|
# | DP, FSDP | mesh axes; `MeshResource(dp_resource=, fsdp_resource=)` |
# | TP, and sequences cut by it | `tp_resource=`, `tpsp_resource=` |
# | CP | `cp_resource=`, used by fused attention |
# | EP | `ep_resource=`; innermost in the mesh, see 10.5 |
# | PP | `pp_resource=`; the schedule is yours, see 10.7 |
# | precision | `autocast(recipe=MXFP8BlockScaling())`, chapter 08 |
# | dispatcher | `transformer_engine.jax.ep`, chapter 07 |
# | recompute | `jax.checkpoint` with a policy of names, chapter 09 |
#
# ```python
# import jax
# import numpy as np
# from jax.sharding import Mesh
# from transformer_engine.jax import MeshResource, autocast
#
# attention, experts = fold(gpus, pp, tp, cp, ep, 1)  # yours, 10.8: the same GPUs, twice
# devices = np.array(jax.devices())
# dense_mesh = Mesh(devices[attention[stage]], ("fsdp", "cp", "tp"))
# expert_mesh = Mesh(devices[experts[stage]][..., 0], ("fsdp", "ep"))
# with expert_mesh, autocast(enabled=True, mesh_resource=MeshResource(fsdp_resource="fsdp", ep_resource="ep")):
#     ...
# ```
#
# Two meshes in one program are more than this course's trainer does: it folds by keeping TP and CP at 1, where
# attention's copies and the experts' ranks are the same GPUs (`moe_course/parallel.py`: axes data, fsdp, expert).
#
# ## Bug museum
#
# ### Exhibit 1: work that nobody does
#
# Two reports: FLOPs by all parameters (alibaba/Pai-Megatron-Patch #485; chapter 01 had another), and the embedding
# table, which is looked up, counted as a matrix product (huggingface/trl #5698). Training FLOPs per token, in GFLOP:

# %%
shapes = published.shapes()
print(f"{'':<20}{'right':>8}{'+ lookup':>10}{'all experts':>13}")
for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    shape = shapes[name]
    terms = flops.published_flops(shape, 4096)
    right = sum(terms.values())
    lookup = right + 6 * shape.d_model * shape.vocab
    everyone = right + terms["routed experts"] * (shape.experts / shape.top_k - 1)
    print(f"{shape.name:<20}{right / 1e9:>8.1f}{100 * (lookup / right - 1):>9.1f}%{everyone / right:>12.1f}x")

# %% [markdown]
# ### Question 10.q8
#
# Which test finds the last column's mistake in any model, without knowing the right answer?
#
# **a** MFU is at most 100 % · **b** twice as many experts, the same picks: no more FLOPs, but for the router · **c**
# twice the sequence: attention's core doubles per token

# %%
quiz(
    "10.q8",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %% [markdown]
# ### Exhibit 2: forced balance
#
# A benchmark wants balanced experts, so it replaces the router: token t picks E/K apart, from t on. Every expert in use
# gets the same number of rows. (vllm-project/afd-plugin #156, sgl-project/sglang #37741; a cousin with duplicates is
# AI-Hypercomputer/maxtext #2723.) Eight tokens a rank, 256 experts, 8 picks:


# %%
def museum_picks(tokens, experts, top_k):
    return (np.arange(tokens)[:, None] + np.arange(top_k) * (experts // top_k)) % experts


def dealt_picks(tokens, experts, top_k, ranks):  # rank by rank, then expert by expert
    deal = np.arange(tokens * top_k).reshape(tokens, top_k)
    return deal % ranks * (experts // ranks) + deal // ranks % (experts // ranks)


print("rows of each rank, EP:".ljust(32), *(f"{ranks:>12}" for ranks in (4, 8, 16, 32)))
for name in ("the exhibit", "dealt to ranks in turn"):
    cells = []
    for ranks in (4, 8, 16, 32):
        picks = museum_picks(8, 256, 8) if name == "the exhibit" else dealt_picks(8, 256, 8, ranks)
        load = np.bincount(picks.ravel() // (256 // ranks), minlength=ranks)
        cells.append(f"{load.min()} to {load.max()}")
    print(name.ljust(32), *(f"{cell:>12}" for cell in cells))

# %%
load = np.bincount(museum_picks(8, 256, 8).ravel() // 16, minlength=16)
fig, axes = plots.figure(8.6, 2.6, columns=2)
for ax, (name, rows_here) in zip(
    axes, {"the exhibit": load, "dealt in turn": np.full(16, 4)}.items(), strict=True
):
    happened = simulate.moe_layer(list(rows_here[:6] / 4), attention=0.5, dispatch=0.3, combine=0.3)
    for event in happened.events:
        rank = int(event.resource.split()[1])
        color = plots.expert_color({"attention": 4, "experts": 0}.get(event.name.split()[0], 5))
        ax.barh(
            rank, event.end - event.start, left=event.start, color=color, edgecolor=plots.PAPER, height=0.8
        )
    ax.set(
        yticks=range(6), ylim=(5.6, -0.6), xlim=(0, 3.3), xlabel="time (experts of 4 rows: 1)", ylabel="rank"
    )
    ax.set_title(f"{name}: {happened.makespan:.1f}", loc="left", fontsize=9.5)
plots.show(
    fig,
    "EP 16, the first six ranks, simulated: half of them idle, the others take twice as long, and the layer waits",
)

# %% [markdown]
# ### Question 10.q9
#
# Where does it show?
#
# **a** in the load of the experts that are in use · **b** at EP 4 or 8 · **c** with more ranks than picks

# %%
quiz(
    "10.q9",
    ### BEGIN ANSWER
    "c",
    ### END ANSWER
)

# %% [markdown]
# ### Exhibit 3: the wrong peak
#
# No one report: this one is everywhere. The same published run, FP8 products on 256 GPUs, by three peaks of its
# machine.

# %%
run = next(run for run in published.training_runs() if run.id == "mbcard-dsv3-gb300-256-mxfp8-forced")
gpu = machine(run.row["hardware"]["gpu"])
reached = run.row["measured"]["tflops_per_gpu"]
print(f"{run.shape.name} on {run.row['hardware']['gpus']} {gpu.name}: {reached:,.0f} TFLOPS per GPU is")
for name, peak in (
    ("bfloat16", gpu.peak("bf16")),
    ("FP8", gpu.peak("fp8")),
    ("FP8 with 2:4 sparsity, as adverts have it", 2 * gpu.peak("fp8")),
):
    print(f"  {reached / peak:.0%} of {peak:,.0f}, the peak of {name}")

# %% [markdown]
# ### Question 10.q10
#
# Which is its MFU?
#
# **a** that of FP8 · **b** that of bfloat16 · **c** that with sparsity

# %%
quiz(
    "10.q10",
    ### BEGIN ANSWER
    "a",
    ### END ANSWER
)

# %% [markdown]
# Print the peak, its format and the formula beside every MFU. The package's reports do: `MFU_FORMULA` is in
# `moe_course/scaling/flops.py`.
#
# ## What changed in the package
#
# `moe_course/scaling/` is now yours to read, and nothing in it imports JAX.
#
# - `flops.py` and `shape.py` count any published model by each source's formula; a test compares with XLA's own count
#   of a compiled step. `hardware.py` and `published.py` hold the data, every figure with its source.
# - `comm.py` is your fit and your closed forms, with all-reduce and the other collectives. `memory.py` is yours with
#   activations, buffers and micro-batches in flight, and knows its error. `layout.py` says why a layout is impossible.
# - `costs.py` is the step as a sum, `calibrate.py` fits its constants and leaves sources out, `plan.py` searches and
#   says why.
# - `simulate.py` makes a step happen in time; tests hold the closed form against it. `ladder.py` has both ladders.
# - `moe-course plan --model deepseek-v3 --hardware gb200 --gpus 1024` prints the table, `--plot` draws it, and
#   `moe-course bench planner` prints every error of this chapter.
#
# ## Further reading
#
# - PaLM, arXiv 2204.02311, appendix B: MFU. DeepSeek-V2, arXiv 2405.04434: MLA.
# - ZeRO, arXiv 1910.02054. Megatron-LM pipelines, arXiv 2104.04473: 1F1B and interleaving. Sequence parallelism, arXiv
#   2205.05198.
# - MoE Parallel Folding, arXiv 2504.14960. Scalable Training of MoE Models with Megatron Core, arXiv 2603.07685.
# - DeepSeek-V3, arXiv 2412.19437, and Insights into DeepSeek-V3, arXiv 2505.09343: the same run by two formulas.
# - "How to Scale Your Model", Google DeepMind, 2025: rooflines and collectives for TPUs.
#
# Next: 11, where the whole model is yours.
