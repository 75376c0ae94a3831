"""Trace, lower and compile TE's calls on a machine without a GPU: a stub driver and made-up answers to its questions.

TE asks the GPU while it traces: which one is it, how large must the workspace be. :func:`load` answers for a GPU of a
compute capability that you name. Such programs show what TE makes of our calls (kernels, operands, attributes,
collectives after partitioning). They must never be run on a GPU: some workspace sizes in them are made up.

One capability per process: TE remembers what it was told.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moe_course.errors import RunError
from moe_course.te import native
from moe_course.te.expert_parallel import ExpertParallel, record

HANDLE_BYTES = 4096
"""Made-up size of NCCL EP's handle; the real one is known only to a GPU."""
STUB_ERROR = 34
"""CUDA_ERROR_STUB_LIBRARY, which every function of the stub returns."""

_loaded: int | None = None


def load(capability: int) -> None:
    """Load TE here and let it take the GPU for one of this compute capability (times ten: 90, 100).

    Raises :class:`RunError` where there is a driver (use the GPU), where TE's pieces or a C compiler are missing, and
    for a second capability in one process.
    """
    global _loaded
    if _loaded is not None:
        if _loaded != capability:
            raise RunError(
                f"TE was told of compute capability {_loaded} here. Use a new process for {capability}."
            )
        return
    if reason := missing():
        raise RunError(reason)
    _load_stub_driver()
    _answer_for(capability)
    _loaded = capability


def missing() -> str:
    """What is missing to load TE without a GPU, in words; "" if nothing is."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed here. Run: make te-wheel"
    if importlib.util.find_spec("nvidia") is None:
        return (
            "NVIDIA's libraries, which Transformer Engine loads, are not installed here. Run: make te-wheel"
        )
    if not _installed("transformer-engine-jax"):
        return "Transformer Engine's JAX extension is not built here. Run: make te-wheel"
    if _loads("libcuda.so.1") and _loaded is None:
        return "there is an NVIDIA driver here; the stub would shadow it. Use the GPU."
    for tool in ("cc", "nm"):
        if shutil.which(tool) is None:
            return f"{tool} is missing, which builds the stub driver. Install gcc and binutils."
    return ""


@contextlib.contextmanager
def taken_for_a_gpu() -> Iterator[None]:
    """Inside, ``te.available()`` answers for the GPU of :func:`load`: whole layers with ``backend="te"`` then trace."""
    native.stand_in = native.compute_capability()
    try:
        yield
    finally:
        native.stand_in = None


def start_expert_parallel(setup: ExpertParallel) -> None:
    """Let TE take NCCL EP for started with ``setup``, so that ``dispatch``, ``combine`` and ``moe`` trace."""
    import transformer_engine_jax as extension

    ep = importlib.import_module("transformer_engine.jax.cpp_extensions.ep")
    ep.set_ep_config(
        ep.EpConfig(
            world_size=setup.devices,
            rank=0,
            ep_size=setup.ranks,
            num_ep_groups=setup.groups,
            num_experts=setup.num_experts,
            num_local_experts=setup.experts_per_rank,
            max_tokens_per_rank=setup.tokens_per_rank,
            recv_capacity_per_rank=setup.capacity,
            hidden_dim=setup.d_model,
        )
    )
    to_te = importlib.import_module("transformer_engine.jax.cpp_extensions.misc").jax_dtype_to_te_dtype
    sizes = (setup.num_experts, setup.tokens_per_rank, setup.capacity, setup.d_model)
    extension.set_ep_bootstrap_params(
        bytes(128),
        setup.ranks,
        0,
        *sizes,
        max_num_sms=0,
        max_token_dtype=int(to_te("bfloat16")),
        drop_on_overflow=True,
        borrowed_comm=True,  # the way without a communicator of its own, which would need a GPU
    )
    record(setup)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _load_stub_driver() -> None:
    """Build a ``libcuda.so.1`` of functions that fail honestly, and load it and NCCL for this process alone."""
    libraries = [
        _find("nvidia", "libcudnn_engines_runtime_compiled.so.9"),
        _find("transformer_engine", "libnccl_ep.so"),
    ]
    listed = [
        subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
        for path in libraries
    ]
    names = sorted({name for done in listed for name in re.findall(r"\bU (cu[A-Z]\w*)", done.stdout)})
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "stub.c"), Path(folder, "libcuda.so.1")
        source.write_text("".join(f"int {name}(void) {{ return {STUB_ERROR}; }}\n" for name in names))
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source]
        subprocess.run(command, check=True, capture_output=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_find("nvidia", "libnccl.so.2")), mode=ctypes.RTLD_GLOBAL)


def _find(package: str, file: str) -> Path:
    for folder in importlib.util.find_spec(package).submodule_search_locations:
        for path in Path(folder).rglob(file):
            return path
    raise RunError(f"{file} of {package} is not installed here. Run: make te-wheel")


def _answer_for(capability: int) -> None:
    """Replace the functions with which TE asks the GPU."""
    native.api()
    import transformer_engine_jax as extension

    def answer(gpu_id: int = 0) -> int:
        return capability

    def one_byte(*_):
        return (((1,), extension.DType.kByte),)

    extension.get_device_compute_capability = answer
    # Not "import ...cpp_extensions.gemm": under that name the package has the function.
    importlib.import_module(
        "transformer_engine.jax.cpp_extensions.gemm"
    ).get_device_compute_capability = answer
    asked = importlib.import_module("transformer_engine.jax.quantize.device_utils")
    asked.get_device_compute_capability.cache_clear()
    asked.is_fp8_gemm_with_all_layouts_supported.cache_clear()
    for question in ("norm_fwd", "norm_bwd", "dbias_quantize", "dact_dbias_quantize"):
        setattr(extension, f"get_{question}_workspace_sizes", one_byte)
    extension.ep_handle_mem_size = lambda top_k, alignment: HANDLE_BYTES
    from jaxlib import gpu_triton

    gpu_triton.get_compute_capability = answer
