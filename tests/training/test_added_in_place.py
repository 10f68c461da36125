"""Gradients of scanned layers that are added to those of other microbatches where they are made."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero

LAYERS, WIDTH = 4, 16


def init(_):
    keys = jax.random.split(jax.random.key(0), 3)
    stacks = [jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 8 for key in keys]
    return {"twice": stacks[0], "otherwise": stacks[1], "made": stacks[2], "head": jnp.ones((WIDTH,))}


def loss_fn(params, batch):
    """Scans forward and in reverse, of one stack twice, of one used elsewhere, and of what is made of a third."""

    def layers(x, stack, **options):
        return jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), x, stack, **options)[0]

    x = layers(layers(batch["x"], params["twice"]), params["twice"], reverse=True)
    x = jax.jit(layers)(x + params["otherwise"].sum((0, 1)), params["otherwise"])
    x = layers(x, params["made"].swapaxes(1, 2))
    losses = jnp.square(x @ params["head"] - batch["y"])
    return (losses * batch["weight"]).sum() / batch["weight"].sum() if "weight" in batch else losses.mean()


def make_batch(*, weighted):
    x, y, weight = (jax.random.normal(jax.random.key(i), (64, WIDTH)) for i in range(3))
    batch = {"x": x, "y": y[:, 0]}
    # The first microbatch of the first device weighs nothing: its loss is 0 / 0.
    return batch | ({"weight": jnp.abs(weight[:, 0]) * (jnp.arange(64) > 3)} if weighted else {})


_SLOW = [
    pytest.param(stage, axes, weighted, marks=pytest.mark.slow)
    for stage, axes, weighted in [(1, {}, False), (0, {"replica": 2}, True), (0, {}, False), (1, {"model": 2}, True)]
]


@pytest.mark.parametrize(("stage", "axes", "weighted"), [(1, {}, True), *_SLOW])
def test_a_step_equals_one_device(stage, axes, weighted):
    with jax.enable_x64(True):
        batch, mesh = make_batch(weighted=weighted), zero.make_mesh(**axes)
        params, tx = init(None), optax.sgd(0.1)
        config = zero.ZeroConfig(stage=stage, num_microbatches=2 if axes else 4, clip_norm=None)
        state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
        state, metrics = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)(state, batch)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-12)
        jax.tree.map(
            lambda new, old, grad: np.testing.assert_allclose(new, old - 0.1 * grad, rtol=0, atol=1e-13),
            state.params,
            params,
            grads,
        )


@pytest.mark.parametrize("noise_scale", [False, True])
def test_gradients_of_a_microbatch_are_not_made_for_all_layers(noise_scale):
    """Unless their size is asked for: then those of all layers of a microbatch are added to those of others."""
    tx, mesh = optax.sgd(0.1), zero.make_mesh()
    config = zero.ZeroConfig(stage=1, num_microbatches=4, noise_scale=noise_scale)
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    text = step.lower(state, jax.eval_shape(functools.partial(make_batch, weighted=True))).as_text()
    stack, layer = f"{mesh.size}x{LAYERS}x{WIDTH}x{WIDTH}xf32", f"{mesh.size}x1x{WIDTH}x{WIDTH}xf32"
    num_added = len(re.findall(rf"stablehlo.add .*tensor<{stack}>", text))
    in_place = re.findall(rf"dynamic_update_slice .*\(tensor<{stack}>, tensor<{layer}>", text)
    assert (num_added, len(in_place)) == ((4, 0) if noise_scale else (2, 3))
