"""TE's compiled JAX extension as a plain module, for a machine that has TE's Python sources (1 MB) and not the rest.

``pip install --no-deps transformer-engine==2.20.2 pydantic`` and ``MOE_COURSE_TE=python pytest tests/te`` run the
lowering and number tests on TE's own Python, with this in place of its library: the enumerations as ``pybind.cpp`` and
``misc.h`` have them, and made-up answers to the questions that TE asks a GPU. What the library itself would say
(which cuBLAS it was built with, its workspace sizes, its FFI targets) is not tested so; ``make test-te`` does.
"""

import enum
import importlib
import os
import sys
import types
import warnings

ENUMERATIONS = {
    "DType": "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1",
    "JAXX_Scaling_Mode": (
        "NO_SCALING DELAYED_TENSOR_SCALING MXFP8_1D_SCALING CURRENT_TENSOR_SCALING NVFP4_1D_SCALING NVFP4_2D_SCALING"
    ),
    "JAXX_Quantize_Layout": "ROWWISE COLWISE ROWWISE_COLWISE",
    "JAXX_Score_Function": "SIGMOID SOFTMAX SQRTSOFTPLUS",
    "JAXX_Routing_Map_Format": "BYTEMAP BITMAP_U8",
    "JAXX_Collective_Op": "NONE ALL_GATHER REDUCE_SCATTER",
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS",
    "NVTE_Mask_Type": (
        "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK "
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
    ),
    "NVTE_QKV_Layout": (
        "NVTE_BS3HD NVTE_BSHD_BS2HD NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_THD_T2HD NVTE_THD_THD_THD NVTE_QKV_Layout_NOT_SET"
    ),
    "NVTE_QKV_Format": "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_QKV_Format_NOT_SET",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_Activation_Type": (
        "GELU GEGLU GLU SILU SWIGLU RELU REGLU QGELU QGEGLU SRELU SREGLU CLAMPED_SWIGLU"
    ),
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
    "NVTE_Norm_Type": "LayerNorm RMSNorm",
}
ANSWERS = {
    "registrations": {},
    "get_cudnn_version": 92801,
    "get_cudnn_frontend_version": 13200,
    "get_cublasLt_version": 131000,
    "get_cuda_version": 13050,
    "get_num_compute_streams": 4,
    "get_cgemm_num_max_streams": 3,
    "get_grouped_gemm_setup_workspace_size": 1024,
    "is_collective_gemm_with_cublasmp": False,
    "nvte_built_with_cublasmp": False,
    "is_non_nt_fp8_gemm_supported": True,
    "set_ep_bootstrap_params": None,
    "initialize_cgemm_communicator": None,
    "nvte_get_qkv_format": None,
}


def install(capability: int) -> None:
    """Put the stand-in under TE and import TE with it, for a GPU of this compute capability (times ten)."""
    from moe_course.te import without_gpu

    if without_gpu._loaded is not None:
        assert without_gpu._loaded == capability
        return
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no CUDA library is loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no extension, which is why we are here
        common = importlib.import_module("transformer_engine.common")
        stand_in = _module(capability)
        sys.modules["transformer_engine_jax"] = stand_in
        common.load_framework_extension = lambda framework: None
        importlib.import_module("transformer_engine.jax")
    without_gpu._answer_for(capability)
    without_gpu._loaded = capability


def _module(capability: int) -> types.ModuleType:
    module = types.ModuleType("transformer_engine_jax")
    for name, members in ENUMERATIONS.items():
        setattr(module, name, enum.IntEnum(name, members.split(), start=0))
    for name, answer in ANSWERS.items():
        setattr(module, name, lambda *_, _answer=answer, **__: _answer)
    module.get_device_compute_capability = lambda gpu_id=0: capability
    return module
