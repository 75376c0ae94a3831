"""Mesh axes and sharding rules: which axis a dimension is cut along.

The mesh is ``data x fsdp x expert``, ``expert`` innermost, so that the ranks which exchange tokens are
neighbours. Tokens are cut over all three axes. Expert weights are cut over ``expert`` by expert and over
``fsdp`` within each expert; every other large weight is cut over ``fsdp``. Where the expert ranks span nodes that
a dispatcher should tell apart, two axes stand for them, ``node x expert``, and mean the same as one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_course.errors import SettingError

DATA, FSDP, NODE, EXPERT = "data", "fsdp", "node", "expert"
TOKEN_AXES = (DATA, FSDP, EXPERT)
"""Axes over which tokens (and the batch) are cut, on a mesh without a ``node`` axis; see :func:`token_axes`."""
STACKED = "layers"
"""Parameters under this name are stacked: their first dimension counts layers."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes. Their product is the number of devices."""

    data: int = 1
    """Replicas of the whole model."""
    fsdp: int = 2
    """Ways the weights and the optimizer state are cut."""
    expert: int = 4
    """Ranks that own different experts and exchange tokens (the expert-parallel size)."""
    nodes: int = 1
    """Nodes that the expert ranks span. With two or more, the mesh tells them apart by an axis of its own."""

    @property
    def size(self) -> int:
        return self.data * self.fsdp * self.expert

    def validate(self, num_devices: int, num_experts: int, batch_size: int) -> None:
        """Raise :class:`SettingError` unless this mesh fits the devices, the experts and the batch."""
        for name in TOKEN_AXES:
            if getattr(self, name) < 1:
                raise SettingError(
                    f"mesh axis {name} is {getattr(self, name)}. Set --mesh.{name} to 1 or more."
                )
        if self.nodes < 1 or self.expert % self.nodes:
            raise SettingError(
                f"an expert axis of {self.expert} does not divide over {self.nodes} nodes. Set --mesh.nodes to a "
                f"divisor of {self.expert}."
            )
        if self.size != num_devices:
            raise SettingError(
                f"the mesh data {self.data} x fsdp {self.fsdp} x expert {self.expert} needs {self.size} devices "
                f"but there are {num_devices}. Set --devices {self.size}, or change --mesh.data, --mesh.fsdp or "
                f"--mesh.expert so that their product is {num_devices}."
            )
        if num_experts % self.expert:
            raise SettingError(
                f"{num_experts} experts do not divide over an expert axis of {self.expert}. "
                f"Set --mesh.expert to a divisor of {num_experts}, or --model.num-experts to a multiple of {self.expert}."
            )
        if batch_size % self.size:
            near = max(self.size, round(batch_size / self.size) * self.size)
            raise SettingError(
                f"batch_size {batch_size} does not divide over {self.size} devices. Set --batch-size to a multiple "
                f"of {self.size}, for example {near}."
            )


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The ``data x fsdp x expert`` mesh over ``devices`` (default: the first ``config.size`` of all)."""
    devices = jax.devices()[: config.size] if devices is None else devices
    sizes = {DATA: config.data, FSDP: config.fsdp, EXPERT: config.expert}
    if config.nodes > 1:
        sizes = sizes | {NODE: config.nodes, EXPERT: config.expert // config.nodes}
    names = tuple(axis for axis in (DATA, FSDP, NODE, EXPERT) if axis in sizes)
    shape = tuple(sizes[axis] for axis in names)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def token_axes(mesh) -> tuple[str, ...]:
    """The axes of ``mesh`` over which tokens are cut: all of them."""
    return tuple(axis for axis in (DATA, FSDP, NODE, EXPERT) if axis in mesh.axis_names)


def expert_axes(mesh=None) -> str | tuple[str, str]:
    """What experts are cut over: ``expert``, or ``(node, expert)``; of the ambient mesh if none is given."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return (NODE, EXPERT) if NODE in mesh.axis_names else EXPERT


def expert_ranks(mesh) -> int:
    """Devices that own different experts (R)."""
    return mesh.shape[EXPERT] * (mesh.shape[NODE] if NODE in mesh.axis_names else 1)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading dimension (batch or tokens) over every axis."""
    return NamedSharding(mesh, P(token_axes(mesh)))


def matrix_spec(shape: tuple[int, ...], fsdp: int) -> P:
    """A weight matrix: its longest dimension that divides over ``fsdp`` is cut there; vectors stay whole."""
    divisible = [d for d in range(len(shape)) if shape[d] % fsdp == 0]
    if fsdp == 1 or len(shape) < 2 or not divisible:
        return P()
    spec: list[str | None] = [None] * len(shape)
    spec[max(divisible, key=lambda d: shape[d])] = FSDP
    return P(*spec)


def expert_spec(shape: tuple[int, int, int], fsdp: int, axes: str | tuple[str, str] = EXPERT) -> P:
    """Expert weights [E, in, out]: E over ``axes`` (:func:`expert_axes`), each matrix as :func:`matrix_spec`."""
    inner = matrix_spec(shape[1:], fsdp)
    return P(axes, *inner)


def param_spec(path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of one parameter (or its optimizer moments), from its name and shape.

    The router stays whole: it is small, float32, and every rank must pick the same experts. Stacked layers
    are cut as one layer is, and never between layers.
    """
    if STACKED in path:
        return P(None, *param_spec(tuple(name for name in path if name != STACKED), shape[1:], mesh))
    fsdp = mesh.shape[FSDP]
    if "router" in path:
        return P()
    if "experts" in path:
        return expert_spec(shape, fsdp, expert_axes(mesh))
    return matrix_spec(shape, fsdp)


def tree_shardings(tree, mesh: Mesh):
    """``NamedSharding`` for every leaf of a parameter or optimizer-state tree, by :func:`param_spec`."""

    def of_leaf(path, leaf):
        return NamedSharding(mesh, param_spec(path_names(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def path_names(path) -> tuple[str, ...]:
    """The keys of a path as ``jax.tree_util.tree_map_with_path`` gives it."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def ambient_mesh():
    """The mesh set by ``jax.set_mesh``, or None. Layers ask for it, so that they need no mesh argument."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def gather_weight(weight: Array, dtype) -> Array:
    """A matrix cut by :func:`matrix_spec`, whole and in ``dtype``, ready for a matmul.

    Cast first, then gather, so that the wire carries ``dtype`` and not the float32 master. The gradient
    goes back the way the weight came: constrained to the cut before it leaves, so that XLA scatters the
    partial sums instead of giving every device the whole gradient.
    """
    mesh = ambient_mesh()
    spec = P() if mesh is None else matrix_spec(weight.shape, mesh.shape[FSDP])
    if spec == P():
        return weight.astype(dtype)
    return _gather(weight, spec, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(weight, spec, dtype):
    cast = jax.lax.with_sharding_constraint(weight.astype(dtype), spec)
    return jax.lax.with_sharding_constraint(cast, P())


def _gather_fwd(weight, spec, dtype):
    return _gather(weight, spec, dtype), jnp.zeros((), weight.dtype)


def _gather_bwd(spec, dtype, like, grad):
    return (jax.lax.with_sharding_constraint(grad, spec).astype(like.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def keep_tokens_sharded(x: Array) -> Array:
    """Pin the leading (token or batch) dimension to all mesh axes, where there is a mesh."""
    mesh = ambient_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, P(token_axes(mesh)))


def per_device(fn: Callable, in_specs, out_specs, *, check: bool = True) -> Callable:
    """``fn`` on every device's own shard (``jax.shard_map`` on the ambient mesh, replication checked).

    ``check=False`` is for kernels whose derivatives do not say along which mesh axes they vary (Transformer Engine's).
    Gradients of replicated arguments are summed either way.
    """
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=check)
