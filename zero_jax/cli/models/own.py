"""A model of the user's own: options that refer to its functions and batches."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax

from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.options import explicit, field_values, option_of, refuse
from zero_jax.core.field_checks import check_fields
from zero_jax.core.tree import PyTree, key_shape
from zero_jax.planning import resolve
from zero_jax.trainer import TEXT_FIELDS, OwnModel

_NEEDED = ("loss", "init", "batches")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnModelConfig:
    """The functions of a model, each as module:name or path/to/file.py:name.

    Attributes:
      loss: your own loss function, as module:function, or path/to/file.py:function; it stands for --model and --data.
      init: the function that makes its params from a key.
      batches: its batches, a function of the step, an iterable, or a function of nothing that returns one.
      validation: batches to validate on, as --batches; none validates nothing.
      eval_loss: the loss function of the validation, such as one without dropout; none takes --loss.
      param_specs: how its params are sharded over the axis `model`: a tree of PartitionSpecs, a dict from regular
        expressions of leaf paths to PartitionSpecs, or a function of the params' shapes, or of nothing, that returns
        one of them.
    """

    loss: str | None = None
    init: str | None = None
    batches: str | None = None
    validation: str | None = None
    eval_loss: str | None = None
    param_specs: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        set_names = [name for name, reference in vars(self).items() if reference]
        missing = [option_of(name) for name in _NEEDED if name not in set_names]
        if set_names and missing:
            of_text = ". Of text it is --validation-data PATH" if set_names == ["validation"] else ""
            raise ValueError(
                f"{option_of(set_names[0])} is of a model of your own, which needs --loss, --init and --batches: give "
                f"{' and '.join(missing)} too{of_text}".rstrip(". ")
            )
        if self.eval_loss and not self.validation:
            raise ValueError("--eval-loss is for the validation: give its batches, --validation, or leave it out")


def read_own_model(options: argparse.Namespace) -> OwnModelConfig | None:
    """Returns the references of a model of the user's own, or None for a preset."""
    config = OwnModelConfig(**field_values(OwnModelConfig, options))
    if config.loss is None:
        return None
    # An option that says nothing would be a mistake of the user's.
    reason = "that is of the presets, and --loss stands for a model of your own: leave it out"
    for option, name in (("--model", "preset"), ("--from-hf", "from_hf")):
        if name in explicit(options):
            raise ValueError(f"{option} {getattr(options, name)}: {reason}")
    names = [name for config in ("GPTConfig", "DecoderConfig", "ActivationConfig") for name in option_fields(config)]
    refuse(options, [*map(option_of, names)], reason=reason)
    names = [option_of(name) for name in (*option_fields("DataConfig"), *TEXT_FIELDS)]
    # A plan has no options of text.
    if hasattr(options, "DataConfig.data"):
        refuse(options, names, reason="that is of text, and --batches stands for a source of your own: leave it out")
    return config


def import_own_model(config: OwnModelConfig) -> OwnModel:
    """Imports what the references name."""
    loss, init, batches = (str(getattr(config, name)) for name in _NEEDED)
    init_fn = function_of("--init", init)
    return OwnModel(
        name=re.split(r"[/\\.]", loss.rpartition(":")[0].removesuffix(".py"))[-1] or "model",
        config=config,
        init_fn=init_fn,
        loss_fn=function_of("--loss", loss),
        batches=resolve("--batches", batches),
        validation=resolve("--validation", config.validation) if config.validation else None,
        eval_fn=function_of("--eval-loss", config.eval_loss) if config.eval_loss else None,
        param_specs=_own_specs(config.param_specs, init_fn),
    )


def _own_specs(reference: str | None, init_fn: Callable[..., PyTree]) -> PyTree:
    """Returns the specs that `--param-specs` names, or None."""
    value = resolve("--param-specs", reference) if reference else None
    if not callable(value):
        return value
    takes_params = bool(inspect.signature(value).parameters)
    return value(jax.eval_shape(init_fn, key_shape())) if takes_params else value()


def function_of(option: str, reference: str) -> Callable[..., Any]:
    """Imports a function by `module:function`."""
    function = resolve(option, reference)
    if not callable(function):
        raise ValueError(f"{option} {reference!r} is of type {type(function).__name__}: name a function")
    return function
