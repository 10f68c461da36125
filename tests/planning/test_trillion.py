"""The rule that a trillion parameters rest on, at their size: one weight of the model on 1,024 chips."""

import jax
import jax.numpy as jnp
import pytest

import zero_jax as zero

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
WIDTH, HIDDEN, TOKENS = 25_600, 102_400, 1024


def loss_fn(params, batch):
    return jnp.mean(jnp.square(batch @ params["up"]).astype(jnp.float32))


def test_the_model_is_laid_over_the_torus():
    mesh = zero.make_mesh(topology="v5p:8x8x16")
    assert [mesh.shape[axis] for axis in ("data_0", "data_1", "data_2")] == [8, 8, 16]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p:8x8x16", "v5e:16x16"])
def test_gathers_and_reduce_scatters_are_native(topology):
    """One gather of 2 bytes an element, and one reduce-scatter.

    XLA may reduce the last, small shard of the gradient (1/16 of it or less) by an all-reduce, never the whole.
    """
    mesh = zero.make_mesh(topology=topology)
    config = zero.ZeroConfig(stage=3)
    params = {"up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.bfloat16)}
    shardings = zero.state_shardings({"params": params}, mesh=mesh, config=config)["params"]
    batch = jax.ShapeDtypeStruct((mesh.size * TOKENS, WIDTH), jnp.bfloat16, sharding=zero.batch_sharding(mesh))
    given = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    grad = jax.jit(jax.grad(zero.gather_on_use(loss_fn, shardings, mesh=mesh)), out_shardings=shardings)
    report = zero.comms.measure(grad.lower(given, batch).compile(), mesh=mesh)
    ideal = 2 * 2 * WIDTH * HIDDEN * (mesh.size - 1) / mesh.size
    assert report.sent_bytes <= 1.05 * ideal
    assert report.by_kind.get("all-reduce", 0) <= 0.1 * ideal
    assert report.largest_buffer_bytes <= 2 * WIDTH * HIDDEN
