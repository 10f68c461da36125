"""What a walk that gathers params is to do: in all of a function, and in the region that it is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.quantized import Quantize


@dataclasses.dataclass(frozen=True)
class GatherFrame:
    """How uses are kept for the backward pass in the region being walked."""

    regather: bool  # gather again in the backward pass, instead of keeping the gathered param as a residual
    prevent_cse: bool  # off in scan bodies, where forward and backward pass are different loops
    ends_forward: bool = False  # its last use is the first that the backward pass needs: not worth gathering twice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a walk is to do; `stored_whole` params are only to have their gradients scattered.

    A function that is `mapped` is one of a device's own examples, under `jax.vmap` over devices: gradients are summed
    across devices at each use.
    """

    mesh: Mesh
    axes: Axes
    stored_whole: bool
    regather: bool
    reduce_dtype: Any
    max_hoisted_bytes: int
    quantize: Quantize | None = None
    mapped: bool = False

    @property
    def product_dtype(self) -> Any:
        """The dtype to compute gradients of weights in, because XLA sums them where they are computed."""
        return None if self.mapped else self.reduce_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRegion:
    """A `jax.checkpoint` that is walked: its jaxpr (so that its id stays its own), and which results are pure."""

    jaxpr: Any
    function: Callable[..., list[Any]]
    pure: list[bool]
