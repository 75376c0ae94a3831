"""Identical layers as one: each array has a leading layer axis, and one ``lax.scan`` applies the layers.

The program then holds a layer once, however many there are, and compiling takes no longer for more of them.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import PyTree

Layer = TypeVar("Layer", bound=nnx.Module)


def stack_layers(make: Callable[[nnx.Rngs], Layer], num_layers: int, rngs: nnx.Rngs) -> Layer:
    """The layers of ``[make(rngs) for _ in range(num_layers)]``, number for number, as one stacked module.

    ``rngs`` holds one stream, ``params``, and goes on where that loop would have left it.
    """
    stream = rngs.params
    key = stream.key[...]

    def one(draws, _):
        own = nnx.Rngs(params=key)
        own.params.count[...] = draws
        layer = make(own)
        return own.params.count[...], layer

    stream.count[...], layers = lax.scan(one, stream.count[...], length=num_layers)
    return layers


def layer_at(stack: PyTree, index: int) -> PyTree:
    """One layer of a stacked module, or of its parameters or gradients."""
    return jax.tree.map(lambda leaf: leaf[index], stack)


def apply_layers(
    apply: Callable, stack: Layer, carry: PyTree, inputs: PyTree, *, scan: bool = True
) -> tuple[PyTree, PyTree]:
    """Run ``carry, output = apply(layer, carry, input)`` over the layers; (last carry, outputs stacked).

    ``inputs`` has a leading layer axis like the stack. Without ``scan`` the program holds every layer
    (the same function and the same arguments; results differ by rounding at most), which XLA:CPU runs faster.
    """
    if scan:
        return lax.scan(lambda carry, xs: apply(xs[0], carry, xs[1]), carry, (stack, inputs))
    outputs = []
    for index in range(len(jax.tree.leaves(inputs)[0])):
        carry, output = apply(layer_at(stack, index), carry, layer_at(inputs, index))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def recompute(apply: Callable, kept: tuple[str, ...] | None) -> Callable:
    """``apply`` whose backward pass recomputes all but its inputs and the values named ``kept``.

    None keeps whatever the backward pass needs. The names are those of ``jax.ad_checkpoint.checkpoint_name``.
    """
    if kept is None:
        return apply
    return jax.checkpoint(apply, policy=jax.checkpoint_policies.save_only_these_names(*kept))
