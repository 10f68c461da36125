"""Convolutions whose kernel's gradient XLA partitions wrongly where a mesh has axes that no batch is sharded over.

Those in groups and depthwise ones have the multiple of it by the size of these axes, those of kernels that are sharded
along the window are wrong if the input is dilated (docs/xla_faults.md). Each device computes the gradient of its own
examples instead (`weight_grads.product`), and these are summed.
"""

from __future__ import annotations

from typing import Any

from zero_jax.core.jaxprs import source_line
from zero_jax.core.subcalls import equations_of, subcall
from zero_jax.sharding.spec import Dims


def is_partitioned_wrongly(eqn: Any, dims: Dims | None = None) -> bool:
    """Tells whether an equation is such a convolution; `dims` says how its kernel is sharded."""
    if eqn.primitive.name != "conv_general_dilated":
        return False
    window = eqn.params["dimension_numbers"].rhs_spec[2:]
    has_groups = eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1
    return has_groups or (dims is not None and any(dims[i] for i in window))


def holds_convolution(eqn: Any) -> bool:
    """Tells whether an equation is such a convolution, or runs one, other than in a `shard_map`."""
    return any(map(is_partitioned_wrongly, equations_of(eqn, skip=["shard_map"])))


def refuse_convolution(eqn: Any) -> None:
    """Raises `ValueError` for such a convolution in an equation that is not looked into."""
    if subcall(eqn) is not None and holds_convolution(eqn):
        found = next(filter(is_partitioned_wrongly, equations_of(eqn, skip=["shard_map"])))
        kernel = list(found.invars[1].aval.shape)
        raise ValueError(
            f"a convolution in groups, of a kernel {kernel}, is within {eqn.primitive.name} at {source_line(eqn)}: XLA "
            "computes a wrong gradient of its kernel on a mesh with axes that the batch is not sharded over "
            "(docs/xla_faults.md): take a mesh without `model` axes, or call the convolution in jax.shard_map"
        )
