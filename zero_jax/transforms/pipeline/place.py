"""Where stages run and in which order microbatches go through them, and how their parts of an array move to others."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.tree import is_key
from zero_jax.dims import Kind, is_float
from zero_jax.program.jaxprs import define_tangents, new_primitive, of_some
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import Dims, gather_steps, named

_FREE = PartitionSpec.UNCONSTRAINED

Pairs = tuple[tuple[int, int], ...]  # of stages: from where, and to where


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which microbatches go through the stages of a pipeline."""

    num_groups: int = 1  # the groups of layers of a stage, which a microbatch goes through one round after another
    # Whether a stage takes one microbatch forward and one backward in turn (1F1B), and not all forward and then all
    # backward
    is_interleaved: bool = False

    def __str__(self) -> str:
        name = "1f1b" if self.is_interleaved else "gpipe" if self.num_groups == 1 else "circular"
        return name if self.num_groups == 1 else f"{name}:{self.num_groups}"

    def num_ticks(self, num_stages: int, num_microbatches: int) -> int:
        """Returns the ticks of a pass, in each of which a stage runs a group of its layers on a microbatch."""
        return num_microbatches * self.num_groups + num_stages - 1

    def num_places(self, num_stages: int, num_layers: int) -> int:
        """Returns the places for layers of all stages, as many in each group; those behind the last layer are idle."""
        num_groups = num_stages * self.num_groups
        return -(-num_layers // num_groups) * num_groups

    def num_runs(self, num_stages: int, num_microbatches: int, num_layers: int) -> float:
        """Returns how often a stage runs as many layers as it has on average, those that it waits in counted."""
        times = self.num_ticks(num_stages, num_microbatches) / self.num_groups
        return times * self.num_places(num_stages, num_layers) / num_layers

    def num_kept(self, num_stages: int, num_microbatches: int) -> int:
        """Returns the microbatches that a stage keeps at most, for a group each; with 1F1B those between two passes."""
        return (
            2 * num_stages * self.num_groups - 1
            if self.is_interleaved
            else self.num_ticks(num_stages, num_microbatches)
        )

    def moved_share(self, num_stages: int) -> float:
        """Returns the part of a stage's layers that is stored in other stages, which have them one after another."""
        groups = range(num_stages * self.num_groups)
        return sum(g // self.num_groups != g % num_stages for g in groups) / len(groups)


def resolve_schedule(name: str) -> Schedule:
    """Returns a schedule by its name: ``gpipe``, ``1f1b``, ``circular`` (of 2 groups), ``circular:N`` or ``1f1b:N``.

    Raises:
      ValueError: it has another name.
    """
    found = re.fullmatch(r"(gpipe|1f1b|circular)(?::([0-9]+))?", name) if isinstance(name, str) else None
    kind, number = found.groups() if found else ("gpipe", "0")
    if number is not None and (kind == "gpipe" or int(number) < 2):
        raise ValueError(
            f"pipeline={name!r}: give 'gpipe', '1f1b', or 'circular:2' or '1f1b:2' with the groups of layers of a "
            "stage, at least 2"
        )
    return Schedule(num_groups=int(number or (2 if kind == "circular" else 1)), is_interleaved=kind == "1f1b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Where stages run."""

    mesh: Mesh  # the mesh
    pipe: tuple[str, ...]  # the mesh axes of the stages
    batch: tuple[str, ...]  # the mesh axes that the examples of a microbatch are sharded over; others may be mapped

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return axis_size(self.mesh, self.pipe)

    @property
    def num_shards(self) -> int:
        """The devices of a stage that the examples of a microbatch are sharded over."""
        return axis_size(self.mesh, self.batch)

    def pinned(self, x: jax.Array, *dims: tuple[str, ...]) -> jax.Array:
        """Returns an array with its first dims sharded over some axes, and the others as XLA has them."""
        if is_key(x):
            return x
        spec = PartitionSpec(*(dim or None for dim in dims), *[_FREE] * (x.ndim - len(dims)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def pinned_to(self, x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
        """Returns what stages have, in a sharding; where it is None sharded by stage."""
        return self.pinned(x, self.pipe) if sharding is None else lax.with_sharding_constraint(x, sharding)

    def sent(self, x: jax.Array, pairs: Iterable[tuple[int, int]]) -> jax.Array:
        """Returns `[stages, ...]` with the part of one stage at another one for each pair, and zeros elsewhere."""
        return send_p.bind(x, mesh=self.mesh, axes=self.pipe, pairs=tuple(pairs))

    def of_each(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """Returns what a function makes of each stage's part `[1, ...]` of arrays, again `[1, ...]`."""
        return own_p.bind(*arrays, function=function, mesh=self.mesh, axes=self.pipe)

    def by_itself(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns a function, to be mapped over stages, which each of them evaluates on its own part alone."""
        own = jax.custom_batching.custom_vmap(function)

        @own.def_vmap
        def mapped(size: int, is_mapped: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
            each = zip(arrays, is_mapped, strict=True)
            arrays = tuple(x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in each)
            return self.of_each(lambda *parts: function(*(x[0] for x in parts))[None], *arrays), True

        return own

    def taken(self, stack: jax.Array, number: jax.Array) -> jax.Array:
        """Returns a layer of a stack of a stage, to be mapped over stages. No remat policy keeps it."""
        return self.by_itself(lambda stack, i: lax.dynamic_index_in_dim(stack, i, keepdims=False))(stack, number)

    def stages(self, stack: jax.Array, num_groups: int = 1, dims: Dims | None = None) -> jax.Array:
        """Returns a stack `[layers, ...]` as `[stages, layers / stages, ...]`, a stage's groups one after another.

        Where layers do not divide, the last one is in the idle places behind it, too: zeros may be divided by. Stages
        have their layers one after another as a stack is stored. With several groups of a stage, group g of all is of
        stage `g % stages`: all but a part `1 / stages` moves there.
        """
        if is_key(stack):
            moved = self.stages(jax.random.key_data(stack), num_groups, dims and (*dims, ()))
            return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(stack))
        num_stages = self.num_stages
        if num_idle := -stack.shape[0] % (num_stages * num_groups):
            stack = jnp.concatenate([stack, *[stack[-1:]] * num_idle])

        def pinned(x: jax.Array) -> jax.Array:
            spec = None if dims is None else named(self.mesh, (self.pipe, *[()] * (x.ndim - 1 - len(dims)), *dims))
            return self.pinned_to(x, spec)

        x = pinned(stack.reshape(num_stages, stack.shape[0] // num_stages, *stack.shape[1:]))
        if num_groups == 1:
            return x
        groups = jnp.split(x, num_groups, axis=1)
        placed = [jnp.zeros_like(groups[0])] * num_groups
        for turn in range(num_groups):
            # The group that each stage sends in this turn, all of them to different stages: of equal numbers as many
            # would go to one stage as stages and groups have for a common divisor, so there are as many numbers.
            sent = [(turn + s * math.gcd(num_stages, num_groups) // num_stages) % num_groups for s in range(num_stages)]
            places = [divmod(s * num_groups + i, num_stages) for s, i in enumerate(sent)]  # its number there, and where
            moved = self.sent(pinned(_chosen(sent, groups)), ((s, target) for s, (_, target) in enumerate(places)))
            numbers = {target: number for number, target in places}
            here = [numbers[s] for s in range(num_stages)]
            placed = [at_stages(np.equal(here, i), moved, x) for i, x in enumerate(placed)]
        return pinned(jnp.concatenate(placed, axis=1))

    def stages_apart(self, stack: jax.Array, num_groups: int, dims: Dims, copies: tuple[str, ...]) -> jax.Array:
        """Returns what `stages` does, the same over the axes `copies`.

        Its gradient stays where the layers run, for `moved_back` to move it.
        """

        @jax.custom_vjp
        def apart(stack: jax.Array) -> jax.Array:
            moved = self.stages(stack, num_groups, dims)
            for each in gather_steps(dims, copies, self.mesh):
                moved = lax.with_sharding_constraint(moved, named(self.mesh, (self.pipe, (), *each)))
            return moved

        shape = stack.shape
        apart.defvjp(lambda stack: (apart(stack), None), lambda _, cotangent: (cotangent.reshape(shape),))
        return apart(stack)

    def moved_back(self, grad: jax.Array, num_groups: int) -> jax.Array:
        """Returns the gradient of a stack by that of `stages_apart`."""
        # `stages` only moves: its transpose moves back, whatever it is differentiated at.
        stages = lambda x: self.stages(x, num_groups).reshape(x.shape)  # noqa: E731
        return jax.vjp(stages, grad)[1](grad)[0]


def extremum_of_none(kind: Kind, dtype: Any) -> Any:
    """Returns what the largest (MAX) or smallest (MIN) of no values is."""
    if jnp.issubdtype(dtype, jnp.floating):
        least, most = -jnp.inf, jnp.inf
    else:
        limits = None if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype)
        least, most = (False, True) if limits is None else (limits.min, limits.max)
    return least if kind is Kind.MAX else most


def at_stages(stages: Any, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns `new` at some stages, and `old` at the others."""
    stages = stages.reshape(-1, *(1,) * (new.ndim - 1))
    return _at(stages, new, old) if is_float(new) else jnp.where(stages, new, old)


# Of each tick the stages are kept for the backward pass: of `jnp.where` it is a mask as large as the arrays.
@jax.custom_vjp
def _at(stages: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(stages, new, old)


def _at_backward(stages: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    nothing = jnp.zeros_like(cotangent)
    return None, jnp.where(stages, cotangent, nothing), jnp.where(stages, nothing, cotangent)


_at.defvjp(lambda stages, new, old: (jnp.where(stages, new, old), stages), _at_backward)


def _chosen(numbers: Sequence[int], arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns for each stage its part of one of some arrays."""
    chosen = arrays[0]
    for i, x in enumerate(arrays[1:], 1):
        chosen = at_stages(np.equal(numbers, i), x, chosen)
    return chosen


# Primitives, because nothing maps a `jax.shard_map` of some axes over others by `spmd_axis_name`.


def is_never_kept(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Tells remat policies whether they keep nothing that a primitive makes: it may take a layer, or is complex.

    A layer is taken by `StagePlace.taken`, which may not be mapped yet. What `jax.checkpoint` keeps it rounds, and that
    fails for complex numbers.
    """
    dtypes = [aval.dtype for aval in avals if hasattr(aval, "dtype")] + [params.get("new_dtype")]
    is_complex = any(x is not None and jnp.issubdtype(x, jnp.complexfloating) for x in dtypes)
    return primitive is own_p or is_complex or primitive.name in ("custom_vmap_call", "complex", "fft", "eig")


def _own(*arrays: jax.Array, function: Callable[..., jax.Array], mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    specs = {"in_specs": PartitionSpec(axes), "out_specs": PartitionSpec(axes)}
    return jax.shard_map(function, mesh=mesh, axis_names=set(axes), check_vma=False, **specs)(*arrays)


def _send(x: jax.Array, *, mesh: Mesh, axes: tuple[str, ...], pairs: Pairs) -> jax.Array:
    return _own(x, function=lambda x: lax.ppermute(x, axes, pairs), mesh=mesh, axes=axes)


def _own_jvp(primals: Any, dots: Any, *, function: Callable[..., Any], **params: Any) -> tuple[Any, Any]:
    moving = [i for i, dot in enumerate(dots) if not isinstance(dot, ad.Zero)]

    def tangent(*values: jax.Array) -> jax.Array:
        inputs = values[: len(primals)]
        return jax.jvp(of_some(function, inputs, moving), tuple(inputs[i] for i in moving), values[len(primals) :])[1]

    made = own_p.bind(*primals, function=function, **params)
    return made, own_p.bind(*primals, *(dots[i] for i in moving), function=tangent, **params)


def _own_aval(*avals: Any, function: Callable[..., jax.Array], **_: Any) -> Any:
    made = jax.eval_shape(function, *(jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in avals))
    return avals[0].update(shape=(avals[0].shape[0], *made.shape[1:]), dtype=made.dtype)


def _batch_own(arrays: Any, dims: Any, *, function: Callable[..., Any], **params: Any) -> tuple[Any, int]:
    # The dim of stages stays in front of the one that is mapped.
    arrays = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in zip(arrays, dims, strict=True)]
    mapped = jax.vmap(function, in_axes=[None if dim is None else 1 for dim in dims], out_axes=1)
    return own_p.bind(*arrays, function=mapped, **params), 1


def _batch(arrays: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    return jnp.moveaxis(send_p.bind(jnp.moveaxis(arrays[0], dims[0], 1), **params), 1, 0), 0


def _transpose(cotangent: Any, x: Any, *, pairs: Pairs, **params: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [send_p.bind(cotangent, pairs=tuple((target, source) for source, target in pairs), **params)]


send_p = new_primitive("zero_send", _send)
define_tangents(
    send_p,
    lambda x, **params: send_p.bind(x, **params),
    lambda dot, **params: dot if isinstance(dot, ad.Zero) else send_p.bind(dot, **params),
)
ad.primitive_transposes[send_p] = _transpose
batching.primitive_batchers[send_p] = _batch

own_p = new_primitive("zero_own", _own, aval=_own_aval)
ad.primitive_jvps[own_p] = _own_jvp
batching.primitive_batchers[own_p] = _batch_own
