"""The loss of one microbatch as a stage runs it, where gradients are taken within the loop over ticks (1F1B).

Everything from the examples of a microbatch to its part of the loss is in it, with one equation for the layers. What is
no value of each example is computed once, outside: what is made of params alone, and the number of tokens of the batch.
So is what is made of several examples before the layers, and by layers without a gradient, as those of a reference
model: a microbatch has its examples of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from zero_jax.dims import COPIES, SAME, SHAPES, Kind, Relation, TraceComparison, is_contraction, rows
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import made_of
from zero_jax.program.evaluation import trace_flat, values_of
from zero_jax.program.subcalls import equations_of, scan_of
from zero_jax.transforms.pipeline.body import CannotCut, draws_of_examples
from zero_jax.transforms.pipeline.cut import OF_ONE, FoundLoop, LayerLoop, are_of_one

# The layers within the loss of a microbatch: of the constants and carries of the scan, without what it slices.
layers_p = jex_core.Primitive("zero_layers")
layers_p.multiple_results = True
layers_p.def_abstract_eval(lambda *_, avals: list(avals))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchProgram:
    """A loss on one microbatch."""

    loop: LayerLoop  # its layers
    # The closed jaxpr. It takes the number of the microbatch, what all microbatches share, and the examples of this
    # one; the equation of `layers_p` in it returns carries and stacks.
    jaxpr: Any
    num_shared: int  # how many of its inputs are shared
    results: tuple[Relation, ...]  # what each of its results is to that of the batch
    summed: tuple[int, ...]  # the results that the loss of the batch is a sum of

    @property
    def layers(self) -> Any:
        """The equation of the layers."""
        return next(eqn for eqn in jaxprs.open_jaxpr(self.jaxpr)[0].eqns if eqn.primitive is layers_p)

    @property
    def num_rows(self) -> int:
        """How many of its inputs are examples, in their leading dim."""
        return len(jaxprs.open_jaxpr(self.jaxpr)[0].invars) - 1 - self.num_shared

    @property
    def dims(self) -> tuple[int | None, ...]:
        """For each result of its equation the dim of examples, None where it has none."""
        return None, None, *(x.dim if x.is_rows else None for x in self.results)


@dataclasses.dataclass(frozen=True)
class _Trace:
    """A trace of a loss."""

    closed: Any
    variables: Mapping[Any, Any]  # its own, by those of the trace on the batch

    @classmethod
    def of(cls, closed: Any, batch: Any, *, of_one: bool) -> _Trace:
        """Returns a trace beside the one on the batch; it is `of_one` example where others are compared with that."""
        own, first = (jaxprs.open_jaxpr(x)[0] for x in (closed, batch))
        if [eqn.primitive.name for eqn in own.eqns] != [eqn.primitive.name for eqn in first.eqns]:
            why = "loss_fn does something else on a microbatch than on the batch, outside of its layers"
            raise CannotCut(OF_ONE if of_one else why)
        made = [[*x.constvars, *x.invars, *(var for eqn in x.eqns for var in eqn.outvars)] for x in (first, own)]
        return cls(closed, dict(zip(*made, strict=True)))


class LossTraces:
    """The traces of a loss on the batch and on parts of it, and what each of its values is to a microbatch.

    A value, by its variable in the trace on the batch, is one of three::

        params, keys, tables --> shared --------------+
                                   |                  v
        the batch ----> examples --+--> own: before, LAYERS, behind --> sums --> the end of the loss (`_End`)
           |               ^
           +--> other layers

    `shared` is computed once, outside of the loop over ticks, and all microbatches read it. `examples` are outside,
    too: leaves of the batch, what layers that are run before have made of them, and what is made of several; a
    microbatch has its part. All else is its own: it is computed in the loop, in the stage that the microbatch is in
    (`operands`).

    Args:
      whole: the flat closed jaxpr of the loss on the batch.
      parts: as for `find_loops`.
      inputs: the relations of the inputs.
      num_params: how many of the inputs are params.
      with_gradient: the variables on the batch through which they have a gradient.
      entry: the layers.
      before: layers with a gradient; those that do not depend on `entry` are stages of their own before it.
      comparison: compares the traces.

    Raises:
      CannotCut: the traces have not the same operations.
    """

    def __init__(
        self,
        whole: Any,
        parts: Sequence[Any],
        inputs: Sequence[Relation],
        *,
        num_params: int,
        with_gradient: set[Any],
        entry: FoundLoop,
        before: Sequence[FoundLoop] = (),
        comparison: TraceComparison,
    ):
        self.whole, _ = jaxprs.open_jaxpr(whole)
        self.index, self.comparison, self.inputs = entry.index, comparison, inputs
        self.with_gradient = with_gradient
        assert entry.loop is not None
        self.made = entry.loop.carry + entry.loop.ys
        of_one = [False, len(parts) > 1, False, False]
        traces = (_Trace.of(x, whole, of_one=flag) for x, flag in zip((whole, *parts), of_one, strict=False))
        self.batch, self.microbatch, *others = traces
        self.compared = others or [self.batch, self.microbatch]
        if others and not are_of_one(_numbers([parts[0], *parts[:0:-1]]), entry.loop.num_microbatches):
            raise CannotCut(OF_ONE)
        eqns = self.whole.eqns
        self.after = made_of(eqns[self.index].outvars, eqns)  # the layers and what is made of them
        self.of_params = made_of([*self.whole.invars[:num_params], *self.whole.constvars], eqns)
        # A table that is read as it is and transposed has one gradient, of the table: what is moved is not shared.
        moves = (eqn for eqn in eqns if eqn.primitive.name in SHAPES | COPIES)
        self.moved = {x for eqn in moves for x in eqn.outvars if x in self.of_params}
        self.relations = self.relations_before()
        # Layers without a gradient, as those of a reference model, run once, outside; so do chains of stages before.
        loops = (eqn for eqn in eqns if eqn.primitive.name == "scan" and with_gradient.isdisjoint(eqn.outvars))
        others = [eqn.outvars for eqn in loops if any(map(is_contraction, equations_of(eqn)))]
        chains = [made for made in (eqns[x.index].outvars for x in before) if self.after.isdisjoint(made)]
        of_chains = made_of([x for made in chains for x in made], eqns)
        # What is made of their results, with the size of the largest of these: what is larger is made again, in a tick.
        largest = {x: max(y.aval.size for y in made) for made in (*others, *chains) for x in made_of(made, eqns)}
        own = self.after | (with_gradient - of_chains)
        self.of_others = {x for x, n in largest.items() if x not in own and x.aval.size <= n and self.has_rows(x)}
        # So is what several examples have a part in, as if they are mixed, and other values that layers read.
        made_whole = {x for x in self.relations if self.compared[0].variables[x] in comparison.made_whole}
        made_whole |= {x for x in self.reads(self.index) if x in self.relations and not self.relations[x].is_plain}
        made_whole = {x for x in made_whole if not self.is_shared(x)}
        if any(x.aval.shape[1:] != self.microbatch.variables[x].aval.shape[1:] for x in made_whole):
            why = "its layers read of the whole batch what has examples in a dim that is not the first one"
            raise CannotCut(OF_ONE if len(parts) > 1 else why)
        self.of_others |= made_whole
        for x in self.whole.constvars:
            if x not in self.of_others and x in self.relations and self.relations[x].kind is Kind.POSITIONS:
                why = f"a constant of shape {x.aval.shape} is as long as the batch"
                raise CannotCut(f"{why}: make it by jnp, as jnp.arange(n)")

    def relations_before(self) -> dict[Any, Relation]:
        """Returns the relations of all that does not depend on the layers, and of constants that are not shared."""
        made = [x for eqn in self.whole.eqns for x in eqn.outvars if x not in self.after]
        made = [x for x in made if type(x).__name__ != "DropVar"]  # which is no result of a jaxpr
        whole, part = (jaxprs.with_results(each.closed, [each.variables[x] for x in made]) for each in self.compared)
        found = dict(zip(made, self.comparison.run(whole, part, self.inputs, keeps_whole=True), strict=True))
        consts = (jaxprs.open_jaxpr(each.closed)[1] for each in self.compared)
        pairs = zip(self.whole.constvars, zip(*consts, strict=True), strict=True)
        found |= {x: self.comparison.constant(*both) for x, both in pairs if np.shape(both[0]) != np.shape(both[1])}
        return found | dict(zip(self.whole.invars, self.inputs, strict=True))

    def relations_after(self) -> dict[Any, Relation]:
        """Returns the relations of what depends on the layers, where what is shared is as it is for the batch."""
        layers = self.whole.eqns[self.index].outvars
        found = {x: dataclasses.replace(y, of_params=True) for x, y in zip(layers, self.made, strict=True)}
        results = [x for x in self.whole.outvars if not jaxprs.is_literal(x) and x in self.after]
        own, shared, examples = self.operands(results)
        own.remove(self.index)
        made = [x for i in own for x in self.whole.eqns[i].outvars if x in self.after and type(x).__name__ != "DropVar"]
        read = [x for x in layers if type(x).__name__ != "DropVar"]
        known = (*((x, SAME) for x in shared), *((x, rows(0)) for x in examples))
        inputs = [dataclasses.replace(relation, of_params=x in self.of_params) for x, relation in known]
        inputs += [found[x] for x in read]
        whole, part = (self.traced(each, own, [*shared, *examples, *read], made) for each in self.compared)
        return found | dict(zip(made, self.comparison.run(whole, part, inputs), strict=True))

    def is_shared(self, x: Any) -> bool:
        """Tells whether a value is computed once for all microbatches."""
        relation = self.relations.get(x)
        if x in self.after or relation is None:
            return x not in self.after
        if relation.is_plain and relation.kind is Kind.SAME:
            return x not in self.moved
        shapes = x.aval.shape, self.microbatch.variables[x].aval.shape
        return relation.kind is not Kind.ROWS and shapes[0] == shapes[1]

    def has_rows(self, x: Any) -> bool:
        """Tells whether a microbatch has a part of a value, of leading examples."""
        relation, of_one = self.relations.get(x), self.microbatch.variables[x].aval.shape  # which may have no dim
        is_rows = relation is not None and relation.is_plain and relation.kind is Kind.ROWS and relation.dim == 0
        return is_rows and of_one[1:] == x.aval.shape[1:]

    def keeps_draws(self, own: Sequence[int], outside: Collection[Any]) -> bool:
        """Tells whether equations of a microbatch draw numbers of examples that are read outside, too; has these wait.

        A microbatch draws others: by a mask, a loss would be weighted otherwise than the sum that it is divided by.
        """
        compared = [jaxprs.open_jaxpr(x.closed)[0].eqns for x in self.compared]
        draws = (i for i in own if i != self.index and any(draws_of_examples(*([eqns[i]] for eqns in compared))))
        drawn = [self.whole.eqns[i] for i in draws if self.after.isdisjoint(self.whole.eqns[i].outvars)]
        drawn = [eqn for eqn in drawn if not made_of(eqn.outvars, self.whole.eqns).isdisjoint(outside)]
        made = {x for eqn in drawn for x in eqn.outvars if x in self.relations and not self.is_shared(x)}
        if not all(map(self.has_rows, made)):
            line = jaxprs.model_line(drawn[0]) or "a line that is not known"
            why = f"what is drawn at {line} is read of the whole batch, and has examples in another dim than the first"
            raise CannotCut(f"{why}: draw it with the examples first")
        self.of_others |= made
        return bool(drawn)

    def operands(self, results: Sequence[Any]) -> tuple[list[int], list[Any], list[Any]]:
        """Returns the equations that results need of a microbatch, and what they read that is shared, and examples."""
        eqns, needed, own = self.whole.eqns, set(results), []
        for i in reversed(range(len(eqns))):
            if all(self.is_shared(x) or x in self.of_others for x in needed.intersection(eqns[i].outvars)):
                continue
            own.append(i)
            needed.update(self.reads(i))
        own = own[::-1]
        made, read = {x for i in own for x in eqns[i].outvars}, dict.fromkeys(x for i in own for x in self.reads(i))
        shared = [x for x in read if self.is_shared(x)]
        return own, shared, [x for x in read if x not in made and not self.is_shared(x)]

    def reads(self, i: int) -> list[Any]:
        """Returns the variables that an equation reads; the layers, without what they slice."""
        eqn = self.whole.eqns[i]
        consts, carry, _ = scan_of(eqn).split(eqn.invars) if i == self.index else (eqn.invars, [], [])
        return [x for x in (*consts, *carry) if not jaxprs.is_literal(x)]

    def traced(self, trace: _Trace, own: Sequence[int], inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns some equations of a trace as a closed jaxpr, with `layers_p` for the layers.

        Args:
          trace: the trace.
          own: the equations.
          inputs: its inputs, variables of the trace on the batch, as are the results.
          results: its results.
        """
        variables, eqns = trace.variables, jaxprs.open_jaxpr(trace.closed)[0].eqns

        def run(*values: Any) -> list[Any]:
            given = dict(zip([variables[x] for x in inputs], values, strict=True))
            env = dict(given)
            for i in own:
                eqn = eqns[i]
                if i == self.index:  # its layers read the numbers of the batch, as `find_loops` has it
                    pairs = zip(self.whole.eqns[i].invars, eqn.invars, strict=True)
                    consts, carry, _ = scan_of(eqn).split([a if jaxprs.is_literal(a) else b for a, b in pairs])
                    avals = tuple(var.aval for var in eqn.outvars)
                    with jaxprs.source_context(eqn):
                        made = layers_p.bind(*values_of((*consts, *carry), env), avals=avals)
                else:
                    made = jaxprs.bind(eqn, values_of(eqn.invars, env))
                env.update(zip(eqn.outvars, made, strict=True))
                env.update(given)  # of the batch, where an equation makes it beside something else
            return [env[variables[x]] for x in results]

        return trace_flat(run, [variables[x].aval for x in inputs])


def _numbers(traces: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yields the numbers that the same operation is on in each of several traces."""
    each = (jaxprs.open_jaxpr(closed)[0].eqns for closed in traces)
    for eqns in zip(*each, strict=True):
        for atoms in zip(*(eqn.invars for eqn in eqns), strict=True):
            if all(map(jaxprs.is_literal, atoms)):
                yield tuple(np.asarray(atom.val) for atom in atoms)
