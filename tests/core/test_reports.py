"""What the last line of a notebook's cell shows: reports their table, steps and states what they are of."""

import dataclasses
import inspect
import types

import jax
import jax.numpy as jnp
import optax

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
        "loss_fn) at stage 2 on {'replica': 1, 'data': 8, 'model': 1}, precision='bf16'"
    ), repr(step)
    report = zero.sharding_report(state, mesh=mesh, config=config)
    assert repr(report) == str(report)
    assert report._repr_html_().startswith("<pre") and "params" in report._repr_html_()
    _, metrics = step(state, {"x": jnp.ones((8, 64))})
    assert repr(metrics).splitlines()[0].split() == ["loss", "4096.0"] and "aux/errors" in repr(metrics)
    assert "[8, 64]" in repr(metrics) and len(repr(metrics)) < 400
    jax.eval_shape(lambda metrics: repr(metrics) and metrics.loss, metrics)
