"""Meshes: their sizes, how `data` is laid over the hardware, and meshes of the user's own."""

import dataclasses
import importlib.util
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from gathering import assert_close, block, check, examples, mlp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zero_jax as zero
from zero_jax.sharding.mesh import axes_of


def sizes(mesh):
    """Returns the mesh axes of more than one device."""
    return {name: size for name, size in mesh.shape.items() if size > 1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"data": 8}),
        ({"data": 8}, {"data": 8}),
        ({"replica": 2}, {"replica": 2, "data": 4}),
        ({"replica": 2, "model": 2}, {"replica": 2, "data": 2, "model": 2}),
        ({"data": 1, "model": 8}, {"model": 8}),
        ({"data": np.int64(8)}, {"data": 8}),
        ({"data_layout": (2, 4)}, {"data_0": 2, "data_1": 4}),
        ({"data_layout": [2, 2, 2]}, {"data_0": 2, "data_1": 2, "data_2": 2}),
        ({"data_layout": (8,)}, {"data": 8}),
        ({"model": 2, "data_layout": (2, 2)}, {"data_0": 2, "data_1": 2, "model": 2}),
    ],
)
def test_sizes(options, expected):
    mesh = zero.make_mesh(**options)
    assert sizes(mesh) == expected
    assert mesh.axis_names[0] == "replica" and mesh.axis_names[-1] == "model"
    assert set(mesh.axis_types) == {AxisType.Auto}  # jax.make_mesh would make them Explicit
    assert sorted(d.id for d in mesh.devices.flat) == list(range(8))


def test_some_of_the_devices():
    mesh = zero.make_mesh(data=2, devices=jax.devices()[2:4])
    assert [d.id for d in mesh.devices.flat] == [2, 3]
    assert zero.make_mesh(devices=mesh.devices.flat) == mesh
    with pytest.raises(ValueError, match=r"devices has .* 2 times: give each device once"):
        zero.make_mesh(devices=[*jax.devices()[:3], jax.devices()[1]])


@pytest.mark.parametrize("options", [{"data": 2.0, "replica": 4}, {"model": -1}, {"replica": None}])
def test_sizes_are_positive_integers(options):
    with pytest.raises(ValueError, match="must be a positive integer"):
        zero.make_mesh(**options)


def test_batch_sharding():
    assert zero.batch_sharding(zero.make_mesh()).spec == P(("replica", "data"))
    mesh = zero.make_mesh(model=2, data_layout=(2, 2))
    assert zero.batch_sharding(mesh).spec == P(("replica", "data_0", "data_1"))
    assert zero.batch_sharding(mesh).shard_shape((8, 3)) == (2, 3)


# --- the network -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Device:
    """Looks like a GPU of a host with a process of its own."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "simulated"
    client: Any = None


@pytest.mark.parametrize(
    ("num_in_each_host", "options", "expected"),
    [
        # The fast network is the major axis: the last to be gathered over is the slow one, with the small shards.
        (4, {}, {"data_0": 4, "data_1": 2}),
        (2, {}, {"data_0": 2, "data_1": 4}),
        (8, {}, {"data": 8}),
        (1, {}, {"data": 8}),  # a process for each device says nothing of hosts
        (4, {"model": 2}, {"data_0": 2, "data_1": 2, "model": 2}),
        (4, {"model": 4}, {"data": 2, "model": 4}),
        (4, {"replica": 2}, {"replica": 2, "data": 4}),
        (4, {"replica": 4}, {"replica": 4, "data": 2}),
        (2, {"replica": 2}, {"replica": 2, "data_0": 2, "data_1": 2}),
        (2, {"replica": 2, "model": 2}, {"replica": 2, "data": 2, "model": 2}),
        (2, {"model": 4}, {"data": 2, "model": 4}),  # the model does not fit into a host
    ],
)
def test_hosts(num_in_each_host, options, expected):
    mesh = zero.make_mesh(devices=[Device(i, i // num_in_each_host) for i in range(8)], **options)
    assert sizes(mesh) == expected
    domain_of = np.vectorize(lambda device: device.process_index)(mesh.devices)
    crossed = {name for i, name in enumerate(mesh.axis_names) if np.any(np.diff(domain_of, axis=i))}
    # At most one axis crosses the network besides `replica`, and not the model's if that can be helped.
    fits = num_in_each_host % options.get("model", 1) == 0
    assert len(crossed - {"replica"}) <= 1 or not fits
    assert "model" not in crossed or not fits
    if options.get("replica", 1) % (8 // num_in_each_host) == 0 and num_in_each_host > 1:
        assert crossed <= {"replica"}


@pytest.mark.parametrize(
    ("num_in_each_host", "options", "expected"),
    [
        (4, {"pipe": 2}, {"data": 4, "pipe": 2}),
        (2, {"pipe": 2}, {"data_0": 2, "data_1": 2, "pipe": 2}),  # two hosts a stage
        (4, {"pipe": 4, "model": 2}, {"data": 1, "pipe": 4, "model": 2}),  # two stages a host
        (1, {"pipe": 4}, {"data": 2, "pipe": 4}),
    ],
)
def test_stages_are_in_hosts_of_their_own(num_in_each_host, options, expected):
    mesh = zero.make_mesh(devices=[Device(i, i // num_in_each_host) for i in range(8)], **options)
    assert sizes(mesh) == {name: size for name, size in expected.items() if size > 1}
    stages = np.moveaxis(mesh.devices, mesh.axis_names.index("pipe"), 0).reshape(mesh.shape["pipe"], -1)
    assert sorted(device.id for device in stages.flat) == list(range(8))
    hosts = [{device.process_index for device in stage} for stage in stages]
    assert all(len(stage) == max(8 // mesh.shape["pipe"] // num_in_each_host, 1) for stage in hosts)
    # The devices of a host are next to each other, as XLA:TPU has native reduce-scatters then.
    order = [device.process_index for device in mesh.devices.flat]
    assert len([*itertools.groupby(order)]) == len({*order})


# --- topologies ------------------------------------------------------------------------------------------------------

V5P_64 = {"data_0": 4, "data_1": 4, "data_2": 4}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "options", "expected"),
    [
        ("v5p:2x2x4", {}, {"data": 16}),
        ("v5p:2x2x4", {"data": 4, "replica": 2, "model": 2}, {"replica": 2, "data": 4, "model": 2}),
        ("v5p:2x2x4", {"data_layout": (4, 4)}, {"data_0": 4, "data_1": 4}),
        ("v5p:4x4x4", {}, V5P_64),
        ("v5p:4x4x4", {"data": 64}, V5P_64),
        ("v5p:4x4x4", {"model": 4}, {"data_0": 4, "data_1": 4, "model": 4}),
        ("v5p:4x4x4", {"replica": 4}, {"replica": 4, "data_0": 4, "data_1": 4}),
        ("v5p:4x4x4", {"model": 2}, {"data": 32, "model": 2}),  # no torus dims of its own: one axis is native there
        ("v5p:4x4x8", {}, {"data_0": 4, "data_1": 4, "data_2": 8}),
        ("v5p:4x4x4", {"data_layout": (64,)}, {"data": 64}),
        ("tpu7x:4x4x4", {}, {"data": 128}),  # two devices a chip
        ("v5e:4x4", {}, {"data": 16}),
        ("v5e:16x16", {}, {"data_0": 16, "data_1": 16}),
        ("v6e:8x8", {"replica": 2}, {"replica": 2, "data": 32}),
        ("v5p:2x2x4", {"pipe": 4}, {"data": 4, "pipe": 4}),
        ("2xv5e:4x4", {"pipe": 2}, {"data": 16, "pipe": 2}),
    ],
)
def test_topology(topology, options, expected):
    mesh = zero.make_mesh(topology=topology, **options)
    assert sizes(mesh) == expected
    assert mesh.devices.flat[0].platform == "tpu"
    assert len({device.id for device in mesh.devices.flat}) == mesh.size


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("options", [{"replica": 64}, {"replica": 16, "pipe": 4}, {"model": 64}])
def test_a_torus_without_data_has_the_axis(options):
    mesh = zero.make_mesh(topology="v5p:4x4x4", **options)
    assert dict(mesh.shape) == {"replica": 1, "data": 1, "model": 1, **options}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("options", [{}, {"model": 4}, {"replica": 4}])
def test_each_axis_of_a_staged_mesh_is_a_dim_of_the_torus(options):
    mesh = zero.make_mesh(topology="v5p:4x4x4", **options)
    coords = np.array([device.coords for device in mesh.devices.flat]).reshape(*mesh.devices.shape, 3)
    for i, name in enumerate(mesh.axis_names):
        if mesh.shape[name] > 1:
            moved = np.any(np.diff(coords, axis=i), axis=tuple(range(mesh.devices.ndim)))
            assert moved.sum() == 1, (name, moved)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"data_0": 4, "data_1": 2}),
        ({"replica": 2}, {"replica": 2, "data": 4}),
        ({"model": 4}, {"data": 2, "model": 4}),
        ({"data_layout": (2, 2, 2)}, {"data_0": 2, "data_1": 2, "data_2": 2}),
        ({"replica": 2, "data_layout": (2, 2)}, {"replica": 2, "data_0": 2, "data_1": 2}),
    ],
)
def test_slices_of_a_topology(options, expected):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    mesh = zero.make_mesh(devices=devices, **options)
    assert sizes(mesh) == expected
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    (crossed,) = (name for i, name in enumerate(mesh.axis_names) if np.any(np.diff(slices, axis=i)))
    assert crossed == ("replica" if "replica" in options else axes_of(mesh).data[-1])
    for wrong in ((2, 4), (8,)):
        with pytest.raises(ValueError, match=r"on 2 slices or hosts: .*give sizes that end in 2, such as \(4, 2\)"):
            zero.make_mesh(devices=devices, data_layout=wrong)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5q:2x2x4", "v5p", "v5p:3x5", "H100"])
def test_unknown_topology(topology):
    with pytest.raises(ValueError, match=rf"topology '{topology}'.*v5p:2x2x4"):
        zero.make_mesh(topology=topology)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is there")
def test_topology_without_libtpu():
    with pytest.raises(ValueError, match=r"pip install \"jax\[tpu\]\""):
        zero.make_mesh(topology="v5p:2x2x4")


# --- meshes of the user's own ----------------------------------------------------------------------------------------


def own_mesh(**axes):
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_roles_by_name():
    axes = axes_of(own_mesh(replica=1, data=4, model=2))
    assert (axes.data, axes.replica, axes.batch) == (("data",), ("replica",), ("replica", "data"))
    assert axes_of(own_mesh(data_0=2, tensor=2, data_1=2)).data == ("data_0", "data_1")
    axes = axes_of(own_mesh(dp=2, fsdp=4), data=("fsdp",), replica=("dp",))
    assert axes.batch == ("dp", "fsdp")


def test_stages_have_a_part_of_data():
    axes = axes_of(own_mesh(data=2, pipe=2, model=2))
    assert (axes.data, axes.pipe, axes.batch) == (("data", "pipe"), ("pipe",), ("data", "pipe"))
    assert axes.of_stage == axes_of(own_mesh(data=2, pipe=2, model=2), pipe=())
    named = axes_of(own_mesh(stage=2, dp=4), data=("dp",), pipe=("stage",))
    assert (named.data, named.pipe) == (("dp", "stage"), ("stage",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"none of them carries `data`: name one `data`, or say which with ZeroConfig\(data_axes"),
        ({"data": ("fdsp",)}, "none called 'fdsp'; did you mean 'fsdp'"),
        ({"data": ("fsdp",), "replica": ("data",)}, "none called 'data'"),
    ],
)
def test_roles_that_are_not_there(options, message):
    with pytest.raises(ValueError, match=message):
        axes_of(own_mesh(dp=2, fsdp=4), **options)


def loss_fn(params, batch):
    return ((block(batch, params)) ** 2).mean()


def test_gather_on_use_on_a_mesh_of_ones_own():
    mesh = own_mesh(dp=2, fsdp=2, tensor=2)
    specs = {"up": P("tensor", "fsdp"), "down": P(("fsdp", "tensor"))}  # a data axis before one of the model's
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    gathered = zero.gather_on_use(loss_fn, shardings, mesh=mesh, data_axes=("fsdp",), replica_axes=("dp",))
    params, batch = mlp(), examples()
    placed = jax.device_put((params, batch), (shardings, NamedSharding(mesh, P(("dp", "fsdp")))))
    got, grads = jax.jit(jax.value_and_grad(gathered))(*placed)
    want, want_grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    assert_close(got, want)
    assert_close(grads, want_grads)
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(shardings[name], 2), name
    report = zero.gather_report(loss_fn, specs, params, batch, mesh=mesh, data_axes=("fsdp",))
    assert {event.path for event in report.events} == {"up", "down"}


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_train_on_a_mesh_of_ones_own(stage):
    mesh, tx = own_mesh(dp=2, fsdp=4), optax.adam(1e-2)
    axes = {"data_axes": ("fsdp",), "replica_axes": ("dp",)}
    config = zero.ZeroConfig(stage=stage, min_shard_size=8, **axes)
    state = zero.init_state(mlp(), tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    mu = state.opt_state[0].mu["up"]
    assert "fsdp" in str(mu.sharding.spec) and mu.addressable_shards[0].data.size == mu.size // 4
    batch = examples()
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    params, opt_state = mlp(), tx.init(mlp())
    for loss in losses:
        want, grads = jax.value_and_grad(loss_fn)(params, batch)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)


def test_one_device():
    mesh = zero.make_mesh(devices=jax.devices()[:1])
    assert not check(loss_fn, mlp(), examples(), mesh=mesh).early
