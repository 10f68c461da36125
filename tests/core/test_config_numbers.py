"""Every config refuses what is no number of its kind, also when it is made in Python."""

import dataclasses
import importlib
import math
import pkgutil
import typing

import numpy as np
import pytest

import zero_jax
from zero_jax.cluster.watchdog import Watchdog
from zero_jax.trainer.optimizers import OptimizerConfig, make_schedule
from zero_jax.training.ema import params_ema
from zero_jax.training.noise_scale import NoiseScale

BAD = (math.nan, math.inf, -math.inf, np.float32("nan"), True, "1", [1], 10**400, -(10**400), -1, 0, 1.5, 1j)
# Fields for which nothing is a number like others.
ZERO_IS_FINE = {
    "ZeroConfig": {"stage", "combine_bytes", "min_shard_size"},
    "OptimizerConfig": {"warmup_steps", "final_learning_rate", "beta1", "beta2", "momentum", "weight_decay"},
    "TrainConfig": {"seed", "hang_seconds", "sample_every", "sample_tokens", "temperature"},
    "CheckpointConfig": {"save_every", "keep_best"},
    "DataConfig": {"prefetch_batches"},
    "LaunchConfig": {"grace_seconds", "max_restarts", "rejoin_seconds"},
    "DecoderConfig": {
        "num_experts",
        "num_shared_experts",
        "num_dense_layers",
        "num_extra_tokens",
        "extra_token_weight",
        "expert_balance",
        "learned_positions",
    },
}
# What a field needs beside it to be allowed at all.
BESIDE = {"decay_fraction": {"schedule": "wsd"}, "momentum": {"optimizer": "sgd"}}


def config_classes():
    """Yields the config dataclasses of all modules."""
    seen = set()
    for module in pkgutil.walk_packages(zero_jax.__path__, "zero_jax."):
        if module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            is_own = isinstance(value, type) and value.__module__.startswith("zero_jax")
            if is_own and value.__name__.endswith("Config") and dataclasses.is_dataclass(value):
                seen.add(value)
    return sorted(seen, key=lambda c: c.__name__)


def numeric_fields(config_class):
    """Yields the name and the kind of each numeric or boolean field."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        members = typing.get_args(hints[field.name]) or (hints[field.name],)
        kinds = [m for m in members if m in (bool, int, float)]
        if kinds and all(m in (bool, int, float, type(None)) for m in members):
            yield field.name, kinds[0]


def is_fine(config_class, name, kind, value):
    """Tells whether a value may be taken for a number of its kind; its range is tested where the field is."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    is_number = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if not is_number or abs(value) > 2**63 or not math.isfinite(value):
        return False
    return value > 0 or (value == 0 and name in ZERO_IS_FINE.get(config_class.__name__, ()))


def test_all_configs_are_there():
    names = {c.__name__ for c in config_classes()}
    assert names >= set(ZERO_IS_FINE) | {
        "LossScaleConfig",
        "GPTConfig",
        "PlanConfig",
        "ActivationConfig",
        "WriterConfig",
    }


@pytest.mark.parametrize("config_class", config_classes(), ids=lambda c: c.__name__)
def test_fields_refuse_what_is_no_number_of_theirs(config_class):
    for name, kind in numeric_fields(config_class):
        for value in BAD:
            try:
                config_class(**{name: value}, **BESIDE.get(name, {}))
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 400, (name, value, error)
                assert name in str(error), (name, value, error)
            else:
                assert is_fine(config_class, name, kind, value), (
                    f"{config_class.__name__}({name}={value!r}) is accepted: give {name} a lowest value in its "
                    "check_fields, or a place in ZERO_IS_FINE"
                )


def test_so_do_functions(tmp_path):
    makers = {
        "decay": lambda x: NoiseScale(decay=x),
        "min_steps": lambda x: NoiseScale(min_steps=x),
        "ema_decay": params_ema,
        "seconds": lambda x: Watchdog(x, tmp_path),
        "num_steps": lambda x: make_schedule(OptimizerConfig(), num_steps=x),
    }
    for name, make in makers.items():
        for value in (math.nan, math.inf, -math.inf, "1", [1], 10**400, -1, True):
            with pytest.raises(ValueError, match=name):
                make(value)
