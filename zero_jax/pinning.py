"""What a function itself lays over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax import jaxprs
from zero_jax.spec import carries, dims_of


def lays_over(fn: Callable[..., Any], args: Any, axes: Sequence[str]) -> bool:
    """Tells whether `fn(*args)` lays values over any of the axes: by a constraint, a `shard_map` or a nested `jit`."""
    return _lays_over(jax.make_jaxpr(fn)(*args), axes)


def _lays_over(jaxpr: Any, axes: Sequence[str]) -> bool:
    for eqn in jaxprs.open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name == "custom_vmap_call":
            continue  # it says itself what it does when it is mapped
        specs = [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_spec) if _is_spec(x)]
        if any(carries(dims_of(spec, _num_dims(spec)), axes) for spec in specs):
            return True
        if any(_lays_over(inner, axes) for inner in jaxprs.inner_jaxprs(eqn)):
            return True
    return False


def _is_spec(x: Any) -> bool:
    return isinstance(x, (NamedSharding, PartitionSpec))


def _num_dims(spec: Any) -> int:
    return len(spec.spec if isinstance(spec, NamedSharding) else spec)
