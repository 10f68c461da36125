"""Whether a loss function can be called on parts of a batch, and the results be averaged.

It cannot where examples are mixed before the loss is a mean over them (batch statistics, in-batch negatives, the load
of experts), or where the loss is no mean. It cannot be called on each device's own examples, either, where the model
itself shards values over the devices of a batch; that is no other loss.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core import jaxprs
from zero_jax.core.evaluation import TracedFunction
from zero_jax.core.subcalls import equations
from zero_jax.core.tree import PyTree
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import carries, dims_of
from zero_jax.transforms.microbatch_weights import PartWeight
from zero_jax.transforms.separable.relations import SAME, Kind, Relation, rows
from zero_jax.transforms.separable.walk import TraceComparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separability:
    """Why a loss function cannot be called on parts of a batch.

    Attributes:
      another_loss: why its mean over the microbatches may be another loss than that of the whole batch, as a sentence;
        empty if it is not.
      not_local: why it cannot be called on each device's own examples; empty if it can.
      convolves: whether it has convolutions, which XLA partitions wrongly if they are mapped over devices
        (docs/xla_faults.md).
      is_plain: whether neither it nor the mesh has axes of a model: XLA ends the process on some such programs in which
        a part of the axes is mapped by `shard_map`.
    """

    another_loss: str
    not_local: str
    convolves: bool = False
    is_plain: bool = False


def separability(
    weighted: TracedFunction,
    params: PyTree,
    batch: PyTree,
    key: jax.Array,
    *,
    mesh: Mesh,
    axes: Axes,
    num_microbatches: int,
    loss_weight: str | None = "auto",
    local: bool = True,
    exact: bool = False,
    num_shards: int | None = None,
) -> Separability:
    """Says, by its traces on the batch and on parts of it, whether a loss function is a mean over examples.

    What is not proven counts as mixing examples: every operation has an exact rule (`rules.py`), or may mix.
    Random numbers count as each example's own.

    Args:
      weighted: the loss function `(variables, batch, key) -> (loss, (aux, model_state, weight))`, as of `with_weight`.
      params: the params, or `Variables`; model state counts as params.
      batch: the whole batch.
      key: a key.
      mesh: the mesh.
      axes: the roles of its axes.
      num_microbatches: the parts that the batch is split into.
      loss_weight: what `with_weight` was called with.
      local: whether it is asked if the loss can be called on each device's own examples.
      exact: whether aux and random numbers, too, have to be what they are for the whole batch then: aux as the step
        combines it, and none drawn.
      num_shards: the devices that a batch is spread over, if they are more than those of `axes`. A microbatch has a run
        of examples of each.
    """
    sizes = {x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x)}
    num_devices = axis_size(mesh, axes.batch)
    num_shards = num_shards or num_devices
    if len(sizes) != 1:
        why = "the leaves of its batch differ in their leading dim" if sizes else ""
        return Separability(another_loss="", not_local=why)
    (size,) = sizes
    traces = _Traces(weighted, params, batch, key, mesh, has_aux=exact)
    not_local = another = ""
    trace = jaxprs.without_dead_code(traces.of(size // num_microbatches))  # an error of the loss is raised here
    names = set(_operations(trace))
    convolves = local and "conv_general_dilated" in names
    if local and shards_over(trace, axes.batch):
        not_local = f"the model itself shards values over {', '.join(axes.batch)}"
    elif convolves and (axes.size_beside_batch(mesh) > 1 or names & {"sharding_constraint", "shard_map"}):
        not_local = "XLA partitions each device's own convolutions wrongly where a mesh or a model has other axes"
    elif exact and any(jaxprs.used_inputs(trace)[-len(jax.tree.leaves(key)) :]):
        not_local = "it draws random numbers, which are those of the whole batch"
    elif local:
        not_local = traces.why_no_mean(size // num_microbatches, num_devices, num_shards, loss_weight, with_aux=exact)
    if not_local or not local or num_devices == 1:  # what is a mean over devices is one over microbatches
        another = traces.why_no_mean(size, num_microbatches, num_microbatches * num_shards, loss_weight, trusted=True)
    if another:
        another = f"the loss on microbatches may be another one than on the whole batch, because {another}"
    is_plain = axis_size(mesh, axes.model) == 1 and not names & {"sharding_constraint", "shard_map"}
    return Separability(another_loss=another, not_local=not_local, convolves=convolves, is_plain=is_plain)


class _Traces:
    """Traces of a loss function with its weight, on batches of several sizes."""

    def __init__(
        self, weighted: TracedFunction, params: PyTree, batch: PyTree, key: jax.Array, mesh: Mesh, *, has_aux: bool
    ):
        self.weighted, self.params, self.batch, self.key, self.has_aux = weighted, params, batch, key, has_aux
        self.sharding = NamedSharding(mesh, PartitionSpec())  # as in the step, which takes the same trace
        self.traced: dict[int, Any] = {}

    def of(self, size: int) -> Any:
        """Returns the closed jaxpr of loss, weight and (with `has_aux`) the leaves of aux on so many examples."""

        def resize(x: Any) -> jax.ShapeDtypeStruct:
            shape = (size, *x.shape[1:]) if np.ndim(x) else ()
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=self.sharding)

        if size not in self.traced:
            with warnings.catch_warnings():
                if self.traced:  # the first is the step's own, or like it
                    warnings.simplefilter("ignore")
                closed, out_shape = self.weighted.trace(self.params, jax.tree.map(resize, self.batch), self.key)
            results = jax.tree.unflatten(jax.tree.structure(out_shape), jaxprs.open_jaxpr(closed)[0].outvars)
            loss, (aux, _, weight) = results
            leaves = jax.tree.leaves(aux) if self.has_aux else []
            self.traced[size] = jaxprs.with_results(closed, [loss, *weight, *leaves])
        return self.traced[size]

    def why_no_mean(
        self,
        size: int,
        num_parts: int,
        num_blocks: int,
        loss_weight: str | None,
        *,
        trusted: bool = False,
        with_aux: bool = False,
    ) -> str:
        """Says why the loss is not the mean over so many parts of a batch; empty if it is.

        Args:
          size: the number of examples of the batch.
          num_parts: the number of its parts.
          num_blocks: the number of runs of examples that the parts are made of.
          loss_weight: as in `ZeroConfig`.
          trusted: whether None as a weight says that parts are averaged as if they weighed the same.
          with_aux: whether aux, too, has to be what the step combines that of the parts to.
        """
        if num_parts == 1:
            return ""
        part = size // num_parts
        # Where a part is a single example, operations differ that only change shapes: larger parts are compared.
        factor = 2 if part == 1 else 1
        try:
            traces = self.of(factor * size), self.of(factor * part)
            single = _operations(self.of(part)) if factor > 1 else None
        except Exception as error:
            return f"loss_fn cannot be traced on {size} examples and on {part} ({type(error).__name__})"
        if single is not None and single != _operations(traces[1]):
            return "loss_fn does something else on one example than on several"
        num_params = len(jax.tree.leaves(self.params))
        inputs = [dataclasses.replace(SAME, of_params=True)] * num_params
        inputs += [rows(0) if np.ndim(x) else SAME for x in jax.tree.leaves(self.batch)]
        inputs += [SAME] * len(jax.tree.leaves(self.key))
        loss, *rest = TraceComparison(num_parts, factor * num_blocks).run(*traces, inputs)
        num = len(PartWeight._fields)
        weight, aux = PartWeight(*rest[:num]), rest[num:]
        avals = [atom.aval for atom in jaxprs.open_jaxpr(traces[0])[0].outvars[1 + num :]]
        if with_aux and not all(
            _combines(x, weight, aval, size=factor * size) for x, aval in zip(aux, avals, strict=True)
        ):
            return "its aux is not known to be a sum, a mean or a value of each example"
        return _why_no_mean(
            loss, weight, named=loss_weight not in ("auto", None), trusted=trusted and loss_weight is None
        )


def _combines(aux: Relation, weight: PartWeight, aval: Any, *, size: int) -> bool:
    """Tells whether a leaf of aux of the whole batch is what a step makes of those of the parts."""
    if aux.kind is Kind.ROWS:
        return aux.is_plain and aux.dim == 0
    if aval.ndim and aval.shape[0] == size:  # it would be taken for values of examples
        return False
    if jax.numpy.issubdtype(aval.dtype, np.inexact):
        is_plain = aux.divisor is None or not weight.divisor.bounded  # aux is averaged by the count
        return is_plain and not _why_no_mean(aux, weight, named=False, trusted=False)
    return aux.kind is Kind.SUM and not aux.power and aux.divisor is None and not aux.bounded and aval.dtype != bool


def _why_no_mean(loss: Relation, weight: PartWeight, *, named: bool, trusted: bool) -> str:
    if loss.kind is Kind.UNKNOWN:
        return loss.why.replace("{}", "a line that is not known")
    if not loss.is_mean:
        remedy = "return loss.mean(), or divide it by the number of examples"
        return f"the loss is a sum over examples, or depends on how many there are: {remedy}"
    is_weight = loss.divisor is not None and (loss.divisor == weight.count.root or named or trusted)
    even = weight.count.kind is Kind.SAME and not weight.count.divisor
    is_even = loss.divisor is None and (loss.kind is Kind.SAME or even)
    is_bounded, remedy = weight.bound.number != -np.inf, "name its weight (ZeroConfig.loss_weight)"
    if loss.divisor is None and (is_bounded or weight.epsilon.number != 0):
        return f"the loss is divided by what is no sum over examples, with a bound or an epsilon: {remedy}"
    if is_weight and is_bounded and not weight.divisor.bounded:
        return f"the loss adds a term to a mean with a bounded divisor: {remedy}"
    if is_weight or is_even:
        return ""
    return "the loss is divided by a sum over examples that is not its weight (ZeroConfig.loss_weight)"


def _operations(jaxpr: Any) -> list[str]:
    """Returns the names of a jaxpr's operations in their order, inner ones too, but of those that change a shape."""
    moves = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "copy")
    return [eqn.primitive.name for eqn in equations(jaxpr, skip=moves)]


def shards_over(jaxpr: Any, axes: Sequence[str]) -> bool:
    """Tells whether a jaxpr shards values over any of the axes: by a constraint, a `shard_map` or a nested `jit`."""
    for eqn in equations(jaxpr, skip=["custom_vmap_call"]):  # that says itself what it does when it is mapped
        specs = [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_spec) if _is_spec(x)]
        if any(carries(dims_of(spec, _num_dims(spec)), axes) for spec in specs):
            return True
    return False


def _is_spec(x: Any) -> bool:
    return isinstance(x, (NamedSharding, PartitionSpec))


def _num_dims(spec: Any) -> int:
    return len(spec.spec if isinstance(spec, NamedSharding) else spec)
