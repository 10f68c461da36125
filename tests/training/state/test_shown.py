"""What a train state shows of itself."""

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero


def init_fn(key):
    return {"w": jax.random.normal(key, (256, 512)), "b": jnp.ones(512)}


def test_a_state_shows_sizes_and_reads_no_array():
    mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=2, precision="bf16")
    settings = {"mesh": mesh, "config": config}
    state = zero.init_state(init_fn, optax.adamw(1e-3), jax.random.key(0), **settings)
    shown = repr(state)
    assert (
        "'data': 8" in shown and "master             2 leaves  131,584 elements  526.34 KB, 67.58 KB a device" in shown
    )
    assert repr(zero.abstract_state(init_fn, optax.adamw(1e-3), **settings)) == shown
    assert "NamedSharding" in repr(zero.state_shardings(state, **settings))
    jax.jit(lambda state: repr(state) and state.step)(state)
    jax.tree.map(lambda x: x.delete(), state)
    assert repr(state) == shown
