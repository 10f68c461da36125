"""Executes a compiled program on the host: arrays are cut into the shards that its devices would hold."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from zero_jax.core.tree import PyTree, key_numbers
from zero_jax.hlo import Program
from zero_jax.interpreter import Interpreter
from zero_jax.program.jaxprs import hlo_text, kept_arguments


@dataclasses.dataclass(frozen=True)
class Sharded:
    """What the devices of a mesh hold of an array."""

    shards: np.ndarray  # the shard of each device, `[devices, *dims of a shard]`
    indices: tuple[tuple[slice, ...], ...]  # its place in the array

    def differences(self, other: np.ndarray) -> np.ndarray:
        """Returns how far elements of any device are from an array, `float64`: infinite where one is not finite."""
        result = np.zeros(other.shape)
        for shard, index in zip(self.shards, self.indices, strict=True):
            # Several devices may hold an element, and each of them has to be right.
            result[index] = np.maximum(result[index], _difference(shard, other[index]))
        return result


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.abs(a - b)
    # Equal infinities, and NaN in both, are no difference.
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.where(np.isfinite(difference), difference, np.inf))


class Execution:
    """A program that was compiled for the devices of a mesh, ready to be executed on the host with any arguments."""

    def __init__(self, compiled: Any, mesh: Mesh):
        self._devices = list(mesh.devices.flat)
        self._kept = kept_arguments(compiled)  # JAX drops arguments that a program does not read
        # Those of arguments that the program does not have are left out, too.
        self._inputs = jax.tree.leaves(compiled.input_shardings)
        self._outputs = jax.tree.leaves(compiled.output_shardings)
        self._infos, self._tree = jax.tree.flatten(compiled.out_info)
        self._interpreter = Interpreter(Program(hlo_text(compiled)))

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Executes the program on arrays; returns a tree of `Sharded`."""
        leaves = jax.tree.leaves(arguments)
        shards = []
        for number, sharding in zip(self._kept, self._inputs, strict=True):
            array, indices = host_array(leaves[number]), self._indices(sharding, leaves[number].shape)
            shards.append(np.stack([array[index] for index in indices]))
        results = self._interpreter.run(shards)
        sharded = [
            Sharded(x, self._indices(sharding, info.shape))
            for x, sharding, info in zip(results, self._outputs, self._infos, strict=True)
        ]
        return jax.tree.unflatten(self._tree, sharded)

    def _indices(self, sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], ...]:
        indices = sharding.devices_indices_map(shape)
        return tuple(indices[device] for device in self._devices)


def host_array(x: Any) -> np.ndarray:
    """Returns an array on the host, in the dtype that JAX takes it in (int64 as int32); of PRNG keys, their data."""
    array = np.asarray(key_numbers(x))
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
