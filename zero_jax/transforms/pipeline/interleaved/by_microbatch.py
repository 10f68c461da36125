"""The loss of a batch by those of its microbatches: one equation for layers and what is behind them, and its value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.dims import Relation, is_float
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import read_for
from zero_jax.program.evaluation import evaluate, evaluate_equations, flattened, trace_flat, values_of
from zero_jax.program.subcalls import kind_of, scan_of
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.precision import wide
from zero_jax.transforms.pipeline.body import CannotCut, layer_of_microbatch
from zero_jax.transforms.pipeline.cut import LayerLoop, checked, pipeline_p
from zero_jax.transforms.pipeline.interleaved.microbatch import LossTraces, MicrobatchProgram
from zero_jax.transforms.pipeline.interleaved.ticks import InterleavedTicks
from zero_jax.transforms.pipeline.loop import Layer


def by_microbatch(
    traces: LossTraces, loop: LayerLoop, axes: Axes, whole: Any
) -> tuple[Any, Sequence[int], tuple[Any, ...]]:
    """Returns the closed jaxpr of a loss whose layers, and sums behind them, are one equation of `pipeline_p`.

    The equation takes the derivatives of the loss by these sums, what microbatches share, the leaves of the batch, and
    what layers slice. It returns the sums times their derivatives, twice (only the first has a gradient), and results.

    Args:
      traces: the traces of the loss.
      loop: its layers.
      axes: the roles of the mesh's axes.
      whole: the loss on the batch, in which other layers may be stages.

    Returns:
      The jaxpr; which equations of `whole` stages run on their microbatches; and the shapes of the examples that wait
      outside, and have a gradient.

    Raises:
      CannotCut: the loss is no sum or mean of those of microbatches.
    """
    whole, consts = jaxprs.open_jaxpr(whole)
    if jaxprs.is_literal(whole.outvars[0]) or whole.outvars[0] not in traces.after:
        raise CannotCut("the loss does not depend on its layers")
    end, layers = _End.of(traces), whole.eqns[traces.index]
    while traces.keeps_draws(traces.operands(end.results)[0], end.outside(traces)):
        end = _End.of(traces)
    loop = dataclasses.replace(loop, layer=_of_loss(loop, [x in traces.with_gradient for x in layers.outvars]))
    own, shared, examples = traces.operands(end.results)
    each = (traces.microbatch, *traces.compared)
    inside = [traces.traced(x, own, [*shared, *examples], end.results) for x in each]
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
        env = dict(zip((*whole.constvars, *whole.invars), (*consts, *leaves), strict=True))
        evaluate_equations((eqn for eqn in whole.eqns if traces.after.isdisjoint(eqn.outvars)), env)
        seeds, pairs = end.seeds(env), zip(examples, values_of(examples, env), strict=True)
        own_examples = [x if var in traces.with_gradient else lax.stop_gradient(x) for var, x in pairs]
        with jaxprs.source_context(layers):
            operands = *values_of(shared, env), *own_examples, *values_of(stacks, env)
            loss, same, *results = pipeline_p.bind(*seeds, *operands, **params)
        env.update(zip(end.results, results, strict=True))
        if end.is_single:
            env[end.summed[0]] = loss.astype(end.summed[0].aval.dtype)
        evaluate_equations(end.eqns, env)
        value, *others = values_of(whole.outvars, env)
        # `loss - same` is 0, and has the gradient; the value is the user's own end of the loss, of sums without one.
        return [value if end.is_single else value + (loss - same).astype(value.dtype), *others]

    closed = trace_flat(run, [var.aval for var in whole.invars])
    waiting = tuple(x.aval for x in examples if x in traces.with_gradient)
    return jaxprs.alone(closed, jaxprs.open_jaxpr(closed)[0].outvars), own, waiting


def _of_loss(loop: LayerLoop, flags: Sequence[bool]) -> Any:
    """Returns the closed jaxpr of a layer whose results have a gradient only where the loss, by flags, is made of them.

    Of the others each stage would have derivatives times zero, which may be infinite: those of a root at zero.
    """
    jaxpr, _ = jaxprs.open_jaxpr(flattened(loop.layer, kinds=("call", "remat")))
    carry = jaxpr.invars[1 + len(loop.consts) :][: len(loop.carry)]
    count, flags = -1, [*flags]
    while sum(flags) > count:  # the next layer may make what the loss is made of, of what this one carries
        count = sum(flags)
        results = (x for x, flag in zip(jaxpr.outvars, flags, strict=True) if flag and not jaxprs.is_literal(x))
        read = read_for(results, jaxpr.eqns)
        flags[: len(carry)] = [flag or x in read for flag, x in zip(flags, carry, strict=False)]
    return loop.layer if all(flags) else _differentiated(loop.layer, flags)


def _differentiated(closed: Any, flags: Sequence[bool]) -> Any:
    """Returns a jaxpr whose results, and those of each `jax.checkpoint` in it, have a gradient where flags ask for it.

    A `jax.checkpoint` derives all that it makes.
    """
    jaxpr, consts = jaxprs.open_jaxpr(closed)
    results = (x for x, flag in zip(jaxpr.outvars, flags, strict=True) if flag and not jaxprs.is_literal(x))
    read = read_for(results, jaxpr.eqns)

    def equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if kind_of(eqn) == "remat" and not read.issuperset(eqn.outvars):
            made = _differentiated(eqn.params["jaxpr"], [x in read for x in eqn.outvars])
            eqn = eqn.replace(params={**eqn.params, "jaxpr": jaxprs.open_jaxpr(made)[0]})
        return jaxprs.bind(eqn, values)

    def run(*values: Any) -> list[Any]:
        results = evaluate(jaxpr, consts, values, equation)
        return [x if flag else lax.stop_gradient(x) for x, flag in zip(results, flags, strict=True)]

    return trace_flat(run, [var.aval for var in jaxpr.invars])


def run_1f1b(
    program: MicrobatchProgram,
    operands: Sequence[Any],
    layer: Layer,
    shardings: Sequence[NamedSharding | None] = (),
) -> list[jax.Array]:
    """Returns the results of a loss for the batch; its gradient is taken in the same loop.

    Args:
      program: the loss on a microbatch.
      operands: those of the equation of the loss (`by_microbatch`); what layers take slices of is `[stages, layers /
        stages, ...]`.
      layer: evaluates a layer of a microbatch.
      shardings: those of the gradients of operands, while they are summed; None leaves them open.
    """
    num_seeds = len(program.summed)
    seeds, operands, shardings = operands[:num_seeds], operands[num_seeds:], shardings[num_seeds:]
    ticks_of = functools.partial(InterleavedTicks, program, layer, shardings)

    # Twice: of the first the gradient is taken, and the second is its value without one (`by_microbatch`).
    def with_loss(seeds: Sequence[Any], results: list[jax.Array]) -> list[jax.Array]:
        loss = sum(jnp.vdot(x, results[i].astype(x.dtype)) for x, i in zip(seeds, program.summed, strict=True))
        return [jnp.asarray(loss), jnp.asarray(loss), *results]

    @jax.custom_vjp
    def run(seeds: list[Any], operands: list[Any]) -> list[jax.Array]:
        return with_loss(seeds, ticks_of(seeds, operands, [False] * len(operands)).run()[0])

    def forward(seeds: list[Any], operands: list[Any]) -> tuple[list[jax.Array], list[Any]]:
        # Only for operands that a gradient is asked of: the loop sums one for each.
        seeds, wanted = [x.value for x in seeds], [x.perturbed for x in operands]
        results, grads = ticks_of(seeds, [x.value for x in operands], wanted).run()
        return with_loss(seeds, results), grads

    def backward(grads: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        loss = cotangents[0]  # the others are not differentiated
        if not isinstance(loss, jax.Array):
            return None, [None] * len(grads)
        return None, [None if x is None else (x * loss).astype(x.dtype) for x in grads]

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(list(seeds), list(operands))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _End:
    """The end of a loss, behind the sums over microbatches."""

    whole: Any  # the jaxpr of the loss on the batch
    eqns: Sequence[Any]  # the equations that are on sums alone
    results: list[Any]  # what is summed, or else put together, of those of microbatches
    roles: list[Relation]  # what each of them is
    summed: list[Any]  # those that the loss is made of

    @classmethod
    def of(cls, traces: LossTraces) -> _End:
        """Finds what is on sums alone.

        Raises:
          CannotCut: something is neither that, nor made of what microbatches have.
        """
        whole, relations = traces.whole, traces.relations_after()
        roles, late, eqns = dict[Any, Relation](), set[Any](), []
        why, with_gradient = "", traces.with_gradient
        for eqn in whole.eqns:
            made = [x for x in eqn.outvars if x in relations]
            reads = [x for x in jaxprs.variables(eqn) if x in traces.after]
            what = "what loss_fn returns or reads of its layers"
            try:
                own = {x: checked(relations[x], what, has_gradient=x in with_gradient) for x in made}
                if any(role.power and x.aval.dtype.kind in "iub" for x, role in own.items()):
                    raise CannotCut("it is made of a mean of whole numbers over the examples")
            except CannotCut as error:
                own, why = {}, str(error)
            if not made or (len(own) == len(made) and late.isdisjoint(reads)):
                roles.update(own)
            elif any(x in roles and roles[x].is_rows for x in reads) and not with_gradient.isdisjoint(eqn.outvars):
                raise CannotCut(f"the loss is not made of those of microbatches: {'examples are read' if own else why}")
            elif eqn is whole.eqns[traces.index]:
                raise CannotCut(why)
            else:
                late.update(made)
                eqns.append(eqn)
        read = [x for eqn in eqns for x in jaxprs.variables(eqn)]
        read += [x for x in whole.outvars if not jaxprs.is_literal(x)]
        results = [x for x in dict.fromkeys(read) if x in roles]
        needed = read_for(whole.outvars[:1], [x for x in eqns if x.primitive.name != "stop_gradient"])
        summed = [x for x in results if x in needed and is_float(x.aval)]
        return cls(whole=whole, eqns=eqns, results=results, roles=[roles[x] for x in results], summed=summed)

    def outside(self, traces: LossTraces) -> set[Any]:
        """Returns what is computed on the whole batch, of what is read behind it."""
        _, shared, examples = traces.operands(self.results)
        read = (x for eqn in self.eqns for x in jaxprs.variables(eqn))
        results = (x for x in self.whole.outvars if not jaxprs.is_literal(x))
        return {*shared, *examples, *read, *results} - traces.after

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
        of_loss = read_for(self.whole.outvars[:1], self.eqns)
        eqns = [eqn for eqn in self.eqns if not of_loss.isdisjoint(eqn.outvars)]

        def loss(summed: list[Any], rest: list[Any]) -> Any:
            own = env | dict(zip((*self.summed, *others), (*summed, *rest), strict=True))
            evaluate_equations(eqns, own)
            return own[self.whole.outvars[0]]

        # The derivatives of a sum of sums are the same everywhere, also at zeros; the trace says whether it is one.
        zeros = [[jnp.zeros(x.aval.shape, x.aval.dtype) for x in each] for each in (self.summed, others)]
        jaxpr = jax.make_jaxpr(jax.grad(loss))(*zeros)
        if any(jaxprs.used_inputs(jaxprs.open_jaxpr(jaxpr)[0])):
            raise CannotCut("the loss is a function of several sums over the examples, and not a sum of these")
        return [x.astype(wide(x.dtype)) for x in jax.grad(loss)(*zeros)]
