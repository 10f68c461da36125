"""What the blocks of a step keep for its backward pass, value by value, where `remat="auto"` leaves it open."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zero_jax.core.tree import PyTree, shapes_of, shard_bytes
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import as_multiplied
from zero_jax.sharding.topology import hardware_of
from zero_jax.training.grads.choice import judge
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.loss.trace import share_staying, trace_step_loss
from zero_jax.training.state.placement import train_state_shardings
from zero_jax.training.state.train_state import TrainState
from zero_jax.transforms import BlockCosts, Remat, ValueChoice, block_costs, choose_values, resolve_remat

# The share of the memory that is left free: near its limit the scheduler hides no collectives.
MEMORY_ROOM = 0.05
_DEVICE = (None, "device")  # memory kinds


def chosen_values(loss: StepLoss, state: TrainState, batch: PyTree) -> ValueChoice | None:
    """Returns what the blocks of a step keep, from arrays or shapes; None where the policy is not `auto`.

    Raises:
      ValueError: no budget is given, and the memory of the devices is not known or too small for the rest of the step;
        or layers are stages of a pipeline.
    """
    remat = resolve_remat(loss.config.remat)
    if remat.policy != "auto":
        return None
    if loss.placement.num_stages > 1:
        raise ValueError(
            f"remat={remat.name!r}: what stages of a pipeline keep of several microbatches is not chosen: name the "
            "values, as zero.Remat(save=['attention'], offload=['input']), or take remat='dots' or 'full'"
        )
    costs = value_costs(loss, state.variables, batch)
    if remat.budget_gb is None:
        remat = dataclasses.replace(remat, budget_gb=_budget_gb(loss, state, batch, costs))
    return choose_values(costs, remat, mesh=loss.placement.mesh)


def value_costs(loss: StepLoss, variables: PyTree, batch: PyTree) -> tuple[BlockCosts, ...]:
    """Returns what the values of the blocks of a loss cost, of a microbatch of a batch."""
    placement, program, arguments = loss.placement, loss.fused, loss.shapes(variables, batch)
    if placement.grad_plan.takes_parts:  # as in the step, without dead code: values on one line are named by numbers
        judged = judge(loss, arguments)
        num_parts = placement.grad_plan.num_microbatches
        program, arguments = judged.program, judged.shapes_of_part(arguments, num_parts)
    specs = placement.loss_shardings()
    return block_costs(program, *arguments, mesh=placement.mesh, axes=placement.axes, specs=specs)


def with_values(loss: StepLoss, state: TrainState, batch: PyTree) -> StepLoss:
    """Returns the loss of a step with the values that it keeps, where `remat="auto"` leaves them open."""
    choice = chosen_values(loss, state, batch)
    return loss if choice is None else loss.with_remat(choice.remat)


def _budget_gb(loss: StepLoss, state: TrainState, batch: PyTree, costs: Sequence[BlockCosts]) -> float:
    """Returns the GB of a device that a step leaves, by estimate, beside what its blocks keep."""
    device = loss.placement.mesh.devices.flat[0]
    hardware = hardware_of(device)
    if hardware is None:
        raise ValueError(
            f"remat='auto': the memory of {device.device_kind!r} is not known: give a budget, as remat='auto:8' (GB of "
            "a device for all that blocks keep), or zero.Remat(policy='auto', budget_gb=8)"
        )
    # By a step whose blocks keep their inputs alone, without these: what is chosen from is all that is kept.
    traced = trace_step_loss(loss.with_remat(Remat(policy="full")), state.variables, batch)
    inputs = sum(block.input_bytes for block in costs)
    # But no experts that activations go to.
    stays, are_sharded = share_staying(loss.placement, traced.moves), "params" in loss.placement.groups
    gathered = traced.whole_bytes(are_sharded=are_sharded, scatters=_scatters(loss), stays=stays)
    shardings = train_state_shardings(state, loss.placement)
    stored = zip(*map(jax.tree.leaves, (state, shardings)), strict=True)
    state_bytes = sum(shard_bytes(x, place) for x, place in stored if place.memory_kind in _DEVICE)
    cast_bytes = _cast_bytes(loss, state.params, shardings.params)
    shards = {"casts": cast_bytes, "grads": _grad_bytes(state, loss)}
    taken = state_bytes + traced.shard_bytes(**shards, num_microbatches=loss.config.num_microbatches)
    taken += gathered + traced.peak_bytes - inputs
    usable = (1 - MEMORY_ROOM) * hardware.usable_bytes
    if usable < taken:
        raise ValueError(
            f"remat='auto': a step needs {taken / 1e9:.2f} GB a device beside what blocks keep, by estimate, and "
            f"{usable / 1e9:.2f} GB of {hardware.name} are usable: take more microbatches, a higher stage or more "
            "devices; or give a budget, as remat='auto:1'"
        )
    return int((usable - taken) / 1e6) / 1e3


def _cast_bytes(loss: StepLoss, params: PyTree, shardings: PyTree) -> float:
    """Returns the bytes of the shards of params cast before the first layer, and kept until the last gradient."""
    casts = as_multiplied(shapes_of(params), loss.placement.precision.compute, on_tpu=loss.is_on_tpu)
    leaves = zip(*map(jax.tree.leaves, (params, casts, shardings)), strict=True)
    return sum(shard_bytes(y, place) for x, y, place in leaves if y.dtype != x.dtype and place.memory_kind in _DEVICE)


def _scatters(loss: StepLoss) -> bool:
    """Tells whether gradients are reduced to shards where they are made: from stage 2 on, or of one microbatch."""
    placement, groups = loss.placement, loss.placement.groups
    are_sharded = "grads" in groups or ("master" in groups and loss.config.num_microbatches == 1)
    return are_sharded and axis_size(placement.mesh, placement.axes.data) > 1


def _grad_bytes(state: TrainState, loss: StepLoss) -> float:
    """Returns the bytes of gradients, which microbatches are summed to in float32."""
    placement, is_sum = loss.placement, loss.config.num_microbatches > 1
    shardings = placement.param_shardings("master" if _scatters(loss) else "grads")
    leaves = list(zip(jax.tree.leaves(state.params), jax.tree.leaves(shardings), strict=True))
    compute = placement.precision.compute
    width = lambda x: jnp.dtype(compute or x.dtype).itemsize + (4 if is_sum else 0)  # noqa: E731
    return sum(
        shard_bytes(x, sharding) / x.dtype.itemsize * width(x)
        for x, sharding in leaves
        if jnp.issubdtype(x.dtype, jnp.inexact)
    )
