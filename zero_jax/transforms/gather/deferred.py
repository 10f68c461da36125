"""Values of a trace that is being walked: ordinary ones, and those still to be made from sharded params."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp

from zero_jax.sharding.gather_names import RELATIVE
from zero_jax.sharding.precision import promoted
from zero_jax.sharding.quantized import PLAIN, Formats
from zero_jax.sharding.spec import Dims


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A param, or what was made of params alone: rebuilt from `roots` at each use rather than kept.

    `dims` is its sharding while it is still a shard (of no axes, if the param is whole), None once the recipe gathers.
    `depth` counts the equations of the recipe that follow one another. `cast` is a wider dtype that it is used in:
    `build` makes it, and `aval` has it, in the dtype from before, in which it is cheaper to gather. `formats` are what
    it is gathered in and its gradient sent in. `on_host` says that `build` fetches it from host memory first.
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

    def widened(self, array: Any) -> Any:
        """Returns what was built, gathered or not, in the dtype that it is used in."""
        return array if self.cast is None else array.astype(self.cast)


def as_it_is(array: Any) -> Any:
    """The recipe of what is its own root."""
    return array


@dataclasses.dataclass(frozen=True)
class Value:
    """An ordinary value; `pure` if it was made of params and constants alone."""

    array: Any
    pure: bool


class Copies(Value):
    """A copy of a whole param for each device: the array has a leading dim of devices."""


class Roots:
    """Flattens mixed inputs to arrays and back, so that they can cross into a region as its arguments."""

    def __init__(self, values: Sequence[Lazy | Value]):
        self.values = list(values)
        self.arrays: list[Any] = []
        self.places: list[list[int]] = []
        seen: dict[int, int] = {}
        for value in self.values:
            roots = value.roots if isinstance(value, Lazy) else (value.array,)
            self.places.append([])
            for root in roots:
                if id(root) not in seen:
                    seen[id(root)] = len(self.arrays)
                    self.arrays.append(root)
                self.places[-1].append(seen[id(root)])

    @property
    def key(self) -> Hashable:
        """What the values are, whatever their arrays: equal where the same is done with them."""

        def described(value: Lazy | Value) -> Hashable:
            if isinstance(value, Value):
                return type(value), value.pure
            return value.build, value.aval, value.path, value.dims, value.depth, value.cast, value.formats

        return tuple((*places, described(v)) for v, places in zip(self.values, self.places, strict=True))

    def spread(self, flags: bool | Sequence[bool]) -> bool | tuple[bool, ...]:
        """Returns flags of the values as flags of the arrays: an array of several values has it if one of them does."""
        if isinstance(flags, bool):
            return flags
        pairs = [(i, flag) for places, flag in zip(self.places, flags, strict=True) for i in places]
        return tuple(any(flag for place, flag in pairs if place == i) for i in range(len(self.arrays)))

    def assign(self, arrays: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """Pairs each value with the arrays that stand for its roots."""
        return [(value, [arrays[i] for i in places]) for value, places in zip(self.values, self.places, strict=True)]

    def rebuild(self, arrays: Sequence[Any]) -> list[Lazy | Value]:
        """Returns the values with other arrays for roots."""
        return [
            dataclasses.replace(value, roots=tuple(roots))
            if isinstance(value, Lazy)
            else dataclasses.replace(value, array=roots[0])
            for value, roots in self.assign(arrays)
        ]


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


def as_array(value: Lazy | Value) -> Any:
    """Returns the array of a value, a shard where it is one."""
    return value.widened(value.build(*value.roots)) if isinstance(value, Lazy) else value.array


# Widening casts are put off until the param is gathered: narrow bytes are cheaper to move. What only moves elements
# commutes with a cast, so a cast stays pending (`Lazy.cast`) through it, up to the first operation that computes.

_MOVES = frozenset("broadcast_in_dim concatenate reshape rev slice split squeeze stack transpose unstack".split())
_MOVES_BY_INDEX = frozenset({"dynamic_slice", "gather"})


def put_off(eqn: Any, values: Sequence[Lazy | Value]) -> Lazy | None:
    """Returns the result of a widening cast of what is not gathered yet, with the cast pending, or None."""
    value = values[0]
    if eqn.primitive.name != "convert_element_type" or not isinstance(value, Lazy) or value.dims is None:
        return None
    narrow, wide = value.aval.dtype, eqn.outvars[0].aval.dtype
    if narrow == wide:
        return dataclasses.replace(value, cast=None)  # there and back again
    used = value.cast or narrow
    exact = promoted(used, wide) == wide and all(jnp.issubdtype(d, jnp.floating) for d in (narrow, wide))
    return dataclasses.replace(value, cast=wide) if exact else None


def pending(eqn: Any, values: Sequence[Lazy | Value]) -> tuple[bool, Any]:
    """Tells whether an equation may come before the casts that are pending on its inputs, and which these are.

    Returns:
      `(True, None)` where none is pending.
    """
    casts = {value.cast for value in values if isinstance(value, Lazy)}
    if casts == {None}:
        return True, None
    moved = values[:1] if eqn.primitive.name in _MOVES_BY_INDEX else values
    moves = eqn.primitive.name in _MOVES | _MOVES_BY_INDEX and all(isinstance(value, Lazy) for value in moved)
    return (True, casts.pop()) if moves and len(casts) == 1 else (False, None)
