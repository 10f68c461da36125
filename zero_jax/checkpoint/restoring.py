"""Restores a checkpoint on any mesh, at any stage, in any precision.

A restore reads the saved form with the shardings of stage 3, so that every device reads only its shards. It verifies
fingerprints on the devices, and then casts and gathers the leaves that the stage keeps in low precision or replicated.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.checkpoint.finding import (
    all_damaged_message,
    list_step_folders,
    missing_message,
    step_folder,
    steps_folder,
)
from zero_jax.checkpoint.leaf_files import agreement_to_read, check_files, check_index, read_arrays
from zero_jax.checkpoint.record import CheckpointError, Record, SavedLeaf, read_record
from zero_jax.checkpoint.saved_state import dtype_name, opt_state_classes, saved_leaves
from zero_jax.core.agreement import agree_on, from_first_process
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.device_put import put_global, reshard_array
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, printable, quoted
from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.core.variables import MODEL_STATE, Variables, of_one_structure, traceable_init
from zero_jax.sharding.mesh import on_mesh
from zero_jax.sharding.precision import init_loss_scale, precision_name, resolve_precision
from zero_jax.training import TrainState, ZeroConfig, abstract_state, init_state, remember_copies, with_gathered_params

_SHOWN = 6
_OF_THE_MODEL = ("params", MODEL_STATE)
_GRAD_ERRORS = "grad_errors"
# Once for all leaves: a function that is made for each would be compiled for each.
_is_too_large = jax.jit(lambda x, cast: (jnp.isfinite(x) & ~jnp.isfinite(cast.astype(x.dtype))).any())
_OPTIONAL = ("loss_scale", _GRAD_ERRORS)  # groups that a checkpoint may lack, as it may leaves without elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored(Report):
    """A restored train state, and where it comes from.

    Attributes:
      state: the train state, with the shardings of the mesh and config asked for.
      step: steps done when it was saved.
      extra: what the run itself had recorded.
      loss: validation loss at that step, or None.
      path: the checkpoint's folder.
      warnings: newer checkpoints that are damaged, and leaves that were cast or dropped.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> restored = zero.restore(folder, init_fn=init_fn, tx=tx, mesh=mesh, config=config)
      >>> restored.step, restored.state.params["up"].shape
      (1, (64, 64))
    """

    state: TrainState
    step: int
    extra: Mapping[str, Any]
    loss: float | None
    path: str
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"restored step {self.step} from {self.path}", *(f"  {line}" for line in self.warnings)])


def restore(
    directory: str | os.PathLike[str],
    *,
    init_fn: Callable[[Array], PyTree] | PyTree,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    config: ZeroConfig,
    step: int | None = None,
    params_only: bool = False,
    key: Array | None = None,
    log: Callable[[str], None] | None = None,
    accept: Callable[[Mapping[str, Any]], None] | None = None,
) -> Restored:
    """Restores a checkpoint; mesh, stage, precision and number of processes may differ from those that saved it.

    Args:
      directory: the folder that a `Checkpointer` saved into, or a run's folder with that in it.
      init_fn: as for `init_state`; or a pytree of arrays or `ShapeDtypeStruct`s like the params, or such `Variables`.
        Only shapes are taken.
      tx: the optimizer.
      mesh: the mesh.
      config: stage, precision and rules.
      step: the checkpoint to take, and no other. None takes the newest that is undamaged.
      params_only: take the params and the model state that `init_fn` has, and begin anew with everything else, as with
        `init_state`.
      key: the key of the new state with `params_only`; None stands for `jax.random.key(0)`.
      log: called with each warning; None stands for Python's own warnings.
      accept: raises a `CheckpointError` for what the run itself had recorded (`extra`) where it cannot be resumed from;
        the checkpoint is then passed over like a damaged one.

    Raises:
      CheckpointError: there is no undamaged checkpoint.
      ValueError: the checkpoint is of another model or optimizer; `config` or `step` of another kind.

    Example:
      >>> with zero.Checkpointer(folder) as saved:
      ...     saved.save(1, state)
      >>> smaller = zero.make_mesh(data=4, model=2)
      >>> zero.restore(folder, init_fn=init_fn, tx=tx, mesh=smaller, config=zero.ZeroConfig(stage=1)).step
      1
    """
    check_arguments(config=config, step=step)
    directory = steps_folder(directory)
    steps = _agreed_steps(directory)
    if not steps or step not in (None, *steps):
        raise CheckpointError(missing_message(directory, steps, step))
    log, lines = log or (lambda line: warnings.warn(line, stacklevel=4)), list[str]()

    def warn(line: str) -> None:
        lines.append(line)
        log(line)

    init_fn = of_one_structure(traceable_init(init_fn))
    settings = {"params_only": params_only, "key": key, "accept": accept or (lambda _: None)}
    attempt = _Restore(init_fn=init_fn, tx=tx, mesh=mesh, config=config, warn=warn, **settings)
    problems: dict[int, str] = {}
    while untried := [number for number in steps if number not in problems and step in (None, number)]:
        candidate = untried[-1]
        try:
            with on_mesh(mesh):
                record, state = attempt.load_step(step_folder(directory, candidate))
        except CheckpointError as error:
            # A removed one counts as a damaged one: the other processes know only that this one failed, and all have to
            # try the same one next.
            problems[candidate] = str(error)
            if step is None:
                warn(f"checkpoint of step {candidate} passed over: {error}")
                steps = _agreed_steps(directory)  # a run may delete it, and save newer ones
            continue
        recorded = {name: getattr(record, name) for name in ("step", "extra", "loss")}
        return Restored(state=state, path=os.fspath(record.path), warnings=tuple(lines), **recorded)
    if step is not None:
        raise CheckpointError(f"{problems[step]}; other checkpoints there: {sorted({*steps} - {step}) or 'none'}")
    raise CheckpointError(all_damaged_message(directory, [*problems.values()]))


def _agreed_steps(directory: epath.Path) -> list[int]:
    """Returns the steps that the first process sees."""
    return [int(step) for step in from_first_process(lambda: " ".join(map(str, list_step_folders(directory)))).split()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Restore:
    """The arguments of a restore, tried on one checkpoint after the other."""

    init_fn: Callable[[Array], PyTree]
    tx: optax.GradientTransformation
    mesh: Mesh
    config: ZeroConfig
    params_only: bool
    key: Array | None
    warn: Callable[[str], None]
    accept: Callable[[Mapping[str, Any]], None]

    def load_step(self, path: epath.Path) -> tuple[Record, TrainState]:
        """Loads a step's folder, in all processes or in none."""
        with agreement_to_read():
            record = read_record(path)
            try:
                self.accept(record.extra)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            if jax.process_index() == 0:  # a walk over all files, of which one process is enough
                check_files(record)
        sharded = self.sharded_shapes(record)
        target = saved_leaves(sharded)
        if self.params_only:
            target = {name: x for name, x in target.items() if _group(name) in _OF_THE_MODEL}
        # A leaf without elements says what it says by its name, such as the alpha of adapters.
        optional = [name for name, x in target.items() if _group(name) in _OPTIONAL or not x.size]
        missing = {name: target[name] for name in optional if name not in record.leaves}
        present = {name: x for name, x in target.items() if name not in missing}
        stored = {**present, **self.of_other_devices(record, present, sharded)}
        try:
            classes = {} if self.params_only else opt_state_classes(sharded)
            _check_leaves(record, stored, classes, params_only=self.params_only)
        except ValueError:
            with agreement_to_read():
                check_index(record)  # of another model, or damaged?
            raise
        arrays = read_arrays(record, {name: x.sharding for name, x in stored.items()}, mesh=self.mesh)
        leaves = {name: _fitted(name, arrays.pop(name), x) for name, x in present.items()} | self.fresh_leaves(missing)
        dropped = [name for name, leaf in record.leaves.items() if 0 in leaf.shape and name not in target]
        if dropped:
            others = ", ".join(printable(name) for name, x in missing.items() if not x.size)
            new = f", the state has {others}" if others else ""
            self.warn(
                f"the checkpoint has {', '.join(map(printable, dropped))}{new}: its params may be of another function"
            )
        if self.params_only:
            tree = {"params": sharded.params, MODEL_STATE: sharded.model_state}
            # `target` is in the order of this tree: JAX sorts dicts by key, here as in `saved_leaves`.
            variables = jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in target])
            key = jax.random.key(0) if self.key is None else self.key
            return record, init_state(Variables(**variables), self.tx, key, mesh=self.mesh, config=self.config)
        self.warn_of_casts(record, present)
        fields = (field.name for field in dataclasses.fields(sharded) if field.name != "master")
        tree = {name: getattr(sharded, name) for name in fields}
        rebuilt = jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in target])
        return record, remember_copies(self.to_stage(TrainState(master=None, **rebuilt), record))

    def shapes(self, config: ZeroConfig, leaf: SavedLeaf | None) -> TrainState:
        """Returns the shapes and shardings of the state under a config, with a key of the kind that was saved."""
        key: Any
        if leaf is None or leaf.is_key:
            key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.dtype[4:-1] if leaf else None))
        else:
            key = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        return abstract_state(self.init_fn, self.tx, key, mesh=self.mesh, config=config)

    def sharded_shapes(self, record: Record) -> TrainState:
        """Returns the shapes of the saved form (full-precision params, nothing derived) with stage 3's shardings."""
        # How gradients are sent is of the target stage: a pipeline may not send them so at stage 3.
        quantize, names = self.config.resolved_quantize(), (field.name for field in dataclasses.fields(self.config))
        of_grads = {"noise_scale": False, **{name: None for name in names if name.startswith("quantize")}}
        key = record.leaves.get("key")
        shapes = self.shapes(dataclasses.replace(self.config, stage=3, **of_grads), key)
        if quantize is None or not quantize.error_feedback:
            return shapes
        return dataclasses.replace(shapes, grad_errors=self.shapes(self.config, key).grad_errors)

    def of_other_devices(
        self, record: Record, target: Mapping[str, Any], state: TrainState
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the saved shapes of gradient errors of another number of devices, sharded as their params."""
        params, saved_shapes, changes = saved_leaves(state), {}, []
        for name, x in target.items():
            shape = record.leaves[name].shape if name in record.leaves else x.shape
            if _group(name) == _GRAD_ERRORS and shape[:1] != x.shape[:1] and shape[1:] == x.shape[1:]:
                spec = params[name.replace(_GRAD_ERRORS, "params", 1)].sharding.spec
                # The dim of devices is not sharded: the mesh need not divide the number of those that saved.
                sharding = NamedSharding(self.mesh, PartitionSpec(None, *spec))
                saved_shapes[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
                changes.append((shape[0], x.shape[0]))
        for (old, new), count in collections.Counter(changes).items():
            self.warn(
                f"errors of {count} quantized gradients are those of {old} devices, not {new}: each has an equal share "
                "of their sum"
            )
        return saved_shapes

    def to_stage(self, sharded: TrainState, record: Record) -> TrainState:
        """Makes the state of the target stage: low-precision copies, and that stage's shardings."""
        target = self.shapes(self.config, record.leaves.get("key"))
        # A process that gathers nothing would leave others waiting whose stage gathers params.
        specs = {f"the spec of {name!r}": str(x.sharding.spec) for name, x in leaves_by_name(target).items()}
        agree_on("the train state that they restore", specs, remedy="all processes the same mesh and config")
        masters = sharded.params
        without_params = dataclasses.replace(sharded, params=None, master=None if target.master is None else masters)
        placed = jax.tree.map(_move, without_params, dataclasses.replace(target, params=None))

        def param(master: Array, like: Any) -> Array:
            moved = _move(master, like)  # the master param itself where it is unsharded and keeps its dtype: an integer
            # A copy: two leaves of one array cannot both be donated to a step.
            return jnp.copy(moved) if moved is master and target.master is not None else moved

        state = dataclasses.replace(placed, params=jax.tree.map(param, masters, target.params))
        if not int(sharded.step):  # of a state that has made no step they are casts
            return state
        return with_gathered_params(state, self.tx, mesh=self.mesh, config=self.config)

    def fresh_leaves(self, missing: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the first loss scale and errors of gradients, and leaves without elements, where none were saved."""
        errors = {name: x for name, x in missing.items() if _group(name) == _GRAD_ERRORS}
        zeros = errors | {name: x for name, x in missing.items() if not x.size}
        leaves = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in zeros.items()}
        if errors:
            self.warn(
                f"the checkpoint has no errors of {len(errors)} quantized gradients (error feedback): they begin with "
                "zeros"
            )
        if missing.keys() - zeros:
            self.warn("the checkpoint has no loss scale: starting with the first one")
            scale = init_loss_scale(resolve_precision(self.config.precision).loss_scale)
            replicated = NamedSharding(self.mesh, PartitionSpec())
            named = leaves_by_name({"loss_scale": scale}).items()
            leaves |= {name: put_global(np.asarray(x), replicated) for name, x in named}
        return leaves

    def warn_of_casts(self, record: Record, target: Mapping[str, Any]) -> None:
        """Warns of saved leaves that are not needed, and of leaves whose dtype changed."""
        if any(_group(name) == "loss_scale" for name in record.leaves.keys() - target.keys()):
            self.warn(f"the loss scale was dropped: precision {precision_name(self.config.precision)!r} has none")
        dropped = [name for name in record.leaves.keys() - target.keys() if _group(name) == _GRAD_ERRORS]
        if dropped:
            self.warn(
                f"errors of {len(dropped)} quantized gradients were dropped: the config has no error feedback there"
            )
        dtypes = collections.Counter((record.leaves[name].dtype, dtype_name(x)) for name, x in target.items())
        for (old, new), count in dtypes.items():
            if old != new:
                self.warn(f"{count} leaves were saved as {old} and are {new} now")


def _check_leaves(record: Record, target: Mapping[str, Any], classes: Mapping[str, str], *, params_only: bool) -> None:
    """Raises for a checkpoint of another model or optimizer; one error lists all differences."""
    groups = {"params", *map(_group, target)} if params_only else set(map(_group, record.leaves)) - {*_OPTIONAL}
    elsewhere = {name: leaf for name, leaf in record.leaves.items() if name not in target}
    extra = [name for name, leaf in elsewhere.items() if _group(name) in groups and 0 not in leaf.shape]
    lines = []
    for name, x in target.items():
        leaf = record.leaves.get(name)
        if leaf is None:
            alike = [other for other in extra if record.leaves[other].shape == x.shape]
            hint = did_you_mean(name, alike or extra, " (it has {})")
            wanted = f"{dtype_name(x)}{list(x.shape)}"
            lines.append(f"{printable(name)}: the checkpoint has no such leaf{hint}, the state has {wanted}")
        elif leaf.shape != tuple(x.shape):
            lines.append(f"{printable(name)}: saved as {list(leaf.shape)}, the state has {list(x.shape)}")
        elif _is_cut(leaf.dtype) or (leaf.dtype != (dtype := dtype_name(x)) and not _are_floats(leaf.dtype, dtype)):
            lines.append(f"{printable(name)}: saved as {leaf.dtype}, the state has {dtype_name(x)}")
    lines += [f"{printable(name)}: the checkpoint has it, the state has not" for name in extra]
    other_classes = [name for name, kind in classes.items() if record.classes.get(name, kind) != kind]
    for name in other_classes:
        saved = printable(record.classes[name])
        lines.append(f"{printable(name)}: saved of the class {saved}, the state has the class {classes[name]}")
    if not lines:
        return
    # What differs in the model first: the optimizer's leaves differ because of that.
    lines.sort(key=lambda line: _group(line) not in _OF_THE_MODEL)
    shown = lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])
    remedies = {
        "params": "Restore it with the model that it was saved with, or begin a run of another name; a state of its "
        "params and new ones is made by init_state({**restored.state.params, ...}, ...)",
        MODEL_STATE: "Restore it with an init_fn that returns the model_state that it was saved with, or none; a state "
        "of its params and other model_state is made by init_state(zero.Variables(params=..., model_state=...), ...)",
    }
    differ = {_group(line) for line in lines}
    renamed = "; a class that was renamed needs the name of before" if other_classes else ""
    default = (
        "Restore it with the optimizer that it was saved with, or its params alone (params_only=True, or a run "
        f"of another name with init_from){renamed}"
    )
    remedy = next((remedy for group, remedy in remedies.items() if group in differ), default)
    if any(_is_cut(record.leaves[name].dtype) for name in target.keys() & record.leaves.keys()):
        remedy = "JAX has 64 bits with jax_enable_x64 (JAX_ENABLE_X64=1) alone: restore it with that on"
    raise ValueError(f"{record.path} does not fit the state:\n  " + "\n  ".join(shown) + f"\n{remedy}")


def _are_floats(*dtypes: str) -> bool:
    return all(not x.startswith("key<") and jnp.issubdtype(jnp.dtype(x), jnp.floating) for x in dtypes)


def _is_cut(dtype: str) -> bool:
    """Tells whether JAX makes fewer bits of a dtype."""
    return not dtype.startswith("key<") and jax.dtypes.canonicalize_dtype(jnp.dtype(dtype)) != jnp.dtype(dtype)


def _group(name: str) -> str:
    # Of a path, or of a line of an error, which begins with one.
    return name.split("/", 1)[0].split(":", 1)[0]


def _cast(x: Array, like: Any) -> Array:
    """Casts an array, keeping its sharding."""
    if x.dtype == like.dtype:
        return x
    return jax.jit(jnp.astype, static_argnums=1, out_shardings=x.sharding)(x, like.dtype)


def _move(x: Array, like: Any) -> Array:
    """Casts an array and then reshards it, to the dtype and sharding of a leaf."""
    return reshard_array(_cast(x, like), like.sharding)


def _fitted(name: str, x: Array, like: Any) -> Array:
    """Casts a leaf; errors of gradients of another number of devices have equal shares of their sum.

    Raises:
      ValueError: finite values become infinite in the dtype that the state has.
    """
    share = lambda x: jnp.broadcast_to(x.sum(0, keepdims=True) / like.shape[0], like.shape)  # noqa: E731
    if x.shape != like.shape:
        return jax.jit(share, out_shardings=like.sharding)(x)
    cast = _cast(x, like)
    # `_check_leaves` lets other dtypes pass among floats alone.
    if cast is not x and _is_too_large(x, cast):
        raise ValueError(f"leaf {quoted(name)} has values too large for {like.dtype}: keep it in {x.dtype}")
    return cast
