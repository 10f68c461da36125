"""Values of a trace that is being walked: ordinary ones, and those still to be made from sharded params."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from zero_jax.dims import BY_INDEX, JOINS, MOVES
from zero_jax.program.walk import Deferred
from zero_jax.sharding.gather_names import RELATIVE
from zero_jax.sharding.precision import promoted
from zero_jax.sharding.quantized import PLAIN, Formats
from zero_jax.sharding.spec import Dims


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy(Deferred):
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

    params_only: ClassVar[bool] = True

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that it is made of."""
        return self.roots

    def with_arrays(self, arrays: Sequence[Any]) -> Lazy:
        """Returns the value made of other roots."""
        return dataclasses.replace(self, roots=tuple(arrays))

    @property
    def key(self) -> Hashable:
        """What is done with it, whatever its arrays."""
        return self.build, self.aval, self.path, self.dims, self.depth, self.cast, self.formats

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

    def as_root(self) -> Lazy:
        """Returns the value as one that is its own root: it is built now."""
        return dataclasses.replace(self, roots=(self.built,), build=as_it_is, depth=0, on_host=False)

    def widened(self, array: Any) -> Any:
        """Returns what was built, gathered or not, in the dtype that it is used in."""
        return array if self.cast is None else array.astype(self.cast)


def as_it_is(array: Any) -> Any:
    """The recipe of a param that is stored as it is used."""
    return array


@dataclasses.dataclass(frozen=True)
class Value(Deferred):
    """An ordinary value; `params_only` if it depends on params and constants only."""

    array: Any
    params_only: bool

    is_deferred: ClassVar[bool] = False

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that it is made of."""
        return (self.array,)

    def with_arrays(self, arrays: Sequence[Any]) -> Value:
        """Returns the value with another array."""
        return dataclasses.replace(self, array=arrays[0])

    @property
    def key(self) -> Hashable:
        """What is done with it, whatever its arrays."""
        return type(self), self.params_only


class Copies(Value):
    """A copy of a whole param for each device: the array has a leading dim of devices."""


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
    return value.widened(value.built) if isinstance(value, Lazy) else value.array


# Widening casts are put off until the param is gathered: narrow bytes are cheaper to move. What only moves elements
# commutes with a cast, so a cast stays pending (`Lazy.cast`) through it, up to the first operation that computes.


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
    moved = values[:1] if eqn.primitive.name in BY_INDEX else values
    moves = eqn.primitive.name in MOVES | JOINS and all(isinstance(value, Lazy) for value in moved)
    return (True, casts.pop()) if moves and len(casts) == 1 else (False, None)
