"""NVIDIA Transformer Engine behind this package's contracts. Only this folder imports ``transformer_engine``.

``available()`` says whether it can be used here and, if not, why, in words. :data:`OPS` says which call runs on which
GPU. The adapters check shapes and dtypes themselves, for TE lets wrong ones through until the kernel runs:

=====================  ==================================================  ====================================
adapter                what it is                                          stands in for
=====================  ==================================================  ====================================
``route``              fused scores and top-k                              ``moe_course.routing.route``
``balance``            fused load balancing loss                           ``moe_course.balance``
``permute, unpermute``  Triton kernels: token order <-> expert order       ``moe_course.grouping``
``grouped_gemm``       cuBLAS grouped GEMM, bf16 and MXFP8                 ``moe_course.grouped_gemm``
``dense``              one GEMM, bf16, FP8, MXFP8                          ``jnp.matmul``
``layernorm_mlp``      RMSNorm, SwiGLU MLP                                 ``layers.linear.SwiGLU``
``dispatch, combine``  NCCL EP: tokens to experts and back                 ``moe_course.dispatch``
``moe``                the whole layer in one call                         ``layers.moe.MoE``
``remat_policy``       checkpoint policies that see TE's GEMMs             ``jax.checkpoint_policies``
=====================  ==================================================  ====================================

An expert-parallel exchange (``dispatch``, ``combine``, ``moe``) takes an ``ExpertParallel``, one ``bootstrap`` per
process, and ``mesh_resources`` around all of training. Written against TE 2.20.2. Nothing here has run on a GPU:
``make test-te`` lowers every call for Hopper and Blackwell on a machine without one and checks numbers through
stand-ins. Importing this imports neither TE nor JAX.
"""

import importlib

from moe_course.te.capability import (
    ARCHITECTURES,
    INSTALL,
    OPS,
    TESTED,
    Availability,
    Machine,
    architecture,
    available,
    examine,
    table,
    why_not,
)

_ADAPTERS = {
    "route": "router",
    "balance": "router",
    "permute": "rows",
    "unpermute": "rows",
    "Permuted": "rows",
    "grouped_gemm": "matmul",
    "dense": "matmul",
    "layernorm_mlp": "matmul",
    "ExpertParallel": "expert_parallel",
    "Received": "expert_parallel",
    "bootstrap": "expert_parallel",
    "mesh_resources": "expert_parallel",
    "receive_capacity": "expert_parallel",
    "dispatch": "expert_parallel",
    "combine": "expert_parallel",
    "moe": "layer",
    "remat_policy": "remat",
}


def __getattr__(name: str):
    """The adapters, imported when first used: they need JAX, and ``moe-course doctor`` must not."""
    if name not in _ADAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ADAPTERS[name]}"), name)


__all__ = [
    "ARCHITECTURES",
    "INSTALL",
    "OPS",
    "TESTED",
    "Availability",
    "Machine",
    "architecture",
    "available",
    "examine",
    "table",
    "why_not",
    *_ADAPTERS,
]
