"""A loss on a part of a batch, made of the counts of the batch: numbers that examples add up to, such as of tokens.

A mean over something uneven ends in a division by a number of the batch, and on a part of the batch it would be a mean
over another number. So numbers of the batch that params have no part in are counted on all parts first (`counts`), and
are inputs of the loss on a part (`CountedProgram`). Then the losses of parts just add up, whatever the loss makes of
its counts: bounds, guards, branches, a divisor for each of its terms.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.core.tree import PyTree
from zero_jax.dims import CASTS, PLACES, SAME_ELEMENTS
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened, inlining
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.sharding.precision import wide
from zero_jax.transforms.separable.quotients import Quotients, named_entry, origin, without_duplicates


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOnParts:
    """How a loss is called on parts of a batch, and how their losses are averaged."""

    size: int = 0  # the number of examples of the batch
    # The powers of the counts that are those of the batch, by their places in `CountedTrace.counts`: such a count is
    # the sum of those of n parts, divided by `n ** power`
    counts: Mapping[int, Fraction] = dataclasses.field(default_factory=dict)
    # What is added to a sum over examples and is the same in all parts, so that parts have a share of it: for the
    # number of an equation (`CountedTrace.numbers`) its operands, which are multiplied by `n ** power`
    terms: Mapping[int, tuple[tuple[int, Fraction], ...]] = dataclasses.field(default_factory=dict)
    # The loss of a part is multiplied by `n ** power`, so that the loss of the batch is the mean over parts
    power: Fraction = Fraction(0)
    of_batch: bool = True  # whether the loss is made of the counts of the batch; else each part has a loss by itself
    # What a part weighs: the place of a count, or the name of an entry of aux; None if all weigh the same
    weight: int | str | None = None
    flat: bool = False  # whether calls are inlined, in which counts or terms are

    @property
    def by_weight(self) -> bool:
        """Whether losses are averaged by weight; where they are made of the counts of the batch, it is in them."""
        return self.weight is not None and not self.of_batch


class CountedTrace:
    """The trace of a loss `(variables, batch, key) -> (loss, (aux, model_state))` on some examples, with its counts.

    Calls are inlined if it is `flat`. Each value of the batch is computed once in its jaxpr (`closed`).
    """

    def __init__(self, traced: Traced, *, flat: bool = False):
        self.traced, self.flat, closed = traced, flat, traced.closed
        self.closed = without_duplicates(flattened(closed) if flat else closed, traced.num_params)
        self.opened, _ = jaxprs.open_jaxpr(self.closed)
        self.quotients = Quotients(self.opened, traced.num_params)
        made = {var for eqn in self.opened.eqns for var in eqn.outvars}
        self.counts = [var for var in self.quotients.counts if var in made]  # the variables that may be counts
        self.is_nested = len(self.counts) < len(self.quotients.counts)  # there are counts in calls

    @property
    def results(self) -> tuple[Any, tuple[PyTree, PyTree]]:
        """The atoms of the results."""
        return jax.tree.unflatten(jax.tree.structure(self.traced.out_shape), self.opened.outvars)

    @functools.cached_property
    def numbers(self) -> dict[Any, int]:
        """The numbers of equations, which are those of a trace on another number of examples, by what they make.

        Equations that only change shapes have none: on a single example there are others. Nor have those that place
        values: for `jnp.ones_like` JAX has others within a `jax.shard_map`, and of shapes without a mesh.
        """
        named = [eqn for eqn in self.opened.eqns if eqn.primitive.name not in (SAME_ELEMENTS | PLACES) - CASTS]
        return {var: i for i, eqn in enumerate(named) for var in eqn.outvars}

    @property
    def mean_over(self) -> int | None:
        """The place of the count that the loss is divided by, or by a function of it; None if there is none."""
        found = self.quotients.results[0].quotient
        return self.counts.index(found.count) if found is not None and found.count in self.counts else None

    def place_of(self, entry: Any) -> int | None:
        """Returns the place of the count that an atom is."""
        found = origin(entry, self.opened.eqns)
        return next((i for i, var in enumerate(self.counts) if origin(var, self.opened.eqns) is found), None)

    def alone(self, places: Sequence[int]) -> Any:
        """Returns the closed jaxpr of counts; no count is made by what has effects."""
        pure = [eqn for eqn in self.opened.eqns if not eqn.effects]
        return jaxprs.alone(self.closed, [self.counts[i] for i in places], eqns=pure)


class OnPart:
    """A loss on a part of a batch, of as many examples as a trace: the counts of the batch are inputs, behind it."""

    def __init__(self, trace: CountedTrace, how: LossOnParts):
        self.trace, self.how, opened = trace, how, trace.opened
        # The variables that depend on counts of the batch, or have a share of a term, by those that they stand for
        self.env = {trace.counts[i]: jaxprs.new_variable(trace.counts[i]) for i in how.counts}
        *batch, key = opened.invars
        self.invars = [*batch, *(self.env[trace.counts[i]] for i in how.counts), key]
        self.numbers, self.eqns = dict(trace.numbers), list[Any]()
        sizes = [var.aval.shape[0] for var in batch[trace.traced.num_params :] if var.aval.shape]
        self.num_parts = Fraction(how.size, sizes[0]) if how.size and sizes else Fraction(1)
        for eqn in opened.eqns:
            self.eqns.append(eqn)
            self._add(eqn, how.terms.get(trace.numbers.get(eqn.outvars[0], -1) if eqn.outvars else -1, ()))

    def _add(self, eqn: Any, shared: Sequence[tuple[int, Fraction]]) -> None:
        """Adds what an equation makes of counts of the batch, and of shares of terms."""
        reads = any(not jaxprs.is_literal(x) and x in self.env for x in eqn.invars)
        # A loss of each part by itself is not computed twice for aux.
        is_twice = not self.how.of_batch and eqn.primitive.name in ("scan", "while", "checkpoint", "remat2", "remat")
        if eqn.effects or is_twice or not (reads or shared):
            return
        invars = [self.of_batch(x) for x in eqn.invars]
        for i, power in shared:
            invars[i] = self.scaled(invars[i], power)
        made = [jaxprs.new_variable(var) for var in eqn.outvars]
        self.eqns.append(eqn.replace(invars=invars, outvars=made))
        for old, new in zip(eqn.outvars, made, strict=True):
            self.env.setdefault(old, new)
            if old in self.trace.numbers:
                self.numbers[new] = self.trace.numbers[old]

    def scaled(self, atom: Any, power: Fraction) -> Any:
        """Returns the atom of a value times `n ** power`."""
        if not power:
            return atom
        scale = float(self.num_parts) ** float(power)  # also 1: traces of all sizes have the same equations
        product = jax.make_jaxpr(lambda x: x * np.asarray(scale, x.dtype))(atom.aval).jaxpr
        renamed = {product.invars[0]: atom}
        for eqn in product.eqns:
            renamed.update((var, jaxprs.new_variable(var)) for var in eqn.outvars)
            invars = [x if jaxprs.is_literal(x) else renamed[x] for x in eqn.invars]
            self.eqns.append(eqn.replace(invars=invars, outvars=[renamed[var] for var in eqn.outvars]))
        return renamed[product.outvars[0]]

    def of_batch(self, atom: Any) -> Any:
        """Returns what stands for an atom where the counts are those of the batch."""
        return atom if jaxprs.is_literal(atom) else self.env.get(atom, atom)

    def closed(self, atoms: Sequence[Any]) -> Any:
        """Returns the closed jaxpr of some results."""
        return jaxprs.alone(self.trace.closed, atoms, invars=self.invars, eqns=self.eqns)


class CountedProgram(LossProgram):
    """A loss on parts: `(variables, (batch, counts), key) -> (loss, (aux, model_state, weight))`, as `how` says.

    `before` is the loss, `(variables, batch, key) -> (loss, (aux, model_state))`.
    """

    before: LossProgram

    def __init__(self, before: LossProgram, how: LossOnParts):
        super().__init__(before.fn, before)
        self.how = how

    def trace(self, *args: Any) -> Traced:
        """Returns the program for arguments of these shapes."""
        variables, (batch, _), key = args
        traced = self.before.trace(variables, batch, key)
        if traced not in self.traces:
            how, trace = self.how, CountedTrace(traced, flat=self.how.flat)
            part, (loss, (aux, model_state)) = OnPart(trace, how), trace.results
            weight = None
            if how.weight is not None:
                weight = trace.counts[how.weight] if isinstance(how.weight, int) else named_entry(aux, how.weight)
            loss = part.scaled(part.of_batch(loss), how.power) if how.of_batch else loss
            results, tree = jax.tree.flatten((loss, (jax.tree.map(part.of_batch, aux), model_state, weight)))
            self.traces[traced] = Traced(
                part.closed(results), traced.params_tree, jax.tree.unflatten(tree, [atom.aval for atom in results])
            )
        return self.traces[traced]

    def counting(self, variables: PyTree, batch: PyTree, key: Any) -> Any:
        """Returns the closed jaxpr of the counts of a part, of which those of the batch are made."""
        trace = CountedTrace(self.before.trace(variables, batch, key), flat=self.how.flat)
        return trace.alone([*self.how.counts])

    def counts(self, variables: PyTree, batch: PyTree, key: Any) -> list[jax.Array]:
        """Returns the counts of a part; the params may be shapes."""
        jaxpr, consts = jaxprs.open_jaxpr(self.counting(variables, batch, key))
        leaves = [*[None] * len(jax.tree.leaves(variables)), *jax.tree.leaves((batch, key))]
        return [jnp.asarray(x) for x in evaluate(jaxpr, consts, leaves, inlining())]


def weight_alone(program: CountedProgram, variables: PyTree, batch: PyTree, key: Any) -> Callable[..., Any]:
    """Returns what a part of a batch weighs as a function of the part (with counts) and a key.

    Raises:
      NotImplementedError: the weight depends on the params.
    """

    def alone(*args: Any) -> Any:
        traced = program.trace(*args)
        return jaxprs.alone(traced.closed, jaxprs.open_jaxpr(traced.closed)[0].outvars[-1:])

    if any(jaxprs.used_inputs(alone(variables, batch, key))[: len(jax.tree.leaves(variables))]):
        raise NotImplementedError("the weight of a part of the batch depends on the params")

    def weigh(batch: PyTree, key: Any) -> jax.Array:
        jaxpr, consts = jaxprs.open_jaxpr(alone(variables, batch, key))
        (weight,) = evaluate(jaxpr, consts, jax.tree.leaves((variables, batch, key)), inlining())
        return jnp.asarray(weight, wide(weight.dtype))

    return weigh
