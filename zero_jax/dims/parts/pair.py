"""An operation as traced on a whole batch and on a part of it, which the rules of relations look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.dims.parts.relations import Refused, Relation
from zero_jax.program.jaxprs import bind
from zero_jax.program.subcalls import Subcall, subcall

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """An equation as traced on the whole batch, and the same one as traced on a part."""

    whole: Any
    part: Any

    @property
    def params(self) -> Any:
        """The parameters on the whole batch; those that differ on a part are compared by the rules (`SIZED`)."""
        return self.whole.params

    def shapes(self, i: int) -> tuple[Shape, Shape]:
        """The shapes of an input, on the whole batch and on a part."""
        return self.whole.invars[i].aval.shape, self.part.invars[i].aval.shape

    def results(self, i: int = 0) -> tuple[Shape, Shape]:
        """The shapes of a result, on the whole batch and on a part."""
        return self.whole.outvars[i].aval.shape, self.part.outvars[i].aval.shape

    def subcalls(self) -> tuple[Subcall, Subcall]:
        """The jaxprs that the equation runs, on the whole batch and on a part."""
        whole, part = subcall(self.whole), subcall(self.part)
        assert whole is not None and part is not None
        return whole, part

    def growing(self) -> int | None:
        """Returns the dim of the result that is larger on the whole batch; None if there is none."""
        found = [i for i, (a, b) in enumerate(zip(*self.results(), strict=True)) if a != b]
        if len(found) > 1:
            raise Refused("sized")
        return found[0] if found else None


Rule = Callable[[Pair, Sequence[Relation]], list[Relation]]


def check(holds: bool, why: str = "mixed") -> None:
    """Refuses what does not hold."""
    if not holds:
        raise Refused(why)


def aval(atom: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an input or a result."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def floating(atoms: Sequence[Any]) -> list[int]:
    """Returns the places of the floating ones."""
    return [i for i, atom in enumerate(atoms) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]


def of_some(eqn: Any, values: Sequence[Any], which: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns an equation as a function of some of its inputs, to its floating results."""

    def call(*some: Any) -> list[Any]:
        full = dict(enumerate(values)) | dict(zip(which, some, strict=True))
        results = bind(eqn, list(full.values()))
        return [results[i] for i in floating(eqn.outvars)]

    return call
