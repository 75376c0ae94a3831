"""Transformer Engine's calls in plain JAX, as their documentation and sources describe them, for machines without it.

Nothing here comes from this package. What TE leaves unwritten is NaN here, so an adapter that reads it fails.
Parameters are those of :data:`moe_course.te.native.CALLS`; a test compares.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CAPABILITY = 100


def fused_topk_with_score_function(
    logits,
    topk,
    use_pre_softmax=False,
    num_groups=-1,
    group_topk=-1,
    scaling_factor=1.0,
    score_function="softmax",
    expert_bias=None,
    compute_aux_scores=False,
    routing_map_format="bytemap",
):
    """As ``fused_topk_with_score_function.cu``: groups are scored by what the choice compares, weights by the rest."""
    assert logits.dtype == jnp.float32
    assert isinstance(scaling_factor, float)
    num_tokens, num_experts = logits.shape
    compared = logits
    if score_function == "sigmoid":
        compared = jax.nn.sigmoid(logits)
    elif use_pre_softmax:
        compared = jax.nn.softmax(logits, axis=-1)
    scores = compared
    if expert_bias is not None:
        assert score_function == "sigmoid"
        compared = compared + expert_bias[None]
    if group_topk > 0:
        groups = compared.reshape(num_tokens, num_groups, -1)
        group_scores = lax.top_k(groups, topk // group_topk)[0].sum(-1)
        best = jax.nn.one_hot(lax.top_k(group_scores, group_topk)[1], num_groups).sum(1) > 0
        compared = jnp.where(jnp.repeat(best, num_experts // num_groups, axis=1), compared, -jnp.inf)
    chosen = jax.nn.one_hot(lax.top_k(compared, topk)[1], num_experts).sum(1) > 0
    if score_function == "softmax" and not use_pre_softmax:
        probs = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=-1)
    else:
        probs = jnp.where(chosen, scores, 0.0)
        if score_function == "sigmoid" and topk > 1:
            probs = probs / (probs.sum(-1, keepdims=True) + 1e-20)
    return probs * scaling_factor, chosen


def fused_moe_aux_loss(probs, tokens_per_expert, topk, coeff):
    assert probs.dtype == jnp.float32
    assert tokens_per_expert.dtype == jnp.int32
    rows, num_experts = probs.shape
    total = (probs.sum(0) * tokens_per_expert.astype(jnp.float32)).sum()
    return total * (num_experts * coeff / (topk * rows * rows))


def token_dispatch(inp, routing_map, num_out_tokens, probs=None, align_size=None):
    assert routing_map.dtype == jnp.int32
    assert routing_map.ndim == 2
    assert num_out_tokens > 0
    num_tokens, num_experts = routing_map.shape
    align = align_size or 1
    num_rows = (num_out_tokens + num_experts * (align - 1)) // align * align
    counts = routing_map.sum(0, dtype=jnp.int32)
    sizes = -(-counts // align) * align
    starts = jnp.cumsum(sizes) - sizes
    rank = jnp.cumsum(routing_map, axis=0) - routing_map
    row = jnp.where(routing_map > 0, starts[None] + rank, num_rows)  # [T, E]
    # Padding is zeroed where there is any; without, TE writes only the rows that hold a token.
    fill = 0.0 if align_size else jnp.nan
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    token_of_row = jnp.full(num_rows, num_tokens, jnp.int32).at[row].set(token, mode="drop")
    expert = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[None], row.shape)
    expert_of_row = jnp.zeros(num_rows, jnp.int32).at[row].set(expert, mode="drop")
    empty = token_of_row == num_tokens
    rows = jnp.where(empty[:, None], fill, inp.at[token_of_row].get(mode="fill", fill_value=0)).astype(
        inp.dtype
    )
    weights = probs.at[token_of_row, expert_of_row].get(mode="fill", fill_value=0)
    row_id_map = jnp.concatenate([row, routing_map, counts.sum(keepdims=True).repeat(num_tokens)[:, None]], 1)
    return rows, jnp.where(empty, fill, weights), row_id_map, starts if align_size else None, sizes


def token_combine(inp, row_id_map, merging_probs=None, pad_offsets=None):
    num_experts = (row_id_map.shape[1] - 1) // 2
    total = jnp.zeros((row_id_map.shape[0], inp.shape[1]), jnp.float32)
    for expert in range(num_experts):
        copy = inp.at[row_id_map[:, expert]].get(mode="fill", fill_value=0).astype(jnp.float32)
        total = total + (copy if merging_probs is None else copy * merging_probs[:, expert, None])
    return total.astype(inp.dtype)


def _live(sizes, num_rows):
    return (jnp.arange(num_rows, dtype=jnp.int32) < sizes.sum())[:, None]


@jax.custom_vjp
def _grouped(x, kernel, sizes):
    out = lax.ragged_dot(jnp.where(_live(sizes, len(x)), x, 0), kernel, sizes)
    return jnp.where(_live(sizes, len(x)), out, jnp.nan).astype(x.dtype)


def _grouped_backward(saved, d_out):
    x, kernel, sizes = saved
    live = _live(sizes, len(x))
    x, d_out = jnp.where(live, x, 0), jnp.where(live, d_out, 0).astype(x.dtype)
    d_x, d_kernel = jax.vjp(lambda x, kernel: lax.ragged_dot(x, kernel, sizes), x, kernel)[1](d_out)
    return jnp.where(live, d_x, jnp.nan).astype(x.dtype), d_kernel, None


_grouped.defvjp(lambda *a: (_grouped(*a), a), _grouped_backward)


def grouped_dense(
    x,
    kernel,
    group_sizes,
    contracting_dims=((1,), (1,)),
    bias=None,
    precision=None,
    preferred_element_type=None,
    group_offset=None,
    quantizer_set=None,
    kernel_fsdp_info=(None, -1),
):
    """Rows past the groups are never read and never written, forward or backward."""
    assert contracting_dims == ((1,), (1,))
    assert bias is None
    assert group_sizes.dtype == jnp.int32
    return _grouped(x, kernel, group_sizes)


def dense(
    x,
    kernel,
    bias=None,
    contracting_dims=((1,), (0,)),
    transpose_batch_sequence=False,
    input_axes=None,
    kernel_axes=None,
    output_axes=None,
    collective_op_set=None,
    quantizer_set=None,
):
    return lax.dot_general(x, kernel, (contracting_dims, ((), ())))


def layernorm_mlp(
    x,
    gamma,
    beta,
    kernels,
    biases,
    norm_type,
    zero_centered_gamma=False,
    epsilon=1e-6,
    transpose_batch_sequence=False,
    norm_input_axes=None,
    dot_1_input_axes=None,
    dot_2_input_axes=None,
    kernel_1_axes=None,
    kernel_2_axes=None,
    ffn1_ckpt_name="ffn1",
    ffn2_ckpt_name="ffn2",
    activation_type=("gelu",),
    activation_params=None,
    collective_op_sets=None,
    quantizer_sets=None,
):
    assert norm_type == "rmsnorm"
    assert beta is None
    assert biases == [None, None]
    assert activation_type == ("silu", "linear")
    assert kernels[0].shape[1] == 2
    wide = x.astype(jnp.float32)
    wide = wide / jnp.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * gamma.astype(jnp.float32)
    hidden = jnp.einsum("...d,dgf->...gf", wide.astype(x.dtype), kernels[0])
    return (jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]) @ kernels[1]


# ---------------------------------------------------------------- expert parallelism, all ranks in one place


@dataclass(frozen=True)
class EpLayerConfig:
    top_k: int
    dispatch_output_per_expert_alignment: int = 0


STARTED = {}


def ep_bootstrap(
    world_size,
    rank,
    num_experts,
    max_tokens_per_rank,
    recv_capacity_per_rank,
    hidden_dim,
    max_token_dtype=None,
    max_num_sms=0,
    drop_on_overflow=False,
):
    STARTED.update(num_experts=num_experts, capacity=recv_capacity_per_rank, tokens=max_tokens_per_rank)


def start(setup):
    """What ``EpConfig`` holds after a bootstrap."""
    STARTED.update(num_experts=setup.num_experts, ranks=setup.ranks, groups=setup.groups)


def _slots(cfg, ids, capacity):
    """Where each pick lands: device [T, K] and row there; C where it is dropped. Counts per device and expert."""
    ranks, groups, num_experts = STARTED["ranks"], STARTED["groups"], STARTED["num_experts"]
    local, align = num_experts // ranks, cfg.dispatch_output_per_expert_alignment
    group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), len(ids) // groups)[:, None]
    bucket = (group * num_experts + ids).reshape(-1)  # (group, expert), experts in order of ranks
    hot = jax.nn.one_hot(bucket, groups * num_experts, dtype=jnp.int32)
    rank = ((jnp.cumsum(hot, axis=0) - hot) * hot).sum(-1)
    counts = (-(-hot.sum(0) // align) * align).reshape(groups * ranks, local)
    starts = (jnp.cumsum(counts, axis=1) - counts).reshape(-1)
    row = starts[bucket] + rank
    return bucket.reshape(ids.shape) // local, jnp.minimum(row, capacity).reshape(ids.shape), counts


def ep_dispatch(cfg, topk_idx, tokens, topk_weights, recv_capacity_per_rank):
    capacity, width = recv_capacity_per_rank, tokens.shape[-1]
    assert tokens.dtype == jnp.bfloat16
    assert topk_weights.dtype == jnp.float32
    device, row, counts = _slots(cfg, topk_idx, capacity)
    shape = (len(counts), capacity)
    last = counts.sum(-1, keepdims=True)
    past = jnp.arange(capacity, dtype=jnp.int32)[None] >= last
    copies = jnp.broadcast_to(tokens[:, None], (*topk_idx.shape, width))
    rows = jnp.zeros((*shape, width), tokens.dtype).at[device, row].set(copies, mode="drop")
    weights = jnp.zeros(shape, jnp.float32).at[device, row].set(topk_weights, mode="drop")
    handle = jnp.stack([device, row], -1)
    nothing = jnp.array(jnp.nan, tokens.dtype)
    return (
        jnp.where(past[..., None], nothing, rows),
        jnp.where(past, jnp.nan, weights),
        handle,
        counts,
        last,
    )


def ep_combine(cfg, handle_mem, token_counts, expert_out, num_local_tokens, out_sharding=None):
    assert handle_mem.shape[0] == num_local_tokens, "the global number of tokens"
    device, row = handle_mem[..., 0], handle_mem[..., 1]
    copies = expert_out.at[device, row].get(mode="fill", fill_value=0).astype(jnp.float32)
    return copies.sum(1).astype(expert_out.dtype)


# ---------------------------------------------------------------- the rest


@dataclass(frozen=True)
class MeshResource:
    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


GUARDS = []


@contextlib.contextmanager
def global_shard_guard(resource):
    GUARDS.append(resource)
    yield
    GUARDS.pop()


def global_mesh_resource():
    assert GUARDS, "Global mesh resource is not set."
    return GUARDS[-1]


@dataclass(frozen=True)
class QuantizerSet:
    x: object
    kernel: object
    dgrad: object


def create_set(
    n_quantizer_sets=1,
    scaling_mode=None,
    fwd_dtype=None,
    bwd_dtype=None,
    is_2x2x=None,
    n_groups=None,
    checkpoint_name=None,
    fp8_recipe=None,
):
    return QuantizerSet(
        (scaling_mode, fwd_dtype, n_groups),
        (scaling_mode, fwd_dtype, n_groups),
        (scaling_mode, bwd_dtype, n_groups),
    )


def is_v2_grouped_gemm_supported(
    scaling_mode,
    dtype,
    has_bias,
    lhs_shape=None,
    rhs_shape=None,
    lhs_axis_boundary=None,
    rhs_axis_boundary=None,
):
    """As ``cpp_extensions/gemm.py``: bf16 anywhere here; MXFP8 with all collapsed sizes in tiles of 128."""
    if scaling_mode == "NO_SCALING":
        return (True, "") if dtype == jnp.bfloat16 else (False, "only bf16.")
    sizes = [
        int(np.prod(part))
        for shape, at in ((lhs_shape, lhs_axis_boundary), (rhs_shape, rhs_axis_boundary))
        for part in (shape[:at], shape[at:])
    ]
    if scaling_mode != "MXFP8_1D_SCALING" or any(size % 128 for size in sizes):
        return False, f"it only supports bf16, and MXFP8 in multiples of 128, not {scaling_mode} {sizes}."
    return True, ""


def te_gemms_saveable(prim, *_, **__):
    return prim.name.startswith("te_")


MOE_CALLS = []


def moe(x, gate_kernel, wi, wo, *, ep_axis, data_parallelism_axes=(), **settings):
    MOE_CALLS.append({"ep_axis": ep_axis, "data_parallelism_axes": data_parallelism_axes, **settings})
    demand = jnp.full((STARTED["ranks"] * STARTED["groups"], 1), 7, jnp.int32)
    return x, None, demand


def get_device_compute_capability(gpu_id=0):
    return CAPABILITY


SCALING_MODES = ("NO_SCALING", "CURRENT_TENSOR_SCALING", "MXFP8_1D_SCALING")


def namespace() -> SimpleNamespace:
    """What ``native.api()`` returns."""
    functions = [
        fused_topk_with_score_function,
        fused_moe_aux_loss,
        token_dispatch,
        token_combine,
        grouped_dense,
        dense,
        layernorm_mlp,
        EpLayerConfig,
        ep_bootstrap,
        ep_dispatch,
        ep_combine,
        MeshResource,
        global_shard_guard,
        global_mesh_resource,
        create_set,
        is_v2_grouped_gemm_supported,
        te_gemms_saveable,
        moe,
        get_device_compute_capability,
    ]
    return SimpleNamespace(
        **{f.__name__: f for f in functions},
        ScalingMode=SimpleNamespace(**{name: name for name in SCALING_MODES}),
        record_ep_bootstrap_signature_for_moe=lambda *sizes: STARTED.update(recorded=sizes),
    )
