"""Params in host memory: each is fetched where a function uses it, and its gradient stays on the devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from zero_jax.core.tree import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class HostParam:
    """A leaf of the params of a function that `gather_on_use` made, in host memory.

    Attributes:
      array: the param.
      dtype: what it is cast to when it has been fetched.
      gradient: an array of its shape and that dtype, on the devices, which nothing reads: the param's cotangent is
        its. None where there is no gradient.
    """

    array: jax.Array
    dtype: Any
    gradient: jax.Array | None = None

    @classmethod
    def of(cls, array: jax.Array, dtype: Any) -> HostParam:
        """Returns a param that is used in a dtype if it is floating, and as it is otherwise or where that is None."""
        is_cast = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        return cls(array=array, dtype=jnp.dtype(dtype) if is_cast else array.dtype)

    @property
    def used_shape(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype that it is used in: what a function of it is traced for."""
        return jax.ShapeDtypeStruct(self.array.shape, self.dtype)


def used_shapes(params: PyTree) -> PyTree:
    """Returns params with shapes in the place of those in host memory."""
    return jax.tree.map(lambda x: x.used_shape if isinstance(x, HostParam) else x, params)


@functools.cache
def fetch_as(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns the function that fetches a param, in a dtype."""
    return lambda array: jax.device_put(array, jax.memory.Space.Device).astype(dtype)


@jax.custom_vjp
def fetch(array: jax.Array, gradient: jax.Array) -> jax.Array:
    """Fetches a param, whose cotangent goes to another array."""
    return fetch_as(gradient.dtype)(array)


fetch.defvjp(lambda array, gradient: (fetch(array, gradient), None), lambda _, cotangent: (None, cotangent))


def differentiated(param: Any, sharding: NamedSharding) -> jax.Array:
    """Returns what to differentiate a function by for a leaf of its params: the leaf, or what stands for it."""
    if not isinstance(param, HostParam):
        return param
    return lax.with_sharding_constraint(jnp.zeros(param.array.shape, param.dtype), sharding)


def with_gradient(param: Any, array: jax.Array) -> Any:
    """Returns a leaf of params whose cotangent is that of an array, of `differentiated`."""
    return dataclasses.replace(param, gradient=array) if isinstance(param, HostParam) else array
