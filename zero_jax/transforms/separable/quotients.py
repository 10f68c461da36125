"""What the results of a loss function are divided by, and the scalars of the batch that may be counts.

The divisor of a mean over something uneven, such as the tokens that a mask leaves, is a function of a count: a scalar
of the batch that params have no part in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.core.tree import PyTree
from zero_jax.dims import ELEMENTWISE, SAME_ELEMENTS, SCATTERS, known_primitives
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dataflow, made_of
from zero_jax.program.evaluation import once_each

# A linear operation on a quotient makes another quotient by the same divisor.
_LINEAR = {name: known.linear for name, known in known_primitives().items() if known.linear}
_OF_OTHERS = frozenset({"add_any", "dynamic_slice", "dynamic_update_slice", "gather", "pad"}) | SCATTERS
_KEEP_DIVISOR = (_LINEAR.keys() - _OF_OTHERS) | {"select_n"}
_MASKS = frozenset({"broadcast_in_dim", "random_bits"})


@dataclasses.dataclass(frozen=True)
class Quotient:
    """A value that was divided by the scalar `divisor`, a function of the scalar `count` of the batch.

    `has_term`: a term was added to the quotient.
    """

    count: Any
    divisor: Any
    has_term: bool = False


@dataclasses.dataclass(frozen=True)
class _Known:
    """What a value depends on, and the divisor if it is a quotient by a scalar of the batch.

    Scalars of a batch are the same in all its parts: `of_batch` is what depends on its examples, or on their number.
    """

    of_params: bool = False  # whether it depends on params
    of_batch: bool = False  # whether it depends on the batch
    count: Any = None  # the scalar of the batch that it is a function of; of the batch it depends on nothing else
    is_count: bool = False  # whether it is the count itself
    scalar: Any = None  # the scalar that it is, or is broadcast from
    quotient: Quotient | None = None  # what it was divided by


class Quotients(Dataflow[_Known]):
    """Which values of an open jaxpr are quotients; its first inputs are params, the others the batch.

    Counts and divisors are variables of the jaxpr that makes them.
    """

    enters = frozenset({"call"})

    def __init__(self, opened: Any, num_params: int):
        super().__init__()
        batch = opened.invars[num_params:]
        self.batch_dims = {var.aval.shape[:1] for var in batch if var.aval.ndim}
        self.env: dict[Any, _Known] = {}  # what is known of each variable of the outer jaxpr
        self.counts: list[Any] = []  # the scalars that may be counts
        self.divisions: set[Any] = set()  # the results of divisions
        inputs = [_Known(of_params=True)] * num_params + [_Known(of_batch=var.aval.ndim > 0) for var in batch]
        self.results = self.run(opened, inputs, self.env)  # what is known of each result

    def constant(self, atom: Any) -> _Known:
        """Returns that a constant depends on nothing."""
        return _Known()

    def operation(self, eqn: Any, operands: list[_Known]) -> list[_Known]:
        """Returns what is known of the results of an equation."""
        of_params = any(x.of_params for x in operands)
        # A mask of ones (`jnp.ones_like(labels)`) or of draws has the shape of the batch and none of its values.
        is_mask = eqn.primitive.name in _MASKS and eqn.params["shape"][:1] in self.batch_dims
        of_batch = (is_mask and not of_params) or any(x.of_batch for x in operands)
        known = _Known(of_params, of_batch, quotient=self.quotient(eqn, operands))
        is_scalar_of_batch = of_batch and not of_params
        return [self.counted(var, known, eqn, operands) if is_scalar_of_batch else known for var in eqn.outvars]

    def counted(self, var: Any, known: _Known, eqn: Any, operands: list[_Known]) -> _Known:
        """Returns a value of the batch with the count that it is a function of; of a scalar that may be itself."""
        name, of_batch = eqn.primitive.name, [x for x in operands if x.of_batch]
        counts = {x.count for x in of_batch}
        is_move, is_number = name in SAME_ELEMENTS, not getattr(var.aval, "shape", ())
        if is_move and of_batch and of_batch[0].count is not None:
            (x,) = of_batch
            return dataclasses.replace(known, count=x.count, is_count=x.is_count, scalar=var if is_number else x.scalar)
        if not is_number:
            return known
        # A count that is scaled is another one, of which the parts' add up to the whole's or to a multiple of it.
        is_scaled = name in ("mul", "div", "neg") and len(of_batch) == 1 and of_batch[0].is_count
        is_function = name in ELEMENTWISE or (name == "cond" and not any(x.aval.shape for x in eqn.invars))
        if is_function and len(counts) == 1 and None not in counts and not is_scaled:
            return dataclasses.replace(known, count=counts.pop(), scalar=var)
        self.counts.append(var)
        return dataclasses.replace(known, count=var, is_count=True, scalar=var)

    def quotient(self, eqn: Any, operands: list[_Known]) -> Quotient | None:
        """Returns what the result of an equation was divided by."""
        name, below = eqn.primitive.name, operands[-1] if operands else _Known()
        if name == "div" and not below.of_batch:
            return operands[0].quotient if not below.of_params else None
        if name == "div" or (name == "integer_pow" and eqn.params["y"] == -1):
            if below.count is None or any(x.quotient for x in operands[:-1]):
                return None
            self.divisions.add(eqn.outvars[0])
            divisor = eqn.invars[-1] if not eqn.invars[-1].aval.shape else below.scalar
            return Quotient(below.count, divisor)
        quotients = [x.quotient for x in operands if x.quotient is not None]
        if name not in _KEEP_DIVISOR or not quotients or any(x != quotients[0] for x in quotients):
            return None
        found = quotients[0]
        if _LINEAR.get(name) == "product":
            return found if len(quotients) == 1 else None
        if name in ("add", "sub") and len(quotients) < 2:
            return None if sum(x.of_batch for x in operands) > 1 else dataclasses.replace(found, has_term=True)
        return found


def named_entry(aux: PyTree, name: str) -> Any:
    """Returns the entry of aux that is the weight of a loss; raises `ValueError` if there is none."""
    if isinstance(aux, Mapping) and name in aux:
        return aux[name]
    has = sorted(aux) if isinstance(aux, Mapping) else type(aux).__name__
    raise ValueError(
        f"loss_weight={name!r}, but the aux that loss_fn returned has no such entry (it has {has}): "
        f"return (loss, {{..., {name!r}: weight}})"
    )


def origin(atom: Any, eqns: Sequence[Any]) -> Any:
    """Returns the atom that an atom is a cast or a move of."""
    for eqn in reversed(eqns):
        if eqn.primitive.name in SAME_ELEMENTS and eqn.outvars[0] is atom:
            atom = eqn.invars[0]
    return atom


def without_duplicates(closed: Any, num_params: int) -> Any:
    """Returns a jaxpr that computes what scalars of the batch are made of once: sums of one mask are one divisor.

    The rest stays as it is: `remat` compares layers, and names their values.
    """
    opened, _ = jaxprs.open_jaxpr(closed)
    of_params = made_of(opened.invars[:num_params], opened.eqns)
    of_scalars: set[Any] = set()  # scalars of the batch, and what they are made of
    for eqn in reversed(opened.eqns):
        scalars = {var for var in eqn.outvars if getattr(var.aval, "shape", None) == ()}
        if of_params.isdisjoint(eqn.outvars) and (scalars or not of_scalars.isdisjoint(eqn.outvars)):
            of_scalars.update(eqn.outvars, jaxprs.variables(eqn))
    return once_each(closed, lambda eqn: not of_scalars.isdisjoint(eqn.outvars) and of_params.isdisjoint(eqn.outvars))
