"""Updates a train state, which may be partly in host memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zero_jax.core.device_put import platform_of
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import MODEL_STATE
from zero_jax.sharding.precision import LossScale, cast_floating, update_loss_scale
from zero_jax.training.grads.norm import GlobalNorm
from zero_jax.training.grads.step_grads import StepGrads
from zero_jax.training.optimizer.frozen import flags_of_all
from zero_jax.training.optimizer.rounding import round_tree
from zero_jax.training.optimizer.streaming import Argument, stream
from zero_jax.training.optimizer.update import (
    Offers,
    TracedUpdate,
    apply_update,
    evaluate_update,
    trace_update,
    update_if,
)
from zero_jax.training.state.matrix_updates import matrix_program
from zero_jax.training.state.placement import Placement
from zero_jax.training.state.train_state import TrainState, fill_zeros, keep_same, merge, trainable
from zero_jax.training.zero_config import ZeroConfig


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
    def of(cls, state: TrainState, placement: Placement) -> OffloadedState:
        """Returns a state with flags for its leaves on the host."""
        return cls(state=state, placement=placement, on_host=placement.on_host(state))

    @property
    def any(self) -> bool:
        """Whether any leaf that the update changes is on the host."""
        return any(any(flags) for group, flags in self.on_host.items() if group != MODEL_STATE)

    @property
    def _master_flags(self) -> list[bool]:
        """The flags of the leaves of `state.masters`."""
        return self.on_host["params" if self.state.master is None else "master"]

    def masters(self) -> PyTree:
        """Returns the sharded master params, with shapes for those on the host."""
        leaves, tree = jax.tree.flatten(self.state.masters)
        leaves = [_shape(x) if on_host else x for x, on_host in zip(leaves, self._master_flags, strict=True)]
        return tree.unflatten(pinned(leaves, self.placement.param_shardings("master"), but=self._master_flags))

    def update(self, tx: Any, function: Callable[..., UpdatedState], *extras: PyTree, same: list[bool]) -> UpdatedState:
        """Returns the updated state, in the memories of the old one.

        Args:
          tx: the optimizer.
          function: maps master params, optimizer state and `extras` to what an update makes of them; the copy is None
            if there is none.
          *extras: further arguments of the function, on the devices.
          same: for each trainable param whether the update never changes it; such params are not moved.

        Raises:
          ValueError: an optimizer that calls functions of the params.
        """
        state, placement = self.state, self.placement
        assert placement.offload is not None
        params, opt_state = jax.tree.map(_shape, (trainable(state.masters), state.opt_state))
        if trace_update(tx, placement.precision.for_optimizer(params), opt_state).calls_functions:
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
        into = [*range(num_masters)]
        if placement.keeps_copy:
            into += range(num_inputs, num_inputs + num_masters)
            arguments += self._copies(master_shardings)
        into += range(num_masters, num_updated)
        tree = jax.tree.structure((state.masters, state.opt_state, *extras))

        def flat(*arrays: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(function(*tree.unflatten(arrays[:num_inputs])))

        frozen = flags_of_all(state.masters, same) * (1 + placement.keeps_copy)
        window_bytes, axes = placement.offload.window_bytes, placement.axes
        results = stream(flat, arguments, into, window_bytes=window_bytes, unchanged=frozen, axes=axes)
        masters_tree = jax.tree.structure(state.masters)
        num_copies = num_masters * placement.keeps_copy
        masters = masters_tree.unflatten(results[:num_masters])
        copies = masters_tree.unflatten(results[num_masters : num_masters + num_copies]) if num_copies else masters
        opt_state = jax.tree.unflatten(jax.tree.structure(state.opt_state), results[num_masters + num_copies :])
        return UpdatedState(masters, copies, opt_state)

    def _copies(self, shardings: PyTree) -> list[Argument]:
        """Returns the arrays that new low-precision params are written to: the old ones if they are sharded alike."""
        old_shardings = jax.tree.leaves(self.placement.param_shardings("params"))
        arguments = []
        for x, old_sharding, sharding in zip(
            jax.tree.leaves(self.state.params), old_shardings, jax.tree.leaves(shardings), strict=True
        ):
            array = (
                x if old_sharding == sharding else lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), sharding)
            )
            arguments.append(Argument(array=array, sharding=sharding))
        return arguments


def _arguments(tree: PyTree, shardings: PyTree, on_host: list[bool]) -> list[Argument]:
    arrays = pinned(jax.tree.leaves(tree), shardings, but=on_host)
    of_each = zip(arrays, jax.tree.leaves(shardings), on_host, strict=True)
    return [Argument(array=x, sharding=sharding, on_host=flag) for x, sharding, flag in of_each]


def pinned(leaves: Sequence[Any], shardings: PyTree, *, but: Sequence[bool]) -> list[Any]:
    """Constrains the leaves of a tree to shardings by one call, except where `but` is true."""
    pairs = zip(leaves, jax.tree.leaves(shardings), but, strict=True)
    selected = [(x, sharding) for x, sharding, skip in pairs if not skip]
    constrained = iter(lax.with_sharding_constraint([x for x, _ in selected], [sharding for _, sharding in selected]))
    return [x if skip else next(constrained) for x, skip in zip(leaves, but, strict=True)]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Scalars(NamedTuple):
    """What an update gets besides arrays of the params; `norm` is that of the gradients, `finite` whether they are."""

    norm: GlobalNorm
    finite: jax.Array
    loss: jax.Array
    loss_scale: LossScale | None
    rounding_key: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateProgram:
    """The part of a step after the gradients; its methods are traced once per compile."""

    tx: Any
    mesh: Mesh
    config: ZeroConfig

    def unscale(self, grads: PyTree, masters: PyTree, placement: Placement, loss_scale: Any) -> PyTree:
        """Casts gradients to the master params' dtype, divides by the loss scale, and constrains their shardings."""

        def unscaled(grad: jax.Array, dtype: Any) -> jax.Array:
            grad = grad.astype(dtype)
            return grad if loss_scale is None else grad / loss_scale.scale.astype(dtype)

        leaves, tree = jax.tree.flatten(masters)
        of_each = zip(leaves, tree.flatten_up_to(grads), strict=True)
        finished = [None if grad is None else unscaled(grad, master.dtype) for master, grad in of_each]
        return tree.unflatten(pinned(finished, placement.param_shardings("master"), but=[x is None for x in finished]))

    def clip(self, grads: PyTree, norm: GlobalNorm) -> PyTree:
        """Scales gradients down to the config's largest norm."""
        return grads if self.config.norm_limit is None else norm.clip(grads, self.config.norm_limit)

    def update(
        self,
        masters: PyTree,
        opt_state: PyTree,
        grads: PyTree,
        *,
        finite: jax.Array,
        offers: Offers,
        traced: TracedUpdate | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Returns new master params and optimizer state; the old ones if a gradient is not finite.

        `traced` is the trace of the update for these arguments, if there is one.
        """
        params, trace = trainable(masters), None
        apply = lambda params, opt_state: apply_update(self.tx, grads, opt_state, params, offers)  # noqa: E731
        if traced is not None and not traced.calls_functions:
            trace = traced.jaxpr, jax.tree.leaves((grads, opt_state, params, offers.value, offers.full_grads))
            if traced.is_rewritten:
                apply = functools.partial(evaluate_update, *trace)
        if self.config.skip_nonfinite is False:
            new_params, opt_state = apply(params, opt_state)
        else:
            in_place = platform_of(self.mesh) == "cpu" and self.config.offload is None
            new_params, opt_state = update_if(finite, apply, (params, opt_state), in_place=in_place, traced=trace)
        return merge(masters, new_params), opt_state

    def rounded(self, masters: PyTree, like: PyTree, key: jax.Array | None) -> PyTree:
        """Returns new master params in the dtypes of the old ones, rounded stochastically if there is a key for it."""
        return masters if key is None else round_tree(masters, like, key)

    def with_whole_matrices(self, traced: TracedUpdate, state: TrainState, placement: Placement) -> TracedUpdate:
        """Returns the trace of an update with its matrix computations on whole matrices (`optimizer.matrices`)."""
        program = matrix_program(traced, state, placement)
        if program is None or not program.is_changed:
            return traced
        return dataclasses.replace(traced, jaxpr=program.rewritten(), is_rewritten=True)

    def streamed_update(
        self, offloaded: OffloadedState, scaled_grads: PyTree, scalars: Scalars, *, same: list[bool]
    ) -> UpdatedState:
        """Returns the update of a state partly on the host.

        Gradients are cast, unscaled and clipped in the same chunks: all of them in the master params' dtype at once
        would take as much memory as the offload saves.
        """
        placement = offloaded.placement

        def function(masters: PyTree, opt_state: PyTree, scaled_grads: PyTree, scalars: Any) -> UpdatedState:
            wide = placement.precision.for_optimizer(masters)
            grads = self.unscale(scaled_grads, wide, placement, scalars.loss_scale)
            offers = Offers(scalars.loss, fill_zeros(grads, wide))
            clipped = fill_zeros(self.clip(grads, scalars.norm), wide)
            wide, opt_state = self.update(wide, opt_state, clipped, finite=scalars.finite, offers=offers)
            masters = self.rounded(wide, masters, scalars.rounding_key)
            low = cast_floating(masters, placement.precision.param) if placement.keeps_copy else None
            return UpdatedState(masters, low, opt_state)

        return offloaded.update(self.tx, function, scaled_grads, scalars, same=same)

    def new_state(
        self,
        state: TrainState,
        placement: Placement,
        updated: UpdatedState,
        of_batch: StepGrads,
        *,
        finite: jax.Array,
        same: list[bool],
    ) -> TrainState:
        """Returns the next train state, of the update and of what the loss function returned.

        `same` tells of each trainable param whether an update never changes it.
        """

        def settled(old: Any, new: Any) -> Any:
            if new is None:  # model state on the host, which no loss function changes
                return old
            return new if self.config.skip_nonfinite is False else jnp.where(finite, new, old)

        skipped = jnp.int32(0) if self.config.skip_nonfinite is False else (~finite).astype(jnp.int32)
        scale = state.loss_scale
        if scale is not None:
            assert placement.precision.loss_scale is not None
            scale = update_loss_scale(scale, finite, placement.precision.loss_scale)
        return TrainState(
            step=state.step + 1,
            # The low-precision copy of a frozen param is there already: stages 1 and 2 need not gather it.
            params=keep_same(state.params, placement.params_of(updated.low, into=state.params), same),
            master=updated.masters if placement.keeps_copy else None,
            opt_state=updated.opt_state,
            key=state.key,
            loss_scale=scale,
            num_skipped_steps=state.num_skipped_steps + skipped,
            model_state=jax.tree.map(settled, state.model_state, of_batch.model_state, is_leaf=lambda x: x is None),
            # The gradients of a skipped step are not applied, nor are the errors that were added to them.
            grad_errors=jax.tree.map(lambda new, old: jnp.where(finite, new, old), of_batch.errors, state.grad_errors),
        )
