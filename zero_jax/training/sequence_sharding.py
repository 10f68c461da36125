"""Sequence parallelism: the residual stream sharded over `model` along the sequence (Korthikanti et al. 2022).

Between the matrices of tensor parallelism the residual stream is replicated over `model`. Sharded over its tokens it
takes 1/model of the memory, and an all-reduce becomes a reduce-scatter and an all-gather of the same bytes. A
constraint on the stream alone is not enough: XLA then shards the products over tokens too, and reshards between the two
with all-to-alls. The inputs and outputs of the matrices need constraints, and so do their cotangents: hence the two
kinds of `place`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from zero_jax.core.device_put import platform_of
from zero_jax.core.signatures import check_arguments
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.device_order import GPUS
from zero_jax.sharding.mesh import axes_of, axis_size
from zero_jax.sharding.spec import named_along


def sequence_parallel(
    mesh: Mesh, *, model_axes: tuple[str, ...] | None = None, dim: int = 1
) -> Callable[[jax.Array, str], jax.Array]:
    """Returns `place(x, kind)`, which a model calls to shard its residual stream over `model` by tokens.

    Kind `residual` is for values added to the residual stream: the output of row-parallel matrices, and of the
    embedding. Kind `gathered` is for the input of column-parallel matrices: the norms' output.

        x = place(params["embed"][tokens], "residual")
        y = place(norm(x), "gathered")
        x = x + place(gelu(y @ up) @ down, "residual")

    Args:
      mesh: the mesh. If its model axes have one device, `place` does nothing.
      model_axes: the axes to shard over, if not named `model` or `model_*`.
      dim: which dim of the activations is the sequence.

    Returns:
      The function. It raises `ValueError` for an unknown kind, and for a sequence that does not divide.

    Raises:
      ValueError: axes that the mesh does not have, or no dim.

    Example:
      >>> mesh = zero.make_mesh(data=4, model=2)
      >>> place = zero.sequence_parallel(mesh)
      >>> x = jax.device_put(jnp.ones((8, 16, 8)), zero.batch_sharding(mesh))
      >>> jax.jit(lambda x: place(x, "residual"))(x).sharding.shard_shape(x.shape)
      (2, 8, 8)
    """
    check_arguments(model_axes=model_axes, dim=dim)
    axes = axes_of(mesh) if model_axes is None else axes_of(mesh, model=model_axes)
    model = axes.model
    num_shards, num_examples = axis_size(mesh, model), axis_size(mesh, axes.batch)
    on_gpus = platform_of(mesh) in GPUS

    def place(x: jax.Array, kind: str) -> jax.Array:
        if kind not in ("residual", "gathered"):
            raise ValueError(f"sequence_parallel: unknown kind of place {kind!r}: use 'residual' or 'gathered'")
        if num_shards == 1:
            return x
        if not 0 <= dim < x.ndim or x.shape[dim] % num_shards:
            raise ValueError(
                f"sequence_parallel: an activation of shape {x.shape} is to be cut over dim {dim} into {num_shards} "
                f"shards: make the sequence a multiple of {num_shards}, or say with `dim` which dim it is"
            )
        unsharded = dict.fromkeys(range(dim, x.ndim), ())  # the dims before are as XLA has them
        sharded, gathered = (named_along(mesh, x.ndim, unsharded | {dim: axes}) for axes in (model, ()))
        scattered = (sharded,)
        one_sequence = math.prod(x.shape[:dim]) in (1, num_examples)
        if one_sequence and not on_gpus and dim < x.ndim - 1 and x.shape[-1] % num_shards == 0:
            # With one sequence a device XLA:TPU reduce-scatters features, but all-reduces tokens, twice the bytes. From
            # features to tokens is an all-to-all of the shards. XLA:GPU reduce-scatters both.
            scattered = (named_along(mesh, x.ndim, unsharded | {x.ndim - 1: model}), sharded)
        if kind == "gathered":  # forward an all-gather; backward a reduce-scatter of partial sums
            return reshard(x, forward=Chain((sharded, gathered)), backward=Chain(scattered))
        return reshard(x, forward=Chain(scattered), backward=Chain((sharded, gathered)))

    return place
