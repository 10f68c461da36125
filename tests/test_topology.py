"""Names of hardware, and what they lead to."""

import importlib.metadata
import importlib.util

import pytest

import zero_jax as zero
from zero_jax import topology


@pytest.mark.parametrize(
    ("name", "kind", "num_slices", "shape"),
    [
        ("v5p:8x8x16", "v5p", 1, (8, 8, 16)),
        ("V5E:4x4", "v5e", 1, (4, 4)),
        ("2xv5e:16x16", "v5e", 2, (16, 16)),
        ("h100:2x8", "h100", 2, (8,)),
        ("b200:8", "b200", 1, (8,)),
        ("tpu7x:2x2x1", "tpu7x", 1, (2, 2, 1)),
    ],
)
def test_names_are_read(name, kind, num_slices, shape):
    read = topology.parse(name)
    assert (read.hardware.name, read.num_slices, read.shape) == (kind, num_slices, shape)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vp5:2x2x4", "did you mean 'v5p:2x2x4'"),
        ("h10:1x8", "did you mean 'h100:1x8'"),
        ("v5p", "known are v3, v4, v5e, v5p"),
        ("", "unknown topology"),
        ("v5p:0x2x2", "extents of at least 1"),
        ("h100:2x2x8", "hosts x GPUs"),
        ("2xh100:8", "hosts x GPUs"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(name)


def test_a_missing_compiler_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "jax\[tpu\]"'):
        topology.devices("v5p:2x2x1")
    with pytest.raises(ValueError, match=r'pip install "zero-jax\[gpu-compiler\]"'):
        topology.devices("h100:1x8")


@pytest.mark.tpu_compiler
def test_a_libtpu_of_another_release_is_refused(monkeypatch):
    assert topology.missing_compiler(topology.HARDWARE["v5p"]) is None
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1.dev1" if name == "libtpu" else real(name))
    with pytest.raises(ValueError, match=r"libtpu 0\.0\.1\.dev1 is not the release that jax .* needs"):
        topology.devices("v5p:2x2x1")


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("name", "num_devices", "data_axes"),
    [("v4:2x2x1", 4, 1), ("v5e:2x2", 4, 1), ("v6e:2x2", 4, 1), ("tpu7x:2x2x1", 8, 1), ("2xv5e:2x2", 8, 2)],
)
def test_every_kind_gives_the_devices_that_jax_gives_there(name, num_devices, data_axes):
    """A chip is one device, save for TPU7x with its two."""
    mesh = zero.make_mesh(topology=name)
    assert mesh.size == num_devices
    assert len([axis for axis in mesh.axis_names if axis.startswith("data")]) == data_axes
    assert topology.hardware_of(mesh.devices.flat[0]) is topology.parse(name).hardware


@pytest.mark.tpu_compiler
def test_a_shape_that_the_hardware_does_not_come_in():
    with pytest.raises(ValueError, match=r"the compiler refuses it .* is v5p:2x2x4"):
        topology.devices("v5p:3x3")


@pytest.mark.tpu_compiler
def test_machines_of_one_chip():
    """The compiler takes a host to have four chips unless it is told."""
    assert [len(topology.devices(name)) for name in ("v5e:1x1", "v6e:1x1")] == [1, 1]


def test_gpu_usable_memory_is_nine_tenths():
    assert topology.HARDWARE["h100"].usable_bytes == 84_978_434_048 * 9 // 10
    assert "device_memory_size: 8497843404" in topology._target_config(topology.HARDWARE["h100"])


def test_unknown_devices_have_no_figures():
    import jax

    assert topology.hardware_of(jax.devices()[0]) is None
