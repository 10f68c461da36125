"""The loss of one microbatch as a stage runs it, where gradients are taken within the loop over ticks (1F1B).

Everything from the examples of a microbatch to its part of the loss is in it, with one equation for the layers. What is
the same for all microbatches is computed once, outside: what is made of params alone, and what no param has a part in
and is no value of each example, such as the number of tokens of the batch. So is what layers without a gradient make,
as those of a reference model: the examples of a microbatch have a part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from zero_jax.core.tree import is_key
from zero_jax.dims import COPIES, SAME, SHAPES, Kind, Relation, TraceComparison, is_contraction, is_float, rows
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import made_of, read_for
from zero_jax.program.evaluation import evaluate_equations, trace_flat, values_of
from zero_jax.program.subcalls import equations_of, scan_of
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.precision import wide
from zero_jax.transforms.pipeline.body import CannotCut, layer_of_microbatch
from zero_jax.transforms.pipeline.cut import FoundLoop, LayerLoop, Role, pipeline_p, role_of

# The layers within the loss of a microbatch: of the constants and carries of the scan, without what it slices.
layers_p = jex_core.Primitive("zero_layers")
layers_p.multiple_results = True
layers_p.def_abstract_eval(lambda *_, avals: list(avals))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchProgram:
    """A loss on one microbatch.

    Attributes:
      loop: its layers.
      jaxpr: the closed jaxpr. It takes the number of the microbatch, what all microbatches share, and the examples of
        this one; the equation of `layers_p` in it returns carries and stacks.
      num_shared: how many of its inputs are shared.
      results: what each of its results is to that of the batch.
      summed: the results that the loss of the batch is a sum of.
    """

    loop: LayerLoop
    jaxpr: Any
    num_shared: int
    results: tuple[Role, ...]
    summed: tuple[int, ...]

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
        return None, None, *(role.dim if role.is_rows else None for role in self.results)


class LossTraces:
    """The traces of a loss on the batch and on parts of it, and what its values are.

    Args:
      whole: the flat closed jaxpr of the loss on the batch.
      parts: as for `find_loops`.
      inputs: the relations of the inputs.
      num_params: how many of the inputs are params.
      differentiated: the variables on the batch through which they have a gradient.
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
        differentiated: set[Any],
        entry: FoundLoop,
        before: Sequence[FoundLoop] = (),
        comparison: TraceComparison,
    ):
        self.differentiated = differentiated
        self.index, self.comparison, self.inputs = entry.index, comparison, inputs
        # The batch, a microbatch, and the two that are compared.
        self.closed = [whole, parts[0], *((whole, parts[0]) if len(parts) == 1 else parts[1:])]
        self.opened = [jaxprs.open_jaxpr(closed)[0] for closed in self.closed]
        self.consts = jaxprs.open_jaxpr(whole)[1]
        names = [[eqn.primitive.name for eqn in jaxpr.eqns] for jaxpr in self.opened]
        if any(other != names[0] for other in names[1:]):
            raise CannotCut("loss_fn does something else on a microbatch than on the batch, outside of its layers")
        self.places: list[dict[Any, Any]] = [self.corresponding(jaxpr) for jaxpr in self.opened]
        first = self.opened[0]  # all sets and relations are of its variables
        self.after = made_of(first.eqns[self.index].outvars, first.eqns)
        self.of_params = made_of([*first.invars[:num_params], *first.constvars], first.eqns)
        # A table that is read as it is and transposed has one gradient, of the table.
        moves = [eqn for eqn in first.eqns if eqn.primitive.name in SHAPES | COPIES]
        self.moved = {x for eqn in moves for x in eqn.outvars if x in self.of_params}
        self.relations = self.relations_before()
        # Layers without a gradient, as those of a reference model, run once, outside; so do chains of stages before.
        loops = (eqn for eqn in first.eqns if eqn.primitive.name == "scan")
        loops = [eqn for eqn in loops if self.differentiated.isdisjoint(eqn.outvars)]
        without_gradient = [eqn.outvars for eqn in loops if any(map(is_contraction, equations_of(eqn)))]
        chains = [
            results for results in (first.eqns[x.index].outvars for x in before) if self.after.isdisjoint(results)
        ]
        made_before = made_of([x for results in chains for x in results], first.eqns)
        self.inside = self.differentiated - made_before
        self.sums_before = {x for x in made_before & self.relations.keys() if self.relations[x].kind is Kind.SUM}
        # What is made of their results, with the size of the largest of these.
        others = [*without_gradient, *chains]
        self.of_others = {x: max(y.aval.size for y in own) for own in others for x in made_of(own, first.eqns)}

    def corresponding(self, jaxpr: Any) -> dict[Any, Any]:
        """Returns for each variable of the trace on the batch the one of another trace."""
        first, found = self.opened[0], dict[Any, Any]()
        found.update(zip((*first.constvars, *first.invars), (*jaxpr.constvars, *jaxpr.invars), strict=True))
        for eqn, other in zip(first.eqns, jaxpr.eqns, strict=True):
            found.update(zip(eqn.outvars, other.outvars, strict=True))
        return found

    def relations_before(self) -> dict[Any, Relation]:
        """Returns the relations of all that does not depend on the layers."""
        made = [x for eqn in self.opened[0].eqns for x in eqn.outvars if x not in self.after]
        made = [x for x in made if type(x).__name__ != "DropVar"]  # which is no result of a jaxpr
        whole, part = (jaxprs.with_results(self.closed[n], [self.places[n][x] for x in made]) for n in (2, 3))
        found = dict(zip(made, self.comparison.run(whole, part, self.inputs), strict=True))
        return found | dict(zip(self.opened[0].invars, self.inputs, strict=True))

    def relations_after(self) -> dict[Any, Relation]:
        """Returns the relations of what depends on the layers, where what is shared is as it is for the batch."""
        first = self.opened[0]
        results = [x for x in first.outvars if not jaxprs.is_literal(x) and x in self.after]
        own, shared, batch = self.operands(list(dict.fromkeys(results)))
        made = [x for i in own for x in first.eqns[i].outvars if x in self.after and type(x).__name__ != "DropVar"]
        stacks = scan_of(first.eqns[self.index]).split(first.eqns[self.index].invars)[2]
        stacks = [x for x in dict.fromkeys(stacks) if not jaxprs.is_literal(x) and x not in shared]
        known = [dataclasses.replace(SAME, of_params=x in self.of_params) for x in (*shared, *stacks)]
        inputs = [*known[: len(shared)], *[rows(0)] * len(batch), *known[len(shared) :]]
        whole, part = (self.traced(n, own, [*shared, *batch, *stacks], made, alone=False) for n in (2, 3))
        return dict(zip(made, self.comparison.run(whole, part, inputs), strict=True))

    def is_shared(self, x: Any) -> bool:
        """Tells whether a value is computed once for all microbatches."""
        relation = self.relations.get(x)
        if x in self.after or relation is None:
            return x not in self.after
        if relation.is_plain and relation.kind is Kind.SAME:
            return x not in self.moved
        # A sum of the batch that no param has a part in, or what is not known, such as a number of tokens.
        shapes = [self.places[n][x].aval.shape for n in (0, 1)]
        return relation.kind is not Kind.ROWS and x not in self.of_params and shapes[0] == shapes[1]

    def is_of_others(self, x: Any) -> bool:
        """Tells whether a value of examples is one that layers before make, or made of it and no larger."""
        if x in self.after or x in self.inside or x.aval.size > self.of_others.get(x, -1):
            return False
        relation, of_one = self.relations.get(x), self.places[1][x].aval.shape  # which may have no dim of examples
        is_rows = relation is not None and relation.is_plain and relation.kind is Kind.ROWS and relation.dim == 0
        return is_rows and of_one[1:] == x.aval.shape[1:]

    def operands(self, results: Sequence[Any]) -> tuple[list[int], list[Any], list[Any]]:
        """Returns the equations that results need of a microbatch, what they read that is shared, and examples."""
        first, needed, own = self.opened[0], set(results), []
        for i in reversed(range(len(first.eqns))):
            eqn = first.eqns[i]
            if all(self.is_shared(x) or self.is_of_others(x) for x in needed.intersection(eqn.outvars)):
                continue
            own.append(i)
            needed.update(x for x in self.reads(i) if not jaxprs.is_literal(x))
        made = {x for i in own for x in first.eqns[i].outvars}
        read = dict.fromkeys(x for i in reversed(own) for x in self.reads(i) if not jaxprs.is_literal(x))
        shared = [x for x in read if self.is_shared(x)]
        return own[::-1], shared, [x for x in read if x not in made and not self.is_shared(x)]

    def reads(self, i: int) -> list[Any]:
        """Returns what an equation reads; the layers, without what they slice."""
        eqn = self.opened[0].eqns[i]
        if i != self.index:
            return list(eqn.invars)
        consts, carry, _ = scan_of(eqn).split(eqn.invars)
        return [*consts, *carry]

    def traced(self, n: int, own: Sequence[int], inputs: Sequence[Any], results: Sequence[Any], *, alone: bool) -> Any:
        """Returns some equations of a trace as a closed jaxpr; `alone` has `layers_p` for the layers.

        Args:
          n: the number of the trace.
          own: the equations.
          inputs: its inputs, variables of the trace on the batch, as are the results.
          results: its results.
          alone: whether the layers are without what they slice.
        """
        places, eqns = self.places[n], self.opened[n].eqns

        def run(*values: Any) -> list[Any]:
            given = dict(zip([places[x] for x in inputs], values, strict=True))
            env = dict(given)
            for i in own:
                eqn = eqns[i]
                if i == self.index and alone:
                    consts, carry, _ = scan_of(eqn).split(eqn.invars)
                    avals = tuple(var.aval for var in eqn.outvars)
                    with jaxprs.source_context(eqn):
                        made = layers_p.bind(*values_of((*consts, *carry), env), avals=avals)
                else:
                    made = jaxprs.bind(eqn, values_of(eqn.invars, env))
                env.update(zip(eqn.outvars, made, strict=True))
                env.update(given)  # of the batch, where an equation makes it beside something else
            return [env[places[x]] for x in results]

        return trace_flat(run, [places[x].aval for x in inputs])


def by_microbatch(traces: LossTraces, loop: LayerLoop, axes: Axes, whole: Any) -> tuple[Any, Sequence[int]]:
    """Returns the closed jaxpr of a loss whose layers, and sums behind them, are one equation of `pipeline_p`.

    The equation takes the derivatives of the loss by these sums, what microbatches share, the leaves of the batch, and
    what layers slice. It returns the sums times their derivatives, twice (only the first has a gradient), and results.

    Args:
      traces: the traces of the loss.
      loop: its layers.
      axes: the roles of the mesh's axes.
      whole: the loss on the batch, in which other layers may be stages.

    Returns:
      The jaxpr, and which equations of `whole` stages run on their microbatches.

    Raises:
      CannotCut: the loss is no sum or mean of those of microbatches.
    """
    whole, _ = jaxprs.open_jaxpr(whole)
    if jaxprs.is_literal(whole.outvars[0]) or whole.outvars[0] not in traces.after:
        raise CannotCut("the loss does not depend on its layers")
    end, layers = _End.of(traces), whole.eqns[traces.index]
    if any(is_key(x.aval) for x in (*layers.outvars, *end.results)):
        raise CannotCut(
            "PRNG keys go from layer to layer, or leave them: let layers take slices of keys, as of jax.random.split, "
            "and return none"
        )
    own, shared, batch = traces.operands(end.results)
    inside = [traces.traced(n, own, [*shared, *batch], end.results, alone=True) for n in (1, 2, 3)]
    program = MicrobatchProgram(
        loop=loop,
        jaxpr=layer_of_microbatch(inside[0], (inside[1], inside[2]), axes),
        num_shared=len(shared),
        results=tuple(end.roles),
        summed=tuple(end.results.index(x) for x in end.summed),
    )
    avals = tuple(var.aval for var in end.results)
    loss_aval = whole.outvars[0].aval.update(dtype=wide(whole.outvars[0].aval.dtype))
    params = {"loop": program, "jaxpr": loop.layer, "avals": (loss_aval, loss_aval, *avals)}
    stacks = scan_of(layers).split(layers.invars)[2]

    def run(*leaves: Any) -> list[Any]:
        env = dict(zip((*whole.constvars, *whole.invars), (*traces.consts, *leaves), strict=True))
        evaluate_equations((eqn for eqn in whole.eqns if traces.after.isdisjoint(eqn.outvars)), env)
        seeds, examples = end.seeds(env), values_of(batch, env)
        pairs = zip(batch, examples, strict=True)
        stops = traces.of_others.keys() - traces.differentiated
        examples = [lax.stop_gradient(x) if atom in stops else x for atom, x in pairs]
        with jaxprs.source_context(layers):
            operands = *values_of(shared, env), *examples, *values_of(stacks, env)
            loss, same, *results = pipeline_p.bind(*seeds, *operands, **params)
        env.update(zip(end.results, results, strict=True))
        if end.is_single:
            env[end.summed[0]] = loss.astype(end.summed[0].aval.dtype)
        evaluate_equations(end.eqns, env)
        value, *others = values_of(whole.outvars, env)
        # `loss - same` is 0, and has the gradient; the value is the user's own end of the loss, of sums without one.
        return [value if end.is_single else value + (loss - same).astype(value.dtype), *others]

    closed = trace_flat(run, [var.aval for var in whole.invars])
    return jaxprs.alone(closed, jaxprs.open_jaxpr(closed)[0].outvars), own


def differentiated(jaxpr: Any, num_params: int) -> set[Any]:
    """Returns the variables of a loss through which params have a gradient."""
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    return made_of(jaxpr.invars[:num_params], eqns) & read_for(jaxpr.outvars[:1], eqns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _End:
    """The end of a loss, behind the sums over microbatches.

    Attributes:
      whole: the jaxpr of the loss on the batch.
      eqns: the equations that are on sums alone.
      results: what is summed, or else put together, of those of microbatches.
      roles: what each of them is.
      summed: those that the loss is made of.
    """

    whole: Any
    eqns: Sequence[Any]
    results: list[Any]
    roles: list[Role]
    summed: list[Any]

    @classmethod
    def of(cls, traces: LossTraces) -> _End:
        """Finds what is on sums alone.

        Raises:
          CannotCut: something is neither that, nor made of what microbatches have.
        """
        whole, relations = traces.opened[0], traces.relations_after()
        roles, late, eqns = dict[Any, Role](), set[Any](), []
        for eqn in whole.eqns:
            made = [x for x in eqn.outvars if x in relations]
            reads = [x for x in jaxprs.variables(eqn) if x in traces.after]
            try:
                own = {x: role_of(relations[x], "what loss_fn returns or reads of its layers") for x in made}
            except CannotCut as error:
                own, why = {}, str(error)
            is_late = not (late.isdisjoint(reads) and traces.sums_before.isdisjoint(jaxprs.variables(eqn)))
            if not made or (len(own) == len(made) and not is_late):
                roles.update(own)
            elif any(x in roles and roles[x].is_rows for x in reads):
                is_aux = read_for(whole.outvars[:1], whole.eqns).isdisjoint(eqn.outvars)
                what = "an entry of aux is" if is_aux else "the loss is"
                raise CannotCut(f"{what} not made of those of microbatches: {why if not own else 'examples are read'}")
            else:
                late.update(made)
                eqns.append(eqn)
        read = [x for eqn in eqns for x in jaxprs.variables(eqn)]
        read += [x for x in whole.outvars if not jaxprs.is_literal(x)]
        results = [x for x in dict.fromkeys(read) if x in roles]
        for x in results:
            if roles[x].power and x.aval.dtype.kind in "iub":
                raise CannotCut("what loss_fn returns is a mean of whole numbers over the examples")
        needed = read_for(whole.outvars[:1], eqns)
        summed = [x for x in results if x in needed and is_float(x.aval)]
        return cls(whole=whole, eqns=eqns, results=results, roles=[roles[x] for x in results], summed=summed)

    @property
    def is_single(self) -> bool:
        """Whether the loss is a function of one number that is summed: it may be any function then."""
        return len(self.summed) == 1 and not self.summed[0].aval.shape

    def seeds(self, env: dict[Any, Any]) -> list[Any]:
        """Returns the derivatives of the loss by what it is made of, or 1 for one number; `env` has all other values.

        Raises:
          CannotCut: they are not known before these are.
        """
        if self.is_single:
            return [jnp.ones((), wide(self.summed[0].aval.dtype))]
        others = [x for x in self.results if x not in self.summed]

        def loss(summed: list[Any], rest: list[Any]) -> Any:
            own = env | dict(zip((*self.summed, *others), (*summed, *rest), strict=True))
            evaluate_equations(self.eqns, own)
            return own[self.whole.outvars[0]]

        # The derivatives of a sum of sums are the same everywhere, also at zeros; the trace says whether it is one.
        zeros = [[jnp.zeros(x.aval.shape, x.aval.dtype) for x in each] for each in (self.summed, others)]
        jaxpr = jax.make_jaxpr(jax.grad(loss))(*zeros)
        if any(jaxprs.used_inputs(jaxprs.open_jaxpr(jaxpr)[0])):
            raise CannotCut("the loss is a function of several sums over the examples, and not a sum of these")
        return [x.astype(wide(x.dtype)) for x in jax.grad(loss)(*zeros)]
