"""Values that no config can use are refused before anything is done: every field, of every kind of wrong value."""

import dataclasses
import pathlib
import typing

import numpy as np
import pytest

from zero_jax.cli.config_classes import option_fields
from zero_jax.cluster.launching import LaunchConfig
from zero_jax.core.field_checks import check_fields
from zero_jax.data.dataset import DataConfig
from zero_jax.models.gpt import GPTConfig
from zero_jax.trainer.reporting.writers import WriterConfig
from zero_jax.trainer.run_folder import make_folder
from zero_jax.trainer.train_config import TrainConfig
from zero_jax.training import ZeroConfig

NAN, INF = float("nan"), float("inf")
CONFIGS = [TrainConfig, DataConfig, WriterConfig, LaunchConfig]
WRONG = {
    bool: [0, 1, "yes", NAN],
    int: [-1, 2**70, 1.5, NAN, INF, "x", "1", True, b"1", [1]],
    float: [-1, -0.5, NAN, INF, -INF, 10**400, "x", "1", True, 1j, [1.0], np.float64("nan"), np.float32("inf")],
    str: [1, 1.5, True, b"x", ["x"], "a\0b", "\udc80"],
}


@pytest.mark.parametrize("config_class", [*CONFIGS, GPTConfig])
def test_every_field_refuses_what_is_not_of_its_type_not_finite_or_out_of_range(config_class):
    for name, field in option_fields(config_class.__name__).items():
        kind = field.kind
        if config_class is GPTConfig and kind.base is not int:
            continue
        for value in [*WRONG[kind.base], *([] if kind.is_optional else [None])]:
            with pytest.raises(ValueError, match=rf"^{name}=") as refused:
                config_class(**{name: value})
            assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
            assert "give" in str(refused.value) or "choose" in str(refused.value)


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (TrainConfig, {"num_epochs": 3}, r"TrainConfig has no field 'num_epochs': did you mean epochs\? It has"),
        (TrainConfig, {"lr": 3}, r"no field 'lr': did you mean optimizer=OptimizerConfig\(learning_rate=...\)\?"),
        (TrainConfig, {"stge": 3}, r"did you mean zero=ZeroConfig\(stage=...\)\?"),
        (ZeroConfig, {"gradient_checkpointing": True}, r"did you mean remat\?"),
        (ZeroConfig, {"xyz": True}, "no field 'xyz': It has stage, precision"),
    ],
)
def test_a_field_that_there_is_not_is_answered_with_the_one_that_is_meant(config_class, values, message):
    with pytest.raises(TypeError, match=message):
        config_class(**values)
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(config_class(), **values)


NAMES = ["../..", "..", ".", "", "a/b", "/tmp/a", "a/", "a\0b", "x" * 300, "\udc80", "a\nb", "~/../a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_named_as_one_folder(name, tmp_path):
    with pytest.raises(ValueError, match=r"^name=.*: give|^name=.* give one without slashes") as refused:
        TrainConfig(name=name, out=str(tmp_path / "out"))
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_ordinary_names_are_taken_and_a_models_name_is_made_one(tmp_path):
    for name in ("run", "läuft 2", "a.b-c_d+e", "x" * 200, ".hidden", "~"):
        assert TrainConfig(name=name).name == name
    folder, is_new = make_folder(tmp_path, None, "../meta/llama-stage3", resume=False)
    assert folder == tmp_path / "..-meta-llama-stage3" and folder.is_dir() and is_new


def test_numbers_of_numpy_and_paths_are_taken_as_pythons():
    config = TrainConfig(steps=np.int32(5), temperature=np.float32(0.5), out=pathlib.Path("a/b"), hang_seconds=600)
    assert (type(config.steps), type(config.temperature), config.out) == (int, float, "a/b")


def test_parts_are_of_their_types():
    for name in ("zero", "data", "optimizer", "checkpoint", "log"):
        with pytest.raises(ValueError, match=rf"^{name}='x': give a \w+Config"):
            TrainConfig(**{name: "x"})


def test_other_types_and_literals():
    @dataclasses.dataclass(frozen=True)
    class Config:
        words: typing.Literal["a", 3] | None = None
        either: int | str = 1
        anything: typing.Any = None

        def __post_init__(self):
            check_fields(self)

    assert (Config(words="a").words, Config(either="x").either) == ("a", "x")
    with pytest.raises(ValueError, match=r"^words='b': give one of a, 3 or None"):
        Config(words="b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^either=1\.5: give a whole number or text"):
        Config(either=1.5)  # type: ignore[arg-type]
    assert Config(anything=object)
