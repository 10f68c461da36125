"""Stochastic rounding: a number becomes one of the two nearest of a smaller dtype, at random, and is right on average.

The probability of a neighbour is one minus its distance in units of theirs (Gupta et al. 2015, "Deep Learning with
Limited Numerical Precision"). Rounding to nearest loses each update below half a unit, so that small updates never add
up.

The random bits of an element are those of a counter, Threefry of a key and of the element's index in the unsharded
array (Salmon et al. 2011, "Parallel Random Numbers"): the same on every mesh and in a resumed run, and a device
computes those of its shard alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.random import threefry2x32_p

from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree, leaves_by_name, shapes_of
from zero_jax.sharding.precision import cast_floating

# Apart from the keys of microbatches, which are numbered from 0.
_OF_PARAMS, _OF_STATE = 0x5352, 0x5354


def rounding_key(key: jax.Array) -> jax.Array:
    """Returns the key of the rounding of a step, `uint32[2]`, from the key of the step, of any kind."""
    return jax.random.bits(jax.random.fold_in(key, _OF_PARAMS), (2,), jnp.uint32)


def round_tree(tree: PyTree, like: PyTree, key: jax.Array) -> PyTree:
    """Rounds arrays, float32 where those of `like` are smaller, to their dtypes, each by the key and its path."""
    rounded = []
    for (name, y), x in zip(leaves_by_name(like).items(), jax.tree.leaves(tree), strict=True):
        rounded.append(
            x if x.dtype == y.dtype else round_array(x, key, number=zlib.crc32(name.encode()), dtype=y.dtype)
        )
    return jax.tree.structure(like).unflatten(rounded)


@jax.named_scope("stochastic_rounding")
def round_array(x: jax.Array, key: jax.Array, *, number: int, dtype: Any) -> jax.Array:
    """Rounds a float32 array `[...]` stochastically to a smaller floating dtype, by a key `uint32[2]` and a number.

    Numbers that the dtype has stay as they are, NaN and infinities too. A finite number becomes infinite only where
    rounding to nearest makes it so. Below 2^-119 numbers are rounded to nearest: float32 has no unit of theirs that all
    hardware computes with. With another key, or another number (a hash of the array's name), the result is independent.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(jnp.float32)
    key_of_array = threefry2x32_p.bind(key[0], key[1], jnp.uint32(number), jnp.uint32(0))
    bits, _ = threefry2x32_p.bind(*key_of_array, *_indices(x.shape))
    num_bits = wide.nmant - info.nmant  # as many as are dropped: the sum below is exact
    share = (bits >> (32 - num_bits)).astype(jnp.float32) * 2.0**-num_bits
    # The distance between neighbours in the dtype: the power of two of x, by its exponent bits, times 2^-nmant.
    exponent = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    unit = lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-info.nmant
    unit = jnp.maximum(unit, float(info.smallest_subnormal))  # of all numbers below the smallest normal one
    rounded = jnp.floor(x / unit + share) * unit
    is_known = (unit >= float(wide.tiny)) & (jnp.abs(rounded) <= float(info.max)) & (x != 0)
    return jnp.where(is_known, rounded, x).astype(dtype)


def _indices(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the index of each element as two numbers of 32 bits, `uint32[shape]`: of leading dims, and of the rest.

    They are made of `iota`s alone, so that a device computes those of its shard.
    """
    halves, at = [], len(shape)
    for _ in range(2):  # trailing dims first, as many as one number of 32 bits counts
        index, stride = jnp.zeros(shape, jnp.uint32), 1
        while at and stride * shape[at - 1] <= 1 << 32:
            at -= 1
            index += lax.broadcasted_iota(jnp.uint32, shape, at) * jnp.uint32(stride)
            stride *= shape[at]
        halves.append(index)
    return halves[1], halves[0]


def round_state(tx: optax.GradientTransformation, field: str, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that keeps a field of its state, such as Adam's `nu`, in a smaller dtype.

    The optimizer gets it in float32. Its new value is rounded stochastically: to nearest, a moment whose decay changes
    it by less than half a unit would never fall. The state keeps its structure, so that checkpoints are exchangeable.

    Args:
      tx: the optimizer, whose states with such a field count updates in a field `count`.
      field: the name of the field.
      dtype: the dtype to keep it in.

    Raises:
      ValueError: no dtype of the range of float32 and at most its bits; or, in `init`, a state without such a field.

    Example:
      >>> small = zero.round_state(tx, "nu", jnp.bfloat16)
      >>> zero.abstract_state(init_fn, small, mesh=mesh, config=config).opt_state[0].nu["up"].dtype
      dtype(bfloat16)
    """
    check_arguments(tx=tx, field=field, dtype=dtype)
    if dtype is None:
        raise ValueError("round_state: dtype=None: give a floating dtype, such as jnp.bfloat16")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        why = "wider than float32" if jnp.finfo(dtype).bits > 32 else "without the range of float32, and loses values"
        raise ValueError(f"round_state: dtype={jnp.dtype(dtype)} is {why}: give jnp.bfloat16")

    def is_state(x: Any) -> bool:
        return isinstance(x, tuple) and {field, "count"} <= {*getattr(x, "_fields", ())}

    def cast(state: PyTree, convert: Callable[[Any], PyTree]) -> PyTree:
        of_node = lambda x: x._replace(**{field: convert(x)}) if is_state(x) else x  # noqa: E731
        return jax.tree.map(of_node, state, is_leaf=is_state)

    def narrow(state: Any) -> PyTree:
        # By the count of updates: an optimizer has no key, and each update has to draw other bits.
        wide, key = getattr(state, field), jnp.stack([state.count.astype(jnp.uint32), jnp.uint32(_OF_STATE)])
        return round_tree(wide, cast_floating(shapes_of(wide), dtype), key)

    def init(params: PyTree) -> PyTree:
        state = tx.init(params)
        if not any(map(is_state, jax.tree.leaves(state, is_leaf=is_state))):
            raise ValueError(
                f"round_state: no part of the optimizer's state has the fields {field!r} and 'count': name a field "
                "of one that counts its updates, such as 'nu' of optax.scale_by_adam"
            )
        return cast(state, lambda x: cast_floating(getattr(x, field), dtype))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extras: Any) -> tuple[PyTree, PyTree]:
        wide = cast(state, lambda x: cast_floating(getattr(x, field), jnp.float32))
        updates, new_state = optax.with_extra_args_support(tx).update(updates, wide, params, **extras)
        return updates, cast(new_state, narrow)

    return optax.GradientTransformationExtraArgs(init, update)
