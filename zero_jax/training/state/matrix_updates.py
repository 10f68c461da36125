"""Which matrices of a train state an optimizer's update needs whole, and where its computations on them run."""

from __future__ import annotations

import jax
import optax

from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.core.variables import MODEL_STATE
from zero_jax.sharding.spec import Dims, dims_of
from zero_jax.training.optimizer.frozen import flags_of_all
from zero_jax.training.optimizer.matrices import Dealing, MatrixProgram, multiplies
from zero_jax.training.optimizer.update import TracedUpdate, trace_update
from zero_jax.training.state.placement import Placement
from zero_jax.training.state.train_state import TrainState, trainable


def matrix_program(traced: TracedUpdate, state: TrainState, placement: Placement) -> MatrixProgram | None:
    """Returns an update as a program of whole matrices; None if it has none, or if nothing is sharded.

    Args:
      traced: the trace of the update.
      state: the train state, or its shapes.
      placement: how it is sharded.
    """
    if traced.calls_functions or "master" not in placement.groups or not multiplies(traced.jaxpr):
        return None

    def dims_of_each(tree: PyTree, shardings: PyTree) -> list[Dims]:
        return [dims_of(y, x.ndim) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)]

    of_all = dims_of_each(state.masters, placement.param_shardings("master"))
    is_trained = flags_of_all(state.masters, [True] * traced.num_grads)
    params = [dims for dims, flag in zip(of_all, is_trained, strict=True) if flag]
    of_state = dims_of_each(state.opt_state, placement.opt_shardings(state.opt_state))
    dims = [*params, *of_state, *params, (), *params]
    return MatrixProgram.of(traced.jaxpr, dims, mesh=placement.mesh, axes=placement.axes)


def matrix_dealings(tx: optax.GradientTransformation, state: TrainState, placement: Placement) -> list[Dealing]:
    """Returns the matrix computations of an optimizer's update; empty where they are streamed from host memory."""
    if any(any(flags) for group, flags in placement.on_host(state).items() if group != MODEL_STATE):
        return []
    params = trainable(state.masters)
    program = matrix_program(trace_update(tx, params, state.opt_state), state, placement)
    return [] if program is None else program.all_dealings


def matrices_of_leaves(tx: optax.GradientTransformation, state: TrainState, placement: Placement) -> dict[str, str]:
    """Returns what an update does with the matrices of each param, by its path; of the others nothing."""
    names, reasons = leaf_names(trainable(state.masters)), {}
    num_inputs = len(names) + len(jax.tree.leaves(state.opt_state))
    for dealing in matrix_dealings(tx, state, placement):
        marks = sorted(dealing.sources)
        of_grads = [names[i] for i in marks if i < len(names)]
        for name in of_grads or [names[i - num_inputs] for i in marks if num_inputs <= i < num_inputs + len(names)]:
            reasons[name] = f"{reasons[name]}; {dealing.reason}" if name in reasons else dealing.reason
    return reasons
