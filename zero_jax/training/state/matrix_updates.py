"""Which matrices of a train state an optimizer's update needs whole, and where its computations on them run."""

from __future__ import annotations

import jax
import optax
from jax.sharding import Mesh

from zero_jax.core.tree import PyTree, leaf_names, shapes_of
from zero_jax.core.variables import MODEL_STATE
from zero_jax.program.subcalls import primitives_in
from zero_jax.sharding.spec import Dims, dims_of
from zero_jax.training.optimizer.matrices import OF_MATRICES, Dealing, MatrixProgram
from zero_jax.training.optimizer.update import TracedUpdate, trace_update
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.state.train_state import TrainState, flags_of_all, trainable
from zero_jax.training.zero_config import ZeroConfig


def step_placement(
    state: TrainState, tx: optax.GradientTransformation | None, *, mesh: Mesh, config: ZeroConfig
) -> Placement:
    """Returns the placement of a state (arrays or shapes) for an optimizer: by layers where its update needs that.

    The master params and the optimizer's state of stacks of matrices `[layers, m, n]` that an update would deal out are
    sharded along the layers, if these divide over axes of `data`: each device has whole matrices of them, or less moves
    for the update. None for the optimizer is one that needs none.
    """
    placement = make_placement(state.variables, mesh=mesh, config=config)
    if tx is None or not placement.may_shard_layers:
        return placement
    state = shapes_of(state)
    before = _by_leaf(_dealings(tx, state, placement), state)
    dealt = {path for path, dealings in before.items() if any(dealing.over is not None for dealing in dealings)}
    if not dealt:
        return placement
    leaves = jax.tree.leaves(placement.params)
    by_layers = {leaf.path: leaf.along_layers(mesh, placement.axes) for leaf in leaves if leaf.path in dealt}
    after = _by_leaf(_dealings(tx, state, placement.by_layers(by_layers)), state)
    # What is not moved as float32 by the update moves once as a gradient, in its own dtype: never more.
    better = {path for path in dealt if _cost(after.get(path, before[path])) < _cost(before[path])}
    return placement.by_layers({path: by_layers[path] for path in better})


def matrix_program(traced: TracedUpdate, state: TrainState, placement: Placement) -> MatrixProgram | None:
    """Returns an update as a program of whole matrices; None if it has none, or if nothing is sharded."""
    if traced.calls_functions or "master" not in placement.groups:
        return None
    if OF_MATRICES.isdisjoint(primitives_in(traced.jaxpr)):
        return None

    def dims_of_each(tree: PyTree, shardings: PyTree) -> list[Dims]:
        return [dims_of(y, x.ndim) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)]

    of_all = dims_of_each(state.masters, placement.param_shardings("master"))
    is_trained = flags_of_all(state.masters, [True] * traced.num_grads)
    params = [dims for dims, flag in zip(of_all, is_trained, strict=True) if flag]
    of_state = dims_of_each(state.opt_state, placement.opt_shardings(state.opt_state))
    dims = [*params, *of_state, *params, (), *(params if traced.clips else ())]  # as the inputs of the jaxpr
    return MatrixProgram.of(traced.jaxpr, dims, mesh=placement.mesh, axes=placement.axes)


def matrix_dealings(tx: optax.GradientTransformation, state: TrainState, placement: Placement) -> list[Dealing]:
    """Returns the matrix computations of an optimizer's update; empty where they are streamed from host memory."""
    if any(any(flags) for group, flags in placement.on_host(state).items() if group != MODEL_STATE):
        return []
    return _dealings(tx, state, placement)


def _dealings(tx: optax.GradientTransformation, state: TrainState, placement: Placement) -> list[Dealing]:
    params = placement.precision.for_optimizer(shapes_of(trainable(state.masters)))
    traced = trace_update(tx, params, state.opt_state, mesh=placement.mesh, clip=placement.config.norm_limit)
    program = matrix_program(traced, state, placement)
    return [] if program is None else program.all_dealings


def _by_leaf(dealings: list[Dealing], state: TrainState) -> dict[str, list[Dealing]]:
    """Returns the matrix computations of an update by the paths of the params that they are made of."""
    by_leaf: dict[str, list[Dealing]] = {}
    names = leaf_names(trainable(state.masters)) if dealings else []
    first_param = len(names) + len(jax.tree.leaves(state.opt_state))  # behind gradients and state
    for dealing in dealings:
        marks = sorted(dealing.sources)
        of_grads = [names[i] for i in marks if i < len(names)]
        # By their gradients, or by themselves where the matrices are made of no gradient.
        of_params = [names[i - first_param] for i in marks if first_param <= i < first_param + len(names)]
        for name in of_grads or of_params:
            by_leaf.setdefault(name, []).append(dealing)
    return by_leaf


def _cost(dealings: list[Dealing]) -> float:
    return sum(dealing.cost(dealing.over) / dealing.num_matrices for dealing in dealings)


def matrices_of_leaves(tx: optax.GradientTransformation, state: TrainState, placement: Placement) -> dict[str, str]:
    """Returns what an update does with the matrices of each param, by its path; of the others nothing."""
    of_each = _by_leaf(matrix_dealings(tx, state, placement), state)
    return {name: "; ".join(dealing.reason for dealing in dealings) for name, dealings in of_each.items()}
