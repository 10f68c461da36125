"""Models in float64 (`jax_enable_x64`) train as on one device, to the last digits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import assert_close, run_plain, run_zero

import zero_jax as zero

# Sums over a batch are made in another order on several devices: float64 rounds at 1e-16.
FLOAT64 = 1e-13


def loss_fn(params, batch):
    """Returns a mean over weights of which no part of the batch has as much as another."""
    errors = jnp.square(jnp.tanh(batch["x"] @ params["w"]) - batch["y"]).mean(-1)
    return (errors * batch["weight"]).sum() / batch["weight"].sum()


def inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(32, 8)), "y": rng.normal(size=(32, 16)), "weight": rng.random(32)}
    return {"w": rng.normal(size=(8, 16)).astype(dtype)}, [batch] * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 0, "num_microbatches": 2},
        {"stage": 1, "mesh": {"data": 4, "replica": 2}},
        {"stage": 2, "offload": "optimizer"},
        {"stage": 3, "num_microbatches": 4},
    ],
    ids=str,
)
def test_equals_one_device(fields):
    with jax.enable_x64(True):
        params, batches = inputs()
        mesh = zero.make_mesh(**fields.get("mesh", {"data": 8}))
        plain = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1, momentum=0.9))
        expected, _, losses = run_plain(loss_fn, plain, batches, params=params)
        fields = {**fields, "mesh": mesh, "params": params, "clip_norm": 0.01}
        state, history = run_zero(loss_fn, optax.sgd(0.1, momentum=0.9), batches, **fields)
        assert_close(state.params, expected, tolerance=FLOAT64)
        assert_close([metrics.loss for metrics in history], losses, tolerance=FLOAT64)
        loss = zero.make_eval_step(loss_fn, mesh=mesh, config=zero.ZeroConfig())(expected, batches[0]).loss
        assert_close(loss, jax.jit(loss_fn)(expected, batches[0]), tolerance=FLOAT64)


def test_an_optimizer_that_reads_the_loss():
    tx = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=0, rtol=1e-9))
    with jax.enable_x64(True):
        params, batches = inputs()
        expected, *_ = run_plain(loss_fn, tx, batches * 4, params=params)
        state, _ = run_zero(loss_fn, tx, batches * 4, stage=1, params=params, mesh=zero.make_mesh(data=8))
        assert_close(state.params, expected, tolerance=FLOAT64)


def test_a_batch_in_float64_for_params_in_float32():
    """The weights of parts are float64 then, and the gradients float32."""
    with jax.enable_x64(True):
        params, batches = inputs(np.float32)
        expected, _, losses = run_plain(loss_fn, optax.sgd(0.1), batches, params=params)
        for stage in (0, 3):
            fields = {"mesh": zero.make_mesh(data=8), "stage": stage, "num_microbatches": 2, "params": params}
            state, history = run_zero(loss_fn, optax.sgd(0.1), batches, **fields)
            assert_close(state.params, expected, tolerance=1e-6)
            assert history[0].loss.dtype == losses[0].dtype == np.float64
