"""Names of hardware, and what they lead to."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

import zero_jax as zero
from zero_jax.core.extras import pip_install
from zero_jax.sharding import topology


@pytest.mark.parametrize(
    ("name", "kind", "num_slices", "shape"),
    [
        ("v5p:8x8x16", "v5p", 1, (8, 8, 16)),
        ("V5E:4x4", "v5e", 1, (4, 4)),
        ("2xv5e:16x16", "v5e", 2, (16, 16)),
        ("h100:2x8", "h100", 2, (8,)),
        ("b200:8", "b200", 1, (8,)),
        ("a100_40gb:2x8", "a100_40gb", 2, (8,)),
        ("gb200:1x72", "gb200", 1, (72,)),
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
        ("v5p-1024", "did you mean 'v5p:8x8x8'"),  # by TensorCores, as Cloud TPU calls it
        ("v5p-8", "did you mean 'v5p:2x2x1'"),
        ("v6e-256", "did you mean 'v6e:16x16'"),
        ("v5litepod-32", "did you mean 'v5e:4x8'"),
        ("v6e-12", "did you mean 'v6e:4x4'"),
        ("v5p", "known are v3, v4, v5e, v5p"),
        ("", "unknown topology"),
        ("v5p:0x2x2", "extents of at least 1"),
        ("h100:2x2x8", "hosts x GPUs"),
        ("2xh100:8", "hosts x GPUs"),
        ("v5e:4x4x4", "slices of v5e have 2 dims: give some as v5e:4x4"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(name)


def test_a_missing_compiler_is_named_with_what_brings_it(monkeypatch):
    tpu, gpu = (re.escape(pip_install(name)) for name in ("jax[tpu]", "zero-jax[gpu-compiler]"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=tpu):
        topology.devices("v5p:2x2x1")
    with pytest.raises(ValueError, match=gpu):
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


def target_config(name):
    """Returns what the GPU compiler is asked for."""
    return topology.compiler_target(topology.parse(name))[1]["target_config"]


def test_gpu_usable_memory_is_nine_tenths():
    assert topology.HARDWARE["h100"].usable_bytes == 84_978_434_048 * 9 // 10
    assert "device_memory_size: 8497843404" in target_config("h100:1x4")


def test_each_hardware_has_a_topology_and_what_its_compiler_asks_for():
    for name, hardware in topology.HARDWARE.items():
        parsed = topology.parse(hardware.example)
        assert parsed.hardware is hardware and hardware.name == name
        assert topology.compiler_target(parsed)[0]


def test_a_gpu_that_is_not_there_has_its_compute_capability():
    cards = {"h100": "major: 9 minor: 0", "l40s": "major: 8 minor: 9", "b300": "major: 10 minor: 3"}
    for name, capability in cards.items():
        assert capability in target_config(f"{name}:1x4")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 141GB HBM3e", "h200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("TPU v5", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5 of another kind", None),
    ],
)
def test_devices_are_known_by_their_kind(kind, name):
    found = topology.hardware_of(types.SimpleNamespace(device_kind=kind))
    assert (found and found.name) == name


def test_unknown_devices_have_no_figures():
    import jax

    assert topology.hardware_of(jax.devices()[0]) is None


def refused(monkeypatch, said, name="v5e:2x2"):
    """Returns what is told where the compiler says something."""

    def get_topology_desc(*_, **__):
        raise said

    monkeypatch.setattr(topology, "missing_compiler", lambda hardware: None)
    monkeypatch.setattr(topology.topologies, "get_topology_desc", get_topology_desc)
    with pytest.raises(ValueError) as caught:
        topology.devices(name)
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value).startswith(f"topology {name!r}: ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("ABORTED: Internal error when accessing libtpu multi-process lockfile. Run", "ALLOW_MULTIPLE_LIBTPU_LOAD=1"),
        ("ABORTED: The TPU is already in use by process with pid 12", "another process of this machine uses libtpu"),
        ("UNKNOWN: Failed to get TPU metadata (tpu-env) from instance metadata", "TPU_SKIP_MDS_QUERY=1"),
        ("topology not implemented for cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 is set before JAX is imported"),
        ("dlopen failed: libtpu.so: undefined symbol: GetPjrtApi", f"cannot be loaded: {pip_install('jax[tpu]')}"),
        ("/tmp/tpu_logs: No space left on device", "libtpu cannot write on this machine: free space"),
        ("INTERNAL: something", "the compiler failed (INTERNAL: something): try v5e:4x4; if that fails too, "),
        ("", "the compiler failed (RuntimeError)"),
    ],
)
def test_a_topology_is_not_blamed_for_its_machine(said, message, monkeypatch):
    told = refused(monkeypatch, RuntimeError(f"{said}\nmore" if said else ""))
    assert message in told
    assert "refuses it" not in told


def test_a_topology_is_blamed_for_its_shape(monkeypatch):
    said = 'INVALID_ARGUMENT: Topology layout "v5p:3x3x3" is not divisible by the given chips_per_host_bounds "2x2x1"'
    told = refused(monkeypatch, RuntimeError(said), "v5p:3x3x3")
    assert "the compiler refuses it (INVALID_ARGUMENT" in told and "is v5p:2x2x4" in told


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p:1000x1000x1000", "has 1,000,000,000 chips, and plans are for at most 131,072"),
        ("h100:100000x8", "has 800,000 chips"),
        ("9999999xv5e:2x2", "chips, and plans are for at most"),
        ("v5p:" + "9" * 5000, "of 5,004 characters"),
        ("v5p:2x2x4\0", "unknown topology"),
    ],
)
def test_topologies_beyond_any_hardware(name, message):
    with pytest.raises(ValueError, match=message):
        topology.parse(name)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_another_process_that_uses_libtpu_is_named():
    """Two that JAX lets lock libtpu for themselves: the second names the first, not the topology."""
    environment = {name: value for name, value in os.environ.items() if name != "ALLOW_MULTIPLE_LIBTPU_LOAD"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = "import sys, zero_jax; print(zero_jax.make_mesh(topology='v5e:2x2').size, flush=True); sys.stdin.read()"
    start = functools.partial(
        subprocess.Popen, [sys.executable, "-c", program], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    was_there, refused = pathlib.Path("/tmp/libtpu_lockfile").exists(), None
    first = start()
    try:
        assert first.stdout
        if first.stdout.readline() == "4\n":
            refused = start()
            _, err = refused.communicate(timeout=120)
    finally:
        _, err_of_first = first.communicate(timeout=120)
        if not was_there:
            pathlib.Path("/tmp/libtpu_lockfile").unlink(missing_ok=True)
    err = err_of_first if refused is None else err  # a process that is not of this test has libtpu
    last = err.strip().splitlines()[-1]
    assert "another process of this machine uses libtpu, whatever the topology: set ALLOW_MULTIPLE_LIBTPU_LOAD" in last
