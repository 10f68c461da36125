"""The public train step: called on states and batches, lowered, compiled once for each structure of the state.

And the metrics that it returns, as an evaluation step does.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from zero_jax.core.device_put import wait_on_cpu
from zero_jax.core.signatures import place_of
from zero_jax.core.text_tables import Report, aligned
from zero_jax.core.tracebacks import SHORT_TRACEBACK
from zero_jax.core.tree import PyTree, has_host_leaves, leaf_names, leaves_by_name, with_shapes
from zero_jax.program.jaxprs import is_traced
from zero_jax.sharding.mesh import Axes, on_mesh
from zero_jax.training.batch import place_batch, shapes_of_batch, sharding_of_leaves
from zero_jax.training.same_program import SameProgram
from zero_jax.training.state.checks import (
    check_devices,
    check_no_leaf_twice,
    check_not_donated,
    checked_placement,
    place_state,
    remember_copies,
    warn_of_lost_copies,
)
from zero_jax.training.state.placement import train_state_shardings
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.xla_options import scatters_in_loops, step_options
from zero_jax.training.zero_config import ZeroConfig
from zero_jax.transforms import PartWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics(Report):
    """What a step reports, replicated on every device. `metrics["loss"]` works as `metrics.loss` does.

    Attributes:
      loss: the mean loss of the batch, unscaled, `float32[]`, or of a wider dtype that the model computes in.
      aux: what the loss function returned beside the loss.
      grad_norm: the global norm of the gradients before clipping, in such a dtype; infinite, though each gradient is
        finite, where that dtype has no number as large.
      skipped: whether the update was skipped because a gradient was not finite, `bool[]`.
      nonfinite_leaf: index (in the order of `jax.tree.leaves(state.params)`) of the first param whose gradient is not
        finite, -1 if there is none, `int32[]`; `TrainStep.leaf_name` turns it into a path.
      loss_scale: the loss scale that the step used, 1 without scaling, `float32[]`.
      num_skipped_steps: steps skipped so far, `int32[]`.
      small_grad_norm_sq: mean by weight of the squared norms of the gradients of the batch's parts, unscaled and before
        clipping, `float32[]`; infinite from norms of 1.8e19 on; None without microbatches, and without
        `ZeroConfig(noise_scale=True)`. `NoiseScale` makes the gradient noise scale of it. A part is a microbatch at
        stages 2 and 3, a device's share of one at stages 0 and 1; with stages of a pipeline the batch is one.
      num_small_grads: parts with a weight above 0, `int32[]`; None where `small_grad_norm_sq` is.
      weight: what the loss of a weighted evaluation is a mean over, `weight.count` tokens or such; None where that is
        the same for all batches of one size, and elsewhere.

    Example:
      >>> _, metrics = step(state, batch)
      >>> float(metrics["loss"]) == float(metrics.loss)
      True
    """

    loss: jax.Array
    aux: PyTree = None
    grad_norm: jax.Array | None = None
    skipped: jax.Array | None = None
    nonfinite_leaf: jax.Array | None = None
    loss_scale: jax.Array | None = None
    num_skipped_steps: jax.Array | None = None
    small_grad_norm_sq: jax.Array | None = None
    num_small_grads: jax.Array | None = None
    weight: PartWeight | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __str__(self) -> str:
        leaves = leaves_by_name(self).items()
        return aligned((name, str(x) if np.ndim(x) == 0 else f"{x.dtype}{list(x.shape)}") for name, x in leaves)


def replicated(metrics: Metrics, mesh: Mesh) -> Metrics:
    """Replicates the scalars of the metrics; larger aux keeps its sharding."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else lax.with_sharding_constraint(x, sharding), metrics)


def shown_step(name: str, loss_fn: Any, mesh: Mesh, config: ZeroConfig) -> str:
    """Returns what a step is of: the place of its loss function, the mesh, and the config."""
    place = place_of(getattr(loss_fn, "make", loss_fn))
    return f"{name} of {place} at stage {config.stage} on {dict(mesh.shape)}, {config!r}"


_NEEDS_OPTIONS = (
    "this step adds to an array by index in a loop, and is called within another jitted function, which takes its own "
    f"compiler options alone: XLA of JAX {jax.__version__} may lose parts of the gradient (openxla/xla#49143) "
    "unless that function has them, jax.jit(..., compiler_options=zero.compiler_options(mesh=mesh, config=config)), or "
    "JAX is 0.12 or newer"
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainStep:
    """A compiled train step: call it, or `lower` it for ahead-of-time compiling and inspection.

    It may also be called within a jitted function, such as a `jax.lax.scan` over batches.

    Example:
      >>> loss, grads = step.grads(state, batch)
      >>> grads["up"].shape
      (64, 64)
    """

    program: Any  # of `make_train_step`: its methods `step` and `loss_and_grads` are compiled
    axes: Axes
    compiled_for: dict[Any, _Compiled] = dataclasses.field(default_factory=dict, repr=False)
    last_call: list[_LastCall] = dataclasses.field(default_factory=lambda: [_LastCall()], repr=False)

    def __repr__(self) -> str:
        return shown_step("TrainStep", self.program.loss_fn, self.program.mesh, self.program.config)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Runs one step; the state given is donated.

        The first call with batches of some sizes compares the program with those of the other processes of the mesh.

        Raises:
          ValueError: a batch that does not divide, a state that was already donated, or processes that differ.

        Warns:
          UserWarning: params that were replaced in a state that has master params, and these were not.
        """
        mesh, last = self.program.mesh, self.last_call[0]
        # The leaves of the very state that the last call returned have the shardings and dtypes that jit gave them: the
        # checks below would take as long again as the dispatch. With a mesh of the user's, `on_mesh` is needed.
        if last.state() is state and state is not None and get_abstract_mesh().empty:
            if not (is_like := last.is_like(state, batch)):
                batch = place_batch(batch, mesh=mesh, axes=self.axes)
                is_like = last.is_like(state, batch)
            if is_like and (results := last.repeat(state, batch)):
                return results[0], wait_on_cpu(results[1], mesh)
        with on_mesh(mesh, in_shard_map=False), SHORT_TRACEBACK:
            given, batch = batch, place_batch(batch, mesh=mesh, axes=self.axes)
            check_not_donated(state)  # first: on some backends running with a deleted buffer ends the process
            check_no_leaf_twice(state)
            is_nested = any(map(is_traced, jax.tree.leaves((state, batch))))
            compiled = self.compiled(state, is_nested=is_nested)
            warn_of_lost_copies(state, who="a step updates")  # before leaves are moved, which gives them other ids
            state = place_state(state, compiled.shardings, compiled.dtypes, also=compiled.by_features)
            function = compiled.function(state, batch)
            if not is_nested:
                self._same.check(function, state, batch, given=given, axes=self.axes)
            state, metrics = function(state, batch)
            if not (is_nested or jax.config.jax_disable_jit):  # type: ignore[attr-defined]
                tree, kinds = jax.tree.structure((state, batch)), list(map(_KIND, jax.tree.leaves(batch)))
                self.last_call[0] = _LastCall(weakref.ref(remember_copies(state)), function, tree, kinds)
            return state, wait_on_cpu(metrics, mesh)

    def lower(self, state: PyTree, batch: PyTree) -> Any:
        """Lowers the step for arrays or `ShapeDtypeStruct`s; `.compile()` gives the program."""
        shapes = shapes_of_batch(batch, sharding_of_leaves(self.program.mesh, self.axes))
        with on_mesh(self.program.mesh), SHORT_TRACEBACK:
            check_devices(state, self.program.mesh)
            return self.compiled(state).function(state, shapes).lower(state, shapes)

    def check_same(self, state: PyTree, batch: PyTree) -> None:
        """Compares the program for arrays or `ShapeDtypeStruct`s between processes, as the first call does.

        Before any state is made: processes with other shapes would end in an abort.

        Raises:
          ValueError: the processes differ.
        """
        if self._same.processes:
            shapes = shapes_of_batch(batch, sharding_of_leaves(self.program.mesh, self.axes))
            with on_mesh(self.program.mesh):
                self._same.check(self.compiled(state).function(state, shapes), state, shapes)

    def jitted(self, state: PyTree) -> Any:
        """Returns the `jax.jit` function for states of this structure."""
        return self.compiled(state).jitted

    def compiled(self, state: PyTree, *, is_nested: bool = False) -> _Compiled:
        """Returns the jitted step for states of this structure, compiled once.

        Within another function that is traced (`is_nested`) it has no compiler options, as JAX takes those of the
        outermost, and donates no state, which a gradient through the step reads again.
        `out_shardings` are explicit, so that the new state has exactly the shardings of the old one.

        Warns:
          UserWarning: within another jitted function, where a release's compiler has a fault that an option avoids.
        """
        leaves, tree = jax.tree.flatten(state)
        if has_host_leaves(leaves):
            state = with_shapes("state", state, remedy="give the state that zero.init_state or the last step returned")
            leaves = jax.tree.leaves(state)
        # Without dtypes: a state whose leaves have others is an error (`place_state`), not another program.
        structure = (tree, tuple(x.shape for x in leaves), is_nested)
        if structure not in self.compiled_for:
            program = dataclasses.replace(self.program, is_nested=is_nested)
            placement = checked_placement(state, program.tx, mesh=program.mesh, config=program.config)
            shardings = train_state_shardings(state, placement)
            is_by_layers = any(leaf.update_dims is not None for leaf in jax.tree.leaves(placement.params))
            by_features = train_state_shardings(state, placement.by_layers({})) if is_by_layers else shardings
            options = step_options(program.mesh, program.config)

            def step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
                self.last_call[0].check_traced(state)
                return program.step(state, batch, placement=placement)

            jit = functools.partial(jax.jit, step, out_shardings=(shardings, None))
            if not is_nested:
                # With `in_shardings` jit refuses a leaf that was replaced by one that is sharded otherwise: `repeat`
                # checks no leaf itself.
                jit = functools.partial(jit, donate_argnums=0, in_shardings=(shardings, None))
            unguarded = options.unguarded
            self.compiled_for[structure] = _Compiled(
                jitted=jit() if is_nested else jit(compiler_options=options.values or None),
                unguarded=None if is_nested or unguarded is None else jit(compiler_options=unguarded or None),
                shardings=jax.tree.leaves(shardings),
                by_features=jax.tree.leaves(by_features),
                dtypes=[x.dtype for x in leaves],
                nested_options=unguarded is not None and is_nested,
            )
        return self.compiled_for[structure]

    def grads(self, state: TrainState, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Returns the loss and the gradients of the next step, for inspection: nothing is updated or donated.

        The gradients are unclipped, without the loss scale, and sharded as the master params; those of params that the
        optimizer freezes are zeros. `zero.read_leaf` gathers one of them. To change the gradients of a step, chain an
        optax transformation before the optimizer.
        """
        with on_mesh(self.program.mesh, in_shard_map=False), SHORT_TRACEBACK:
            given, batch = batch, place_batch(batch, mesh=self.program.mesh, axes=self.axes)
            check_not_donated(state)
            check_devices(state, self.program.mesh)
            checked_placement(state, self.program.tx, mesh=self.program.mesh, config=self.program.config)
            self._same_grads.check(self._grads, state, batch, given=given, axes=self.axes)
            return self._grads(state, batch)

    @functools.cached_property
    def _same(self) -> SameProgram:
        return SameProgram("train step", self.program.mesh, self.program.config)

    @functools.cached_property
    def _same_grads(self) -> SameProgram:
        return SameProgram("gradients of a step", self.program.mesh, self.program.config)

    @functools.cached_property
    def _grads(self) -> Any:
        program = self.program
        options = step_options(program.mesh, program.config).values
        return jax.jit(program.loss_and_grads, compiler_options=options or None)

    def leaf_name(self, state: TrainState, index: Any) -> str | None:
        """Returns the path of a param by its index, such as `metrics.nonfinite_leaf`; None for -1."""
        return leaf_names(state.params)[int(index)] if int(index) >= 0 else None

    def _cache_size(self) -> int:
        functions = [x for compiled in self.compiled_for.values() for x in (compiled.jitted, compiled.unguarded)]
        return sum(function._cache_size() for function in functions if function is not None)


@dataclasses.dataclass(slots=True)
class _LastCall:
    """The last call of a step: what it checked of a state and a batch holds for the state that it returned."""

    state: Callable[[], Any] = lambda: None  # a weak reference to that state, whose memory belongs to whoever holds it
    function: Any = None  # the jitted step
    tree: Any = None  # the structure of the state and the batch
    kinds: Any = None  # the type, shape, dtype and sharding of each leaf of the batch
    thread: int = 0  # the thread that repeats the call now, or 0

    def is_like(self, state: PyTree, batch: PyTree) -> bool:
        """Tells whether a batch is like that of the call, and the state was not donated, nor has an array twice.

        XLA may end the process where an array is donated twice.
        """
        try:
            leaves = self.tree.flatten_up_to((state, batch))  # faster than `jax.tree.leaves`
            num_state_leaves = len(leaves) - len(self.kinds)
            if list(map(_KIND, leaves[num_state_leaves:])) != self.kinds:
                return False
        except (AttributeError, TypeError, ValueError):  # of what is no array, or another structure
            return False
        return len({*map(id, leaves[:num_state_leaves])}) == num_state_leaves and not state.step.is_deleted()

    def repeat(self, state: PyTree, batch: PyTree) -> Any:
        """Returns the results for the state that the call returned; None where a leaf of it was replaced or deleted.

        That is possible in its dicts and lists. jit finds it before it runs anything: the leaf cannot be taken, or it
        would trace the step again.
        """
        self.thread = threading.get_ident()
        try:
            results = self.function(state, batch)
        except (TypeError, ValueError, RuntimeError):
            if state.step.is_deleted():  # not that: the program itself has failed
                raise
            return None
        finally:
            self.thread = 0
        self.state = weakref.ref(remember_copies(results[0]))
        return results

    def check_traced(self, state: PyTree) -> None:
        """Raises an error where jit calls the step's function in `repeat`, or without tracing it on what it donated."""
        if is_traced(state.step):
            if self.thread == threading.get_ident():
                raise ValueError("a leaf of the state was replaced")
        elif state.step.is_deleted():  # `jax_debug_nans` runs the function again to find the line
            raise FloatingPointError(
                "the step made a NaN or an infinity, and had its state donated: to have the line that made it, set "
                "jax_debug_nans (JAX_DEBUG_NANS=1) before the first step"
            )


_KIND = operator.attrgetter("__class__", "shape", "dtype", "sharding")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Compiled:
    """The jitted step for states of one structure, and how their leaves are sharded and typed."""

    jitted: Any  # the step, with all options
    # The step without the options that guard against the compiler's fault of scatters in loops, which cost traffic in
    # other programs; None where there are none
    unguarded: Any
    shardings: list[NamedSharding]  # of the state's leaves
    by_features: list[NamedSharding]  # those that they have without regard to the optimizer
    dtypes: list[Any]  # of the state's leaves
    nested_options: bool = False  # whether the outermost jitted function needs the options that guard against it
    # Whether the step has scatters in loops, by the structure of the batch
    scatters: dict[Any, bool] = dataclasses.field(default_factory=dict)

    def function(self, state: TrainState, batch: PyTree) -> Any:
        """Returns the jitted step for a batch of this structure."""
        if self.unguarded is None and not self.nested_options:
            return self.jitted
        leaves, tree = jax.tree.flatten(batch)
        structure = (tree, tuple((x.shape, x.dtype) for x in leaves))
        if structure not in self.scatters:
            self.scatters[structure] = scatters_in_loops((self.unguarded or self.jitted).trace(state, batch).jaxpr)
            if self.nested_options and self.scatters[structure]:
                warnings.warn(_NEEDS_OPTIONS, stacklevel=3)
        return self.jitted if self.unguarded is None or self.scatters[structure] else self.unguarded
