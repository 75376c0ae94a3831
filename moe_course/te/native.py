"""The only lines that import Transformer Engine, and what its versions do differently.

:data:`CALLS` lists every function and class of TE that the adapters use, with its parameters as 2.20.2 has them.
:func:`api` hands out exactly those, so a test that reads TE's sources with ``ast`` against this list
(``tests/te/test_te_signatures.py``) sees a drift before a user does.
"""

import functools
import importlib
import inspect
from types import SimpleNamespace

from moe_course.errors import SettingError

CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fused_topk_with_score_function": (
        "jax.router",
        (
            "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias "
            "compute_aux_scores routing_map_format"
        ).split(),
    ),
    "fused_moe_aux_loss": ("jax.router", "probs tokens_per_expert topk coeff".split()),
    "token_dispatch": ("jax.permutation", "inp routing_map num_out_tokens probs align_size".split()),
    "token_combine": ("jax.permutation", "inp row_id_map merging_probs pad_offsets".split()),
    "dense": (
        "jax.dense",
        (
            "x kernel bias contracting_dims transpose_batch_sequence input_axes kernel_axes output_axes "
            "collective_op_set quantizer_set"
        ).split(),
    ),
    "grouped_dense": (
        "jax.dense",
        (
            "x kernel group_sizes contracting_dims bias precision preferred_element_type group_offset "
            "quantizer_set kernel_fsdp_info"
        ).split(),
    ),
    "layernorm_mlp": (
        "jax.layernorm_mlp",
        (
            "x gamma beta kernels biases norm_type zero_centered_gamma epsilon transpose_batch_sequence "
            "norm_input_axes dot_1_input_axes dot_2_input_axes kernel_1_axes kernel_2_axes ffn1_ckpt_name "
            "ffn2_ckpt_name activation_type activation_params collective_op_sets quantizer_sets"
        ).split(),
    ),
    "ep_bootstrap": (
        "jax.ep",
        (
            "world_size rank num_experts max_tokens_per_rank recv_capacity_per_rank hidden_dim max_token_dtype "
            "max_num_sms drop_on_overflow"
        ).split(),
    ),
    "ep_dispatch": ("jax.ep", "cfg topk_idx tokens topk_weights recv_capacity_per_rank".split()),
    "ep_combine": (
        "jax.ep",
        "cfg handle_mem token_counts expert_out num_local_tokens out_sharding".split(),
    ),
    "EpLayerConfig": ("jax.cpp_extensions.ep", "top_k dispatch_output_per_expert_alignment".split()),
    "moe": (
        "jax.moe",
        (
            "x gate_kernel wi wo wi_0_bias wi_1_bias wo_bias expert_bias num_experts num_experts_per_tok "
            "activation_type score_function use_pre_softmax num_groups group_topk scaling_factor aux_loss_coeff "
            "apply_topk_weights_early quantizer_sets ep_axis data_parallelism_axes input_axes gate_kernel_axes "
            "wi_kernel_axes wo_kernel_axes dtype recv_capacity_per_rank"
        ).split(),
    ),
    "record_ep_bootstrap_signature_for_moe": (
        "jax.moe",
        "num_experts max_tokens_per_rank recv_capacity_per_rank hidden_dim ep_size".split(),
    ),
    "get_moe_recv_capacity_per_rank": (
        "jax.moe",
        "num_experts num_experts_per_tok max_tokens_per_rank ep_size recv_capacity_factor alignment".split(),
    ),
    "MeshResource": (
        "jax.sharding",
        "dp_resource tp_resource tpsp_resource fsdp_resource pp_resource cp_resource ep_resource".split(),
    ),
    "global_shard_guard": ("jax.sharding", ["resource"]),
    "global_mesh_resource": ("jax.sharding", []),
    "QuantizerFactory.create_set": (
        "jax.quantize.quantizer",
        "n_quantizer_sets scaling_mode fwd_dtype bwd_dtype is_2x2x n_groups checkpoint_name fp8_recipe".split(),
    ),
    "ScalingMode": ("jax.quantize.scaling_modes", ()),
    "get_device_compute_capability": ("jax.quantize.device_utils", ["gpu_id"]),
    "is_v2_grouped_gemm_supported": (
        "jax.cpp_extensions.gemm",
        "scaling_mode dtype has_bias lhs_shape rhs_shape lhs_axis_boundary rhs_axis_boundary".split(),
    ),
    "te_gemms_saveable": ("jax.checkpoint_policies", ["prim"]),
}
"""Name -> (module under ``transformer_engine``, parameters or dataclass fields in order)."""

stand_in: int | None = None
"""Compute capability times ten of the GPU that :mod:`moe_course.te.without_gpu` made up, while it does."""

FAILURES = (ImportError, RuntimeError, OSError, AssertionError)
"""What importing TE raises where a library, a version or the extension is not right."""


@functools.cache
def api() -> SimpleNamespace:
    """Everything in :data:`CALLS`, imported. ``QuantizerFactory.create_set`` is ``create_set``.

    Raises :class:`SettingError` where TE does not load, with TE's own words.
    """
    try:
        import transformer_engine.jax  # noqa: F401  (loads the extension that the modules below ask)

        found = {}
        for name, (module, _) in CALLS.items():
            value = importlib.import_module(f"transformer_engine.{module}")
            for part in name.split("."):
                value = getattr(value, part)
            found[name.rpartition(".")[2]] = value
    except (*FAILURES, AttributeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(
            f"Transformer Engine does not load here: {said}. te.available() says what it needs."
        ) from error
    return SimpleNamespace(**found)


def load_error() -> str:
    """Why TE does not load, in its own words; "" if it does."""
    try:
        api()
    except SettingError as error:
        return str(error.__cause__) or type(error.__cause__).__name__
    return ""


def library_versions() -> dict[str, tuple[int, ...]]:
    """cuBLAS and cuDNN as TE sees them at run time. Only after :func:`api`."""
    import transformer_engine_jax as extension

    return {
        "cublas": _split(extension.get_cublasLt_version()),
        "cudnn": _split(extension.get_cudnn_version()),
    }


def _split(number: int) -> tuple[int, int, int]:
    """A library's version number, 130400 or 92801, as (13, 4, 0) or (9, 28, 1)."""
    return number // 10_000, number % 10_000 // 100, number % 100


def compute_capability() -> int:
    """The first GPU's compute capability times ten, as TE asks for it while tracing.

    Raises :class:`SettingError` without a GPU: TE cannot choose a kernel then.
    """
    try:
        return api().get_device_compute_capability(0)
    except RuntimeError as error:
        raise SettingError(
            "TE chooses its kernels by the GPU, and there is none here. moe_course.te.without_gpu traces, lowers "
            "and compiles without one."
        ) from error


def moe_axes(expert_axis: str, outer_axes: tuple[str, ...], resources) -> dict:
    """How this version's ``moe`` is told the mesh axes: 2.21 takes the resources, 2.20 the names."""
    if "mesh_resource" in inspect.signature(api().moe).parameters:
        return {"mesh_resource": resources}
    return {"ep_axis": expert_axis, "data_parallelism_axes": outer_axes}
