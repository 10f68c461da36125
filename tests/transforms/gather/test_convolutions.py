"""Convolutions that XLA partitions wrongly beside a model axis: docs/xla_faults.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax import lax
from reference import mesh_of

import zero_jax as zero

SLOW = pytest.mark.slow
DIMS = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel, groups=1):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=DIMS, feature_group_count=groups)


def make_params():
    shapes = {"depthwise": (4, 4, 1, 8), "grouped": (2, 3, 3, 4, 8), "up": (2, 2, 4, 8), "each": (2, 1, 1, 8, 8)}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) / 4 for name, shape in shapes.items()}


def loss_fn(params, batch):
    """A depthwise one, some in a scan and of a nested `jit`, a transposed one, a mapped one, and one by activations."""

    @jax.checkpoint
    def block(h, kernel):
        return jnp.sin(h + convolve(h, kernel, groups=2)), None

    h = jnp.tanh(convolve(batch["x"], params["depthwise"], groups=8))
    h, _ = lax.scan(block, h, params["grouped"])
    h = lax.conv_transpose(h[..., :4], params["up"], (2, 2), "SAME", dimension_numbers=DIMS)
    h += jax.jit(lambda h, kernel: convolve(h, kernel, groups=8))(h, 2 * params["depthwise"])
    h += convolve(h, jnp.tanh(batch["x"].mean() + params["each"].mean()) * params["depthwise"], groups=8)
    h = jax.vmap(functools.partial(convolve, h))(params["each"])
    return jnp.square(h - 1).mean()


def make_batch():
    return {"x": np.random.default_rng(1).standard_normal((8, 4, 4, 8), dtype=np.float32)}


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize("mesh", ["model4", pytest.param("model2", marks=SLOW)])
def test_gradients_of_kernels_beside_a_model_axis(stage, mesh):
    params, tx = make_params(), optax.sgd(0.1)
    state, step = reference.make_trainer(loss_fn, tx, mesh=mesh_of(mesh), params=params, stage=stage)
    loss, grads = step.grads(state, make_batch())
    want_loss, want = jax.jit(jax.value_and_grad(loss_fn))(params, make_batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for name in params:
        assert reference.norm(grads[name] - want[name]) < 1e-5 * reference.norm(want[name]), name


@jax.custom_vjp
def own_rule(x, kernel):
    return convolve(x, kernel, groups=8)


own_rule.defvjp(
    lambda *args: (own_rule(*args), args), lambda args, ct: jax.vjp(lambda *a: convolve(*a, 8), *args)[1](ct)
)


def test_what_is_not_looked_into_is_refused():
    params = {"kernel": make_params()["depthwise"]}
    state, step = reference.make_trainer(
        lambda params, batch: jnp.square(own_rule(batch["x"], params["kernel"])).mean(),
        optax.sgd(0.1),
        mesh=mesh_of("model4"),
        params=params,
        stage=3,
    )
    with pytest.raises(ValueError, match=r"kernel \[4, 4, 1, 8\], is within custom_vjp_call .*without `model` axes"):
        step(state, make_batch())


def test_evaluation_needs_no_gradient():
    config, params = reference.make_config(stage=3), make_params()
    mesh = mesh_of("model4")
    state = zero.init_state(params, optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    metrics = zero.make_eval_step(loss_fn, mesh=mesh, config=config)(state.params, make_batch())
    np.testing.assert_allclose(metrics.loss, loss_fn(params, make_batch()), rtol=1e-5)
