"""The update of a train state that is partly in host memory: what is there streams through the devices in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core.tree import PyTree, shapes_of
from zero_jax.core.variables import MODEL_STATE
from zero_jax.training.optimizer.streaming import Argument, stream
from zero_jax.training.optimizer.update import trace_update
from zero_jax.training.state.placement import Placement, pinned
from zero_jax.training.state.train_state import TrainState, flags_of_all, trainable


class UpdatedState(NamedTuple):
    """What an update makes of a state: new master params, their low-precision copy, and the optimizer's state."""

    masters: PyTree
    low: PyTree
    opt_state: PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadedState:
    """A train state within a step, and by group a flag for each leaf, whether it is on the host."""

    state: TrainState
    placement: Placement
    on_host: dict[str, list[bool]]

    @classmethod
    def of(cls, state: TrainState, placement: Placement) -> OffloadedState | None:
        """Returns a state with flags for its leaves on the host; None if no leaf that the update changes is there."""
        flags = placement.on_host(state) if placement.offload is not None else {}
        is_offloaded = any(any(each) for group, each in flags.items() if group != MODEL_STATE)
        return cls(state=state, placement=placement, on_host=flags) if is_offloaded else None

    @property
    def _master_flags(self) -> list[bool]:
        """The flags of the leaves of `state.masters`."""
        return self.on_host["params" if self.state.master is None else "master"]

    def masters(self) -> PyTree:
        """Returns the sharded master params, with shapes for those on the host."""
        leaves, tree = jax.tree.flatten(self.state.masters)
        leaves = [shapes_of(x) if on_host else x for x, on_host in zip(leaves, self._master_flags, strict=True)]
        return tree.unflatten(pinned(leaves, self.placement.param_shardings("master"), but=self._master_flags))

    def update(
        self, tx: Any, function: Callable[..., UpdatedState], *extras: PyTree, unchanged: list[bool]
    ) -> UpdatedState:
        """Returns the updated state, in the memories of the old one.

        The function maps master params, optimizer state and `extras`, on the devices, to what an update makes of them;
        the copy is None if there is none. Trainable params that the update never changes (`unchanged`) are not moved.

        Raises:
          ValueError: an optimizer that calls functions of the params.
        """
        state, placement = self.state, self.placement
        assert placement.offload is not None
        params, opt_state = shapes_of((trainable(state.masters), state.opt_state))
        params = placement.precision.for_optimizer(params)
        if trace_update(tx, params, opt_state, mesh=placement.mesh).calls_functions:
            raise ValueError(
                "offload: the optimizer computes losses at other params (a line search), which needs all of them on "
                "the devices: leave offload out, or give an optimizer that takes gradients alone"
            )
        master_shardings = placement.param_shardings("master")
        arguments = [
            *_arguments(state.masters, master_shardings, self._master_flags),
            *_arguments(state.opt_state, placement.opt_shardings(state.opt_state), self.on_host["opt_state"]),
        ]
        num_masters, num_updated = len(jax.tree.leaves(state.masters)), len(arguments)
        arguments += [Argument(array=x) for x in jax.tree.leaves(extras)]
        num_inputs = len(arguments)
        # For each result, in the order of `UpdatedState`, the argument that it is written over.
        into = [*range(num_masters)]
        if placement.keeps_copy:
            into += range(num_inputs, num_inputs + num_masters)
            arguments += self._copies(master_shardings)
        into += range(num_masters, num_updated)
        tree = jax.tree.structure((state.masters, state.opt_state, *extras))

        def flat(*arrays: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(function(*tree.unflatten(arrays[:num_inputs])))

        frozen = flags_of_all(state.masters, unchanged) * (1 + placement.keeps_copy)  # of masters, and of copies
        window_bytes, axes = placement.offload.window_bytes, placement.axes
        results = stream(flat, arguments, into, window_bytes=window_bytes, unchanged=frozen, axes=axes)
        old = UpdatedState(state.masters, state.masters if placement.keeps_copy else None, state.opt_state)
        updated = jax.tree.unflatten(jax.tree.structure(old), results)
        return updated if placement.keeps_copy else updated._replace(low=updated.masters)

    def _copies(self, shardings: PyTree) -> list[Argument]:
        """Returns the arrays that new low-precision params are written to: the old ones if they are sharded alike."""
        trees = self.state.params, self.placement.param_shardings("params"), shardings
        arguments = []
        for x, old, new in zip(*map(jax.tree.leaves, trees), strict=True):
            # At stages 1 and 2 params are whole: each device makes its shard, which is gathered after (`params_of`).
            array = x if old == new else lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), new)
            arguments.append(Argument(array=array, sharding=new))
        return arguments


def _arguments(tree: PyTree, shardings: PyTree, on_host: list[bool]) -> list[Argument]:
    arrays = pinned(jax.tree.leaves(tree), shardings, but=on_host)
    of_each = zip(arrays, jax.tree.leaves(shardings), on_host, strict=True)
    return [Argument(array=x, sharding=sharding, on_host=flag) for x, sharding, flag in of_each]
