"""The use of a param: its shard is gathered, and its gradient goes to the shard, both in the formats of the leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from zero_jax.dims import is_float
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.gather_names import gather_scope
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.quantized import Blocks, Quantize, blocks_of
from zero_jax.sharding.spec import Dims, named, without
from zero_jax.sharding.torus import gather_shardings, scattering
from zero_jax.transforms.gather.deferred import Lazy, Value, as_array
from zero_jax.transforms.gather.per_device import DeviceSum, summed_use

MAX_HOISTED_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """What is done at the uses of params.

    Attributes:
      mesh: the mesh.
      axes: the roles of its axes.
      stored_whole: params are stored whole, and only have their gradients scattered.
      regather: params are gathered again in the backward pass, rather than kept.
      reduce_dtype: the dtype in which gradients are summed across devices; None for their own.
      max_hoisted_bytes: params that a loop uses whole in every iteration are gathered once before the loop if all of
        them together take at most this many bytes.
      quantize: the formats that params are gathered in, and gradients sent in where they are summed at each use.
      mapped: the function is one of a device's own examples, to be mapped over devices by `jax.vmap`: the gradients
        that devices have of a param are summed at each use, so that those of the mapped function are the same for all.
    """

    mesh: Mesh
    axes: Axes
    stored_whole: bool = False
    regather: bool = True
    reduce_dtype: Any = None
    max_hoisted_bytes: int = MAX_HOISTED_BYTES
    quantize: Quantize | None = None
    mapped: bool = False

    @property
    def product_dtype(self) -> Any:
        """The dtype to compute gradients of weights in, because XLA sums them where they are computed."""
        return None if self.mapped else self.reduce_dtype

    @property
    def own_examples(self) -> tuple[Mesh, tuple[str, ...]] | None:
        """The mesh and the axes of the batch where the mesh has others: XLA partitions some convolutions wrongly."""
        has_others = self.axes.size_beside_batch(self.mesh) > 1
        return (self.mesh, self.axes.batch) if has_others and not self.mapped else None


def whole(options: GatherOptions, value: Lazy | Value, *, dtype: Any = None, pin: bool = False) -> Any:
    """Returns the array of a value, with a shard gathered; its cotangent is made whole, too, if `pin`."""
    if isinstance(value, Value):
        return value.array
    array = value.built if dtype is None else value.built.astype(dtype)
    if value.is_shard and options.mapped:
        with gather_scope(value.path):
            array = reshard(array, forward=gathering(options, value, array.shape), backward=Chain())
            array = _summed(options, value, array)
    elif value.is_shard:
        backward = scattering(
            options.mesh, value.shard, options.axes.data, shape=array.shape, dtype=options.reduce_dtype
        )
        with gather_scope(value.path):
            array = reshard(array, forward=gathering(options, value, array.shape), backward=backward)
        of_model = without(value.shard, options.axes.data)
        # Sharded over `model` first: XLA takes the shards of features that were permuted for others (xla_faults.md).
        if pin or any(of_model):
            array = reshard(array, forward=Chain(), backward=Chain((named(options.mesh, of_model),)))
    return value.widened(array) if dtype is None else array


def array_of(options: GatherOptions, value: Lazy | Value) -> Any:
    """Returns the array of a value, a shard where it is one."""
    array = as_array(value)
    return _summed(options, value, array) if options.mapped and isinstance(value, Lazy) else array


def gathering(options: GatherOptions, value: Lazy, shape: tuple[int, ...]) -> Chain:
    """Returns the shardings that a shard goes through to be gathered; none for params that are stored whole."""
    steps = () if options.stored_whole else gather_shardings(options.mesh, value.shard, options.axes.data)
    return Chain(steps, barrier=True, coding=_blocks(options, value, value.formats.gather, shape)) if steps else Chain()


def device_sum(options: GatherOptions, dims: Dims, **how: Any) -> DeviceSum:
    """Returns how the gradients of all devices are summed to the shards `dims`."""
    axes = options.axes
    return DeviceSum(mesh=options.mesh, axes=axes, over=axes.batch, dims=dims, dtype=options.reduce_dtype, **how)


def _summed(options: GatherOptions, value: Lazy, array: jax.Array) -> jax.Array:
    """Returns the array of a param at its use, where the gradients that devices have of it are summed."""
    if not (value.is_shard and is_float(array)):
        return array
    coding = _blocks(options, value, value.formats.grad, array.shape)
    coded = () if options.quantize is None else options.quantize.grad_axes(options.axes)
    return summed_use(array, device_sum(options, value.shard, coding=coding, coded=coded))


def _blocks(options: GatherOptions, value: Lazy, format: str | None, shape: tuple[int, ...]) -> Blocks | None:
    if format is None:
        return None
    size = value.formats.block_size
    return blocks_of(format, value.path, shape, value.shard, mesh=options.mesh, block_size=size)
