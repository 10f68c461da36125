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
from zero_jax.dims import (
    CASTS,
    EXTREMA,
    SAME,
    SAME_ELEMENTS,
    Kind,
    Relation,
    TraceComparison,
    computed_whole,
    is_float,
    rows,
    unknown,
)
from zero_jax.program import jaxprs
from zero_jax.program.dataflow import Dependence
from zero_jax.program.loss import LossProgram
from zero_jax.program.subcalls import CALLS, KINDS, equations
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import carries, dims_of
from zero_jax.transforms.separable.counts import CountedTrace, LossOnParts, OnPart
from zero_jax.transforms.separable.quotients import named_entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separability:
    """Why a loss function cannot be called on parts of a batch, and how what it returns for parts is combined."""

    # Why its mean over the microbatches may be another loss than that of the whole batch; empty if it is not
    another_loss: str = ""
    not_local: str = ""  # why it cannot be called on each device's own examples; empty if it can
    # Whether it has convolutions, which XLA partitions wrongly if they are mapped over devices (docs/xla_faults.md)
    convolves: bool = False
    branches_on_params: bool = False  # whether a `lax.cond` takes what is made of params alone
    # Whether it has kernels of Pallas, or other operations, that XLA does not partition
    has_kernels: bool = False
    # Whether neither it nor the mesh has axes of a model: XLA ends the process on some such programs in which a part of
    # the axes is mapped by `shard_map`
    is_plain: bool = False
    on_parts: LossOnParts = dataclasses.field(default_factory=LossOnParts)  # how it is called on parts
    # How each leaf of aux is made of those of parts, by its path; UNKNOWN says why it is not, with the line
    aux: Mapping[str, Relation] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchParts:
    """The parts of a batch that a loss is to be called on."""

    mesh: Mesh  # the mesh
    axes: Axes  # the roles of its axes
    num_microbatches: int  # the parts that the batch is split into
    # The devices that a batch is spread over, if they are more than those of `axes`. A microbatch has a run of examples
    # of each.
    num_shards: int = 0
    local: bool = True  # whether it is asked if the loss can be called on each device's own examples
    # Whether aux and random numbers, too, have to be what they are for the whole batch then: aux as the step combines
    # it, and none drawn
    exact: bool = False


def separability(
    program: LossProgram,
    arguments: tuple[PyTree, PyTree, jax.Array],
    parts: BatchParts,
    *,
    loss_weight: str | None = "auto",
) -> Separability:
    """Says, by its traces on the batch and on parts of it, whether a loss is made of the losses of parts.

    What is not proven counts as mixing examples: every operation has an exact rule (`dims/parts/`), or may mix.
    Random numbers count as each example's own, model state counts as params. The program is
    `(variables, batch, key) -> (loss, (aux, model_state))`, and `arguments` are its arguments for the whole batch.
    """
    mesh, axes, k = parts.mesh, parts.axes, parts.num_microbatches
    sizes = {x.shape[0] for x in jax.tree.leaves(arguments[1]) if np.ndim(x)}
    if len(sizes) > 1:
        return Separability(not_local="the leaves of its batch differ in their leading dim")
    num_devices = axis_size(mesh, axes.batch)
    size, num_shards = max(sizes, default=0), parts.num_shards or num_devices
    traces = _Traces(program, arguments, mesh)
    try:
        of_batch = traces.trace(size)
    except Exception:  # not made for so many examples, or an error of the loss, which is raised here
        of_batch = traces.trace(size // k)
    # Without what is for the model state alone.
    trace = jaxprs.without_dead_code(jaxprs.with_results(of_batch.closed, _values(of_batch)))
    names = set(operations(trace))
    has_shardings = bool(names & {"sharding_constraint", "shard_map"})
    convolves = parts.local and "conv_general_dilated" in names
    found, not_local = Separability(), ""
    if parts.local and shards_over(trace, axes.batch):
        not_local = f"the model itself shards values over {', '.join(axes.batch)}"
    elif convolves and (axes.size_beside_batch(mesh) > 1 or has_shardings):
        not_local = "XLA partitions each device's own convolutions wrongly where a mesh or a model has other axes"
    elif parts.exact and any(jaxprs.used_inputs(trace)[-len(jax.tree.leaves(arguments[2])) :]):
        not_local = "it draws random numbers, which are those of the whole batch"
    elif parts.local:
        # A part is of one device and microbatch; `loss_weight=None` says of microbatches alone that all weigh the same.
        found = traces.means(size, k * num_devices, k * num_shards, loss_weight, trusted=num_devices == 1)
        not_local = found.another_loss
        if parts.exact and any(how.why for how in found.aux.values()):
            not_local = not_local or "its aux is not known to be a sum, a mean, an extremum or a value of each example"
    if not_local or not parts.local:
        # A microbatch may be of a single example of each device, within a shard_map.
        least = num_devices if "shard_map" in names else 1
        found = traces.means(size, k, k * num_shards, loss_weight, trusted=True, least=least)
    is_plain = axis_size(mesh, axes.model) == 1 and not has_shardings
    has_kernels = bool(names & (computed_whole(None) | {"pallas_call"}))
    return dataclasses.replace(
        found,
        not_local=not_local,
        convolves=convolves,
        has_kernels=has_kernels,
        branches_on_params="cond" in names and _Branches.on_params(trace, len(jax.tree.leaves(arguments[0]))),
        is_plain=is_plain,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """What is known of a loss on parts of a batch."""

    on_parts: LossOnParts  # the counts and terms of the batch
    loss: Relation  # the relation of the loss, made of the counts of the batch
    aux: Sequence[Relation]  # those of the leaves of aux
    depends_on_counts: bool  # whether the loss is made of counts
    has_unknown_calls: bool  # whether there are counts or terms in calls, of which nothing is known


class _Traces:
    """Traces of a loss function, on batches of several sizes."""

    def __init__(self, program: LossProgram, arguments: tuple[PyTree, PyTree, jax.Array], mesh: Mesh):
        self.program, (self.params, self.batch, self.key) = program, arguments
        self.sharding = NamedSharding(mesh, PartitionSpec())  # as in the step, which takes the same trace
        self.traced: dict[tuple[int, bool], CountedTrace] = {}

    def trace(self, size: int, *, flat: bool = False) -> CountedTrace:

        def resize(x: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *x.shape[1:]) if np.ndim(x) else ()
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.sharding)

        if (size, flat) not in self.traced:
            with warnings.catch_warnings():
                if self.traced:  # the first is the step's own, or like it
                    warnings.simplefilter("ignore")
                args = self.params, jax.tree.map(resize, self.batch), self.key
                self.traced[size, flat] = CountedTrace(self.program.trace(*args), flat=flat)
        return self.traced[size, flat]

    def means(
        self,
        size: int,
        num_parts: int,
        num_blocks: int,
        loss_weight: str | None,
        *,
        trusted: bool = False,
        least: int = 1,
    ) -> Separability:
        """Says why the loss is not made of those of so many parts of `size` examples, and how their aux is combined.

        The parts are made of `num_blocks` runs of examples, and `least` of them may have a function of a single one. If
        it is `trusted`, None as a weight says that they are averaged as if they weighed the same.
        """
        part, first = size // num_parts, self.trace(next(iter(self.traced))[0])
        leaves = leaves_by_name(first.results[1][0])
        if num_parts == 1:
            return Separability(aux=dict.fromkeys(leaves, SAME))
        sizes = [size, part]
        if part <= least:
            # On a single example operations differ that only change shapes: it is to have all others of two examples,
            # and half as many parts of two are compared, or two parts of two. Two parts alone tell fewer powers of
            # their number apart: up to four parts, the batch is twice as large.
            compared = size if least == 1 and num_parts % 2 == 0 and num_parts > 4 else 2 * size
            sizes, num_blocks = [compared, 2 * part, part], num_blocks * compared // size
            num_parts = compared // (2 * part)
        try:
            traces = [self.trace(n) for n in sizes]
        except Exception as error:
            why = f"loss_fn cannot be traced on {sizes[0]} examples and on {part} ({type(error).__name__})"
            on_parts = LossOnParts(size=size, of_batch=False, weight=None if loss_weight == "auto" else loss_weight)
            return Separability(another_loss=why, on_parts=on_parts, aux=dict.fromkeys(leaves, unknown(why)))
        found = self.found(traces, size, num_parts, num_blocks)
        # What is not known may be of a value in nested `jit`s.
        if found.has_unknown_calls and any(x.kind is Kind.UNKNOWN for x in (found.loss, *found.aux)):
            traces = [self.trace(n, flat=True) for n in sizes]
            found = self.found(traces, size, num_parts, num_blocks)
        why, on_parts = _averaged(found, traces[1], loss_weight, trusted=trusted)
        if not on_parts.of_batch and on_parts.counts:
            # Its loops have the counts of a part, and so has what aux makes of their results.
            parts = [OnPart(trace, dataclasses.replace(on_parts, terms={})) for trace in traces]
            comparison = TraceComparison(num_parts, num_blocks, shares_terms=True)
            relations = self.relations(parts, comparison)
            if not _terms(parts[1], comparison).items() <= on_parts.terms.items():  # which parts have shares of
                relations = [unknown("terms are added to sums behind a loop that reads counts")] * len(relations)
            found = dataclasses.replace(found, aux=relations[1:])
        atoms = leaves_by_name(traces[0].results[1][0])
        each = zip(atoms.items(), found.aux, strict=True)
        combinations = {name: _combined(x, atom, traces[0].closed) for (name, atom), x in each}
        return Separability(another_loss=why, on_parts=on_parts, aux=combinations)

    def found(self, traces: Sequence[CountedTrace], size: int, num_parts: int, num_blocks: int) -> _Found:
        """Returns what is known of the results by traces on a batch and on a part.

        If there is a third, of one example, it has to be of the same operations as the second. What is computed for an
        entry of aux alone does not count against others, nor against the loss.
        """
        counts, comparison = (TraceComparison(num_parts, num_blocks, shares_terms=flag) for flag in (False, True))
        powers = dict[int, Fraction]()  # of what may be a count and adds up over parts
        if len({len(trace.counts) for trace in traces}) == 1:
            for i, var in enumerate(traces[0].counts):
                (x,) = counts.run(traces[0].alone([i]), traces[1].alone([i]), self.inputs())
                if x.kind is Kind.SUM and not x.of_params and (not x.power or is_float(var.aval)):
                    powers[i] = x.power
        on_parts = LossOnParts(size=size, counts=powers, flat=traces[0].flat)
        parts = [OnPart(trace, on_parts) for trace in traces]
        relations = self.relations(parts, comparison)
        return _Found(
            on_parts=dataclasses.replace(on_parts, terms=_terms(parts[1], comparison)),
            loss=relations[0],
            aux=relations[1:],
            depends_on_counts=parts[0].of_batch(_values(traces[0])[0]) is not _values(traces[0])[0],
            has_unknown_calls=comparison.has_terms_within or traces[0].is_nested,
        )

    def inputs(self, num_counts: int = 0) -> list[Relation]:
        """Returns the relations of the inputs of the loss, of so many counts of the batch, too."""
        return [*relations_of(self.params, self.batch), *[SAME] * (num_counts + len(jax.tree.leaves(self.key)))]

    def relations(self, parts: Sequence[OnPart], comparison: TraceComparison) -> list[Relation]:
        """Returns the relations of the results of the first, the loss and the leaves of its aux, to the second's."""
        traces = [part.closed([part.of_batch(x) for x in _values(part.trace)]) for part in parts]
        inputs = self.inputs(len(parts[0].how.counts))
        whole, part, *single = traces
        another = unknown("loss_fn does something else on one example than on several")
        names = [[eqn.primitive.name for eqn in jaxprs.open_jaxpr(x)[0].eqns] for x in (whole, part)]
        if names[0] == names[1] and _holds_for_single(whole, part, single, comparison):
            found = comparison.run(whole, part, inputs)
        else:
            # Some results may be of equal operations in all traces, and others not: each by what it alone is made of.
            found = []
            by_result = [[jaxprs.alone(x, [atom]) for atom in jaxprs.open_jaxpr(x)[0].outvars] for x in traces]
            for whole, part, *single in zip(*by_result, strict=True):
                holds = _holds_for_single(whole, part, single, comparison)
                found += comparison.run(whole, part, inputs) if holds else [another]
        # Terms are known by the numbers of their equations.
        if comparison.terms and len({tuple(operations(part.trace.closed)) for part in parts[1:]}) > 1:
            comparison.terms.clear()
            return [another] * len(found)
        return found


def _terms(part: OnPart, comparison: TraceComparison) -> dict[int, tuple[tuple[int, Fraction], ...]]:
    """Returns what parts have a share of, as `LossOnParts.terms` has it."""
    return {part.numbers[var]: tuple(terms) for var, terms in comparison.terms.items()}


def _holds_for_single(whole: Any, part: Any, single: Sequence[Any], comparison: TraceComparison) -> bool:
    """Tells whether what relates a batch to parts of two examples relates these to single ones, if there are such.

    A single one is to have the same operations, and numbers such as `1 / len(x)` that depend on the size as before.
    """
    by_two = TraceComparison(2)
    for x in single:
        numbers = [_numbers(jaxpr) for jaxpr in (whole, part, x)]
        if operations(x) != operations(part) or len(numbers[1]) != len(numbers[2]):
            return False
        for of_whole, of_part, of_one in zip(*numbers, strict=False):
            relation = comparison.constant(of_whole, of_part)
            if relation.kind is Kind.SAME and not relation.agrees(by_two.constant(of_part, of_one)):
                return False
    return True


def _numbers(jaxpr: Any) -> list[Any]:
    """Returns the constants among the operands of operations, in the order of `operations`."""
    operands = (atom for eqn in equations(jaxpr, skip=SAME_ELEMENTS - CASTS) for atom in eqn.invars)
    return [atom.val for atom in operands if jaxprs.is_literal(atom)]


def _values(trace: CountedTrace) -> list[Any]:
    """Returns the atoms of the loss and of the leaves of its aux."""
    loss, (aux, _) = trace.results
    return [loss, *jax.tree.leaves(aux)]


def _averaged(found: _Found, part: CountedTrace, loss_weight: str | None, *, trusted: bool) -> tuple[str, LossOnParts]:
    """Returns why the loss on parts may be another one, and how these are averaged."""
    loss, on_parts, is_named = found.loss, found.on_parts, loss_weight not in ("auto", None)
    place = part.mean_over if part.mean_over in on_parts.counts else None  # of the count that the loss is divided by
    named = named_entry(part.results[1][0], str(loss_weight)) if is_named else None
    if loss.kind is Kind.UNKNOWN or loss.kind in EXTREMA:
        why = loss.why.replace("{}", "a line that is not known")
    elif loss.kind not in (Kind.SAME, Kind.SUM):
        why = "the loss is not made of those of parts"
    else:
        power = loss.power if loss.kind is Kind.SAME else loss.power - 1
        exact = dataclasses.replace(on_parts, power=-power, weight=place if loss.kind is Kind.SUM else None)
        if loss_weight == "auto" or not (found.depends_on_counts or is_named):
            return "", exact
        is_same = part.place_of(named) == place is not None if found.depends_on_counts else _is_even(found, part, named)
        if is_named and is_same:
            return "", exact
        # A mean of each part, by what the config says that parts weigh.
        is_sum = loss.kind is Kind.SUM and place is not None and loss.power == on_parts.counts[place]
        if found.depends_on_counts and is_sum and (is_named or trusted):
            return "", dataclasses.replace(on_parts, of_batch=False, weight=loss_weight)
        why = "the loss is divided by a sum over examples that is not its weight (ZeroConfig.loss_weight)"
    weight = loss_weight if is_named else place if loss_weight == "auto" else None
    return why, dataclasses.replace(on_parts, of_batch=False, weight=weight)


def _is_even(found: _Found, part: CountedTrace, named: Any) -> bool:
    """Tells whether an entry of aux is the same in all parts, of which none has counts of its own."""
    if OnPart(part, found.on_parts).of_batch(named) is not named:
        return False
    entries = zip(jax.tree.leaves(part.results[1][0]), found.aux, strict=True)
    return any(atom is named and x.kind is Kind.SAME and x.is_plain for atom, x in entries)


def _combined(x: Relation, atom: Any, jaxpr: Any) -> Relation:
    """Returns how a leaf of aux, an `atom` of the jaxpr of the whole batch, is made of those of parts."""
    if x.kind in (Kind.SAME, Kind.ROWS, Kind.SUM, *EXTREMA):
        if is_float(atom.aval) or x.power in range(-8, 1):
            return x.of_elements()
        why = "it depends on how many examples there are"
    else:
        why = x.why if x.kind is Kind.UNKNOWN else "it depends on the places of examples in the batch"
    why = why.replace("{}", "a line that is not known")
    made_by = () if " at " in why else (eqn for eqn in jaxprs.open_jaxpr(jaxpr)[0].eqns if atom in eqn.outvars)
    return unknown(" at ".join(filter(None, [why, *map(jaxprs.source_line, made_by)])))


def relations_of(params: PyTree, batch: PyTree) -> list[Relation]:
    """Returns the relations of the leaves of params and of a batch to those of a part of the batch."""
    relations = [dataclasses.replace(SAME, of_params=True)] * len(jax.tree.leaves(params))
    return relations + [rows(0) if np.ndim(x) else SAME for x in jax.tree.leaves(batch)]


def operations(jaxpr: Any) -> list[str]:
    """Returns the names of a jaxpr's operations in their order, inner ones too, but of those that change a shape."""
    return [eqn.primitive.name for eqn in equations(jaxpr, skip=SAME_ELEMENTS - CASTS)]


def shards_over(jaxpr: Any, axes: Sequence[str]) -> bool:
    """Tells whether a jaxpr shards values over any of the axes: by a constraint, a `shard_map` or a nested `jit`."""
    for eqn in equations(jaxpr, skip=["custom_vmap_call"]):  # that says itself what it does when it is mapped
        values = [getattr(x, "spec", x) for x in jax.tree.leaves(list(eqn.params.values()))]
        specs = (x for x in values if isinstance(x, PartitionSpec))
        if any(carries(dims_of(spec, len(spec)), axes) for spec in specs):
            return True
    return False


class _Branches(Dependence):
    """Whether values are made of params (0), and of what else there is (1); notes what branches take of params alone.

    A gradient of that is sharded as the param, and has no sharding in a branch that does not use it.
    """

    enters = CALLS | {*KINDS.values()}

    @classmethod
    def on_params(cls, jaxpr: Any, num_params: int) -> bool:
        """Tells whether branches of a loss, whose first inputs are params, take what is made of params alone."""
        branches, inputs = cls(), jaxprs.open_jaxpr(jaxpr)[0].invars
        branches.run(jaxpr, [frozenset({int(i >= num_params)}) for i in range(len(inputs))])
        return bool(branches.notes)

    def of_jaxprs(self, eqn: Any, sub: Any, operands: list[frozenset[int]]) -> Sequence[frozenset[int]]:
        if sub.kind == "cond" and {0} in operands[1:]:
            self.notes[eqn] = True
        return super().of_jaxprs(eqn, sub, operands)
