"""The batch of a step: checked, and sharded by its examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import check_has_devices, is_global, is_sharded_as, put_keys
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree, check_arrays, is_key, leading_dims, leaf_names
from zero_jax.program.jaxprs import is_array, is_traced
from zero_jax.sharding.mesh import Axes, axes_of, axis_size, batch_sharding
from zero_jax.training.same_program import check_given

_SHARED = "; an array that all examples share goes into model_state, or is closed over by loss_fn"


def check_batch(batch: PyTree, *, mesh: Mesh, axes: Axes, num_microbatches: int = 1) -> None:
    """Checks that every leaf of a batch divides over the batch axes and the microbatches.

    Without microbatches leaves may differ in their leading dim, as the nodes and edges of a graph do: the loss function
    sees the whole batch. The microbatches of a pipeline are a multiple of its stages.

    Raises:
      ValueError: a leaf does not divide, or leaves of microbatches differ in size or have none.
    """
    # The microbatches of a pipeline are of examples on all stages.
    over = axes.batch if num_microbatches == 1 else axes.of_stage.batch
    shards = axis_size(mesh, over)
    unit = shards * num_microbatches
    divides = lambda size: size > 0 and size % unit == 0  # noqa: E731
    sizes = {shape[0] for shape in map(np.shape, jax.tree.leaves(batch)) if shape}  # names take time
    whole = "leave pipe out" if axes.num_stages(mesh) > 1 else "set num_microbatches=1"
    if num_microbatches > 1 and len(sizes) > 1:
        raise ValueError(
            f"the leaves of the batch differ in their leading dim: {leading_dims(batch)}; give each one entry per "
            f"example, or {whole}{_SHARED}"
        )
    if not all(map(divides, sizes)):
        name, size = next(leaf for leaf in leading_dims(batch).items() if not divides(leaf[1]))
        axes_text = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in over)
        micro = f" and {num_microbatches} microbatches" if num_microbatches > 1 else ""
        raise ValueError(
            f"batch leaf {name!r} has {size} examples, which do not divide over {shards} devices "
            f"({axes_text}){micro}: make the batch size a multiple of {unit}, for example "
            f"{max(unit, math.ceil(size / unit) * unit)}" + (_SHARED if len(sizes) > 1 else "")
        )
    if num_microbatches > 1 and not sizes:
        raise ValueError(
            f"num_microbatches={num_microbatches}: no leaf of the batch has examples to be divided: give one an entry "
            f"per example, or {whole}"
        )


def shapes_of_batch(batch: PyTree, sharding_of: Callable[[Any], NamedSharding | None] = lambda x: None) -> PyTree:
    """Returns the shapes of a batch of arrays, numbers or `ShapeDtypeStruct`s; raises `ValueError` for other leaves."""
    check_arrays("batch", batch, remedy="give arrays or jax.ShapeDtypeStructs [examples, ...]")
    shape_of = lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=sharding_of(x))  # noqa: E731
    return jax.tree.map(shape_of, batch)


def shapes_of_part(batch: PyTree, num_parts: int) -> PyTree:
    """Returns the shapes of one of so many parts of a batch; scalars are in each."""

    def part(x: Any) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // num_parts, *x.shape[1:]) if np.ndim(x) else ()
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    return jax.tree.map(part, batch)


@functools.lru_cache(maxsize=16)
def sharding_of_leaves(mesh: Mesh, axes: Axes) -> Callable[[Any], NamedSharding]:
    """Returns the function that gives the sharding of a leaf of a batch, by its examples; scalars are replicated."""
    over_batch, replicated = batch_sharding(mesh, axes), NamedSharding(mesh, PartitionSpec())
    return lambda x: over_batch if np.ndim(x) else replicated


def shard_batch(batch: PyTree, *, mesh: Mesh, axes: Axes | None = None) -> PyTree:
    """Shards a batch over the batch axes by its leading dim; leaves that are sharded so already are not copied.

    Where all are, the batch itself is returned.

    Args:
      batch: a pytree of host arrays `[batch, ...]`. With several processes each gives its own share of the examples, as
        many for each of its devices as the others.
      mesh: the mesh.
      axes: the roles of its axes, if not by their names.

    Raises:
      ValueError: a leaf whose leading dim does not divide over the batch axes, or that is no array; an abstract mesh; a
        batch of other sizes than that of another process, or of other values of the same examples.

    Warns:
      UserWarning: the first batch of such a size has the values of another process's.

    Example:
      >>> zero.shard_batch({"x": np.ones((16, 64))}, mesh=mesh)["x"].sharding.shard_shape((16, 64))
      (2, 64)
    """
    placed = place_batch(batch, mesh=mesh, axes=axes)
    if jax.process_count() > 1 and not any(map(is_traced, jax.tree.leaves(placed))):
        check_given(batch, placed, mesh, axes or axes_of(mesh))
    return placed


def place_batch(batch: PyTree, *, mesh: Mesh, axes: Axes | None = None, is_whole: bool = False) -> PyTree:
    """Shards a batch as `shard_batch` does, for functions that compare the sizes with other processes themselves.

    Where `is_whole`, each process gives the global batch, of which its devices take their parts.
    """
    check_arguments(axes=axes)
    axes = axes or axes_of(mesh)
    sharding_of = sharding_of_leaves(mesh, axes)

    def is_placed(x: Any) -> bool:
        return is_array(x) and not x.is_deleted() and x.size > 0 and is_sharded_as(x, sharding_of(x))

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        if is_traced(x):  # the step is called within another jitted function, or scanned over
            return lax.with_sharding_constraint(x, sharding)
        if is_placed(x):
            return x
        check_has_devices(mesh)
        if jax.process_count() == 1 or is_global(x):
            return jax.device_put(x, sharding)
        return put_keys(x, sharding, of_process) if is_key(x) else of_process(x, sharding)

    def of_process(x: Any, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, np.asarray(x), np.shape(x) if is_whole else None)

    leaves, tree = jax.tree.flatten(batch)
    if all(map(is_placed, leaves)):  # the usual case of a data loader, before each step
        return batch
    check_arrays("batch", batch, remedy="leave it out of the batch, or make an array of it")
    for i, x in enumerate(leaves):
        if isinstance(x, jax.ShapeDtypeStruct) or (is_array(x) and x.is_deleted()):
            why = "is deleted, as an array that was donated is" if isinstance(x, jax.Array) else "is a shape alone"
            raise ValueError(f"batch leaf {leaf_names(batch)[i]!r} {why}: give an array of its values")
    shardings = [*map(sharding_of, leaves)]
    if jax.process_count() == 1:
        check_batch(batch, mesh=mesh, axes=axes)
        if not any(map(is_traced, leaves)):  # all at once, which is faster than one by one
            check_has_devices(mesh)
            return tree.unflatten(jax.device_put(leaves, shardings))
    else:
        _check_share(batch, leaves, mesh, axes, is_whole=is_whole)
    return tree.unflatten(map(place, leaves, shardings))


def _check_share(batch: PyTree, leaves: Sequence[Any], mesh: Mesh, axes: Axes, *, is_whole: bool) -> None:
    """Raises `ValueError` for examples of one of several processes that do not divide over its devices."""
    num_parts = axis_size(mesh, axes.batch) if is_whole else _num_own_parts(mesh, axes)
    for i, x in enumerate(leaves):
        size = np.shape(x)[:1]
        has_all = is_traced(x) or is_global(x)  # the examples of all processes
        if size and not has_all and num_parts and size[0] % num_parts:
            whose = "all processes" if is_whole else f"process {jax.process_index()}"
            raise ValueError(
                f"batch leaf {leaf_names(batch)[i]!r} has {size[0]} examples, which do not divide over the {num_parts} "
                f"devices with examples of their own of {whose}: give a multiple of {num_parts}, for example "
                f"{math.ceil(size[0] / num_parts) * num_parts}"
            )


@functools.lru_cache(maxsize=16)
def _num_own_parts(mesh: Mesh, axes: Axes) -> int:
    """Returns how many parts of a batch the devices of this process have; several devices may have the same one."""
    num_parts = axis_size(mesh, axes.batch)
    indices = batch_sharding(mesh, axes).addressable_devices_indices_map((num_parts,))
    return len({index[0].indices(num_parts) for index in indices.values() if index is not None})
