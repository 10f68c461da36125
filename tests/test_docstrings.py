"""The examples in the docstrings of public names, run as their readers would, with the names of the quickstart."""

import doctest
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero

EXAMPLES = {
    name: found[0]
    for name in zero.__all__
    if not isinstance(value := getattr(zero, name), types.ModuleType)
    if (found := doctest.DocTestFinder(recurse=False).find(value, name)) and found[0].examples
}


@functools.cache
def quickstart():
    """Returns the names that examples stand on: a model, its optimizer, mesh, config, step and first state."""

    def init_fn(key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (64, 64)) / 8, "down": jax.random.normal(down, (64, 64)) / 8}

    def loss_fn(params, batch):
        return jnp.square(jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]).mean()

    mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=3), optax.adamw(1e-3)
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    batch = {"x": np.ones((16, 64), np.float32), "y": np.zeros((16, 64), np.float32)}
    return locals() | {"zero": zero, "jax": jax, "jnp": jnp, "np": np, "optax": optax}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs(name):
    example, told = EXAMPLES[name], []
    given = quickstart()
    example.globs = {**given, "state": jax.tree.map(jnp.copy, given["state"])}  # a step donates its own
    failed, tried = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert tried and not failed, "".join(told)


def test_the_names_of_every_day_have_an_example():
    assert {"ZeroConfig", "make_mesh", "init_state", "make_train_step", "make_eval_step", "from_nnx"} <= EXAMPLES.keys()
