"""What the last line of a notebook's cell shows: reports their table, steps and states what they are of."""

import dataclasses
import inspect
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import zero_jax as zero
from zero_jax.core.text_tables import Report

SETTINGS = {zero.Precision, zero.Remat}  # which users make, and which show their fields


def public_classes():
    """Yields the classes of the public names, and of the modules among them."""
    for value in (getattr(zero, name) for name in zero.__all__):
        values = vars(value).values() if isinstance(value, types.ModuleType) else [value]
        yield from (x for x in values if inspect.isclass(x) and x.__module__.startswith("zero_jax."))


def test_every_public_result_with_a_text_shows_it():
    with_text = {x for x in public_classes() if dataclasses.is_dataclass(x) and x.__str__ is not object.__str__}
    reports = {x for x in with_text if issubclass(x, Report)}
    assert len(reports) > 15 and {x for x in with_text - reports if "__str__" in vars(x)} <= SETTINGS
    assert all(x.__repr__ is Report.__repr__ for x in reports)


def test_reports_steps_states_and_metrics_are_short():
    def loss_fn(params, batch):
        errors = batch["x"] @ params["w"]
        return jnp.square(errors).mean(), {"largest": jnp.abs(errors).max(), "errors": errors}

    mesh, tx, config = zero.make_mesh(), optax.sgd(0.1), zero.ZeroConfig(stage=2, precision="bf16")
    variables = zero.Variables(params={"w": jnp.ones((64, 64))}, model_state={"count": jnp.int32(0)})
    assert repr(variables).splitlines()[1:] == [
        "params       1 leaf  4,096 elements  16.38 KB, 16.38 KB a device",
        "model_state  1 leaf  1 elements      4 bytes, 4 bytes a device",
    ]
    state = zero.init_state(variables.params, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    assert "test_reports.py" in repr(step) and repr(step).endswith(
        "loss_fn) on {'replica': 1, 'data': 8, 'model': 1}, ZeroConfig(stage=2, precision='bf16')"
    ), repr(step)
    evaluate = zero.make_eval_step(loss_fn, mesh=mesh, config=config)
    assert repr(evaluate) == repr(step).replace("TrainStep", "EvalStep")
    report = zero.sharding_report(state, mesh=mesh, config=config)
    assert repr(report) == str(report)
    assert report._repr_html_().startswith("<pre") and "params" in report._repr_html_()
    _, metrics = step(state, {"x": jnp.ones((8, 64))})
    assert repr(metrics).splitlines()[0].split() == ["loss", "4096.0"] and "aux/errors" in repr(metrics)
    assert "[8, 64]" in repr(metrics) and len(repr(metrics)) < 400
    jax.eval_shape(lambda metrics: repr(metrics) and metrics.loss, metrics)


@pytest.mark.parametrize("name", [name for name in zero.__all__ if name.endswith("Config")])
def test_a_config_shows_what_is_not_as_usual_and_that_makes_it(name):
    config_class = getattr(zero, name)
    assert repr(config_class()) == f"{name}()"
    for field in dataclasses.fields(config_class):
        default = getattr(config_class(), field.name)
        if type(default) in (int, float) and field.name != "stage":
            changed = dataclasses.replace(
                config_class(), **{field.name: default + 1 if isinstance(default, int) else default / 2}
            )
            assert repr(changed) == f"{name}({field.name}={getattr(changed, field.name)!r})"
            assert eval(repr(changed), vars(zero)) == changed


def test_settings_and_trainers_are_short(tmp_path):
    config = zero.TrainConfig(
        steps=20, zero=zero.ZeroConfig(stage=2, precision="bf16", quantize=zero.Quantize(gathers="int8"))
    )
    shown = "TrainConfig(zero=ZeroConfig(stage=2, precision='bf16', clip_norm=1.0, quantize=Quantize(gathers='int8'))"
    assert repr(config) == f"{shown}, steps=20)"
    assert repr(zero.Lora(rules={"a": "io"})) == "Lora(rules={'a': 'io'})"
    assert repr(zero.LossScaleConfig(initial=8.0)) == "LossScaleConfig(initial=8.0)"
    trainer = zero.Trainer(lambda params, batch: 0.0, lambda key: {}, [], config=config, name="a")
    assert repr(trainer).splitlines()[1] == repr(config) and "test_reports.py" in repr(trainer)
    assert trainer._repr_html_().startswith("<pre")
    with zero.Checkpointer(tmp_path) as saved:
        assert repr(saved) == f"Checkpointer of {tmp_path}: 0 saved, CheckpointConfig()"
    made = zero.from_nnx(lambda rngs: nnx.Linear(4, 4, rngs=rngs), lambda model, batch: model(batch).mean())
    assert "test_reports.py" in repr(made) and repr(made).endswith(": init_fn, loss_fn, eval_fn, merge")
