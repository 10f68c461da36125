"""Whether a loss function can be called on each device's own examples, and the results be averaged.

It cannot where examples meet before the loss is a mean over them (batch statistics, in-batch negatives, the load of
experts), where the loss is no mean, nor where the model itself lays values over the devices of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax import jaxprs
from zero_jax.mesh import Axes
from zero_jax.spec import carries, dims_of
from zero_jax.spread import Move, spread
from zero_jax.spread_kinds import Laid
from zero_jax.tree import PyTree


def why_inseparable(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    key: jax.Array,
    *,
    mesh: Mesh,
    axes: Axes,
    num_microbatches: int,
) -> str:
    """Says, by its trace on a microbatch, why a loss function cannot be mapped over the devices of a batch.

    Numbers that are summed over the devices do not count where they end as a mean does: added up, and divided by what
    does not depend on the params.

    Args:
      loss_fn: `(params, batch, key) -> (loss, aux)`.
      params: the params.
      batch: the whole batch.
      key: a key.
      mesh: the mesh.
      axes: the roles of its axes.
      num_microbatches: the parts that the batch is cut into.

    Returns:
      The reason; empty for a function that can be mapped.
    """
    cut = lambda x: x[: x.shape[0] // num_microbatches] if x.ndim else x  # noqa: E731
    micro = jax.eval_shape(lambda batch: jax.tree.map(cut, batch), batch)
    jaxpr = jaxprs.without_dead_code(jax.make_jaxpr(lambda *args: loss_fn(*args)[0])(params, micro, key))
    if lays_over(jaxpr, axes.batch):
        return f"the model itself lays values over {', '.join(axes.batch)}"
    num_params, num_inputs = len(jax.tree.leaves(params)), len(jax.tree.leaves((params, micro)))
    inputs = []
    for i, var in enumerate(jaxpr.invars):
        dims = ((),) * len(var.aval.shape)
        of_batch = num_params <= i < num_inputs
        laid = (axes.batch, *dims[1:]) if of_batch and dims else dims
        inputs.append(Laid(dims=laid, varies=i >= num_params, of_params=i < num_params))
    found = spread(jaxpr, inputs, sizes=dict(mesh.shape), counted=axes.batch)
    meetings = [*(move.source for move in found.moves if _is_array(move, mesh)), *found.meetings]
    return f"examples of a batch meet at {meetings[0]}" if meetings else ""


def _is_array(move: Move, mesh: Mesh) -> bool:
    """Tells whether more than a number is summed."""
    size = np.prod([mesh.shape[axis] for axis in move.axes])
    return move.kind != "all-reduce" or move.sent_bytes > 2 * (size - 1) / size * np.dtype(move.dtype).itemsize


def lays_over(jaxpr: Any, axes: Sequence[str]) -> bool:
    """Tells whether a jaxpr lays values over any of the axes: by a constraint, a `shard_map` or a nested `jit`."""
    for eqn in jaxprs.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "custom_vmap_call":
            continue  # it says itself what it does when it is mapped
        specs = [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_spec) if _is_spec(x)]
        if any(carries(dims_of(spec, _num_dims(spec)), axes) for spec in specs):
            return True
        if any(lays_over(inner, axes) for inner in jaxprs.inner_jaxprs(eqn)):
            return True
    return False


def _is_spec(x: Any) -> bool:
    return isinstance(x, (NamedSharding, PartitionSpec))


def _num_dims(spec: Any) -> int:
    return len(spec.spec if isinstance(spec, NamedSharding) else spec)
