"""Products whose factor XLA leaves unsharded, though it is made of the batch: its examples were mixed.

After a sort, a lookup or a sum over the examples, as in a mixture of experts, each device has all of the result, and
so all of the gradient of a weight that multiplies it: no device needs to send any of it. Asked for a shard of that
gradient, XLA instead cuts the product and the activations, and sends these (docs/gather_on_use.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from zero_jax.core.jaxprs import is_literal
from zero_jax.core.subcalls import equations
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.transforms.passthrough import is_contraction
from zero_jax.transforms.propagation.kinds import ValueSharding
from zero_jax.transforms.propagation.propagate import value_shardings
from zero_jax.transforms.propagation.rules import is_ragged


def mixed_products(
    jaxpr: Any, params: Sequence[Any], values: Sequence[Any], *, mesh: Mesh, axes: Axes
) -> frozenset[int]:
    """Returns the `id`s of the products of params with unsharded values; what is not known counts as sharded.

    Args:
      jaxpr: open or closed.
      params: its first inputs, as they are gathered.
      values: its other inputs.
      mesh: the mesh.
      axes: the roles of its axes.
    """
    inputs = [ValueSharding(dims=((),) * x.aval.ndim) for x in params]
    for x in values:
        is_batch = getattr(x, "ndim", 0) > 0 and x.shape[0] % axis_size(mesh, axes.batch) == 0
        dims = (axes.batch, *((),) * (x.ndim - 1)) if is_batch else ((),) * getattr(x, "ndim", 0)
        inputs.append(ValueSharding(dims=dims, varies=True, exact=is_batch))
    shardings = value_shardings(jaxpr, inputs, sizes=dict(mesh.shape))

    def is_mixed(eqn: Any) -> bool:
        factors = [shardings[x] for x in eqn.invars[:2] if not is_literal(x) and x in shardings]
        is_unsharded = all(x.exact and not x.axes & {*axes.batch} for x in factors)
        return is_ragged(eqn) or (is_unsharded and any(x.varies for x in factors))

    return frozenset(id(eqn) for eqn in equations(jaxpr) if is_contraction(eqn) and is_mixed(eqn))
