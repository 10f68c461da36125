"""A training run: its model, and the checks of its config before it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from zero_jax.checkpoint import (
    LOCK,
    check_outside,
    find_checkpoint,
    find_restorable,
    list_step_folders,
    resolve_folder,
)
from zero_jax.core.agreement import Agreement, agree_on, from_first_process
from zero_jax.core.field_checks import check_value
from zero_jax.core.files.folder_lock import FolderLock
from zero_jax.core.files.untrusted import mapping, user_path
from zero_jax.core.signatures import check_arguments, check_is, check_takes
from zero_jax.core.text_tables import flattened
from zero_jax.core.tree import shown
from zero_jax.planning import resolve
from zero_jax.sharding.mesh import axes_of, make_mesh
from zero_jax.sharding.precision import resolve_precision
from zero_jax.trainer.callbacks import Callback, as_callbacks, name_of
from zero_jax.trainer.capacity import check_params_fit, check_text_fits
from zero_jax.trainer.inputs.own import OwnInput, OwnModel, own_input
from zero_jax.trainer.inputs.text import Sampler, TextInput, open_dataset
from zero_jax.trainer.optimizers import make_optimizer, make_schedule
from zero_jax.trainer.reporting.trackers import OpenTracker, Tracker, tracker_functions
from zero_jax.trainer.run_folder import as_json, folder_name, make_folder
from zero_jax.trainer.train_config import LEFT_OPEN, TEXT_FIELDS, TrainConfig
from zero_jax.training import MeshLoss, TrainStep, ZeroConfig, abstract_state, check_batch, make_train_step, releases
from zero_jax.transforms import rematerialize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A language model as the trainer needs it; `OwnModel` is for all others.

    Attributes:
      name: its name.
      config: a dataclass of its sizes, saved with the run.
      vocab_size: size of its vocabulary.
      seq_len: tokens in a training sequence.
      init_fn: `init_fn(key) -> params`, or `zero.Variables` of params and model state.
      loss_fn: `loss_fn(params, batch)` or `loss_fn(params, batch, key)`, returning `loss` or `(loss, aux)`; a batch has
        `inputs`, `targets` (int32) and `weights` (float32, 0 where a target is in another document than its input), and
        `segments` (int32) if documents are kept apart, all `[batch, seq_len]`.
      generate_fn: `generate_fn(params, prompt, key, num_tokens=, temperature=, top_k=) -> tokens`, or None.
      param_specs: how the params are sharded over the mesh axis `model`, as for `ZeroConfig.param_specs`; used where
        that axis has more than one device. None where the params carry their specs themselves, or have none.
      load_fn: `load_fn(mesh, zero_config) -> params`, the params that a run begins with, sharded; None makes them by
        `init_fn`, which always says their shapes.
      base_init_fn: with adapters, makes the params that `TrainConfig.init_from` restores.
      base_param_specs: with adapters, the `param_specs` of these.
      adapt_fn: with adapters, `adapt_fn(params, key)`, compiled, returns the `Variables` of adapters and frozen base.
      adapters: with adapters, a dataclass of their settings, saved with the run.
    """

    name: str
    config: Any
    vocab_size: int
    seq_len: int
    init_fn: Callable[[Array], Any]
    loss_fn: Callable[..., Any] | MeshLoss
    generate_fn: Callable[..., Array] | None = None
    param_specs: Any = None
    load_fn: Callable[[Mesh, ZeroConfig], Any] | None = None
    base_init_fn: Callable[[Array], Any] | None = None
    base_param_specs: Any = None
    adapt_fn: Callable[[Any, Array], Any] | None = None
    adapters: Any = None


# Fields that may differ between processes: where a host has its files, whose content is compared, and what concerns
# one process alone.
_OF_ONE_PROCESS = re.compile(
    r"(out|log\..*|hang_seconds|profile_steps|data\.(data|validation_data|tokenizer|token_cache|prefetch.*))$"
)


RunInput = TextInput | OwnInput  # with the same attributes and methods


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A checked training run: nothing is on the devices yet.

    Attributes:
      config: the config.
      zero: `config.zero` with the trainer's additions.
      model: the model.
      mesh: the mesh.
      input: the text, or the batches of the user's own.
      tx: the optimizer.
      schedule: learning rate by the number of updates, or None for an optimizer of the user's own.
      train_step: the train step.
      folder: folder of the run.
      has_new_folder: whether this process made it.
      callbacks: what is called after steps.
      trackers: functions that open the user's own trackers, by name.
      save_options: writes the options of the run, in process 0: of one that resumes, once it is not refused.
    """

    config: TrainConfig
    zero: ZeroConfig
    model: Model | OwnModel
    mesh: Mesh
    input: RunInput
    tx: optax.GradientTransformation
    schedule: optax.Schedule | None
    train_step: TrainStep
    folder: pathlib.Path
    has_new_folder: bool
    callbacks: tuple[Callback, ...] = ()
    trackers: Mapping[str, OpenTracker] = dataclasses.field(default_factory=dict)
    save_options: Callable[[Run], None] = lambda _: None

    @functools.cached_property
    def saved_config(self) -> dict[str, Any]:
        """The config and the model's, as they are saved with the run and its checkpoints."""
        shape = {} if self.model.config is None else as_json(self.model.config)
        if self.model.adapters is not None:
            shape["adapters"] = as_json(self.model.adapters)
        return {"model": {"name": self.model.name, **shape}, **as_json(self.config)}

    @property
    def checkpoints(self) -> str:
        """The folder of the checkpoints, or its URL."""
        return _checkpoints_of(self.config, self.folder)


def prepare(
    config: TrainConfig,
    *,
    model: Model | OwnModel,
    tx: optax.GradientTransformation | None = None,
    log: Callable[[str], None] = lambda _: None,
    callbacks: Sequence[Any] = (),
    trackers: Sequence[Tracker | OpenTracker] = (),
) -> Run:
    """Checks a config against devices, data and model, reads the data and makes the run's folder.

    Of batches of the user's own the first one is read, and the loss function is traced with it. Several processes
    compare config, releases, batches and the lowered train step. The arguments are those of `zero.Trainer`.

    Raises:
      ValueError: more devices than there are, a batch that does not divide over devices and microbatches, no such data
        or too little of it, a vocabulary larger than the model's, a loss that is no scalar, processes that differ, or
        a folder that exists or cannot be made.
      OtherProcessFailed: in the other processes, where one alone refuses something.
    """
    with Agreement():
        check_kinds(config, model)
        check_arguments(callbacks=callbacks, trackers=trackers)
        called = as_callbacks(callbacks)
        # First of all: processes of different configs would wait for one another in different programs.
        agree_on("the config of the run", _facts(config, model, called), remedy="all the same options and releases")
        named = [] if config.log.tracker is None else [resolve("tracker", config.log.tracker)]
        config = dataclasses.replace(config, zero=_as_begun(config, model, log))
        mesh = _mesh_of(config)
        check_takes("init_fn", model.init_fn, ["key"], remedy="give a function of a key that returns the params")
        rematerialize(model.init_fn, config.zero.remat, mesh=mesh)  # raises for a mesh that the policy does not support
        check_params_fit(model.init_fn, mesh=mesh)
        if tx is None and config.epochs is None:
            make_schedule(config.optimizer, num_steps=config.steps)  # its errors, before the data is read
        config, run_input = _with_input(config, model, mesh, log)
        schedule = None
        if tx is None:
            schedule = make_schedule(config.optimizer, num_steps=config.steps)
            tx = make_optimizer(config.optimizer, num_steps=config.steps)
        if config.init_from is not None and config.resume == "never":
            find_restorable(config.init_from)  # before there is a folder
        zero = _zero_of(config, model)
        train_step = make_train_step(model.loss_fn, tx, mesh=mesh, config=zero)
        if jax.process_count() > 1:
            # Before the state is made: initialization with other shapes in one process ends in an abort.
            train_step.check_same(abstract_state(model.init_fn, tx, mesh=mesh, config=zero), run_input.batch_shapes)
        # Last: what is refused above leaves no folder behind.
        folder, has_new_folder = make_folder(
            user_path(config.out),
            config.name,
            _default_name(config, model),
            resume=config.resume == "auto",
            check=functools.partial(_check_checkpoints, config),
        )
        return Run(
            config=config,
            zero=zero,
            model=model,
            mesh=mesh,
            input=run_input,
            tx=tx,
            schedule=schedule,
            train_step=train_step,
            folder=folder,
            has_new_folder=has_new_folder,
            callbacks=called,
            trackers=tracker_functions([*named, *trackers]),
        )


def check_kinds(config: Any, model: Any) -> None:
    """Raises `ValueError` for what is no config of a run, and no model."""
    remedy = "give a zero.TrainConfig, as zero.TrainConfig(zero=zero.ZeroConfig(stage=3))"
    check_is("config", config, TrainConfig, remedy=remedy)
    check_is("model", model, Model | OwnModel, remedy="give a zero.trainer.OwnModel, or a zero.trainer.Model of text")
    check_value("name", model.name, str)
    # With one device along `model` specs are not used, and nobody else checks them.
    if config.model_axis == 1:
        check_arguments(param_specs=model.param_specs)


def _mesh_of(config: TrainConfig) -> Mesh:
    """Returns the mesh of a run; raises `ValueError` for other devices than there are, or a process without one."""
    devices = jax.devices()
    if config.devices is not None and not 1 <= config.devices <= len(devices):
        can_be = devices[0].platform == "cpu" and config.devices > 0
        more = f", or simulate more (JAX_NUM_CPU_DEVICES={config.devices})" if can_be else ""
        raise ValueError(
            f"devices={config.devices}, but there are {len(devices)} of kind {devices[0].device_kind}: "
            f"choose from 1 to {len(devices)}, leave it out to use all{more}"
        )
    # `data` takes what these leave.
    sizes: dict[str, Any] = {"replica": config.replica, "model": config.model_axis, "pipe": config.pipe}
    mesh = make_mesh(**sizes, devices=devices[: config.devices])
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise ValueError(
            f"the mesh of {mesh.size} devices leaves process{'es' if len(idle) > 1 else ''} "
            f"{', '.join(map(str, sorted(idle)))} without one: use all devices, or start fewer processes"
        )
    return mesh


def _zero_of(config: TrainConfig, model: Model | OwnModel) -> ZeroConfig:
    """Returns `config.zero` with the trainer's additions: what the model says of its sharding, and skipped steps."""
    skips, specs = config.zero.skip_nonfinite, config.zero.param_specs
    specs = model.param_specs if specs is None and config.model_axis > 1 else specs
    return dataclasses.replace(config.zero, skip_nonfinite=True if skips is None else skips, param_specs=specs)


def _with_input(
    config: TrainConfig, model: Model | OwnModel, mesh: Mesh, log: Callable[[str], None]
) -> tuple[TrainConfig, RunInput]:
    """Returns the data of a run, and its config with what the data decide: the steps, and the size of own batches."""
    run_input = open_text(config, model, mesh, log) if isinstance(model, Model) else _own_input(config, model, mesh)
    if isinstance(run_input, OwnInput):
        config = dataclasses.replace(config, batch_size=run_input.batch_size, sample_tokens=0, sample_prompt="")
    # From here on the number of steps is known, whichever way it was given.
    if config.epochs is not None:
        config = dataclasses.replace(config, epochs=None, steps=run_input.steps_of(config.epochs))
    return config, run_input


def _own_input(config: TrainConfig, model: OwnModel, mesh: Mesh) -> OwnInput:
    for name in TEXT_FIELDS:
        if getattr(config, name) != getattr(TrainConfig, name):
            raise ValueError(
                f"{name}={shown(getattr(config, name))} is for runs on text, and this one has its own batches: leave "
                "it out"
            )
    return own_input(
        model, mesh=mesh, zero=config.zero, eval_batches=config.eval_batches, process_batches=config.process_batches
    )


def _checkpoints_of(config: TrainConfig, folder: pathlib.Path) -> str:
    """Returns the folder of the checkpoints of the run with a folder, or its URL."""
    parent = config.checkpoints
    return str(folder / "checkpoints") if parent is None else f"{parent.rstrip('/')}/{folder.name}"


def _default_name(config: TrainConfig, model: Model | OwnModel) -> str:
    return f"{model.name}-stage{config.zero.stage}"


def _as_begun(config: TrainConfig, model: Model | OwnModel, log: Callable[[str], None]) -> ZeroConfig:
    """Returns `config.zero`; where the trainer has chosen for a run that is resumed, as that run has it until now."""
    open_fields = getattr(config.zero, LEFT_OPEN, ())
    if not open_fields or config.resume != "auto":
        return config.zero
    saved = json.loads(from_first_process(lambda: json.dumps(_saved_zero(config, model))))
    plain = {name: saved[name] for name in open_fields if isinstance(saved.get(name, ()), str | int | float | None)}
    changed = {name: value for name, value in plain.items() if value != getattr(config.zero, name)}
    if changed:
        values = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        log(f"{values} as in the run until now, because the config does not say")
    return dataclasses.replace(config.zero, **changed)


def _saved_zero(config: TrainConfig, model: Model | OwnModel) -> dict[str, Any]:
    """Returns the `ZeroConfig` of the run to resume, as its newest checkpoint has it; {} if there is none."""
    folder = user_path(config.out) / folder_name(config.name, _default_name(config, model))
    with contextlib.suppress(ValueError):  # of which `begin` says more
        record, _ = find_checkpoint(_checkpoints_of(config, folder))
        return dict(mapping(mapping(record.extra.get("config")).get("zero")))
    return {}


def _facts(config: TrainConfig, model: Model | OwnModel, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Returns what must be the same in all processes, by name."""
    if jax.process_count() == 1:
        return {}
    shape = {name: getattr(model, name) for name in ("name", "config", "adapters")}
    called = [(name_of(callback), callback.every) for callback in callbacks]
    fields = flattened({"model": shape, **vars(config), "callbacks": called})
    texts = {name: json.dumps(x, default=str) for name, x in fields if not _OF_ONE_PROCESS.match(name)}
    # The `repr` of a function has its address, which differs between processes.
    return releases() | {name: re.sub(r" at 0x[0-9a-f]+", "", text) for name, text in texts.items()}


def open_text(
    config: TrainConfig, model: Model, mesh: Mesh, log: Callable[[str], None], *, held_out: bool = False
) -> TextInput:
    """Opens the text of a run; with `held_out`, all of it for validation, in as many batches as there are."""
    if config.process_batches is not None:
        raise ValueError(
            f"process_batches={config.process_batches!r} is for batches of your own; of text each process reads its "
            "part: leave it out"
        )
    batch = {"tokens": jax.ShapeDtypeStruct((config.batch_size,), np.int32)}
    check_batch(batch, mesh=mesh, axes=axes_of(mesh), num_microbatches=config.zero.num_microbatches)
    check_text_fits(batch_size=config.batch_size, seq_len=model.seq_len, prefetch_batches=config.data.prefetch_batches)
    dataset = open_dataset(config.data, model, held_out=held_out, log=log)
    num_rows = dataset.validation.num_rows(seq_len=model.seq_len)
    sampler = None
    if model.generate_fn is not None and config.sample_tokens:
        sampler = Sampler(
            generate_fn=model.generate_fn,
            tokenizer=dataset.tokenizer,
            compute=resolve_precision(config.zero.precision).compute,
            prompt=config.sample_prompt,
            num_tokens=config.sample_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            seed=config.seed,
        )
        sampler.check(model.init_fn)
    return TextInput(
        dataset=dataset,
        config=config.data,
        mesh=mesh,
        batch_size=config.batch_size,
        seq_len=model.seq_len,
        seed=config.seed,
        eval_batches=-(-num_rows // config.batch_size) if held_out else config.eval_batches,
        sampler=sampler,
    )


def _check_checkpoints(config: TrainConfig, name: str) -> None:
    """Raises for the name of a run in a checkpoint, or of a new one whose checkpoints are locked or there already."""
    check_outside(user_path(config.out) / name)
    if config.checkpoints is None:
        return
    folder = resolve_folder(_checkpoints_of(config, user_path(config.out) / name))
    # A folder beside other runs' may be in use by a run whose own folder is elsewhere.
    if (folder / LOCK).exists():
        FolderLock(folder / LOCK).check()
    if config.resume == "never" and list_step_folders(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
