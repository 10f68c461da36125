"""How a jaxpr uses its params, found without evaluating it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from zero_jax.dims import CASTS, SHAPES, narrows
from zero_jax.program.passes import Pass


class _Uses(Pass[bool]):
    """Which values are a param in another form; notes the equations that use it, and which of their operands it is."""

    def __init__(self, forms: Collection[str], enters: frozenset[str]):
        super().__init__()
        self.forms, self.enters, self.is_returned = forms, enters, False

    def constant(self, atom: Any) -> bool:
        return False

    def join(self, first: bool, second: bool) -> bool:
        return first or second

    def slice_of(self, operand: bool) -> bool:
        return False

    def run(self, jaxpr: Any, inputs: Sequence[bool], env: dict[Any, bool] | None = None) -> list[bool]:
        results = super().run(jaxpr, inputs, env)
        self.is_returned = self.is_returned or any(results)
        return results

    def operation(self, eqn: Any, operands: list[bool]) -> list[bool]:
        is_form = any(operands) and eqn.primitive.name in self.forms
        if any(operands) and not is_form:
            self.notes[id(eqn), tuple(operands)] = eqn, [i for i, is_param in enumerate(operands) if is_param]
        return [is_form] * len(eqn.outvars)


def param_uses(
    jaxpr: Any, param: Any, *, forms: Collection[str], enters: frozenset[str]
) -> tuple[list[tuple[Any, list[int]]], bool]:
    """Returns the equations that use an input of a jaxpr, each with the numbers of the operands that it is.

    Args:
      jaxpr: the jaxpr; slices that a loop in it takes of the param are no uses.
      param: the input.
      forms: the primitives whose results count as the param.
      enters: the kinds of `Subcall` that are looked into.

    Returns:
      The uses, and whether the param itself is a result, of the jaxpr or of one in it.
    """
    uses = _Uses(forms, enters)
    uses.run(jaxpr, [var is param for var in jaxpr.invars])
    return list(uses.notes.values()), uses.is_returned


def used_whole(jaxpr: Any, param: Any) -> bool:
    """Tells whether a loop body uses a param as a whole, rather than slices of it that differ by iteration."""
    uses, _ = param_uses(jaxpr, param, forms=SHAPES | CASTS, enters=frozenset({"call", "remat", "scan"}))
    return not all(narrows(eqn) for eqn, _ in uses)
