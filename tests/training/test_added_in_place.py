"""Gradients of scanned layers that are added to those of other microbatches where they are made."""

import dataclasses
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


def _hessian_products(forward):
    """An optimizer that takes products with the Hessian of the loss, forward over reverse or reverse twice."""

    def update(grads, state, params=None, *, value_fn, **_):
        vector = jax.tree.map(jnp.ones_like, params)
        if forward:
            product = jax.jvp(jax.grad(value_fn), (params,), (vector,))[1]
        else:
            along = lambda params: sum(x.sum() for x in jax.tree.leaves(jax.grad(value_fn)(params)))  # noqa: E731
            product = jax.grad(along)(params)
        return jax.tree.map(lambda g, h: -0.1 * g - 0.01 * h, grads, product), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _scanned(params, batch):
    x = batch["x"] * params.get("scale", 1)
    x = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])[0]
    return jnp.square(x - batch["y"][:, None]).mean()


@pytest.mark.parametrize("forward", [True, False])
def test_an_optimizer_takes_second_derivatives(forward):
    with jax.enable_x64(True):
        params, mesh = {"stack": init(None)["made"]}, zero.make_mesh(devices=jax.devices()[:2])
        batch, tx = make_batch(weighted=False), _hessian_products(forward)
        config = zero.ZeroConfig(stage=1, num_microbatches=2)
        state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=config)
        state, _ = zero.make_train_step(_scanned, tx, mesh=mesh, config=config)(state, batch)
        value_fn = lambda params: _scanned(params, batch)  # noqa: E731
        updates, _ = tx.update(jax.grad(value_fn)(params), tx.init(params), params, value_fn=value_fn)
        expected = optax.apply_updates(params, updates)
        np.testing.assert_allclose(state.params["stack"], expected["stack"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("derive", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]])
@pytest.mark.parametrize("axes", [{}, {"pipe": 2}])
@pytest.mark.parametrize("argument", ["params", "batch"])
def test_a_derivative_through_a_step_is_refused(derive, axes, argument):
    """It would be wrong: what a loop adds to sums has no derivatives of its own."""
    tx, mesh = optax.sgd(0.1), zero.make_mesh(**axes, devices=jax.devices()[: 4 if axes else 2])
    config = zero.ZeroConfig(stage=1, num_microbatches=2)
    params = {"stack": init(None)["made"], "scale": jnp.ones(WIDTH)}  # a layer's input is made of a param, too
    state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=config)
    step, batch = zero.make_train_step(_scanned, tx, mesh=mesh, config=config), make_batch(weighted=False)

    def after(params, x):
        new, _ = step(dataclasses.replace(state, params=params), batch | {"x": x})
        return new.params["stack"].sum()

    with pytest.raises(ValueError, match="without `pipe`" if axes else "set num_microbatches=1 or stage=2"):
        if argument == "params":
            derive(lambda params: after(params, batch["x"]))(state.params)
        else:
            derive(lambda x: after(state.params, x))(batch["x"])


def _perturbed(grads, params, grad_fn):
    """Updates by the gradients at params nearby, as SAM has them."""
    return jax.tree.map(lambda g: -0.1 * g, grad_fn(jax.tree.map(lambda p, g: p + 0.1 * g, params, grads)))


@pytest.mark.parametrize("argument", ["params", "batch"])
def test_a_derivative_through_an_optimizer_that_calls_for_gradients(argument):
    tx = optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(),
        lambda grads, state, params=None, *, grad_fn, **_: (_perturbed(grads, params, grad_fn), state),
    )
    with jax.enable_x64(True):
        params, batch, mesh = {"stack": init(None)["made"]}, make_batch(weighted=False), zero.make_mesh()
        state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=(config := zero.ZeroConfig(stage=1)))
        step = zero.make_train_step(_scanned, tx, mesh=mesh, config=config)

        def after(params, x):
            new, _ = step(dataclasses.replace(state, params=params), batch | {"x": x})
            return jnp.sin(new.params["stack"]).sum()

        def plain(params, x):
            grad_fn = jax.grad(lambda params: _scanned(params, batch | {"x": x}))
            return jnp.sin(optax.apply_updates(params, _perturbed(grad_fn(params), params, grad_fn))["stack"]).sum()

        number = ["params", "batch"].index(argument)
        found = jax.grad(after, number)(state.params, batch["x"])
        expected = jax.grad(plain, number)(params, batch["x"])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, expected)
