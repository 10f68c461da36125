"""Whether a loss function can be called on parts of a batch, and how the results are combined.

It cannot where examples are mixed before the loss is a mean over them (batch statistics, in-batch negatives, the load
of experts), or where the loss is no mean. It cannot be called on each device's own examples, either, where the model
itself shards values over the devices of a batch; that is no other loss.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.dims import CASTS, EXTREMA, SAME, SAME_ELEMENTS, Kind, Relation, TraceComparison, rows, unknown
from zero_jax.program import jaxprs
from zero_jax.program.loss import LossProgram, Traced
from zero_jax.program.subcalls import equations
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import carries, dims_of
from zero_jax.transforms.microbatch_weights import PartWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """How a value of a batch is made of those of its n parts.

    Attributes:
      kind: it is the SAME in all, has them as its blocks (ROWS), or is their SUM, MAX or MIN; UNKNOWN if it is not made
        of them.
      dim: the dim of the blocks.
      power: what is so made is divided by `n ** power`.
      by: with ``divisor``, values are multiplied by the divisors of the parts (`PartWeight`) before, and divided by
        that of the batch; with ``function``, the value is the divisor of the batch itself.
      count_power: `PartWeight.power` of these divisors.
      why: why it is UNKNOWN, with the line.
    """

    kind: Kind = Kind.UNKNOWN
    dim: int = 0
    power: Fraction = Fraction(0)
    by: str = ""
    count_power: Fraction = Fraction(0)
    why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separability:
    """Why a loss function cannot be called on parts of a batch, and how what it returns for parts is combined.

    Attributes:
      another_loss: why its mean over the microbatches may be another loss than that of the whole batch; empty if it is
        not.
      not_local: why it cannot be called on each device's own examples; empty if it can.
      convolves: whether it has convolutions, which XLA partitions wrongly if they are mapped over devices
        (docs/xla_faults.md).
      is_plain: whether neither it nor the mesh has axes of a model: XLA ends the process on some such programs in which
        a part of the axes is mapped by `shard_map`.
      weigh: what the losses of parts are averaged by: their ``divisor``; or their ``count``, where it adds up to that
        of the batch and the loss may be another one; or as if they weighed the same, ``equal``.
      count_power: `PartWeight.power` of the loss.
      aux: how each leaf of aux is combined, by its path.
    """

    another_loss: str = ""
    not_local: str = ""
    convolves: bool = False
    is_plain: bool = False
    weigh: str = "divisor"
    count_power: Fraction = Fraction(0)
    aux: Mapping[str, Combination] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchParts:
    """The parts of a batch that a loss is to be called on.

    Attributes:
      mesh: the mesh.
      axes: the roles of its axes.
      num_microbatches: the parts that the batch is split into.
      num_shards: the devices that a batch is spread over, if they are more than those of `axes`. A microbatch has a run
        of examples of each.
      local: whether it is asked if the loss can be called on each device's own examples.
      exact: whether aux and random numbers, too, have to be what they are for the whole batch then: aux as the step
        combines it, and none drawn.
    """

    mesh: Mesh
    axes: Axes
    num_microbatches: int
    num_shards: int = 0
    local: bool = True
    exact: bool = False


def separability(
    weighted: LossProgram,
    arguments: tuple[PyTree, PyTree, jax.Array],
    parts: BatchParts,
    *,
    loss_weight: str | None = "auto",
) -> Separability:
    """Says, by its traces on the batch and on parts of it, whether a loss function is a mean over examples.

    What is not proven counts as mixing examples: every operation has an exact rule (`dims/parts/`), or may mix.
    Random numbers count as each example's own.

    Args:
      weighted: the loss function `(variables, batch, key) -> (loss, (aux, model_state, weight))`, as of `with_weight`.
      arguments: the params, or `Variables` (model state counts as params); the whole batch; a key.
      parts: the parts of the batch.
      loss_weight: what `with_weight` was called with.
    """
    mesh, axes, k = parts.mesh, parts.axes, parts.num_microbatches
    sizes = {x.shape[0] for x in jax.tree.leaves(arguments[1]) if np.ndim(x)}
    if len(sizes) > 1:
        return Separability(not_local="the leaves of its batch differ in their leading dim")
    num_devices = axis_size(mesh, axes.batch)
    size, num_shards = max(sizes, default=0), parts.num_shards or num_devices
    traces = _Traces(weighted, arguments, mesh)
    try:
        of_batch = traces.trace(size)
    except Exception:  # not made for so many examples, or an error of the loss, which is raised here
        of_batch = traces.trace(size // k)
    trace = jaxprs.without_dead_code(of_batch.jaxpr)
    names = set(operations(trace))
    places = bool(names & {"sharding_constraint", "shard_map"})
    convolves = parts.local and "conv_general_dilated" in names
    found, not_local = Separability(), ""
    if parts.local and shards_over(trace, axes.batch):
        not_local = f"the model itself shards values over {', '.join(axes.batch)}"
    elif convolves and (axes.size_beside_batch(mesh) > 1 or places):
        not_local = "XLA partitions each device's own convolutions wrongly where a mesh or a model has other axes"
    elif parts.exact and any(jaxprs.used_inputs(trace)[-len(jax.tree.leaves(arguments[2])) :]):
        not_local = "it draws random numbers, which are those of the whole batch"
    elif parts.local:
        found = traces.means(size, k * num_devices, k * num_shards, loss_weight, trusted=num_devices == 1)
        not_local = found.another_loss
        if parts.exact and any(how.why for how in found.aux.values()):
            not_local = not_local or "its aux is not known to be a sum, a mean, an extremum or a value of each example"
    if not_local or not parts.local:
        found = traces.means(size, k, k * num_shards, loss_weight, trusted=True)
    is_plain = axis_size(mesh, axes.model) == 1 and not places
    return dataclasses.replace(found, not_local=not_local, convolves=convolves, is_plain=is_plain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trace:
    """The closed jaxpr of a loss, its weights and the leaves of its aux, and which of its results is which."""

    jaxpr: Any
    weight: PartWeight
    names: Sequence[str]
    aux: Sequence[tuple[Any, PartWeight | None]]

    @classmethod
    def of(cls, traced: Traced) -> _Trace:
        closed, tree = traced.closed, jax.tree.structure(traced.out_shape)
        results = jax.tree.unflatten(tree, jaxprs.open_jaxpr(closed)[0].outvars)
        loss, (aux, _, weight, aux_weights) = results
        leaves = leaves_by_name(aux)
        entries = [*zip(leaves.values(), aux_weights, strict=True)]
        jaxpr = jaxprs.with_results(closed, [loss, *jax.tree.leaves((weight, entries))])
        return cls(jaxpr=jaxpr, weight=weight, names=[*leaves], aux=entries)

    def apart(self) -> list[Any]:
        """Returns the closed jaxprs of loss and weight, and of each leaf of aux and its weight."""
        loss = jaxprs.open_jaxpr(self.jaxpr)[0].outvars[0]
        results = [[loss, *jax.tree.leaves(self.weight)], *([x, *jax.tree.leaves(own)] for x, own in self.aux)]
        alone = (jaxprs.with_results(self.jaxpr, atoms) for atoms in results)
        return [
            jaxprs.with_results(x, jaxprs.open_jaxpr(x)[0].outvars, eqns=jaxprs.without_dead_code(x).eqns)
            for x in alone
        ]


class _Traces:
    """Traces of a loss function with its weights, on batches of several sizes."""

    def __init__(self, weighted: LossProgram, arguments: tuple[PyTree, PyTree, jax.Array], mesh: Mesh):
        self.weighted, (self.params, self.batch, self.key) = weighted, arguments
        self.sharding = NamedSharding(mesh, PartitionSpec())  # as in the step, which takes the same trace
        self.traced: dict[int, _Trace] = {}

    def trace(self, size: int) -> _Trace:

        def resize(x: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *x.shape[1:]) if np.ndim(x) else ()
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.sharding)

        if size not in self.traced:
            with warnings.catch_warnings():
                if self.traced:  # the first is the step's own, or like it
                    warnings.simplefilter("ignore")
                args = self.params, jax.tree.map(resize, self.batch), self.key
                self.traced[size] = _Trace.of(self.weighted.trace(*args))
        return self.traced[size]

    def means(
        self, size: int, num_parts: int, num_blocks: int, loss_weight: str | None, *, trusted: bool = False
    ) -> Separability:
        """Says why the loss is not the mean over so many parts of a batch, and how the parts' aux is combined.

        Args:
          size: the number of examples of the batch.
          num_parts: the number of its parts.
          num_blocks: the number of runs of examples that the parts are made of.
          loss_weight: as in `ZeroConfig`.
          trusted: whether None as a weight says that parts are averaged as if they weighed the same.
        """
        part = size // num_parts
        names = self.trace(next(iter(self.traced))).names
        if num_parts == 1:
            return Separability(aux=dict.fromkeys(names, Combination(kind=Kind.SAME)))
        sizes = [size, part]
        if part == 1:
            # On a single example operations differ that only change shapes: it is to have all others of two examples,
            # and half as many parts of two are compared, or two parts of two.
            whole = size if num_parts % 2 == 0 and num_parts > 4 else 2 * size
            sizes, num_parts, num_blocks = [whole, 2, 1], whole // 2, num_blocks * whole // size
        try:
            traces = [self.trace(n) for n in sizes]
        except Exception as error:
            why = f"loss_fn cannot be traced on {sizes[0]} examples and on {part} ({type(error).__name__})"
            return Separability(another_loss=why, weigh="equal", aux=dict.fromkeys(names, Combination(why=why)))
        whole, comparison = traces[0], TraceComparison(num_parts, num_blocks)
        loss, *rest = self.relations(traces, comparison)
        tree = jax.tree.structure((whole.weight, whole.aux))
        weight, entries = jax.tree.unflatten(tree, rest)
        is_named = loss_weight not in ("auto", None)
        why = _why_no_mean(loss, weight, named=is_named, trusted=trusted and loss_weight is None)
        each = zip(names, entries, whole.aux, strict=True)
        combinations = {name: _combination(x, own, atom, whole.jaxpr) for name, (x, own), (atom, _) in each}
        return Separability(
            another_loss=why,
            weigh="divisor" if is_named else _weigh(loss, weight, why),
            count_power=weight.count.power,
            aux=combinations,
        )

    def relations(self, traces: Sequence[_Trace], comparison: TraceComparison) -> list[Relation]:
        """Returns the relations of the results of the first trace to those of the second.

        If there is a third, of one example, it has to be of the same operations as the second. What is computed for an
        entry of aux alone does not count against others, nor against the loss.
        """
        num_params = len(jax.tree.leaves(self.params))
        inputs = [dataclasses.replace(SAME, of_params=True)] * num_params
        inputs += [rows(0) if np.ndim(x) else SAME for x in jax.tree.leaves(self.batch)]
        inputs += [SAME] * len(jax.tree.leaves(self.key))
        groups = [[trace.jaxpr for trace in traces]]
        whole, part, *single = groups[0]
        names = [[eqn.primitive.name for eqn in jaxprs.open_jaxpr(x)[0].eqns] for x in (whole, part)]
        if names[0] != names[1] or any(operations(x) != operations(part) for x in single):
            groups = zip(*(trace.apart() for trace in traces), strict=True)
        found = []
        for whole, part, *single in groups:
            if any(operations(x) != operations(part) for x in single):
                why = unknown("loss_fn does something else on one example than on several")
                found += [why] * len(jaxprs.open_jaxpr(whole)[0].outvars)
            else:
                found += comparison.run(whole, part, inputs)
        return found


def _weigh(loss: Relation, weight: PartWeight, why: str) -> str:
    """Returns what parts are averaged by (`Separability`)."""
    is_sum, is_even = weight.count.kind is Kind.SUM and weight.count.root is not None, weight.count.number == 1
    if is_even or (not why and loss.divisor is not None):
        return "divisor"
    return "count" if why and is_sum else "equal"


def _why_no_mean(loss: Relation, weight: PartWeight, *, named: bool, trusted: bool) -> str:
    if loss.kind is Kind.UNKNOWN or loss.kind in EXTREMA:
        return loss.why.replace("{}", "a line that is not known")
    if not loss.is_mean:
        remedy = "return loss.mean(), or divide it by the number of examples"
        return f"the loss is a sum over examples, or depends on how many there are: {remedy}"
    is_weight = loss.divisor is not None and (loss.divisor == weight.count.root or named or trusted)
    even = weight.count.kind is Kind.SAME and not weight.count.divisor
    if loss.divisor is None and (loss.kind is Kind.SAME or even or not named):
        return ""
    if is_weight and weight.function is not None and weight.function.quotient.has_term:
        return "the loss adds a term to a mean with a bounded divisor: name its weight (ZeroConfig.loss_weight)"
    if is_weight and _is_of_count(weight):
        return ""
    return "the loss is divided by a sum over examples that is not its weight (ZeroConfig.loss_weight)"


def _is_of_count(weight: PartWeight) -> bool:
    """Tells whether divisor and guards of a weight are the same functions of its count in all parts."""
    made = (weight.divisor, *weight.guards) if weight.function is not None else ()
    return all(x.kind is Kind.SUM and x.root == weight.count.root for x in made)


def _combination(x: Relation, weight: PartWeight | None, atom: Any, jaxpr: Any) -> Combination:
    """Returns how a leaf of aux, an `atom` of the jaxpr of the whole batch, is made of those of parts."""
    is_float = jax.numpy.issubdtype(atom.aval.dtype, np.inexact)
    plain = Combination(kind=x.kind, dim=x.dim or 0, power=x.power)
    if x.kind in EXTREMA:
        return plain
    if weight is not None and weight.function is not None and weight.function.quotient.has_term:
        weight = None  # parts below the bound of a divisor would add too much of the term
    if weight is not None and not _is_of_count(weight):
        weight = None
    if x.kind in (Kind.SAME, Kind.ROWS, Kind.SUM):
        if x.bounded and weight is not None and weight.divisor.root == x.root:
            return Combination(kind=Kind.SUM, by="function", count_power=weight.count.power)
        if x.divisor is not None and weight is not None and weight.count.root == x.divisor:
            # What is the same after a multiplication by the divisors of parts is their mean over the parts.
            kind, power = (Kind.SUM, x.power + 1) if x.kind is Kind.SAME else (x.kind, x.power)
            return dataclasses.replace(plain, kind=kind, power=power, by="divisor", count_power=weight.count.power)
        if not x.bounded and x.divisor is None and (is_float or x.power in range(-8, 1)):
            return plain
        why = "it is divided by what may not add up over parts, or depends on how many examples there are"
    else:
        why = x.why if x.kind is Kind.UNKNOWN else "it depends on the places of examples in the batch"
    why = why.replace("{}", "a line that is not known")
    made = () if " at " in why else (eqn for eqn in jaxprs.open_jaxpr(jaxpr)[0].eqns if atom in eqn.outvars)
    return Combination(why=" at ".join(filter(None, [why, *map(jaxprs.source_line, made)])))


def operations(jaxpr: Any) -> list[str]:
    """Returns the names of a jaxpr's operations in their order, inner ones too, but of those that change a shape."""
    return [eqn.primitive.name for eqn in equations(jaxpr, skip=SAME_ELEMENTS - CASTS)]


def shards_over(jaxpr: Any, axes: Sequence[str]) -> bool:
    """Tells whether a jaxpr shards values over any of the axes: by a constraint, a `shard_map` or a nested `jit`."""
    for eqn in equations(jaxpr, skip=["custom_vmap_call"]):  # that says itself what it does when it is mapped
        specs = [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_spec) if _is_spec(x)]
        entries = (spec.spec if isinstance(spec, NamedSharding) else spec for spec in specs)
        if any(carries(dims_of(spec, len(spec)), axes) for spec in entries):
            return True
    return False


def _is_spec(x: Any) -> bool:
    return isinstance(x, (NamedSharding, PartitionSpec))
