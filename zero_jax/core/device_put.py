"""Moves arrays to a sharding (device_put, reshard), on the devices of this process and of others, or off the host."""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from zero_jax.core.tree import is_key


def is_on_host(aval: Any) -> bool:
    """Tells whether a traced value is in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def put_global(x: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array, the same in all processes, as `jax.device_put` does; each puts its own devices' shards."""
    check_has_devices(getattr(sharding, "mesh", None))  # one device is no mesh
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array):
        if not x.is_fully_addressable:
            return reshard_array(x, sharding)
        if is_key(x):
            return put_keys(x, sharding, put_global)
    # `jax.device_put` would compare the values of all processes by a collective first.
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_keys(keys: jax.Array, sharding: NamedSharding, put: Callable[[jax.Array, Any], jax.Array]) -> jax.Array:
    """Places random keys on devices of several processes by `put`, which places an array of numbers."""
    # Shards are made from NumPy arrays, which have no dtype of keys.
    wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(keys))
    return jax.jit(wrap, out_shardings=sharding)(put(jax.random.key_data(keys), sharding))


def check_has_devices(mesh: Any) -> None:
    """Raises `ValueError` for an abstract mesh."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"the mesh {dict(mesh.shape)} is a jax.sharding.AbstractMesh, which has no devices to put arrays on: "
            "give a mesh of devices, as of zero.make_mesh() (zero.abstract_state takes an abstract one)"
        )


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array on the host that a CPU device takes as it is, where `device_put` copies that of `np.empty`.

    Its memory begins at a page. NumPy's would also ask for huge pages, which cost more than all else where the system
    has to make room for them. All pages are made at once, where the system can: one by one they take longer.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)  # private: a process that is forked has its own
    # mmap refuses a length of 0.
    pages = mmap.mmap(-1, max(1, num_bytes), flags=flags)
    return np.frombuffer(pages, np.uint8)[:num_bytes].view(dtype).reshape(shape)


def is_sharded_as(x: jax.Array, sharding: NamedSharding) -> bool:
    """Tells whether an array on the devices may stay as it is for a sharding of a mesh whose axes are Auto."""
    return not is_explicit(x) and x.sharding.is_equivalent_to(sharding, x.ndim)


def is_explicit(x: Any) -> bool:
    """Tells whether an array is typed for a mesh with Explicit axes: JAX takes those of no other mesh beside it."""
    if isinstance(x, jax.core.Tracer):
        return False
    types = getattr(getattr(getattr(x, "sharding", None), "mesh", None), "axis_types", ())
    return AxisType.Explicit in types and isinstance(x, jax.Array)  # which takes longer


def reshard_array(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Moves an array, or a traced value, to another sharding of the same mesh; without a copy where it has that."""
    if not isinstance(x, jax.core.Tracer) and is_sharded_as(x, sharding):
        return x
    # A program, which also moves shards between processes. `_identity` is a function of the module: JAX would compile a
    # new lambda at each call.
    return wait_on_cpu(jax.jit(_identity, out_shardings=sharding)(x), sharding.mesh)


def platform_of(mesh: Any) -> str:
    """Returns what JAX calls the platform of a mesh's devices: `cpu`, `gpu`, `cuda`, `rocm` or `tpu`."""
    return mesh.devices.flat[0].platform


def wait_on_cpu(results: Any, mesh: Any) -> Any:
    """Returns results; waits for CPU devices, which deadlock with over 32 programs with collectives in flight."""
    is_on_cpu = mesh.size > 1 and platform_of(mesh) == "cpu"
    return jax.block_until_ready(results) if is_on_cpu else results


def simulated_threads(num_devices: int) -> str:
    """Returns a value of the environment variable `NPROC`, for XLA:CPU to have threads for all simulated devices.

    A collective holds a thread until all devices are there, and a device may wait in several at once. On few cores XLA
    makes a thread for each device, and all of them may wait for a device that has none (docs/xla_faults.md).
    """
    return str(max(os.cpu_count() or 1, 4 * num_devices))


def warn_of_few_threads(mesh: Any) -> None:
    """Warns where a program whose collectives do not wait for one another is to run on simulated devices."""
    if isinstance(mesh, AbstractMesh) or platform_of(mesh) != "cpu":
        return
    num_devices, nproc = len(mesh.local_devices), os.environ.get("NPROC", "")
    num_threads = int(nproc) if nproc.isdigit() else os.cpu_count() or 1
    if 1 < num_devices and num_threads < 2 * num_devices:
        warnings.warn(
            f"a pipeline on {num_devices} simulated devices may stop for good, all threads waiting in collectives: "
            f"start Python with the environment variable NPROC={simulated_threads(num_devices)} (docs/xla_faults.md)",
            stacklevel=3,
        )


def is_global(x: Any) -> bool:
    """Tells whether an array has shards in other processes; traced ones do not know it."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def to_device(x: Any, *, after: Any = None) -> Any:
    """Returns a traced value in device memory; one that is on the host is fetched after another value is there."""
    if not is_on_host(jax.typeof(x)):
        return x
    if after is not None:
        # Without the barrier XLA may start all transfers at once, and so have all arrays in device memory.
        x, _ = lax.optimization_barrier((x, after))
    return jax.device_put(x, jax.memory.Space.Device)


def map_on_device(function: Callable[[Any], Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns a traced function of each array; those in host memory are fetched one after another."""
    results: list[Any] = []
    for x in arrays:
        # Once the result before is there, the array that it was made of can be freed.
        results.append(function(to_device(x, after=results[-1] if results else None)))
    return results


def default_layout(device: Any, shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
    """Returns the dims of a shape as XLA orders them in a device's memory, minor last; in order where unknown."""
    try:
        layout = str(device.client.get_default_layout(np.dtype(dtype), tuple(shape), device))
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        layout = ""
    # A layout's text begins with the dims from minor to major.
    order = re.match(r"\{([\d,]+)", layout)
    minor_to_major = [int(i) for i in order[1].split(",")] if order else range(len(shape))[::-1]
    return tuple(minor_to_major)[::-1]


def _identity(x: jax.Array) -> jax.Array:
    return x
