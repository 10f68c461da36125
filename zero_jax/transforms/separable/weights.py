"""The weight of a batch among others: what its mean loss is a mean over.

The mean of means is the mean of all only if every batch weighs the same. A loss that is a mean over something uneven,
such as the tokens that a mask leaves, ends in a division by a value of the batch; that divisor is the weight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.program import jaxprs
from zero_jax.program.dataflow import read_for
from zero_jax.program.evaluation import evaluate, flattened, inlining, trace_flat, with_equations
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.program.subcalls import equations
from zero_jax.sharding.precision import wide
from zero_jax.transforms.separable.quotients import Quotient, Quotients, named_entry, origin, without_duplicates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartWeight:
    """The weight of a batch: scalars for one, or arrays of those of several.

    A divisor is often a function of a count, as `jnp.maximum(count, 1)` is. Such divisors of batches do not add up to
    that of all of them, which is the same function of the sum of their counts.
    """

    count: Any  # what the loss is a mean over, such as a number of tokens: 0 for an empty batch
    divisor: Any  # what the loss is divided by
    others: tuple[Any, ...] = ()  # scalars that the divisor is made of beside the count: the same in all batches
    # The jaxpr of the divisor, of the count and the others; None where it is the count
    function: Any = dataclasses.field(default=None, metadata={"static": True})

    def joined(self) -> PartWeight:
        """Returns the weight of all batches together; a divisor of 0 is 1, as those of batches are."""
        count, others = jnp.sum(self.count), tuple(jnp.ravel(x)[0] for x in self.others)
        divisor = count
        if self.function is not None:
            scalars = zip((count, *others), self.function.invars, strict=True)
            (divisor,) = evaluate(self.function, [], [jnp.asarray(x, var.aval.dtype) for x, var in scalars])
        divisor = jnp.asarray(divisor, wide(divisor.dtype))
        divisor = jnp.where((self.divisor == 0).all(), divisor, _nonzero(divisor))
        return dataclasses.replace(self, count=count, divisor=divisor, others=others)


def with_weight(program: LossProgram, loss_weight: str) -> LossProgram:
    """Returns a loss with its `PartWeight`, None where all batches of a size weigh the same.

    From `(variables, batch, key) -> (loss, (aux, model_state))` it makes a function to `(loss, (aux, model_state,
    weight))`. `loss_weight` names an entry of aux; `auto` finds the divisor that the loss ends in. The sum of a batch
    whose divisor is 0 is divided by 1, which is its divisor then: the sum of all batches has it, too. So it is in
    detection, where a batch without objects has a loss. What is added to such a mean counts by the divisor itself, and
    is 0 in these batches.
    """

    def add_weight(traced: Traced) -> Traced:
        closed, division, out_shape = traced.closed, None, list[Any]()
        if loss_weight == "auto":
            closed, division = _with_division(closed, traced.num_params)
        opened, consts = jaxprs.open_jaxpr(closed)

        def function(*arrays: Any) -> list[Any]:
            if division is None:
                results = evaluate(opened, consts, arrays)
            else:
                results = evaluate(opened, consts, arrays, division.equation, division.env)
            loss, (aux, model_state) = jax.tree.unflatten(jax.tree.structure(traced.out_shape), results)
            weight = None if division is None else division.weight()
            if loss_weight != "auto":
                weight = PartWeight(*[named_entry(aux, loss_weight)] * 2)
            leaves, tree = jax.tree.flatten((loss, (aux, model_state, weight)))
            out_shape.append(jax.tree.unflatten(tree, [jax.typeof(x) for x in leaves]))
            return leaves

        closed = trace_flat(function, [var.aval for var in opened.invars])
        return traced.rewritten(closed, out_shape[0])

    return program.then(add_weight)


class _Division:
    """The division that a loss ends in: evaluates equations, those by its divisor by 1 where it is 0.

    `function` is the divisor as a function of its count and of other scalars.
    """

    def __init__(self, found: Quotient, quotients: Quotients, function: Any):
        self.found, self.quotients, self.function = found, quotients, function
        self.env: dict[Any, Any] = {}  # the values of all variables

    def equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Evaluates an equation."""
        known = self.quotients.env[eqn.outvars[0]].quotient if eqn.outvars else None
        if known is None or known.divisor is not self.found.divisor:
            return jaxprs.bind(eqn, values)
        if eqn.outvars[0] in self.quotients.divisions:
            values = [*values[:-1], _nonzero(values[-1])]
        elif eqn.primitive.name in ("add", "sub"):
            is_none, env = self.env[self.found.divisor] == 0, self.quotients.env
            is_mean = [not jaxprs.is_literal(x) and env[x].quotient is not None for x in eqn.invars]
            values = [
                x if flag else jnp.where(is_none, jnp.zeros_like(x), x) for x, flag in zip(values, is_mean, strict=True)
            ]
        return jaxprs.bind(eqn, values)

    def weight(self) -> PartWeight:
        """Returns the weight of the batch that was evaluated."""
        count, *others = (self.env[var] for var in self.function.invars)
        divisor = _nonzero(count if self.found.has_term else self.env[self.found.divisor])
        if self.found.count is self.found.divisor:
            return PartWeight(count, divisor)
        return PartWeight(count, divisor, tuple(others), self.function)


def _with_division(closed: Any, num_params: int) -> tuple[Any, _Division | None]:
    """Returns the division that a loss ends in, None if it ends in none, and a jaxpr that has it."""
    closed = without_duplicates(closed, num_params)
    if any(_empty_case(eqn) is not None for eqn in equations(closed)):
        closed = without_duplicates(_with_cases(closed), num_params)
    opened, _ = jaxprs.open_jaxpr(closed)
    quotients = Quotients(opened, num_params)
    found, env = quotients.results[0].quotient, quotients.env
    made = [var for eqn in opened.eqns if jaxprs.inner_jaxprs(eqn) for var in eqn.outvars]
    is_within = found is not None and not {found.count, found.divisor} <= env.keys()
    if is_within or any(env[var].quotient for var in made):  # it is in a nested `jit`, or terms are added there
        closed = flattened(closed)
        opened, _ = jaxprs.open_jaxpr(closed)
        quotients = Quotients(opened, num_params)
        found = quotients.results[0].quotient
    function = None if found is None else _function_of(found, quotients, opened)
    if found is None or function is None or not any(jaxprs.used_inputs(jaxprs.with_results(closed, [found.count]))):
        return closed, None
    return closed, _Division(found, quotients, function)


def _function_of(found: Quotient, quotients: Quotients, opened: Any) -> Any:
    """Returns the jaxpr of a divisor, of its count and of other scalars; None if it is made of more."""
    env = quotients.env
    of_batch = [eqn for eqn in opened.eqns if any(env[var].of_batch for var in eqn.outvars)]
    of_batch = [eqn for eqn in of_batch if found.count not in eqn.outvars]
    needed = read_for([found.divisor], of_batch)
    eqns = [eqn for eqn in of_batch if not needed.isdisjoint(eqn.outvars)]
    made = {found.count, *(var for eqn in eqns for var in eqn.outvars)}
    others = [var for var in dict.fromkeys(var for eqn in eqns for var in jaxprs.variables(eqn)) if var not in made]
    fits = [not (var.aval.shape or env[var].of_batch or env[var].of_params) for var in others]
    if not all(fits) or needed - {*others} - made:
        return None
    return opened.replace(constvars=[], invars=[found.count, *others], outvars=[found.divisor], eqns=eqns)


def _nonzero(total: Any) -> jax.Array:
    """Returns a sum of weights to divide by: 1 where it is 0."""
    return jnp.where(total == 0, 1, total)


def _empty_case(eqn: Any) -> int | None:
    """Returns which branch of a `lax.cond` returns the number 0 and nothing else; None if none or both do."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2 or len(eqn.outvars) != 1:
        return None
    if eqn.outvars[0].aval.shape or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    ends = [origin(opened.outvars[0], opened.eqns) for opened, _ in map(jaxprs.open_jaxpr, eqn.params["branches"])]
    is_empty = [jaxprs.is_literal(x) and not jnp.shape(x.val) and bool(x.val == 0) for x in ends]
    return is_empty.index(True) if sum(is_empty) == 1 else None


def _with_cases(closed: Any) -> Any:
    """Returns a jaxpr in which branches that may be 0 are cases that are chosen from, and calls are inlined."""
    inline = inlining()

    def equation(eqn: Any, values: list[Any]) -> list[Any]:
        if _empty_case(eqn) is not None:
            cases = [evaluate(*jaxprs.open_jaxpr(x), values[1:], equation)[0] for x in eqn.params["branches"]]
            cases = [jnp.asarray(x, eqn.outvars[0].aval.dtype) for x in cases]
            with jaxprs.source_context(eqn):
                return [jax.lax.select_n(values[0], *cases)]
        return list(inline(eqn, values))

    return with_equations(flattened(closed), equation)
