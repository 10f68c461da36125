"""What each value of a flat jaxpr is, as far as attention goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.core import jaxprs
from zero_jax.core.passes import Pass
from zero_jax.transforms.attention import scores
from zero_jax.transforms.attention.dims import after, common, renamed, shape_of
from zero_jax.transforms.attention.follow import follow
from zero_jax.transforms.attention.masks import Affine, Leaf, Masked, Same, View
from zero_jax.transforms.attention.operations import operation
from zero_jax.transforms.attention.scores import Attended, Followed, Logits, Lost, RowShift, RowTest, Scores, Weights
from zero_jax.transforms.attention.static import Known, known

_STATIC = (Known, Affine, Masked)


class Prover(Pass[Any]):
    """Runs a flat jaxpr on what its values are: numbers, masks, views of arrays, logits, weights.

    Attributes:
      known: what each variable is.
      found: by the variable of its result, each softmax of a product, multiplied with values.
      lost: by the variable of a product, why it is no such softmax.
      leaves: the variables of which nothing is known; equal ones share a leaf.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]):
        super().__init__()
        self.consts = dict(zip(jaxpr.constvars, consts, strict=True))
        self.found: dict[Any, Attended] = {}
        self.lost: dict[Any, Lost] = {}
        self.leaves: dict[Any, Leaf] = {}
        self._numbers: dict[Any, Any] = {}
        self._of_number: dict[Any, Leaf] = {}
        self.known: dict[Any, Any] = {}
        values = [self.leaf(var) if x is None else x for var, x in zip(jaxpr.invars, inputs, strict=True)]
        self.run(jaxpr, values, self.known)

    def constant(self, atom: Any) -> Any:
        """Returns a number, or an array that the function closes over."""
        if jaxprs.is_literal(atom):
            return known(atom.val)
        value = self.consts[atom]
        is_plain = isinstance(value, np.ndarray) or (jaxprs.is_array(value) and value.is_fully_addressable)
        if not is_plain or not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.number, jnp.bool_)):
            return self.leaf(atom)
        return Known(value.shape, lambda: np.asarray(value))

    def leaf(self, var: Any) -> View:
        """Returns a variable as an array of which nothing is known."""
        number = self._number(var)
        if number not in self._of_number:
            self._of_number[number] = Leaf(getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None))
            self.leaves[var] = self._of_number[number]
        return View.whole(self._of_number[number])

    def _number(self, atom: Any) -> Any:
        if jaxprs.is_literal(atom):
            return ("literal", str(atom.val), str(atom.aval))
        return self._numbers.setdefault(atom, ("variable", len(self._numbers)))

    def _name(self, eqn: Any) -> None:
        """Numbers the results of an equation such that equal ones have equal numbers."""
        key = (eqn.primitive, tuple(eqn.params.items()), tuple(map(self._number, eqn.invars)))
        try:
            hash(key)
        except TypeError:
            return
        if not eqn.effects:
            number = self._numbers.setdefault(key, ("result", len(self._numbers)))
            self._numbers.update((var, (*number, i)) for i, var in enumerate(eqn.outvars))

    def operation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """Returns what the results of an equation are."""
        self._name(eqn)
        result = self._result(eqn, operands)
        indices = getattr(result, "indices", None)
        if indices is not None and shape_of(indices) != eqn.outvars[0].aval.shape:
            result = self._lost(eqn, operands, None)
        if isinstance(result, Attended) and scores.is_softmax(result):
            self.found[eqn.outvars[0]] = result
            self.lost.pop(result.result, None)
            result = None
        if result is not None:
            return [result]
        return [self.leaf(var) for var in eqn.outvars]

    def _result(self, eqn: Any, operands: list[Any]) -> Any:
        """Returns what the only result of an equation is; None if nothing is known of it."""
        if len(eqn.outvars) != 1:
            return self._lost(eqn, operands, None)
        if eqn.primitive.name == "dot_general":
            return self._product(eqn, operands)
        if any(isinstance(x, Followed) for x in operands) and not any(isinstance(x, Lost) for x in operands):
            found = follow(eqn, operands)
            return self._lost(eqn, operands, found) if found is None or isinstance(found, Lost) else found
        if any(isinstance(x, Lost) for x in operands):
            return self._lost(eqn, operands, None)
        if all(isinstance(x, _STATIC) for x in operands):
            if len(operands) == 1 and not isinstance(operands[0], Known):
                if (moved := _moved(eqn, operands[0])) is not None:
                    return moved
            return operation(eqn, operands)
        if len(operands) == 1:
            return _moved(eqn, operands[0])
        return _compared(eqn, operands)

    def _product(self, eqn: Any, operands: list[Any]) -> Any:
        is_float = all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in eqn.invars)
        if not is_float:
            return None
        weights = [i for i, x in enumerate(operands) if isinstance(x, Weights)]
        if len(weights) == 1:
            (place,) = weights
            found = scores.attended(eqn, operands[place], place)
            if found is not None:
                is_normal = any(symbol.kind == "lse" and symbol.over != found.contracted for symbol, _ in found.shift)
                reason = "the softmax is not over the keys" if is_normal else "the weights are not divided by their sum"
                self.lost[eqn.outvars[0]] = _at(eqn, Lost(reason, True))
                return found
        for x in sorted((x for x in operands if isinstance(x, Lost)), key=lambda x: x.is_core):
            self.lost[eqn.outvars[0]] = x
        product = scores.made_product(eqn)
        return Scores(logits=Logits(product), indices=product.indices)

    def _lost(self, eqn: Any, operands: list[Any], found: Lost | None) -> Lost | None:
        """Returns that logits or weights are lost, if they are among the operands."""
        before = [x for x in operands if isinstance(x, Lost)]
        if before:
            lost = max(before, key=lambda x: x.is_core)
        else:
            of = next((x for x in operands if isinstance(x, Scores | Weights | Attended)), None)
            if of is None or (isinstance(of, Scores) and of.constant):
                return None
            is_core = not isinstance(of, Scores)
            what = {Scores: "the logits", Weights: "the weights", Attended: "the sum of the values"}[type(of)]
            lost = _at(eqn, found or Lost(f"{eqn.primitive.name} of {what}", is_core))
        is_exp = eqn.primitive.name in ("exp", "exp2")
        if len(eqn.outvars) != 1 or not jnp.issubdtype(getattr(eqn.outvars[0].aval, "dtype", bool), jnp.floating):
            return None
        return dataclasses.replace(lost, is_core=lost.is_core or is_exp)


def _at(eqn: Any, lost: Lost) -> Lost:
    line = jaxprs.source_line(eqn)
    return dataclasses.replace(lost, reason=f"{lost.reason} ({line})") if line else lost


def _moved(eqn: Any, x: Any) -> Any:
    """Returns a mask, a range or a view after a transpose, reshape or broadcast."""
    name = eqn.primitive.name
    if isinstance(x, RowShift | RowTest):
        return None
    if name in ("copy", "copy_p", "sharding_constraint", "name", "zero_reshard"):
        return x
    if name == "convert_element_type" and isinstance(x, View):
        old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        is_same = all(jnp.issubdtype(dtype, jnp.signedinteger) for dtype in (old, new)) and new.itemsize >= old.itemsize
        return x if is_same else None
    indices = after(eqn, x.indices)
    if indices is None:
        return None
    changes = {} if isinstance(x, View) else {"shape": eqn.outvars[0].aval.shape}
    return dataclasses.replace(x, indices=indices, **changes)


def _compared(eqn: Any, operands: list[Any]) -> Masked | None:
    """Returns the comparison of an array of integers with itself at other places."""
    x, y = operands if len(operands) == 2 else (None, None)
    if eqn.primitive.name not in ("eq", "ne") or not isinstance(x, View) or not isinstance(y, View):
        return None
    if x.leaf is not y.leaf or not jnp.issubdtype(x.leaf.dtype, jnp.integer):
        return None
    shared = common(x.indices, y.indices)
    if shared is None:
        return None
    indices, left, right = shared
    first, second = (renamed((i for dim in z.axes for i in dim), names) for z, names in ((x, left), (y, right)))
    if first is None or second is None or first == second:
        return None
    on = np.bool_(eqn.primitive.name == "eq")
    return Masked(indices, frozenset([Same(x.leaf, first, second)]), on, ~on, eqn.outvars[0].aval.shape)
