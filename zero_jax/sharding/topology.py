"""Hardware by name: its figures, and compile-only devices of it for machines that do not have it.

`v5p:8x8x16` is a TPU slice in chips, `2xv5e:16x16` two such slices, `h100:2x8` two hosts of eight GPUs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.experimental import topologies

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.extras import pip_install

_GIB = 2**30
MAX_DEVICES = 2**17  # the largest TPU slice has 9,216 chips
_INSTALL_TPU = pip_install("jax[tpu]")
_INSTALL_GPU = pip_install("zero-jax[gpu-compiler]")
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """The figures of one device, as its maker and the compiler give them."""

    name: str  # what a topology's name begins with
    platform: str  # `tpu` or `cuda`
    device_kind: str  # what JAX calls such a device
    # Device memory that a program may use. TPU: what the compiler itself allows; GPU: nine tenths of the memory, which
    # takes XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 (JAX's own default is 0.75).
    usable_bytes: int
    flops_per_second: float  # dense bfloat16 multiply-adds, two operations each, at the nominal clock
    memory_bytes_per_second: float  # bandwidth of the device memory
    product_share: float = 1.0  # share of the FLOPs that large products reach where the compiler gives no cycles (GPUs)
    memory_share: float = 1.0  # the same of the bandwidth of the memory
    clock_hz: float | None = None  # the clock that the TPU compiler's cycles count; None where it gives none
    link_bytes_per_second: float  # one direction of one link of a TPU's torus, or of all NVLinks of a GPU together
    network_bytes_per_second: float  # one direction of a device's share of the network between slices or hosts
    host_bytes_per_second: float  # one direction between a device and its host
    host_memory_bytes: float | None = None  # memory of a host for each of its devices; None if it is not known
    # How a torus closes: `cubes` where all extents are multiples of 4, a number where a dim has that extent
    wraps_at: str | int | None = None
    topology_options: tuple[tuple[str, str], ...] = ()  # further options of the TPU compiler's topology
    example: str  # a topology of it


def _hardware(
    name: str, kind: str, tflops: float, gb_per_s: tuple[float, float, float, float], **rest: Any
) -> Hardware:
    """Returns the figures of a device: `gb_per_s` are those of memory, link, network and host."""
    memory, link, network, host = (1e9 * speed for speed in gb_per_s)
    return Hardware(
        name=name,
        device_kind=kind,
        flops_per_second=1e12 * tflops,
        memory_bytes_per_second=memory,
        link_bytes_per_second=link,
        network_bytes_per_second=network,
        host_bytes_per_second=host,
        **rest,
    )


def _tpu(*figures: Any, gib: float, ghz: float, **rest: Any) -> Hardware:
    return _hardware(*figures, platform="tpu", usable_bytes=int(gib * _GIB), clock_hz=ghz * 1e9, **rest)


def _gpu(name: str, *figures: Any, memory_bytes: int, **rest: Any) -> Hardware:
    rest = {"example": f"{name}:1x8"} | rest | {"platform": "cuda", "usable_bytes": memory_bytes * 9 // 10}
    return _hardware(name, *figures, product_share=0.72, memory_share=0.88, **rest)


# Usable memory: "available HBM" of the TPU compiler's own out-of-memory errors (libtpu 0.0.42). Speeds: Google's system
# architecture pages; links per direction: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter 2. GPU
# memory and bandwidth: XLA's target configurations; FLOPs and NVLink: NVIDIA's data sheets; a NIC of 400 Gb/s a GPU
# (A100: 200). The shares of GPUs and 78% of PCIe x 16 are what an H100 reached for seconds on end, products of bf16
# (640 to 735 TFLOP/s), copies on the device (2.9 TB/s) and to its host (45 to 55 GB/s). A TPU and its host have PCIe of
# 15 GB/s, v6e of 32 (the same chapter), of which 78% are taken to be reached, too. Host memory: Google's machine types
# (ct5p-hightpu-4t has 448 GB for 4 chips, a3-highgpu-8g 1,872 GB for 8 GPUs), where it was looked up.
_TPUS = (
    _tpu("v3", "TPU v3", 61.5, (450, 50, 3.1, 12), gib=15.48, ghz=0.94, host_memory_bytes=8.5e10, wraps_at=16,
         example="v3:4x4"),
    _tpu("v4", "TPU v4", 275, (1229, 45, 6.25, 12), gib=30.75, ghz=1.05, host_memory_bytes=1.01e11, wraps_at="cubes",
         topology_options=(("chip_config_name", "megacore"),), example="v4:2x2x4"),
    _tpu("v5e", "TPU v5 lite", 197, (819, 45, 3.1, 12), gib=15.75, ghz=1.5, host_memory_bytes=4.8e10, wraps_at=16,
         example="v5e:4x4"),
    _tpu("v5p", "TPU v5", 459, (2765, 90, 6.25, 12), gib=95.74, ghz=1.75, host_memory_bytes=1.12e11, wraps_at="cubes",
         example="v5p:2x2x4"),
    _tpu("v6e", "TPU v6 lite", 918, (1640, 90, 12.5, 25), gib=31.25, ghz=1.75, host_memory_bytes=1.76e11, wraps_at=16,
         example="v6e:4x4"),
    _tpu("tpu7x", "TPU7x", 1153, (3690, 90, 6.25, 12), gib=94.75, ghz=2.2, wraps_at="cubes", example="tpu7x:2x2x2"),
)  # fmt: skip
_GPUS = (
    _gpu("a100", "NVIDIA A100-SXM4-80GB", 312, (2039, 300, 25, 25), memory_bytes=85_100_068_864),
    _gpu("a100_40gb", "NVIDIA A100-SXM4-40GB", 312, (1555, 300, 25, 25), memory_bytes=42_298_834_944),
    _gpu("h100", "NVIDIA H100 80GB HBM3", 989, (3352, 450, 50, 50), memory_bytes=84_978_434_048,
         host_memory_bytes=2.34e11),
    _gpu("h200", "NVIDIA H200", 989, (4800, 450, 50, 50), memory_bytes=151_397_597_184),
    _gpu("b200", "NVIDIA B200", 2250, (7672, 900, 50, 50), memory_bytes=191_514_411_008),
    _gpu("b300", "NVIDIA B300", 2250, (7936, 900, 100, 50), memory_bytes=297_021_865_984),
    _gpu("gb200", "NVIDIA GB200", 2500, (7928, 900, 50, 450), memory_bytes=197_897_748_480, example="gb200:1x72"),
    # Without NVLink: GPUs of a host reach each other over PCIe x 16, and share NICs.
    _gpu("a10g", "NVIDIA A10G", 70, (600, 25, 1.5, 25), memory_bytes=23_826_792_448, example="a10g:1x4"),
    _gpu("l4", "NVIDIA L4", 121, (300, 25, 1.5, 25), memory_bytes=23_569_891_328),
    _gpu("l40s", "NVIDIA L40S", 362, (864, 25, 6.25, 25), memory_bytes=47_803_531_264),
    _gpu("a6000", "NVIDIA RTX A6000", 155, (768, 25, 1.5, 25), memory_bytes=51_041_271_808, example="a6000:1x4"),
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 165, (1008, 25, 1.5, 25), memory_bytes=25_393_364_992,
         example="rtx4090:1x2"),
    _gpu("rtx6000pro", "NVIDIA RTX PRO 6000 Blackwell", 504, (1792, 50, 50, 50), memory_bytes=102_005_473_280,
         example="rtx6000pro:1x8"),
)  # fmt: skip
HARDWARE: Mapping[str, Hardware] = {hardware.name: hardware for hardware in (*_TPUS, *_GPUS)}

# What XLA:GPU has to know of a GPU that is not there: multiprocessors, FPUs and shared memory of each, L2, GHz,
# compute capability.
_GPU_CORES: Mapping[str, tuple[int, int, int, int, float, str]] = {
    "a100": (108, 64, 167_936, 41_943_040, 1.41, "8.0"),
    "a100_40gb": (108, 64, 167_936, 41_943_040, 1.41, "8.0"),
    "h100": (132, 128, 233_472, 52_428_800, 1.98, "9.0"),
    "h200": (132, 128, 233_472, 52_428_800, 1.98, "9.0"),
    "b200": (148, 128, 233_472, 132_644_864, 1.965, "10.0"),
    "b300": (148, 128, 233_472, 135_528_448, 1.965, "10.3"),
    "gb200": (152, 128, 233_472, 135_528_448, 2.062, "10.0"),
    "a10g": (80, 128, 102_400, 6_291_456, 1.71, "8.6"),
    "l4": (58, 128, 102_400, 50_331_648, 2.04, "8.9"),
    "l40s": (142, 128, 102_400, 100_663_296, 2.52, "8.9"),
    "a6000": (84, 128, 102_400, 6_291_456, 1.8, "8.6"),
    "rtx4090": (128, 128, 102_400, 75_497_472, 2.52, "8.9"),
    "rtx6000pro": (188, 128, 102_400, 134_217_728, 2.6, "12.0"),
}
_NAME = re.compile(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A parsed topology name."""

    name: str  # the name
    hardware: Hardware  # the kind of device
    num_slices: int  # TPU slices, or GPU hosts
    shape: tuple[int, ...]  # the extents of a TPU slice in chips, or the GPUs of a host


def parse(name: str) -> Topology:
    """Reads a topology's name; raises `ValueError` for no such hardware, or a shape that it does not come in."""
    if not isinstance(name, str):
        raise ValueError(f"topology={name!r} is no name: give one such as 'v5p:2x2x4' or 'h100:2x8'")
    if len(name) > 100:
        raise ValueError(f"topology {name[:40]!r}... of {len(name):,} characters: give a name such as 'v5p:2x2x4'")
    lower = name.strip().lower()
    match = _NAME.fullmatch(lower)
    if not match or match[2] not in HARDWARE:
        near = did_you_mean(match[2] if match else lower, HARDWARE, "{}", cutoff=0.5)
        meant = _of_cloud_name(lower) or (near and HARDWARE[near].example)
        hint = f"did you mean {meant!r}? " if meant else ""
        raise ValueError(
            f"unknown topology {name!r}: {hint}a TPU slice is named by its shape in chips, as in v5p:2x2x4 or "
            f"2xv5e:16x16 (two slices), GPUs by hosts x GPUs, as in h100:2x8; known are {', '.join(HARDWARE)}"
        )
    slices, kind, shape = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    hardware = HARDWARE[kind]
    if hardware.platform == "cuda":
        if len(shape) > 2 or match[1]:
            raise ValueError(f"topology {name!r}: name GPUs by hosts x GPUs a host, as in {hardware.example}")
        slices, shape = (shape[0] if len(shape) == 2 else 1), shape[-1:]
    num_dims = hardware.example.count("x", len(kind)) + 1
    if hardware.platform == "tpu" and max(shape[num_dims:], default=1) > 1:
        raise ValueError(f"topology {name!r}: slices of {kind} have {num_dims} dims: give some as {hardware.example}")
    if min(*shape, slices, math.prod(shape)) < 1:
        raise ValueError(f"topology {name!r} has no devices: give extents of at least 1, as in {hardware.example}")
    if slices * math.prod(shape) > MAX_DEVICES:
        raise ValueError(
            f"topology {name!r} has {slices * math.prod(shape):,} chips, and plans are for at most {MAX_DEVICES:,}: "
            f"give a smaller one, such as {hardware.example}"
        )
    return Topology(name=name, hardware=hardware, num_slices=slices, shape=shape)


def _of_cloud_name(name: str) -> str:
    """Returns the topology that Cloud TPU calls `v6e-256`, or by its TensorCores, two a chip, `v5p-128`; '' if none."""
    match = re.fullmatch(r"(v3|v4|v5p|v5e|v5litepod|v6e)-(\d{1,5})", name)
    if match is None:
        return ""
    kind = "v5e" if match[1] == "v5litepod" else match[1]
    num_chips = int(match[2]) // (2 if kind in ("v3", "v4", "v5p") else 1)
    if num_chips < 4 or num_chips.bit_count() > 1:
        return ""
    num_dims, doublings = HARDWARE[kind].example.count("x") + 1, num_chips.bit_length() - 1
    extents = [2 ** ((doublings + i) // num_dims) for i in range(num_dims)]
    return f"{kind}:{'x'.join(map(str, extents if num_chips > 4 else [2, 2, 1][:num_dims]))}"


def small_topology(name: str, num_parts: int) -> str:
    """Returns a few devices of the hardware of a topology: 2 for each part, and at least one host's 4 chips."""
    hardware = parse(name).hardware
    if hardware.platform != "tpu":
        return f"{hardware.name}:1x{max(4, 2 * num_parts)}"
    dims = [2] * len(hardware.example.partition(":")[2].split("x"))
    if len(dims) == 3 and num_parts <= 2:
        dims[2] = 1
    elif len(dims) == 2 and num_parts > 2:
        dims[1] = 4
    return f"{hardware.name}:{'x'.join(map(str, dims))}"


def missing_compiler(hardware: Hardware) -> str | None:
    """Returns what to install before this hardware can be compiled for, or None if nothing is missing."""
    if hardware.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            return f"the TPU compiler is not installed: {_INSTALL_TPU} brings it to any machine, no TPU needed"
        return _mismatched_libtpu()
    if not any(map(importlib.util.find_spec, _GPU_PLUGINS)):
        return f"the GPU compiler is not installed: {_INSTALL_GPU} brings it to any Linux machine, no GPU needed"
    return None


def _mismatched_libtpu() -> str | None:
    """Returns an error for a libtpu that jax does not pin: such a pair compiles, but its programs cannot be read."""
    pins = [x for x in importlib.metadata.requires("jax") or () if x.replace(" ", "").startswith("libtpu==")]
    pinned = re.search(r"==\s*([\d.]+)", pins[0]) if pins else None
    try:
        have = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:  # a build of one's own
        return None
    if pinned and not f"{have}.".startswith(pinned[1].rstrip(".") + "."):
        jax_version = importlib.metadata.version("jax")
        return (
            f"libtpu {have} is not the release that jax {jax_version} needs ({pinned[1]}): {_INSTALL_TPU} brings that"
        )
    return None


def devices(name: str) -> Sequence[Any]:
    """Returns compile-only devices of a topology.

    Raises:
      ValueError: an unknown topology, one that the hardware does not come in, or no compiler for it is installed.
    """
    topology = parse(name)
    hardware = topology.hardware
    missing = missing_compiler(hardware)
    if missing:
        raise ValueError(f"topology {name!r}: {missing}")
    shape, options = compiler_target(topology)
    try:
        return topologies.get_topology_desc(shape, platform=hardware.platform, **options).devices
    except Exception as error:
        raise ValueError(f"topology {name!r}: {_why_refused(error, hardware)}") from error


# What libtpu says of a machine, not of a topology: its error, and what to do.
_MACHINE_ERRORS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"lockfile|libtpu_lock|already in use|in use by (another )?process|multi-process", re.IGNORECASE),
        "another process of this machine uses libtpu, whatever the topology: set ALLOW_MULTIPLE_LIBTPU_LOAD=1 before "
        "JAX is imported, or use zero.plan, which compiles in a process of its own",
    ),
    (
        re.compile(r"metadata|\bMDS\b|TPU_ACCELERATOR_TYPE|TPU_WORKER_HOSTNAMES|worker hostname", re.IGNORECASE),
        "libtpu asks this machine which TPU it is: set TPU_SKIP_MDS_QUERY=1, TPU_ACCELERATOR_TYPE=v5p-16 and "
        "TPU_WORKER_HOSTNAMES=localhost before JAX is imported, or use zero.plan, which does",
    ),
    (
        re.compile(r"permission denied|no space left|read-only file system", re.IGNORECASE),
        "libtpu cannot write on this machine: free space in its temporary folder (TMPDIR), or make it writable",
    ),
    (
        re.compile(r"not implemented for (cuda|gpu)", re.IGNORECASE),
        "JAX loads no GPU compiler on a machine without a GPU, unless JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 is set before "
        "JAX is imported: set that, or use zero.plan, which does",
    ),
    (
        re.compile(r"dlopen|cannot open shared object|undefined symbol|failed to open|plugin|pjrt api", re.IGNORECASE),
        "the compiler's library cannot be loaded: {install} brings the one that goes with this jax",
    ),
)
_SHAPE_ERROR = re.compile(r"INVALID_ARGUMENT|topology|bounds|layout|unsupported|num_slices", re.IGNORECASE)


def _why_refused(error: Exception, hardware: Hardware) -> str:
    """Says why there are no devices of a topology; a shape is blamed only for an error about shapes."""
    install = _INSTALL_TPU if hardware.platform == "tpu" else _INSTALL_GPU
    said = (str(error).splitlines() or [type(error).__name__])[0]
    for pattern, remedy in _MACHINE_ERRORS:
        if pattern.search(str(error)):
            return f"{remedy.format(install=install)} ({said})"
    if _SHAPE_ERROR.search(str(error)):
        return f"the compiler refuses it ({said}). A shape that it knows is {hardware.example}"
    return (
        f"the compiler failed ({said}): try {hardware.example}; if that fails too, {install} brings a compiler that "
        "goes with this jax"
    )


def compiler_target(topology: Topology) -> tuple[str, dict[str, Any]]:
    """Returns what a compiler is asked for: the topology's name with it, and options; all that it knows of hardware."""
    hardware = topology.hardware
    if hardware.platform == "cuda":
        shape = f"1x{topology.num_slices}x{topology.shape[0]}"
        return shape, {"topology": shape, "target_config": _target_config(hardware)}
    options: dict[str, Any] = dict(hardware.topology_options)
    if topology.num_slices > 1:
        options["num_slices"] = topology.num_slices
    if set(topology.shape) == {1}:  # machines of one chip; the compiler's default is a host of four
        options["chips_per_host_bounds"] = (1, 1, 1)
    return f"{hardware.name}:{'x'.join(map(str, topology.shape))}", options


def _target_config(hardware: Hardware) -> str:
    """Returns the text of XLA's GpuTargetConfigProto for a GPU."""
    cores, fpus, shared, l2, clock, version = _GPU_CORES[hardware.name]
    major, _, minor = version.partition(".")
    memory, threads = hardware.usable_bytes * 10 // 9, 2048 if shared > 131_072 else 1536
    return (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
        f"shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024} "
        f"threads_per_core_limit: {threads} "
        f"core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 "
        f"block_dim_limit_z: 65535 memory_bandwidth: {int(hardware.memory_bytes_per_second)} l2_cache_size: {l2} "
        f"clock_rate_ghz: {clock} device_memory_size: {memory} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} "
        "registers_per_core_limit: 65536 registers_per_block_limit: 65536 } "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } '
        f'device_description_str: "{hardware.device_kind}"'
    )


def hardware_of(device: Any) -> Hardware | None:
    """Returns the figures of a device, real or compile-only, or None if they are not known."""
    kind = device.device_kind

    def is_known_as(known: Hardware) -> bool:
        # Boards have longer names, as "NVIDIA B300 SXM6 AC". A part of a GPU (MIG) has other figures.
        is_board = known.platform == "cuda" and kind.startswith(f"{known.device_kind} ") and " MIG " not in kind
        return kind == known.device_kind or is_board

    return next(filter(is_known_as, HARDWARE.values()), None)
