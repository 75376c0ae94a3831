"""TE's expert parallelism over NCCL EP, held to the contract of :mod:`moe_course.dispatch`.

The seam is at global shapes: call these under ``jit`` on the ambient mesh, not inside ``shard_map``. NCCL EP starts
once per process, outside ``jit`` (:func:`bootstrap`), with the buffers of one :class:`ExpertParallel`. Everything that
traces or compiles an exchange, its derivative too, runs inside :func:`mesh_resources`.
"""

import contextlib
import math
import warnings
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from moe_course.errors import SettingError
from moe_course.parallel import DATA, EXPERT, FSDP, NODE
from moe_course.routing import Routing
from moe_course.te import native
from moe_course.te.checks import require, require_dtype, require_integers, require_shape

ALIGN = 128
"""Rows that each expert's block starts at a multiple of. TE's layer fixes it, and every GEMM recipe is content."""


@dataclass(frozen=True)
class ExpertParallel:
    """The static facts of one expert-parallel exchange; NCCL EP is started with exactly these."""

    num_experts: int
    top_k: int
    ranks: int
    """GPUs along the expert axis (R)."""
    groups: int
    """GPUs along the axis outside it: R * groups in all (N)."""
    tokens_per_rank: int
    d_model: int
    capacity: int
    """Receive rows of a rank (C), padding included; a multiple of 128."""
    outer_axis: str = FSDP
    """The one mesh axis outside ``expert`` that tokens are cut over: TE knows one, data or fsdp."""
    expert_axis: str = EXPERT

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise SettingError(f"NCCL EP needs 2 ranks at least, not {self.ranks}. Use the local dispatcher.")
        if self.num_experts % self.ranks:
            raise SettingError(
                f"{self.num_experts} experts do not divide over {self.ranks} ranks. Use a divisor as --mesh.expert."
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise SettingError(f"top_k is {self.top_k} of {self.num_experts} experts.")
        if self.capacity < ALIGN or self.capacity % ALIGN:
            raise SettingError(
                f"capacity {self.capacity} is not a multiple of {ALIGN} rows. receive_capacity() gives one."
            )
        if self.d_model * 2 % 16:
            raise SettingError(
                f"d_model {self.d_model}: a bf16 row must be a multiple of 16 bytes on the wire."
            )

    @property
    def devices(self) -> int:
        return self.ranks * self.groups

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.ranks

    @property
    def spec(self) -> P:
        """How tokens, and everything that an exchange returns, are cut along their first dimension."""
        axes = (self.outer_axis, self.expert_axis) if self.groups > 1 else (self.expert_axis,)
        return P(axes)

    @classmethod
    def for_mesh(
        cls,
        mesh: Mesh,
        *,
        num_experts: int,
        top_k: int,
        tokens: int,
        d_model: int,
        factor: float | None = None,
        capacity: int | None = None,
    ) -> "ExpertParallel":
        """For ``tokens`` in all on ``mesh``, with buffers of ``factor`` times the balanced need; None: any routing.

        A ``capacity`` in rows takes the place of the factor.
        """
        if NODE in mesh.shape:
            raise SettingError("TE's expert parallelism knows no node axis. Set --mesh.nodes to 1.")
        outer = [axis for axis in (DATA, FSDP) if mesh.shape.get(axis, 1) > 1]
        if len(outer) > 1:
            raise SettingError(
                "TE's expert parallelism knows one axis outside the expert axis. Set --mesh.data or --mesh.fsdp to 1."
            )
        outer_axis = outer[0] if outer else FSDP
        ranks, groups = mesh.shape[EXPERT], mesh.shape.get(outer_axis, 1)
        if tokens % (ranks * groups):
            raise SettingError(f"{tokens} tokens do not divide over {ranks * groups} devices.")
        per_rank = tokens // (ranks * groups)
        return cls(
            num_experts=num_experts,
            top_k=top_k,
            ranks=ranks,
            groups=groups,
            tokens_per_rank=per_rank,
            d_model=d_model,
            capacity=capacity or receive_capacity(per_rank, top_k, num_experts, ranks, factor),
            outer_axis=outer_axis,
        )


def receive_capacity(
    tokens_per_rank: int, top_k: int, num_experts: int, ranks: int, factor: float | None = None
) -> int:
    """Receive rows of a rank, a multiple of 128: ``factor`` times the balanced need, or enough for any routing (None).

    TE's rule (``get_moe_recv_capacity_per_rank``), which needs no TE. The worst case is absurd at scale: 1,576,960
    rows, 22.6 GB in bf16 at width 7,168, for 24,576 tokens per rank, 256 experts, 8 picks, 8 ranks.
    """
    if factor is not None and not (math.isfinite(factor) and factor >= 1):
        raise SettingError(
            f"factor is {factor}. Set it to 1 or more, or to None for a buffer that fits any routing."
        )
    local, copies = num_experts // ranks, ranks * tokens_per_rank

    def aligned(rows: int) -> int:
        return math.ceil(rows / ALIGN) * ALIGN

    most = copies * min(top_k, local)
    worst = min(local * aligned(copies), aligned(most + (ALIGN - 1) * min(local, most)))
    if factor is None:
        return worst
    balanced = local * aligned(math.ceil(tokens_per_rank * top_k / local))
    return min(aligned(math.ceil(balanced * factor)), worst)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "row_weights", "group_sizes", "demand", "handle"],
    meta_fields=["setup"],
)
@dataclass(frozen=True)
class Received:
    """Token copies where their experts are; the fields of ``moe_course.dispatch.Dispatched`` that TE can fill."""

    rows: Float[Array, "N_C d_model"]
    """In expert order on each device, each expert's block padded to 128; rows that hold no token are zero."""
    row_weights: Float[Array, "N_C"]
    """Combine weight of each row, 0 where it holds no token. ``combine`` does not apply it."""
    group_sizes: Int[Array, "N experts_per_rank"]
    """Rows of each expert's block, padding included."""
    demand: Int[Array, "N"]
    """Rows each device was asked for before any was dropped, padding included: demand <= capacity is the proof."""
    handle: Array
    """The way back, opaque."""
    setup: ExpertParallel


def resources(setup: ExpertParallel):
    """TE's ``MeshResource`` for this exchange."""
    outer = {"dp_resource" if setup.outer_axis == DATA else "fsdp_resource": setup.outer_axis}
    return native.api().MeshResource(ep_resource=setup.expert_axis, **(outer if setup.groups > 1 else {}))


def mesh_resources(setup: ExpertParallel) -> contextlib.AbstractContextManager:
    """A context in which TE knows the mesh axes. Put the whole of training in it.

    TE asks while it traces forward and backward and again while XLA partitions, so a context around the call alone
    would be gone by then.
    """
    return native.api().global_shard_guard(resources(setup))


def check_resources(setup: ExpertParallel) -> None:
    """SettingError outside of :func:`mesh_resources`."""
    try:
        found = native.api().global_mesh_resource()
    except AssertionError:
        found = None
    if found != resources(setup):
        raise SettingError(
            f"TE was told the mesh axes {found}, not {resources(setup)}. Put tracing and compiling in "
            "`with te.mesh_resources(setup):`."
        )


def bootstrap(setup: ExpertParallel, mesh: Mesh, *, drop_on_overflow: bool = True) -> None:
    """Start NCCL EP with these buffers: once per process, eagerly, on every process. Needs GPUs.

    ``drop_on_overflow`` drops what does not fit, still counted in ``demand``, so that a step can be refused and run
    again with a larger buffer; without it the GPU traps and the process dies. Raises :class:`SettingError` where it
    cannot run and for a mesh of another size.
    """
    require("dispatch")
    if mesh.size != setup.devices or mesh.shape[setup.expert_axis] != setup.ranks:
        raise SettingError(f"this mesh has {dict(mesh.shape)}; {setup} needs {setup.devices} devices.")
    sizes = (setup.num_experts, setup.tokens_per_rank, setup.capacity, setup.d_model)
    with warnings.catch_warnings(), mesh_resources(setup):
        # TE looks for the devices of the mesh, which jax.set_mesh does not show it.
        warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)
        with mesh:
            native.api().ep_bootstrap(None, None, *sizes, drop_on_overflow=drop_on_overflow)
    record(setup)


def record(setup: ExpertParallel) -> None:
    """Tell TE's layer with which sizes NCCL EP was started; it compares."""
    native.api().record_ep_bootstrap_signature_for_moe(
        setup.num_experts, setup.tokens_per_rank, setup.capacity, setup.d_model, setup.ranks
    )


def dispatch(x: Float[Array, "tokens d_model"], routing: Routing, *, setup: ExpertParallel) -> Received:
    """Send each token copy to the rank that owns its expert, grouped by expert there. bf16 on the wire.

    Differentiable in ``x`` and the weights. A token that the mask left out cannot stay behind: it travels with weight
    0 to K experts in turn, and uses buffer. Every result is pinned to the mesh: left to itself, XLA gathers inside
    the collective's stream and does not compile (JAX 0.12).

    Raises ``TypeError`` and ``ValueError`` for dtypes and shapes, :class:`SettingError` where it cannot run.
    """
    require("dispatch")
    tokens = setup.tokens_per_rank * setup.devices
    require_shape("x", x, tokens, setup.d_model)
    require_dtype("x", x, jnp.bfloat16)
    require_shape("expert_ids", routing.expert_ids, tokens, setup.top_k)
    require_integers("expert_ids", routing.expert_ids)
    require_shape("weights", routing.weights, tokens, setup.top_k)
    check_resources(setup)
    api = native.api()
    ids = _somewhere(routing.expert_ids.astype(jnp.int32), setup.num_experts)
    x, ids, weights = (_pin(a, setup) for a in (x, ids, routing.weights.astype(jnp.float32)))
    rows, row_weights, handle, counts, demand = api.ep_dispatch(
        _layer(setup), ids, x, weights, setup.capacity
    )
    rows, row_weights, handle, counts, demand = (
        _pin(a, setup) for a in (rows, row_weights, handle, counts, demand)
    )
    # Past the last block TE leaves what was there before.
    live = _live(counts, setup)
    rows = jnp.where(live[..., None], rows, jnp.zeros_like(rows))
    row_weights = jnp.where(live, row_weights, jnp.zeros_like(row_weights))
    return Received(
        rows=_pin(rows.reshape(-1, setup.d_model), setup),
        row_weights=_pin(row_weights.reshape(-1), setup),
        group_sizes=counts,
        demand=demand.reshape(-1),
        handle=handle,
        setup=setup,
    )


def combine(rows: Float[Array, "N_C d_model"], received: Received) -> Float[Array, "tokens d_model"]:
    """Bring expert outputs back to their tokens and add the K copies. Unweighted: weigh the rows before.

    Rows past the groups are read by nothing, whatever they hold. Raises as :func:`dispatch`.
    """
    setup = received.setup
    require("dispatch")
    require_shape("rows", rows, setup.devices * setup.capacity, setup.d_model)
    require_dtype("rows", rows, jnp.bfloat16)
    check_resources(setup)
    rows = rows.reshape(setup.devices, setup.capacity, setup.d_model)
    rows = jnp.where(_live(received.group_sizes, setup)[..., None], rows, jnp.zeros_like(rows))
    out = native.api().ep_combine(
        _layer(setup),
        received.handle,
        received.group_sizes,
        _pin(rows, setup),
        setup.tokens_per_rank * setup.devices,
        out_sharding=tuple(setup.spec),
    )
    return _pin(out, setup)


def _layer(setup: ExpertParallel):
    return native.api().EpLayerConfig(setup.top_k, ALIGN)


def _live(counts: Int[Array, "N experts_per_rank"], setup: ExpertParallel):
    """[N, C]: rows that belong to an expert's block."""
    row = jnp.arange(setup.capacity, dtype=jnp.int32)[None, :]
    return row < counts.sum(-1, keepdims=True, dtype=jnp.int32)


def _somewhere(ids: Int[Array, "tokens top_k"], num_experts: int) -> Int[Array, "tokens top_k"]:
    """Ids outside [0, E) replaced by experts in turn, distinct within a token that has none."""
    slot = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    return jnp.where((ids >= 0) & (ids < num_experts), ids, slot % num_experts)


def _pin(x: Array, setup: ExpertParallel) -> Array:
    return jax.lax.with_sharding_constraint(x, setup.spec)
