"""What the command line reads from the source of the config classes is what the classes are."""

import dataclasses
import importlib
import inspect
import re

import pytest

from zero_jax.analysis import PAPER_CONFIGS
from zero_jax.cli.config_classes import CONFIG_MODULES, defaults_of, keys_of, option_fields
from zero_jax.cli.models.presets import PRESETS
from zero_jax.core.field_checks import field_kinds
from zero_jax.trainer import X_LABELS, OptimizerConfig, TrainConfig
from zero_jax.training import ZeroConfig
from zero_jax.transforms.remat.policies import POLICIES


@pytest.mark.parametrize("name", CONFIG_MODULES)
def test_kinds_defaults_and_help_are_those_of_the_class(name):
    config_class = getattr(importlib.import_module(f"zero_jax.{CONFIG_MODULES[name]}"), name)
    fields, kinds = option_fields(name), field_kinds(config_class)
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    assert fields and {option: kinds[option] for option in fields} == {x: field.kind for x, field in fields.items()}
    assert {option: defaults[option] for option in fields} == {x: field.default for x, field in fields.items()}
    documented = re.findall(r"^  (\w+): ", inspect.cleandoc(config_class.__doc__ or ""), re.MULTILINE)
    assert all(field.help for field in fields.values()) and {*fields} <= {*documented}


@pytest.mark.parametrize("part", ["zero", "data", "optimizer", "checkpoint", "log"])
def test_parts_of_a_run_have_their_defaults_there(part):
    own = getattr(TrainConfig(), part)
    expected = {name: getattr(own, name) for name in option_fields(type(own).__name__)}
    assert defaults_of(type(own).__name__) == expected


def test_names_to_choose_from():
    assert [*keys_of("models/presets.toml", "gpts"), *keys_of("models/presets.toml", "decoders")] == [*PRESETS]
    assert keys_of("analysis.paper", "CONFIGS") == [*PAPER_CONFIGS]
    words = {name: field.words for name, field in option_fields("ZeroConfig").items() if field.words}
    assert words.pop("remat") == (*POLICIES,)
    assert {*words} == {"stage", "precision", "attention", "offload", "pipeline", "quantize_gathers", "quantize_grads"}
    for name, values in words.items():
        for value in values:
            ZeroConfig(**{"stage": 3, "precision": "bf16", name: value})
    for name in option_fields("OptimizerConfig")["optimizer"].words:
        OptimizerConfig(optimizer=name)
    assert keys_of("trainer.reporting.curves", "X_LABELS") == [*X_LABELS]
