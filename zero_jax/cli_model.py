"""The model that a command is about: a preset of the reference GPT, or functions of the user's own."""

import argparse
import dataclasses
import difflib
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.compile_job import batch_of
from zero_jax.models import gpt
from zero_jax.options import add_fields, given
from zero_jax.training_run import Model
from zero_jax.tree import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """What a plan has to know of a model.

    Attributes:
      name: what to call it.
      init_fn: `init_fn(key) -> params`.
      loss_fn: the loss function.
      batch_fn: the shapes of a batch of so many examples.
      config: the reference model's shape, or None for a model of the user's own.
    """

    name: str
    init_fn: Callable[..., PyTree]
    loss_fn: Callable[..., Any]
    batch_fn: Callable[[int], PyTree]
    config: gpt.GPTConfig | None


def add_model_options(group: Any) -> None:
    """Adds the options that say which preset, and what is changed in it."""
    presets = ", ".join(gpt.PRESETS)
    default = "gpt-tiny"
    group.add_argument(
        "--model", dest="preset", default=default, metavar="PRESET", help=f"one of {presets} (default: %(default)s)"
    )
    add_fields(group, gpt.GPTConfig, default_of=None)


def add_own_model_options(group: Any) -> None:
    """Adds the options that name the user's own functions."""
    where = "as module:function, or path/to/file.py:function"
    group.add_argument("--loss", metavar="REF", help=f"your own loss function, {where}; it stands for --model")
    group.add_argument("--init", metavar="REF", help=f"the function that makes its params from a key, {where}")
    group.add_argument(
        "--batch",
        metavar="REF",
        help="a function that returns a batch (arrays or ShapeDtypeStructs) of any number of examples",
    )


def preset_config(options: argparse.Namespace) -> gpt.GPTConfig:
    """Returns the shape of the preset that was chosen, with its changes.

    Raises:
      ValueError: there is no such preset, or the shape cannot be built.
    """
    name = options.preset
    if name not in gpt.PRESETS:
        near = difflib.get_close_matches(str(name), gpt.PRESETS, n=1, cutoff=0)[0]
        raise ValueError(f"unknown model {name!r}: did you mean {near!r}? Choose one of {', '.join(gpt.PRESETS)}")
    changes = {name: value for name, value in given(gpt.GPTConfig, options).items() if value is not None}
    return dataclasses.replace(gpt.PRESETS[name], **changes)


def preset_model(options: argparse.Namespace) -> Model:
    """Returns the model to train."""
    config = preset_config(options)
    return Model(
        name=options.preset,
        config=config,
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        init_fn=functools.partial(gpt.init, config),
        loss_fn=gpt.loss_fn(config),
        generate_fn=functools.partial(gpt.generate, config),
    )


def planned_model(options: argparse.Namespace) -> PlannedModel:
    """Returns the model to plan for.

    Raises:
      ValueError: a reference that leads nowhere, or one without the others.
    """
    own = {name: getattr(options, name) for name in ("loss", "init", "batch")}
    if any(own.values()):
        missing = [f"--{name}" for name, ref in own.items() if not ref]
        if missing:
            raise ValueError(f"a model of your own needs --loss, --init and --batch: give {' and '.join(missing)} too")
        batch = _resolve("--batch", own["batch"])
        return PlannedModel(
            name=own["loss"],
            init_fn=_resolve("--init", own["init"]),
            loss_fn=_resolve("--loss", own["loss"]),
            batch_fn=lambda num_examples: batch_of(batch(), num_examples),
            config=None,
        )
    return gpt_model(options.preset, preset_config(options))


def gpt_model(name: str, config: gpt.GPTConfig) -> PlannedModel:
    """Returns a reference GPT with the trainer's batches."""

    def batch(num_examples: int) -> PyTree:
        tokens = jax.ShapeDtypeStruct((num_examples, config.seq_len), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    return PlannedModel(
        name=name,
        init_fn=functools.partial(gpt.init, config),
        loss_fn=gpt.loss_fn(config),
        batch_fn=batch,
        config=config,
    )


def _resolve(option: str, reference: str) -> Callable[..., Any]:
    """Imports `module:function` or `path/to/file.py:function`."""
    module_name, _, name = reference.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{option} {reference!r}: write module:function, such as my_model:loss_fn")
    path = pathlib.Path(module_name)
    folder = path.parent if path.suffix == ".py" else pathlib.Path()
    sys.path.insert(0, str(folder.resolve()))  # the compiler's process is given the same path
    try:
        module = importlib.import_module(path.stem if path.suffix == ".py" else module_name)
    except (ImportError, OSError) as error:
        raise ValueError(f"{option} {reference!r}: cannot import {module_name!r} ({error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [one for one in vars(module) if callable(getattr(module, one)) and not one.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{option} {reference!r}: {module_name!r} has no function {name!r}{hint}")
    return function
