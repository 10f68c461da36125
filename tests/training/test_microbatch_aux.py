"""Aux with microbatches: each entry is that of the batch, or is not returned and named in a warning."""

import functools
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_close, mesh_of

import zero_jax as zero

SLOW = pytest.mark.slow
SIZE = 32


class Extremes(typing.NamedTuple):
    largest: typing.Any
    median: typing.Any
    is_small: typing.Any


def known(params, batch):
    """Entries of every kind that can be made of those of parts."""
    out = reference.predict(params, batch["tokens"])
    errors, mask = jnp.square(out - batch["targets"]).mean(-1), batch["mask"]
    n, total = mask.sum(), (errors * mask).sum()
    return {
        "sizes": jnp.array([2, 3]),
        "limit": 0.5,
        "count": len(errors),
        "norm": jnp.linalg.norm(params["head"]["kernel"]),
        "num_large": (errors > 1).sum(),
        "sum": errors.sum(),
        "mean": errors.mean(),
        "mean_of_each": out.mean(0),
        "mean_per_mask": errors.sum() / batch["mask"].mean(),
        "share": mask.mean(),
        "mask": n,
        "bounded_mask": jnp.maximum(n, 3.0),
        "has_mask": n > 2,
        "masked": total / jnp.maximum(n, 1),
        "masked_targets": (batch["targets"][:, 0] * mask).sum() / n,
        "guarded": jnp.where(n > 0, total / n, 0),
        "branch": jax.lax.cond(n > 0, lambda: total / n, lambda: 0.0),
        "losses": {"one": total / n + 1, "both": jnp.stack([total / n, 2 * total / n])},
        "inverse": 1 / n,
        "largest": jnp.abs(out).max(),
        "smallest_of_each": 1 - out.min(0),
        "all_small": (errors < 2).all(),
        "any_large": jnp.any(out > 1, axis=0),
        "per_example": errors,
        "features": out.T,
        "halves": out.reshape(-1, 4),
        "per_token": params["embed"][batch["tokens"]].reshape(-1, reference.FEATURES)[:, :2],
        "parts_of_loss": errors * mask / n,
        "shares": (errors / len(errors), out.sum(-1).astype(jnp.bfloat16)),
    }


def unknown(params, batch):
    """Entries that cannot."""
    out = reference.predict(params, batch["tokens"])
    return {
        "variance": out.var(),
        "order": jnp.argsort(out[:, 0]),
        "precision": (out * (out > 0)).sum() / (out > 0).sum(),
        "places": jnp.arange(len(out)),
        "by_size": jnp.tanh(out).max() if len(out) > 16 else out.max(),  # other operations, which count for it alone
        "extremes": Extremes(out.max(), jnp.median(out), (out < 9).all()),
    }


def loss_fn(params, batch):
    aux = known(params, batch)
    return aux["masked"], {**aux, **unknown(params, batch)}


def batch_of(seed=0):
    batch = reference.make_batch(seed, SIZE)
    mask = (np.random.default_rng(seed).random(SIZE) < 0.6).astype(np.float32)
    mask[:2] = 0  # a device has a microbatch of nothing
    return batch | {"mask": mask}


@functools.cache
def expected():
    return jax.device_get(jax.jit(loss_fn)(reference.host_params(), batch_of()))


def quantized():
    return zero.Quantize(grads={"head/kernel": "int8"}, block_size=8)


@pytest.mark.parametrize(
    ("stage", "mesh", "fields"),
    [
        (3, "replica", {"num_microbatches": 2}),
        pytest.param(1, "4", {"num_microbatches": 2}, marks=SLOW),
        pytest.param(0, "8", {"num_microbatches": 4}, marks=SLOW),
        pytest.param(2, "staged24", {"num_microbatches": 4}, marks=SLOW),
        pytest.param(1, "replica", {"num_microbatches": 2}, marks=SLOW),
        pytest.param(3, "model2", {"num_microbatches": 2, "param_specs": reference.PARAM_SPECS}, marks=SLOW),
        pytest.param(3, "4", {"num_microbatches": 2, "quantize": quantized()}, marks=SLOW),
        pytest.param(3, "replica", {"num_microbatches": 1, "quantize": quantized()}, marks=SLOW),
    ],
)
def test_every_entry_is_that_of_the_batch_or_is_left_out(stage, mesh, fields):
    where = r"test_microbatch_aux\.py:\d+:\d+ \(unknown\)"
    with pytest.warns(
        UserWarning, match=rf"aux is returned without .*'extremes/median', because .* at .*{where}"
    ) as warned:
        _, (metrics,) = reference.run_zero(
            loss_fn, optax.sgd(0.1), [batch_of()], mesh=mesh_of(mesh), stage=stage, **fields
        )
    (message,) = [str(x.message) for x in warned if "aux is" in str(x.message)]
    for name in ("'variance'", "'order'", "'precision'", "'places'", "'by_size'"):
        assert name in message
    loss, aux = expected()
    wanted = {name: aux[name] for name in aux if name in metrics.aux}
    assert aux.keys() - wanted.keys() == {"variance", "order", "precision", "places", "by_size"}
    wanted["extremes"] = aux["extremes"]._replace(median=None)
    found = dict(metrics.aux)
    for name in wanted:
        assert_close(found[name], wanted[name], tolerance=1e-5)
        chex.assert_trees_all_equal_dtypes(found[name], wanted[name])
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)


@SLOW
def test_aux_of_devices_that_have_nothing_by_a_weight_that_is_named():
    """Such a device takes the gradient of another part, and has aux of its own."""

    def loss_fn(params, batch):
        errors = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"]).mean(-1)
        mean = (errors * batch["mask"]).sum() / batch["mask"].sum()
        return mean, {"weight": (2 * batch["mask"]).sum(), "mean": mean}

    batch = batch_of()
    batch["mask"][:4] = 0
    fields = {"num_microbatches": 2, "quantize": quantized(), "loss_weight": "weight"}
    _, (metrics,) = reference.run_zero(loss_fn, optax.sgd(0.1), [batch], mesh=mesh_of("4"), stage=3, **fields)
    loss, aux = jax.jit(loss_fn)(reference.host_params(), batch)
    assert_close((metrics.loss, metrics.aux), (loss, aux), tolerance=1e-5)


def test_aux_behind_layers_that_read_counts_of_each_microbatch():
    """Where the loss is of each microbatch by itself, no loop is run again with the counts of the batch."""

    def loss(params, batch):
        x = params["embed"][batch["tokens"]].mean(1) * (batch["mask"].sum() / SIZE)
        weights = params["layers"]["w_in"][..., : x.shape[-1]]
        last, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        return jnp.median(jnp.square(last).mean(1)), {"before": x.mean(0), "behind": last.mean(0)}

    with pytest.warns(
        UserWarning, match="the loss on microbatches|aux is returned without 'behind', because"
    ) as warned:
        _, (metrics,) = reference.run_zero(loss, optax.sgd(0.1), [batch_of()], mesh=mesh_of("2"), num_microbatches=2)
    assert len(warned) == 2
    (before,) = metrics.aux.values()
    _, aux = jax.jit(loss)(reference.host_params(), batch_of())
    assert_close(before, aux["before"], tolerance=1e-5)


def test_aux_with_terms_of_a_loss_that_does_something_else_on_one_example():
    """What is added to a sum, and is the same in all parts, is known by its place among the operations."""

    def loss(params, batch):
        x, mask = params["embed"][batch["tokens"]].mean(1), batch["mask"]
        mixed = jnp.cos(jnp.sin(x)).sum() if len(x) > 1 else 0.0
        aux = {"sum": mask.sum() * jnp.tanh(x).sum() + jnp.square(params["embed"]).sum()}
        return jnp.square(x * (mask.sum() / SIZE)).mean() * mask.sum() + mixed, aux

    with pytest.warns(UserWarning, match="the loss on microbatches|aux is returned without 'sum', because") as warned:
        _, (metrics,) = reference.run_zero(loss, optax.sgd(0.1), [batch_of()], mesh=mesh_of("1"), num_microbatches=SIZE)
    assert len(warned) == 2 and not metrics.aux


def drawing_loss(params, batch, key, *, model_state):
    """Aux that is drawn, or read from model state that the loss changes, though the loss is made of neither."""
    keys = jax.random.split(key)
    aux = {
        "steps": model_state["steps"],
        "scale": model_state["scale"],
        "noise": jax.random.normal(keys[0], batch["targets"].shape),
        "repeated": batch["targets"][:, 0] * jax.random.uniform(jax.random.key(1), batch["targets"].shape[:1]),
        "by_examples": jax.vmap(lambda x: jax.random.uniform(jax.random.fold_in(keys[1], x)))(batch["tokens"][:, 0]),
        "of_examples": jax.vmap(lambda x: jax.random.uniform(jax.random.key(x)))(batch["tokens"][:, 0]),
        "temperature": jax.random.uniform(keys[1]),
        "centred": (batch["targets"] - model_state["mean"]).mean(),
        "scaled": (batch["targets"] * model_state["scale"]).sum(),
    }
    mean = batch["targets"].mean(0)
    return reference.loss_fn(params, batch), aux, {**model_state, "steps": model_state["steps"] + 1, "mean": mean}


@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=SLOW)])
@pytest.mark.filterwarnings("ignore:gradients are summed across devices")
def test_what_differs_from_microbatch_to_microbatch(stage):
    model_state = {"steps": np.int32(3), "scale": np.float32(2), "mean": np.zeros(reference.OUTPUTS, np.float32)}
    init = lambda key: zero.Variables(params=reference.init_params(key), model_state=model_state)  # noqa: E731
    mesh, config = mesh_of("4"), reference.make_config(stage=stage, num_microbatches=2)
    state = zero.init_state(init, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    step, batch = zero.make_train_step(drawing_loss, optax.sgd(0.1), mesh=mesh, config=config), batch_of()
    reads = r"'centred', because it reads 'model_state/mean', which it changes at .*test_microbatch_aux.py:\d+"
    repeats = "'repeated', because it is drawn with a key that all microbatches have"
    draws = "'temperature', because it is drawn with the key of each microbatch"
    with pytest.warns(UserWarning, match=f"aux is returned without {reads}.*{repeats}.*{draws}"):
        _, metrics = step(state, batch)
    assert set(metrics.aux) == {"steps", "scale", "noise", "scaled", "by_examples", "of_examples"}
    assert (int(metrics.aux["steps"]), float(metrics.aux["scale"])) == (3, 2)
    assert len(np.unique(metrics.aux["noise"])) == batch["targets"].size
    assert float(metrics.aux["of_examples"][3]) == jax.random.uniform(jax.random.key(batch["tokens"][3, 0]))
    np.testing.assert_allclose(metrics.aux["scaled"], 2 * batch["targets"].sum(), rtol=1e-4)


def test_aux_that_is_one_array():
    def loss(params, batch):
        error = jnp.square(reference.predict(params, batch["tokens"]) - batch["targets"])
        return error.mean(), jnp.median(error)

    with pytest.warns(UserWarning, match="aux is returned without ''"):
        _, (metrics,) = reference.run_zero(loss, optax.sgd(0.1), [batch_of()], mesh=mesh_of("2"), num_microbatches=2)
    assert metrics.aux is None
