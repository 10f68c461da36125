"""What each value of a flat jaxpr is, as far as attention goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.evaluation import first_of_equals
from zero_jax.transforms.attention.dims import shape_of
from zero_jax.transforms.attention.followed import Followed, Lost, RowTest
from zero_jax.transforms.attention.softmax import attended, follow, logits_of
from zero_jax.transforms.attention.tables import Leaf, Table, View, compared, operation


class Prover(Dataflow[Any]):
    """Runs a flat jaxpr on what its values are: tables, views of arrays, logits, weights."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]):
        super().__init__()
        self.consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self.producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.found: dict[Any, Followed] = {}  # each softmax of a product, multiplied with values, by that result
        self.lost: dict[Any, Lost] = {}  # by the variable of a product, why it is no such softmax
        self.leaves: dict[Any, Leaf] = {}  # of the variables of which nothing is known; equal ones share a leaf
        self.first = first_of_equals(jaxpr)
        self.known: dict[Any, Any] = {}  # what each variable is
        values = [self.leaf(var) if x is None else x for var, x in zip(jaxpr.invars, inputs, strict=True)]
        self.run(jaxpr, values, self.known)

    def constant(self, atom: Any) -> Any:
        """Returns a number, or an array that the function closes over."""
        if jaxprs.is_literal(atom):
            return Table.known(atom.val)
        value = self.consts[atom]
        is_plain = isinstance(value, np.ndarray) or (jaxprs.is_array(value) and value.is_fully_addressable)
        if not is_plain or not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.number, jnp.bool_)):
            return self.leaf(atom)
        return Table.known(value)

    def leaf(self, var: Any) -> View:
        """Returns a variable as an array of which nothing is known."""
        var = self.first.get(var, var)
        if var not in self.leaves:
            self.leaves[var] = Leaf(getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None))
        return View.whole(self.leaves[var])

    def operation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Returns what the results of an equation are."""
        result = self._result(eqn, operands) if len(eqn.outvars) == 1 else None
        if isinstance(result, Followed | RowTest | Table | View) and (
            shape_of(result.indices) != eqn.outvars[0].aval.shape  # an operand of size 1 was broadcast
        ):
            result = None
        if result is None or isinstance(result, Lost):
            result = self._lost(eqn, operands, result)
        if isinstance(result, Followed) and result.values and result.is_softmax:
            self.found[eqn.outvars[0]] = result
            self.lost.pop(result.result, None)
            result = None  # to what follows, it is an array as any other
        return [self.leaf(var) for var in eqn.outvars] if result is None else [result]

    def _result(self, eqn: Any, operands: list[Any]) -> Any:
        """Returns what the result of an equation is, or why it is no attention any more; None if nothing is known."""
        if eqn.primitive.name == "dot_general":
            return self._product(eqn, operands)
        if any(isinstance(x, Lost) for x in operands):
            return None
        if any(isinstance(x, Followed | RowTest) for x in operands):
            return follow(eqn, operands)
        if all(isinstance(x, Table) for x in operands):
            return operation(eqn, operands)
        return operands[0].moved(eqn) if len(operands) == 1 else compared(eqn, operands)

    def _product(self, eqn: Any, operands: list[Any]) -> Any:
        if not all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in eqn.invars):
            return None
        weights = [i for i, x in enumerate(operands) if isinstance(x, Followed) and x.is_weights]
        found = attended(eqn, operands[weights[0]], weights[0]) if len(weights) == 1 else None
        if found is not None:
            of_others = any(symbol.kind == "lse" and symbol.over != found.contracted for symbol, _ in found.shift)
            reason = "the softmax is not over the keys" if of_others else "the weights are not divided by their sum"
            self.lost[eqn.outvars[0]] = _at(eqn, Lost(reason, True))
            return found
        for x in sorted((x for x in operands if isinstance(x, Lost)), key=lambda x: x.is_core):
            self.lost[eqn.outvars[0]] = x
        return logits_of(eqn)

    def _lost(self, eqn: Any, operands: list[Any], found: Lost | None) -> Lost | None:
        """Returns that logits or weights are lost, if they are among the operands."""
        if len(eqn.outvars) != 1 or not jnp.issubdtype(getattr(eqn.outvars[0].aval, "dtype", bool), jnp.floating):
            return None
        before = [x for x in operands if isinstance(x, Lost)]
        operand = next((x for x in operands if isinstance(x, Followed) and x.logits), None)
        if before:
            lost = max(before, key=lambda x: x.is_core)
        elif operand is None or operand.is_constant:
            return None
        else:
            lost = _at(eqn, found or Lost(f"{eqn.primitive.name} of {operand.name}", operand.is_exp))
        return dataclasses.replace(lost, is_core=lost.is_core or eqn.primitive.name in ("exp", "exp2"))


def _at(eqn: Any, lost: Lost) -> Lost:
    line = jaxprs.source_line(eqn)
    return dataclasses.replace(lost, reason=f"{lost.reason} ({line})") if line else lost
