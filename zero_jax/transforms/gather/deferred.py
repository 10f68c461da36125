"""Values of a trace that is being walked: ordinary ones, and those still to be made from sharded params, at their use.

There a shard is gathered, and its gradient goes to the shard, both in the formats of the leaf. A param in host memory
is fetched, and its gradient stays on the devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zero_jax.core.tree import PyTree
from zero_jax.dims import BY_INDEX, JOINS, MOVES, is_float
from zero_jax.program.walk import Deferred, as_it_is
from zero_jax.sharding.chains import RELATIVE, Chain, gather_scope, gather_shardings, moving, reshard, scattering
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.precision import promoted
from zero_jax.sharding.quantized import PLAIN, Blocks, Formats, Quantize, blocks_of
from zero_jax.sharding.spec import Dims, named, without
from zero_jax.transforms.gather.per_device import DeviceSum, copy_per_device, summed_use
from zero_jax.transforms.pipeline.place import StagePlace
from zero_jax.transforms.weight_grads import summed_in


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy(Deferred):
    """A param, or what was made of params alone: rebuilt from `roots` at each use rather than kept.

    `dims` is its sharding while it is still a shard (of no axes, if the param is whole), None once the recipe gathers.
    `depth` counts the equations of the recipe that follow one another. `cast` is a wider dtype that it is used in:
    `build` makes it, and `aval` has it, in the dtype from before, in which it is cheaper to gather. `formats` are what
    it is gathered in and its gradient sent in. `on_host` says that `build` fetches it from host memory first.
    `is_gathered` says that it was gathered before a loop: `dims` are those of its gradient alone. Along a
    `scattered_dim` its gradient arrives in shards, which are summed across devices. `moved` is the same value as a
    shard still, of another dim than the one that an equation cuts, for loops that take slices of it.
    """

    roots: tuple[Any, ...]
    build: Callable[..., Any]
    aval: Any
    path: str
    dims: Dims | None
    depth: int = 0
    cast: Any = None
    formats: Formats = PLAIN
    on_host: bool = False
    is_gathered: bool = False
    scattered_dim: int | None = None
    moved: Lazy | None = None

    params_only: ClassVar[bool] = True

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that it is made of."""
        return self.roots

    def with_arrays(self, arrays: Sequence[Any]) -> Lazy:
        """Returns the value made of other roots."""
        moved = self.moved and self.moved.with_arrays(arrays)
        return dataclasses.replace(self, roots=tuple(arrays), moved=moved)

    @property
    def key(self) -> Hashable:
        """What is done with it, whatever its arrays."""
        of_gradient = self.formats, self.is_gathered, self.scattered_dim
        return self.build, self.aval, self.path, self.dims, self.depth, self.cast, *of_gradient

    @property
    def is_shard(self) -> bool:
        """Whether it is to be gathered at its use."""
        return self.dims is not None and any(self.dims)

    @property
    def is_deferred(self) -> bool:
        """Whether it is to be made at its use, and not kept for the backward pass: gathered, or fetched."""
        return self.is_shard or (self.on_host and self.dims is not None)

    @property
    def shard(self) -> Dims:
        """`dims` of what is not gathered yet."""
        assert self.dims is not None
        return self.dims

    @property
    def built(self) -> Any:
        """The array, a shard where it is one, in the dtype in which it is gathered."""
        return self.build(*self.roots)

    def at_home(self) -> Lazy:
        """Returns the param as it is."""
        return self

    def as_root(self) -> Lazy:
        """Returns the value as one that is its own root: it is built now."""
        return dataclasses.replace(self, roots=(self.built,), build=as_it_is, depth=0, on_host=False)

    def widened(self, array: Any) -> Any:
        """Returns what was built, gathered or not, in the dtype that it is used in."""
        return array if self.cast is None else array.astype(self.cast)


@dataclasses.dataclass(frozen=True)
class Value(Deferred):
    """An ordinary value; `params_only` if it depends on params and constants only."""

    array: Any
    params_only: bool

    is_deferred: ClassVar[bool] = False

    @property
    def home(self) -> Any:
        """The array, sharded as XLA has it."""
        return self.array

    def at_home(self) -> Value:
        """Returns the value where its devices have examples."""
        return self

    @property
    def key(self) -> Hashable:
        """What is done with it, whatever its arrays."""
        return type(self), self.params_only


class Copies(Value):
    """A copy for each device of a whole param, or of what is made of such: the array has a leading dim of devices."""

    @property
    def home(self) -> Any:
        """One of the copies: any will do."""
        return self.array[0]

    def at_home(self) -> Value:
        """Returns one of the copies."""
        return Value(self.home, self.params_only)


def relative(values: Sequence[Lazy | Value]) -> tuple[str, list[Lazy | Value]]:
    """Returns what the paths of params begin with, and the values with paths that continue it."""
    paths = {value.path for value in values if isinstance(value, Lazy)}
    parents = [[f"{part}/" for part in path.split("/")[:-1]] for path in paths]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    prefix = "".join(parts[0] for parts in same).removesuffix("/")
    if not prefix or any(" and " in path or path.startswith(RELATIVE) for path in paths):
        return "", list(values)
    return prefix, [
        dataclasses.replace(v, path=RELATIVE + v.path.removeprefix(prefix)) if isinstance(v, Lazy) else v
        for v in values
    ]


# Widening casts are put off until the param is gathered: narrow bytes are cheaper to move. What only moves elements
# commutes with a cast, so a cast stays pending (`Lazy.cast`) through it, up to the first operation that computes.


def defer_cast(eqn: Any, values: Sequence[Lazy | Value]) -> Lazy | None:
    """Returns the result of a widening cast of what is not gathered yet, with the cast pending, or None."""
    value = values[0]
    if eqn.primitive.name != "convert_element_type" or not isinstance(value, Lazy) or value.dims is None:
        return None
    narrow, wide = value.aval.dtype, eqn.outvars[0].aval.dtype
    if narrow == wide:
        return dataclasses.replace(value, cast=None)  # there and back again
    used = value.cast or narrow
    # A cast to fewer digits than one before it rounds, and has to stay.
    is_exact = promoted(used, wide) == wide and all(jnp.issubdtype(d, jnp.floating) for d in (narrow, wide))
    return dataclasses.replace(value, cast=wide) if is_exact else None


def pending(eqn: Any, values: Sequence[Lazy | Value]) -> tuple[bool, Any]:
    """Tells whether an equation may come before the casts that are pending on its inputs, and which these are.

    Returns:
      `(True, None)` where none is pending.
    """
    casts = {value.cast for value in values if isinstance(value, Lazy)}
    if casts == {None}:
        return True, None
    arrays = values[:1] if eqn.primitive.name in BY_INDEX else values  # the others are indices
    moves = eqn.primitive.name in MOVES | JOINS and all(isinstance(value, Lazy) for value in arrays)
    return (True, casts.pop()) if moves and len(casts) == 1 else (False, None)


@dataclasses.dataclass(frozen=True, eq=False)
class HostParam:
    """A leaf of the params of a function that `gather_on_use` made, in host memory."""

    array: jax.Array  # the param
    dtype: Any  # what it is cast to when it has been fetched
    # An array of its shape and that dtype, on the devices, which nothing reads: the param's cotangent is its. None
    # where there is no gradient.
    gradient: jax.Array | None = None

    @classmethod
    def of(cls, array: jax.Array, dtype: Any) -> HostParam:
        """Returns a param that is used in a dtype if it is floating, and as it is otherwise or where that is None."""
        is_cast = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        return cls(array=array, dtype=jnp.dtype(dtype) if is_cast else array.dtype)

    @property
    def used_shape(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype that it is used in: what a function of it is traced for."""
        return jax.ShapeDtypeStruct(self.array.shape, self.dtype)


def used_shapes(params: PyTree) -> PyTree:
    """Returns params with shapes in the place of those in host memory."""
    return jax.tree.map(lambda x: x.used_shape if isinstance(x, HostParam) else x, params)


@functools.cache
def fetch_as(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that fetches a param, in a dtype."""
    return lambda array: jax.device_put(array, jax.memory.Space.Device).astype(dtype)


@jax.custom_vjp
def fetch(array: jax.Array, gradient: jax.Array) -> jax.Array:
    """Fetches a param, whose cotangent goes to another array."""
    return fetch_as(gradient.dtype)(array)


fetch.defvjp(lambda array, gradient: (fetch_as(gradient.dtype)(array), None), lambda _, cotangent: (None, cotangent))


def differentiated(param: Any, sharding: NamedSharding) -> jax.Array:
    """Returns what to differentiate a function by for a leaf of its params: the leaf, or what stands for it."""
    if not isinstance(param, HostParam):
        return param
    return lax.with_sharding_constraint(jnp.zeros(param.array.shape, param.dtype), sharding)


def with_gradient(param: Any, array: jax.Array) -> Any:
    """Returns a leaf of params whose cotangent is that of an array, of `differentiated`."""
    return dataclasses.replace(param, gradient=array) if isinstance(param, HostParam) else array


MAX_HOISTED_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherOptions:
    """What is done at the uses of params."""

    mesh: Mesh  # the mesh
    axes: Axes  # the roles of its axes
    stored_unsharded: bool = False  # params are stored whole, and only have their gradients scattered
    regather: bool = True  # params are gathered again in the backward pass, rather than kept
    reduce_dtype: Any = None  # the dtype in which gradients are summed across devices; None for their own
    # Params that a loop uses whole in every iteration are gathered once before the loop if all of them together take at
    # most this many bytes
    max_hoisted_bytes: int = MAX_HOISTED_BYTES
    # The formats that params are gathered in, and gradients sent in where they are summed at each use
    quantize: Quantize | None = None
    # The function is one of a device's own examples, to be mapped over devices by `jax.vmap`: the gradients that
    # devices have of a param are summed at each use, so that those of the mapped function are the same for all
    mapped: bool = False
    # Where the stages of a pipeline run, if the function is one of a stage's layers, to be mapped over stages
    stages: StagePlace | None = None
    # Nobody puts a `jax.checkpoint` around the function, in which JAX (0.10 to 0.12) cannot differentiate one that has
    # its barriers before some arrays alone
    outermost: bool = False

    @property
    def product_dtype(self) -> Any:
        """The dtype to compute gradients of weights in, because XLA sums them where they are computed."""
        return None if self.mapped else self.reduce_dtype

    @functools.cached_property
    def conv_batch(self) -> tuple[Mesh, tuple[str, ...]] | None:
        """The mesh and the axes of the batch where the mesh has others: XLA partitions some convolutions wrongly."""
        has_others = self.axes.size_beside_batch(self.mesh) > 1
        return (self.mesh, self.axes.batch) if has_others and not self.mapped else None


def gathered_array(options: GatherOptions, value: Lazy | Value, *, dtype: Any = None, pin: bool = False) -> Any:
    """Returns the array of a value, with a shard gathered; its cotangent is made whole, too, if `pin`."""
    if isinstance(value, Value):
        return value.home
    array = value.built if dtype is None else summed_in(value.built, dtype)
    if value.is_shard and options.mapped:
        with gather_scope(value.path):
            array = reshard(array, forward=gathering(options, value, array.shape), backward=Chain())
            array = _summed(options, value, array)
    elif value.is_shard and value.scattered_dim is not None:
        backward = moving(options.mesh, value.shard, value.scattered_dim, options.axes.data)
        with gather_scope(value.path):
            array = reshard(array, forward=gathering(options, value, array.shape), backward=backward)
    elif value.is_shard:  # the cotangent goes the way of a reduce-scatter, in steps that XLA:TPU has natively
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


def gathered_copies(options: GatherOptions, value: Lazy, dtype: Any = None) -> jax.Array:
    """Gives each device its own copy of a param, gathered; their gradients are summed in the reduce dtype."""
    array = value.built if dtype is None else value.built.astype(dtype)
    dims = value.shard if value.is_shard else ((),) * array.ndim
    with gather_scope(value.path):
        if value.is_shard:
            forward = gathering(options, value, array.shape)
            array = reshard(array, forward=forward, backward=Chain((named(options.mesh, dims),)))
        return copy_per_device(array, dims, mesh=options.mesh, axes=options.axes, dtype=options.reduce_dtype)


def array_of(options: GatherOptions, value: Lazy | Value) -> Any:
    """Returns the array of a value, a shard where it is one."""
    if isinstance(value, Value):
        return value.home
    array = value.widened(value.built)
    return _summed(options, value, array) if options.mapped else array


def is_unsharded(options: GatherOptions, value: Lazy) -> bool:
    """Tells whether a param is on each device as a whole before its use: it is stored so, or was gathered."""
    return options.stored_unsharded or value.is_gathered


def gathering(options: GatherOptions, value: Lazy, shape: tuple[int, ...]) -> Chain:
    """Returns the shardings that a shard goes through to be gathered; none for params that are stored whole."""
    steps = () if is_unsharded(options, value) else gather_shardings(options.mesh, value.shard, options.axes.data)
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
    return blocks_of(format, value.path, shape, value.shard, mesh=options.mesh, block_size=value.formats.block_size)
