"""A region of a function that is recomputed: what of it is kept for the backward pass, and where."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.attention import RESIDUALS
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.transforms.remat.kept import is_kept, keep, keep_names
from zero_jax.transforms.remat.policies import Remat
from zero_jax.transforms.remat.values import (
    Mark,
    MarkedValues,
    all_values,
    attention_cores,
    fused_attention,
    is_large,
    pinned_dims,
    placed_dim,
    products_with_weights,
)

# The names of what is kept as it is, and of what is kept elsewhere.
KEPT, PLACED = "zero_kept", "zero_residual"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematSetting:
    """What a transform is to do, and for which mesh; `batch_sizes` tell the dims of examples."""

    remat: Remat
    mesh: Mesh
    axes: Axes
    batch_sizes: frozenset[int]

    @property
    def num_shards(self) -> int:
        """Devices along the axes of the model."""
        return axis_size(self.mesh, self.axes.model)

    def marked(self, jaxpr: Any, marks: Sequence[Mark]) -> MarkedValues:
        """Returns what is known of the values of an open jaxpr, from the marks of its inputs."""
        return MarkedValues(jaxpr, marks, mesh=self.mesh, model=self.axes.model)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RematRegion:
    """A flat jaxpr that is to be recomputed.

    Attributes:
      setting: what to do.
      jaxpr: the open jaxpr.
      consts: its constants.
      marks: for each input what is known of it; what is held is alive beside the region, and not kept elsewhere.
      kind: what it is.
      prevent_cse: as of `jax.checkpoint`.
      own_policy: the policy of the model's `jax.checkpoint` that this is, with the policy `own`.
    """

    setting: RematSetting
    jaxpr: Any
    consts: Sequence[Any]
    marks: Sequence[Mark]
    kind: str
    prevent_cse: bool = True
    own_policy: Callable[..., Any] | None = None

    @functools.cached_property
    def known(self) -> MarkedValues:
        """What is known of its values; inputs that the region itself shards over the model are marked so."""
        known = self.setting.marked(self.jaxpr, self.marks)
        for eqn in self.jaxpr.eqns:
            dims = pinned_dims(eqn, self.setting.axes.model)
            for var in jaxprs.variables(eqn) if dims is not None else ():
                if known.marks[var].dims is None:
                    known.marks[var] = dataclasses.replace(known.marks[var], dims=dims)
        return known

    @functools.cached_property
    def kept(self) -> set[Any]:
        """What the policy keeps of what the region makes."""
        remat, jaxpr = self.setting.remat, self.jaxpr
        if remat.policy == "full":
            return set()
        if remat.policy == "own":
            return {v for eqn in jaxpr.eqns if is_kept(self.own_policy, eqn) for v in eqn.outvars}
        if remat.policy == "names":
            named = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "name" and eqn.params["name"] in remat.names)
            return {var for eqn in named for var in eqn.outvars}
        products = products_with_weights(self.known)
        if remat.policy == "dots":
            return products
        cores = self.cores
        if remat.residuals == "device":
            return all_values(self.known) - cores.inner - self.fused
        # What is between the products is cheap to compute again, and would have to be gathered otherwise.
        return (products | cores.results) - cores.inner

    @functools.cached_property
    def fused(self) -> set[Any]:
        """What fused attention makes, whose log-sum-exps the backward pass needs, too."""
        return fused_attention(self.jaxpr)

    @functools.cached_property
    def cores(self) -> Any:
        """The cores of attention in the region."""
        return attention_cores(self.known)

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The policy for `jax.checkpoint`."""
        remat = self.setting.remat
        ours = [KEPT, PLACED] if remat.residuals != "offloaded" else [KEPT]
        away = [PLACED] if remat.residuals == "offloaded" else []
        # Names and products may also be in loops within the region, where nothing is placed.
        fused = [RESIDUALS] if remat.policy in ("dots", "attention") else []
        (away if remat.residuals == "offloaded" else ours).extend([*remat.names, *fused])
        return keep_names(on_device=ours, on_host=away, otherwise=self.own_policy)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Evaluates the region with its residuals named and placed."""
        inputs = [
            self.place(var, array) if not mark.held and self.leaves(var) else array
            for var, array, mark in zip(self.jaxpr.invars, arrays, self.marks, strict=True)
        ]

        def equation(eqn: Any, values: list[Any]) -> list[Any]:
            outs = zip(eqn.outvars, jaxprs.bind(eqn, values), strict=True)
            return [self.place(var, out) if var in self.kept else out for var, out in outs]

        return evaluate(self.jaxpr, self.consts, inputs, equation)

    def plain(self, *arrays: Any) -> list[Any]:
        """Evaluates the region without recomputation."""
        return evaluate(self.jaxpr, self.consts, arrays)

    def not_sharded(self) -> list[str]:
        """Says for each input that would be kept sharded, but is not, why."""
        if self.setting.remat.residuals != "sharded":
            return []
        inputs = [var for var, mark in zip(self.jaxpr.invars, self.marks, strict=True) if not mark.held]
        large = [var for var in inputs if self.known.kind(var) == "value" and is_large(var.aval)]
        sharded = {var for var in large if self.known.marks[var].dims is not None}
        return [
            "already sharded over `model`" if var in sharded else f"no dim of {var.aval.shape} divides"
            for var in large
            if not self.leaves(var)
        ]

    def leaves(self, var: Any) -> bool:
        """Tells whether an input is worth keeping elsewhere than where it is."""
        if self.setting.remat.residuals == "device" or self.known.kind(var) != "value" or not is_large(var.aval):
            return False
        return self.setting.remat.residuals == "offloaded" or self.dim(var) is not None

    def dim(self, var: Any) -> int | None:
        """Returns the dim that a residual is sharded on over the model, or None."""
        if self.setting.num_shards == 1 or self.known.marks[var].dims is not None:
            return None
        return placed_dim(var.aval.shape, self.setting.num_shards, self.setting.batch_sizes)

    def place(self, var: Any, array: Any) -> Any:
        """Names a value for the policy to keep, and says where."""
        remat = self.setting.remat
        if remat.residuals == "device" or not is_large(var.aval):
            return checkpoint_name(array, KEPT)
        dim = self.dim(var)
        if dim is None:
            return checkpoint_name(array, PLACED if remat.residuals == "offloaded" else KEPT)
        # Every other dim stays as it is. Both sides need both pins: without them the partitioner makes the copy whole,
        # or shards what is computed like the copy. It takes the last of a chain of pins for all that uses the value, so
        # the value has a pin of its own, and a barrier ends the chain.
        shard, whole = (self.sharding(array.ndim, dim, axes) for axes in (self.setting.axes.model, None))
        array = reshard(array, forward=Chain((whole,)), backward=Chain((whole,)))
        return keep(array, name=PLACED, shard=Chain((shard,), barrier=True), unshard=Chain((shard, whole)))

    def sharding(self, num_dims: int, dim: int, axes: tuple[str, ...] | None) -> NamedSharding:
        """Returns the sharding of one dim, with the others as they are."""
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * num_dims
        entries[dim] = axes
        return NamedSharding(self.setting.mesh, PartitionSpec(*entries))
