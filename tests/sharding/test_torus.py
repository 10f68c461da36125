"""Mesh axes over several dims of a torus, and native reduce-scatters over them whatever the shape."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import mesh_of, torus_mesh

import zero_jax as zero
from zero_jax import hlo
from zero_jax.sharding.chains import Chain, gather_shardings, reshard, scattering, split_axes, torus_sizes
from zero_jax.sharding.mesh import axes_of
from zero_jax.sharding.spec import named


@pytest.mark.parametrize(
    ("torus_shape", "order", "shape", "sizes"),
    [
        ((2, 2, 4), (0, 1, 2), (1, 16), (2, 2, 4)),
        ((2, 2, 4), (2, 0, 1), (1, 16), (4, 2, 2)),
        ((2, 2, 4), (0, 1, 2), (2, 8), (2, 4)),  # `replica` has a dim
        ((4, 4, 4), (0, 1, 2), (2, 32), (2, 4, 4)),  # and a part of one
        ((4, 8, 1), (0, 1, 2), (1, 32), (4, 8)),
        ((4, 8, 1), (0, 1, 2), (4, 8), (8,)),
    ],
)
def test_torus_sizes(torus_shape, order, shape, sizes):
    grid = np.array(list(itertools.product(*map(range, torus_shape)))).reshape(*torus_shape, 3)
    coords = grid.transpose(*order, 3).reshape(-1, 3).tolist()
    assert torus_sizes(torus_mesh(coords, shape, ("replica", "data")), "data") == sizes


def test_an_order_that_follows_no_dims_is_left_alone():
    ring = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    assert torus_sizes(torus_mesh(ring, (4,), ("data",)), "data") == (4,)
    same_chip_of_two_slices = [(0, 0, 0)] * 2
    assert torus_sizes(torus_mesh(same_chip_of_two_slices, (2,), ("data",)), "data") == (2,)


def test_devices_on_no_torus_are_scattered_over_as_they_are():
    mesh = mesh_of("8")
    assert scattering(mesh, ((), ("data",)), ("data",)) == Chain((named(mesh, ((), ("data",))),))


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("shape", "swapped"),
    [((4096, 50304), True), ((4096, 51200), False), ((2048, 50304), False), ((6144, 50304), False), ((), False)],
)
def test_gradients_are_swapped_where_only_that_is_native(shape, swapped):
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology="v5p:4x4x4")
    data = tuple(f"data_{i}" for i in range(3))
    assert scattering(mesh, (data[:2], data[2:]), data, shape=shape).swapped == swapped


def test_a_swapped_chain_changes_no_value():
    mesh = mesh_of("8")
    chain = Chain((named(mesh, (("data",), ())),), swapped=True)
    x = jnp.arange(2.0 * 4 * 16).reshape(2, 4, 16)
    np.testing.assert_array_equal(jax.jit(lambda x: reshard(x[0], forward=chain, backward=chain))(x), x[0])
    mapped = jax.jit(jax.grad(lambda x: (jax.vmap(lambda y: reshard(y, forward=chain, backward=chain))(x) ** 2).sum()))
    np.testing.assert_array_equal(mapped(x), 2 * x)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "replica"), [("v5p:2x2x4", 1), ("v5p:2x2x4", 2), ("v5p:2x2x4", 4), ("v5e:4x4", 1), ("v5e:4x4", 2)]
)
def test_gradients_are_reduce_scattered_natively(topology, replica):
    """Rows and lanes, of sizes for which XLA:TPU all-reduces if it is left alone; replicas sum shards."""
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology=topology, replica=replica)
    num_data, shape = mesh.shape["data"], (1024, 1024)
    tokens = jax.ShapeDtypeStruct((256 * mesh.size, 1024), jnp.bfloat16, sharding=zero.batch_sharding(mesh))

    def grads(x, y):
        chains = [scattering(mesh, dims, ("data",)) for dims in ((("data",), ()), ((), ("data",)))]
        return [reshard(x.T @ (y * i), forward=chain, backward=Chain()) for i, chain in enumerate(chains, 1)]

    found = hlo.collectives(jax.jit(grads).lower(tokens, tokens).compile().as_text())
    sent = {kind: sum(c.total_sent_bytes for c in found if c.kind == kind) for kind in {c.kind for c in found}}
    full = 2 * 2 * shape[0] * shape[1]
    assert sent.pop("reduce-scatter") == pytest.approx(full * (num_data - 1) / num_data)
    assert sent.pop("all-reduce", 0) == pytest.approx(2 * full / num_data * (replica - 1) / replica)
    assert not sent


@pytest.mark.tpu_compiler
def test_a_part_of_a_torus_is_scattered_over_one_dim_of_an_array_after_another():
    """As of experts in stages, whose features in and out are sharded: over both at once XLA:TPU all-reduces."""
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology="v5p:8x8x8", pipe=2)
    data = axes_of(mesh).of_stage.data
    chain = scattering(mesh, ((), data[:2], data[2:]), data)
    tokens = jax.ShapeDtypeStruct((2, 2048, 4, 1024), jnp.bfloat16, sharding=named(mesh, (("pipe",), data, (), ())))

    def grads(x, y):
        grad = lambda x, y: reshard(jnp.einsum("tef,teg->efg", x, y), forward=chain, backward=Chain())  # noqa: E731
        return jax.vmap(grad, spmd_axis_name="pipe")(x, y)

    found = hlo.collectives(jax.jit(grads).lower(tokens, tokens).compile().as_text())
    assert {c.kind for c in found} == {"reduce-scatter"}
    sent = 2 * 4 * 1024 * 1024 * (63 / 64 + 3 / 4 / 64)
    assert sum(c.total_sent_bytes for c in found) == pytest.approx(sent)


def all_reduces_of_stages(topology, pipe, *, table, layers, examples, **fields):
    """Returns the all-reduces of a step whose stages are beside a table, which is looked up and multiplied by."""
    pytest.importorskip("libtpu")
    mesh, tx = zero.make_mesh(topology=topology, pipe=pipe), optax.sgd(0.1)
    config = zero.ZeroConfig(precision="bf16", **fields)
    init_fn = lambda key: {"table": jnp.ones(table), "layers": jnp.ones(layers)}  # noqa: E731

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["table"][batch], params["layers"])
        return jnp.square(x @ params["table"].T).mean()

    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    batch = jax.ShapeDtypeStruct((examples, 2048), "i4")
    compiled = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).compile()
    return [x for x in hlo.collectives(compiled.as_text()) if x.kind == "all-reduce"]


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_a_table_beside_stages_is_reduce_scattered():
    """Along its last dim over `pipe`: along another one XLA:TPU all-reduces, which sends twice as much."""
    sizes = {"table": (50304, 512), "layers": (4, 512, 512), "examples": 64}
    reduced = all_reduces_of_stages("v5p:4x4x4", 4, **sizes, stage=1, num_microbatches=4)
    assert not [x for x in reduced if "bf16" in x.dtypes]


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
def test_gradients_of_stages_in_slices_of_their_own_are_reduce_scattered(pipeline):
    """Those of layers and of a table that is looked up and multiplied by: in no tick are they all-reduced."""
    sizes = {"table": (8192, 4096), "layers": (4, 4096, 4096), "examples": 128}
    reduced = all_reduces_of_stages("2xv5p:4x4x4", 2, **sizes, stage=3, num_microbatches=2, pipeline=pipeline)
    assert not [x for x in reduced if x.full_bytes > 1 << 23]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kernel", [False, True])
def test_copies_of_params_have_axes_that_are_split_along_the_torus(stage, kernel):
    """The gradient is mapped over `replica`; within it `data`, over three dims, is gathered and scattered in steps."""
    pytest.importorskip("libtpu")
    mesh, tx = zero.make_mesh(topology="v5p:4x4x4", replica=2), optax.sgd(0.1)
    assert split_axes(mesh, ("data",))[0].shape["data.2"] > 1
    config = zero.ZeroConfig(stage=stage, min_shard_size=0)
    attend = zero.dot_product_attention if kernel else jax.nn.dot_product_attention

    def loss_fn(params, batch):
        heads = (batch @ params).reshape(*batch.shape[:2], 2, 128)
        return jnp.square(attend(heads, heads, heads, is_causal=True)).mean()

    state = zero.abstract_state(lambda key: jnp.ones((256, 256)), tx, mesh=mesh, config=config)
    batch = jax.ShapeDtypeStruct((64, 128, 256), jnp.float32)
    text = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).as_text()
    assert ("tpu_custom_call" in text) == kernel


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [0, 1])
def test_devices_along_the_torus_have_gradients_of_their_own_convolutions(stage):
    """The loss is mapped over `data`, one axis over three dims, by `jax.shard_map`."""
    pytest.importorskip("libtpu")
    mesh, tx = zero.make_mesh(topology="v5p:2x2x4", model=1), optax.sgd(0.1)
    assert split_axes(mesh, ("data",))[0].shape["data.2"] == 2
    config = zero.ZeroConfig(stage=stage, num_microbatches=2, min_shard_size=0)

    def loss_fn(params, batch):
        dims = ("NHWC", "HWIO", "NHWC")
        return jnp.square(jax.lax.conv_general_dilated(batch, params, (1, 1), "SAME", dimension_numbers=dims)).mean()

    state = zero.abstract_state(lambda key: jnp.ones((3, 3, 8, 8)), tx, mesh=mesh, config=config)
    batch = jax.ShapeDtypeStruct((32, 4, 4, 8), jnp.float32)
    assert "convolution" in zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).as_text()


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("overlap", [True, False])
def test_gathers_over_two_dims_of_a_3d_torus_are_native(overlap):
    """One step over the first dim, one over the other two: the links of both carry, and the bytes are the ideal."""
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology="v5p:4x4x4")
    data = ("data_0", "data_1", "data_2")
    dims = (data[:2], data[2:])
    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=named(mesh, dims))
    chain = Chain(gather_shardings(mesh, dims, data), barrier=True)
    options = zero.compiler_options(mesh=mesh, config=zero.ZeroConfig(overlap=overlap))
    gather = jax.jit(lambda x: reshard(x, forward=chain, backward=Chain()), compiler_options=options or None)
    found = hlo.collectives(gather.lower(weight).compile().as_text())
    assert [(c.kind, c.group_size) for c in found] == [("all-gather", 4), ("all-gather", 16)]
    assert all(c.is_async == overlap for c in found)
    assert sum(c.total_sent_bytes for c in found) == 2 * 4096**2 * 63 // 64


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("topology", ["v6e:8x8", "v6e:2x4"])
def test_collectives_over_all_of_a_plane_are_native(topology, overlap):
    """Gathers and reduce-scatters, of rows and of lanes, are one operation each with the options of a step."""
    pytest.importorskip("libtpu")
    mesh, (rows, lanes) = zero.make_mesh(topology=topology), (2048, 1024)
    data = tuple(axis for axis in mesh.axis_names if axis.startswith("data"))
    options = zero.compiler_options(mesh=mesh, config=zero.ZeroConfig(overlap=overlap))
    x = jax.ShapeDtypeStruct((256 * mesh.size, rows), jnp.bfloat16, sharding=zero.batch_sharding(mesh))
    y = jax.ShapeDtypeStruct((256 * mesh.size, lanes), jnp.bfloat16, sharding=zero.batch_sharding(mesh))
    for dims in ((data, ()), ((), data)):
        weight = jax.ShapeDtypeStruct((rows, lanes), jnp.bfloat16, sharding=named(mesh, dims))
        gather, scatter = Chain(gather_shardings(mesh, dims, data)), scattering(mesh, dims, data)

        def step(x, y, weight, gather=gather, scatter=scatter):
            grad = reshard(x.T @ y, forward=scatter, backward=Chain())
            return grad, x @ reshard(weight, forward=gather, backward=Chain())

        found = hlo.collectives(jax.jit(step, compiler_options=options).lower(x, y, weight).compile().as_text())
        sent = 2 * rows * lanes * (mesh.size - 1) // mesh.size
        assert sorted((c.kind, c.total_sent_bytes) for c in found) == [("all-gather", sent), ("reduce-scatter", sent)]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("overlap", "shape", "dims"),
    [
        (True, (1024, 2048), (("data",), ())),
        pytest.param(False, (2048, 1024), ((), ("data",)), marks=pytest.mark.slow),
    ],
)
def test_gradients_of_few_rows_are_reduce_scattered_on_chips_of_two_devices(overlap, shape, dims):
    """To four rows a device XLA all-reduces; over all but the cores of a chip there are eight, a tile."""
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology="tpu7x:4x4x8")
    options = zero.compiler_options(mesh=mesh, config=zero.ZeroConfig(overlap=overlap))
    x, y = (jax.ShapeDtypeStruct((32 * mesh.size, n), jnp.bfloat16, sharding=zero.batch_sharding(mesh)) for n in shape)
    chain = scattering(mesh, dims, ("data",), shape=shape)
    grads = jax.jit(lambda x, y: reshard(x.T @ y, forward=chain, backward=Chain()), compiler_options=options)
    found = hlo.collectives(grads.lower(x, y).compile().as_text())
    assert sum(c.total_sent_bytes for c in found) == pytest.approx(2 * math.prod(shape), rel=1e-2)
    assert {c.kind for c in found if c.group_size > 2} == {"reduce-scatter"}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "dims", "shape"),
    [
        ("v5p:4x4x4", (("data_0", "data_1"), ("data_2",)), (4096, 50304)),
        ("v6e:2x4", (("data",), ()), (1024, 151936)),
        pytest.param("v5e:2x4", ((), ("data",)), (201088, 256), marks=pytest.mark.slow),
        ("v5e:2x4", ((), ("data",)), (128256, 1024)),
        pytest.param("v5e:4x8", (("data",), ()), (1024, 128256), marks=pytest.mark.slow),
        pytest.param("v4:2x2x2", ((), ("data",)), (65024, 1024), marks=pytest.mark.slow),
        pytest.param("v4:2x2x4", ((), ("data",)), (128256, 1024), marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_a_head_is_reduce_scattered(topology, dims, shape):
    """XLA:TPU has no reduce-scatter of rows of 50,304 lanes over three dims, nor of 151,936, 128 times a prime.

    On v4 and v5e, without SparseCores for it, it has none of 128,256, 1,002 tiles of 128 lanes, either.
    """
    pytest.importorskip("libtpu")
    mesh, data = zero.make_mesh(topology=topology), tuple(axis for dim in dims for axis in dim)
    x, y = (jax.ShapeDtypeStruct((16 * mesh.size, n), jnp.bfloat16, sharding=zero.batch_sharding(mesh)) for n in shape)
    chain = scattering(mesh, dims, data, shape=shape)
    options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}  # as a step's: no product in windows
    grads = jax.jit(lambda x, y: reshard(x.T @ y, forward=chain, backward=Chain()), compiler_options=options)
    found = hlo.collectives(grads.lower(x, y).compile().as_text())
    assert {c.kind for c in found} <= {"reduce-scatter", "collective-permute", "all-to-all"}
    ideal = 2 * math.prod(shape) * (1 - 1 / mesh.size)
    moved = ideal / mesh.size if "all-to-all" in {c.kind for c in found} else 0
    sent = sum(c.total_sent_bytes for c in found)
    # The ends of shards that are no whole tiles are padded, or permuted.
    assert 0.99 * (ideal + moved) <= sent <= (1.04 if shape[0] % 1024 or shape[1] % 1024 else 1.01) * (ideal + moved)
