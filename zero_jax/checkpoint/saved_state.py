"""Encodes a train state for saving: the same leaves for every stage, mesh and precision.

They are, by name, the full-precision params, the optimizer's state, the model state, the key, the loss scale and the
counters; low-precision copies are not saved. Only errors of quantized gradients depend on the mesh. A leaf with a dtype
that the files do not support is saved as its bits.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.checkpoint.fingerprint import fingerprint, host_fingerprint
from zero_jax.checkpoint.record import SavedLeaf, file_key, is_bits
from zero_jax.core.device_put import map_on_device, platform_of
from zero_jax.core.tree import is_key, leaves_by_name, path_name
from zero_jax.training import TrainState

_FEW_ELEMENTS = 16


def saved_leaves(state: TrainState) -> dict[str, Any]:
    """Returns the leaves to save by name and in order, of a state of arrays or of `ShapeDtypeStruct`s."""
    return leaves_by_name({
        "params": state.masters,
        "opt_state": state.opt_state,
        "model_state": state.model_state,
        "step": state.step,
        "key": state.key,
        "loss_scale": state.loss_scale,
        "num_skipped_steps": state.num_skipped_steps,
        "grad_errors": state.grad_errors,
    })  # fmt: skip


def opt_state_classes(state: TrainState) -> dict[str, str]:
    """Returns the classes of the nodes of the optimizer state that have leaves of their own, by path.

    The fields of Adam and AdaBelief have the same names, and hold other things. Of containers, and of what contains
    params, nothing is said; nor of modules, between which releases move classes.
    """
    skipped, nodes = {tuple, list, dict, collections.OrderedDict, collections.defaultdict}, dict[Any, type]()
    # `is_leaf` is asked of every node, and its answer here is False.
    jax.tree.leaves(state.masters, is_leaf=lambda node: skipped.add(type(node)) is not None)
    see = lambda path, node: nodes.update({path: type(node)}) is not None  # noqa: E731
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.opt_state, is_leaf=see, is_leaf_takes_path=True)
    classes = {}
    for path, _ in leaves:
        above = (path[:i] for i in reversed(range(len(path))))
        owner = next((at for at in above if nodes[at] not in skipped), None)
        if owner is not None:
            classes[path_name((jax.tree_util.DictKey("opt_state"), *owner))] = nodes[owner].__qualname__
    return classes


def dtype_name(x: Any) -> str:
    """Returns the name of a leaf's dtype, such as `float32` or `key<threefry2x32>`."""
    if is_key(x):
        # Not `key_impl`, which takes no `ShapeDtypeStruct`.
        return f"key<{x.dtype._impl.name}>"
    return jnp.dtype(x.dtype).name


def _encode(x: Array) -> Array:
    """Encodes a leaf: PRNG keys as their words, one-byte dtypes such as float8 and int4 as their bits."""
    if is_key(x):
        return jax.random.key_data(x)
    return lax.bitcast_convert_type(x, _bits_of(x.dtype)).astype(np.uint8)


def decode(x: Array, leaf: SavedLeaf) -> Array:
    """Returns a leaf from its saved form."""
    if leaf.is_key:
        return jax.random.wrap_key_data(x, impl=leaf.dtype[4:-1])
    if not is_bits(leaf.dtype):
        return x
    return lax.bitcast_convert_type(x.astype(_bits_of(jnp.dtype(leaf.dtype))), jnp.dtype(leaf.dtype))


def _bits_of(dtype: np.dtype) -> np.dtype:
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return jnp.dtype(f"uint{info.bits}")


def encode_state(state: TrainState, *, mesh: Mesh) -> tuple[dict[str, Array], dict[str, SavedLeaf]]:
    """Returns a state's arrays to save by key, none without elements, and the records of its leaves; waits for it."""
    leaves = saved_leaves(state)
    for name, x in leaves.items():
        if not isinstance(x, jax.Array) or x.is_deleted():
            problem = "was donated to a step" if isinstance(x, jax.Array) else f"is a {type(x).__name__}, no jax.Array"
            raise ValueError(f"leaf {name!r} of the state {problem}: save the state that the last step returned")
    # Most are stored as they are.
    arrays = {n: jax.jit(_encode)(x) if is_key(x) or is_bits(dtype_name(x)) else x for n, x in leaves.items()}
    checksums = fingerprints(list(arrays.values()), mesh=mesh)
    records = {
        name: SavedLeaf(
            shape=tuple(x.shape),
            dtype=dtype_name(x),
            stored_shape=tuple(arrays[name].shape),
            stored_dtype=jnp.dtype(arrays[name].dtype).name,
            fingerprint=number,
        )
        for (name, x), number in zip(leaves.items(), checksums, strict=True)
    }
    return {file_key(name): x for name, x in arrays.items() if x.size}, records


def fingerprints(arrays: list[Array], *, mesh: Mesh) -> list[int]:
    """Returns the fingerprints of encoded arrays, computed by programs that gather no array.

    That is one program, but on CPU devices one for each shape, which compile sooner. There, what every device has and
    is small needs none.
    """
    program = fingerprint_program(mesh)
    if platform_of(mesh) != "cpu":
        return np.asarray(program(arrays)).tolist() if arrays else []
    are_small = [x.size <= _FEW_ELEMENTS and x.is_fully_replicated for x in arrays]
    of_each = zip(arrays, are_small, strict=True)
    return [host_fingerprint(np.asarray(x)) if is_small else program([x]).item() for x, is_small in of_each]


@functools.cache
def fingerprint_program(mesh: Mesh) -> Any:
    """Returns the jitted function from arrays to their fingerprints, `uint32[num_arrays]`, replicated."""

    def run(arrays: list[Array]) -> Array:
        of_each = functools.partial(fingerprint, on_cpu=platform_of(mesh) == "cpu")
        return jnp.stack(map_on_device(of_each, arrays))

    return jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))
