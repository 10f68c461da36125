"""Specs as tuples of axes, and the steps between a shard and the whole."""

import itertools
import random

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of, torus_mesh

import zero_jax as zero
from zero_jax.sharding import spec


@pytest.mark.parametrize(
    ("given", "num_dims", "dims"),
    [
        (None, 2, ((), ())),
        (P(), 0, ()),
        (P(), 2, ((), ())),
        (P("a"), 3, (("a",), (), ())),
        (P(None, "a"), 2, ((), ("a",))),
        (P(("a", "b"), None), 2, (("a", "b"), ())),
        (P(P.UNCONSTRAINED, "a"), 2, ((), ("a",))),
        (P((), ("a",)), 2, ((), ("a",))),
    ],
)
def test_dims_of(given, num_dims, dims):
    assert spec.dims_of(given, num_dims) == dims


def test_dims_of_a_named_sharding():
    mesh = mesh_of("staged24")
    assert spec.dims_of(NamedSharding(mesh, P(None, ("data_0", "data_1"))), 2) == ((), ("data_0", "data_1"))


def test_dims_of_something_else():
    with pytest.raises(ValueError, match="2 entries, but the array has 1 dims"):
        spec.dims_of(P("a", "b"), 1)
    for wrong in ("a", ("a",), 3):
        with pytest.raises(TypeError, match="expected a PartitionSpec"):
            spec.dims_of(wrong, 1)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((), P()),
        (((), ()), P()),
        ((("a",), ()), P("a")),
        (((), ("a", "b"), ()), P(None, ("a", "b"))),
    ],
)
def test_partition_spec(dims, expected):
    assert spec.partition_spec(dims) == expected
    assert spec.dims_of(spec.partition_spec(dims), len(dims)) == dims


def test_small_ones():
    dims, mesh = (("model", "data_0"), (), ("data_1",)), mesh_of("staged24")
    assert spec.carries(dims, ("data_1",))
    assert not spec.carries(dims, ("data",))
    assert spec.without(dims, ("data_0", "data_1")) == (("model",), (), ())
    assert spec.num_shards(mesh, dims) == 8
    assert spec.named(mesh, (("data_0",), ())) == NamedSharding(mesh, P("data_0"))


def test_axes_of_one_device_are_left_out_of_checked_dims():
    mesh = zero.make_mesh(data=8)
    assert mesh.shape["model"] == 1
    assert spec.checked_dims("leaf", P(("model", "data"), "model"), (8, 4), mesh) == (("data",), ())


AXES = ("x", "y", "z")


@pytest.mark.parametrize(
    ("dims", "steps"),
    [
        (((), ()), []),
        ((("x",), ()), [((), ())]),
        # The last axis first, whichever dim it cuts.
        ((("x", "y", "z"),), [(("x", "y"),), (("x",),), ((),)]),
        ((("x", "y"), ("z",)), [(("x", "y"), ()), (("x",), ()), ((), ())]),
        ((("z",), ("x", "y")), [((), ("x", "y")), ((), ("x",)), ((), ())]),
        # An order that is not the mesh's: only the minor axis of a dim can go.
        ((("z", "x"),), [(("z",),), ((),)]),
        # The model's axes stay, before or after the data's.
        ((("model", "x"), ("y",)), [(("model", "x"), ()), (("model",), ())]),
        ((("x", "model"), ("y",)), [(("x", "model"), ()), (("model",), ())]),
    ],
)
def test_gather_steps(dims, steps):
    assert spec.gather_steps(dims, AXES) == steps


@pytest.mark.parametrize(
    ("dims", "steps"),
    [
        ((("x",), ()), [(("x",), ())]),
        ((("x", "y"), ()), [(("x",), ()), (("x", "y"), ())]),
        ((("x", "y"), ("z",)), [(("x", "y"), ()), (("x", "y"), ("z",))]),  # two, then the third
        ((("x", "y", "z"),), [(("x", "y"),), (("x", "y", "z"),)]),
        ((("model", "x"),), [(("model", "x"),)]),
        ((("x", "model"),), [(("x", "model"),)]),
    ],
)
def test_scatter_steps(dims, steps):
    assert spec.scatter_steps(dims, AXES) == steps


@pytest.mark.parametrize(
    ("shape", "kind", "dims", "num_steps"),
    [
        ((4, 4, 2), "TPU v5", ("x", "y", "z"), 2),
        ((4, 4, 2), "TPU v5", ("x", "y"), 1),  # a part of the torus
        ((4, 8, 1), "TPU v5 lite", ("x", "y"), 2),
        ((4, 8, 1), "TPU v5 lite", ("x",), 1),
        ((4, 8, 1), "TPU v6 lite", ("x", "y"), 1),
        ((4, 8, 1), "TPU v6 lite", ("x",), 1),
    ],
)
def test_scatter_steps_on_a_torus(shape, kind, dims, num_steps):
    """All of a 3-D torus is scattered over in two steps, of v5e's axis by axis, and a part or all of v6e's at once."""
    mesh = torus_mesh(itertools.product(*map(range, shape)), shape, AXES, kind)
    steps = spec.scatter_steps((dims, ()), AXES, mesh)
    assert len(steps) == num_steps
    assert steps[-1] == (dims, ())


@pytest.mark.parametrize(
    ("shape", "dims", "num_steps"),
    [
        ((4, 4, 4), (("x", "y"), ("z",)), 2),
        ((4, 4, 4), (("x", "y", "z"),), 2),
        ((4, 4, 4), (("x", "y"), ()), 1),
        ((4, 4, 4), (("x",), ("y",)), 2),  # two dims of the array
        ((4, 4, 4), (("x", "model", "y"), ()), 2),
        ((16, 16, 1), (("x", "y"), ()), 2),  # all of a 2-D torus
        ((4, 4, 1), (("x", "y"), ("z",)), 3),
    ],
)
def test_gather_steps_on_a_torus(shape, dims, num_steps):
    """Over two dims of a 3-D torus at once, last; else axis by axis."""
    check_gather_steps(shape, dims, num_steps, "TPU v5")


@pytest.mark.parametrize(
    ("dims", "num_steps"), [((("x", "y"), ()), 1), ((("y", "x"), ()), 1), ((("x",), ("y",)), 2), ((("x",), ()), 1)]
)
def test_gather_steps_of_a_plane(dims, num_steps):
    """All of the 2-D torus of v6e is gathered over at once."""
    check_gather_steps((16, 16, 1), dims, num_steps, "TPU v6 lite")


def check_gather_steps(shape, dims, num_steps, kind):
    mesh = torus_mesh(itertools.product(*map(range, shape)), (*shape, 1), (*AXES, "model"), kind)
    steps = spec.gather_steps(dims, AXES, mesh)
    assert len(steps) == num_steps and steps[-1] == spec.without(dims, AXES)
    if num_steps < len(spec.gather_steps(dims, AXES)):
        assert steps == [*spec.gather_steps(dims, AXES)[:-2], steps[-1]]


def test_axes_that_are_no_dims_of_the_torus_are_gathered_one_by_one():
    shape = (4, 4, 4)
    mesh = torus_mesh(itertools.product(*map(range, shape)), (16, 2, 2), AXES)
    for dims in ((("x", "y"), ()), (("y", "z"), ("x",))):
        assert spec.gather_steps(dims, AXES, mesh) == spec.gather_steps(dims, AXES)
    mesh = torus_mesh(itertools.product(*map(range, shape)), shape, AXES)
    assert len(spec.gather_steps((("x", "y"), ()), AXES, mesh)) == 1
    mesh.devices.flat[0].core_on_chip = 1  # chips of several devices
    assert spec.gather_steps((("x", "y"), ("z",)), AXES, mesh) == spec.gather_steps((("x", "y"), ("z",)), AXES)
    mesh.devices.flat[0].device_kind = "TPU7x"
    assert spec.gather_steps((("x", "y"), ("z",)), AXES, mesh) == [((), ())]


@pytest.mark.parametrize(
    ("dims", "to", "steps"),
    [
        (((), ("x",)), 1, []),
        ((("x",), ()), 1, [((), ("x",))]),
        ((("x", "y"), ("z",)), 1, [(("x",), ("z", "y")), ((), ("z", "y", "x"))]),
        ((("x",), (), ("y",)), 1, [(("x",), ("y",), ()), ((), ("y", "x"), ())]),
    ],
)
def test_move_steps(dims, to, steps):
    assert spec.move_steps(dims, to, AXES) == steps


def all_dims(num_dims, axes):
    """Yields every way to lay axes over dims, each dim's axes in every order."""
    for places in itertools.product(range(num_dims + 1), repeat=len(axes)):  # the last place: not used
        for order in itertools.permutations(range(len(axes))):
            yield tuple(tuple(axes[i] for i in order if places[i] == dim) for dim in range(num_dims))


def test_steps_change_one_axis_at_a_time():
    for dims in random.Random(0).sample(sorted(set(all_dims(3, (*AXES, "model")))), 300):
        used = [axis for dim in dims for axis in dim if axis in AXES]
        gathered = spec.gather_steps(dims, AXES)
        assert (gathered[-1] if gathered else dims) == spec.without(dims, AXES)
        ends = any("model" in dim[i + 1 :] for dim in dims for i, axis in enumerate(dim) if axis in AXES)
        assert ends or len(gathered) == len(used)
        scattered = spec.scatter_steps(dims, AXES)
        assert scattered[-1] == dims
        assert ends or len(scattered) == (max(1, len(used)) if len(used) < 3 else (len(used) + 1) // 2)
        if "model" not in {axis for dim in dims for axis in dim}:
            moved = spec.move_steps(dims, 1, AXES)
            end = moved[-1] if moved else dims
            assert sorted(end[1]) == sorted(used) and not end[0] and not end[2]
            assert len(moved) == len(dims[0]) + len(dims[2])


@pytest.mark.parametrize(
    ("dims", "to", "axes", "steps"),
    [
        (((), ("x",)), 1, AXES, []),
        (((), ("x", "y"), ("z",)), 0, AXES, [(("z",), ("x", "y"), ()), (("z", "x", "y"), (), ())]),
        (((), ("x", "y"), ("z",)), 0, ("y",), [(("y",), ("x",), ("z",))]),
    ],
)
def test_steps_by_dim(dims, to, axes, steps):
    assert spec.steps_by_dim(dims, to, axes) == steps
