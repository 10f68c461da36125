"""What a loss function returns beside the loss, of a batch, made of that of the parts of the batch."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp

from zero_jax.core.tree import PyTree
from zero_jax.dims import Kind
from zero_jax.sharding.precision import wide
from zero_jax.transforms import Combination, PartWeight

# An entry of aux, and its weight if it has one; both stacked over the parts.
Entry = tuple[jax.Array, PartWeight | None]


_MISSING = object()
_MAX_NAMED = 20  # entries in a warning


def of_trace(weight: PartWeight | None, like: PartWeight | None, power: Fraction) -> PartWeight | None:
    """Returns a weight whose function has the equations of another trace, as of one that is not within `shard_map`."""
    if weight is None or like is None:
        return None
    return dataclasses.replace(weight, function=like.function, power=power)


def _without_missing(tree: PyTree) -> PyTree:
    if type(tree) is dict:
        return {name: _without_missing(x) for name, x in tree.items() if x is not _MISSING}
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        return None if tree is _MISSING else tree
    return jax.tree.map(_without_missing, tree, is_leaf=lambda x: x is not tree)


@dataclasses.dataclass(frozen=True)
class CombinedAux:
    """How each entry of aux is combined; those of which that is not known are left out, and not computed.

    Attributes:
      combinations: how, by the path of the entry, in the order of the leaves.
      weights: the weight of each entry, or None; of the arrays in them only the shapes.
    """

    combinations: Mapping[str, Combination]
    weights: Sequence[PartWeight | None]

    def warn(self, *, num_microbatches: int) -> None:
        """Warns of the entries that are not returned."""
        parts, remedy = f"{num_microbatches} microbatches", "num_microbatches=1 returns all of it"
        if num_microbatches == 1:
            parts, remedy = "the examples of each device", "leave grads out of zero.Quantize to have all of it"
        if unknown := [f"{name!r}, because {how.why}" for name, how in self.combinations.items() if how.why]:
            more = [f"and {len(unknown) - _MAX_NAMED} more"] if len(unknown) > _MAX_NAMED else []
            named = "; ".join([*unknown[:_MAX_NAMED], *more])
            warnings.warn(
                f"aux is returned without {named}: it cannot be made of that of {parts}. {remedy}", stacklevel=2
            )

    def entries(self, aux: PyTree, weights: Sequence[PartWeight | None]) -> list[Entry]:
        """Returns the entries of the aux of a part that are combined."""
        entries = []
        for how, x, own, like in zip(
            self.combinations.values(), jax.tree.leaves(aux), weights, self.weights, strict=True
        ):
            assert not how.by or own is not None
            weight = of_trace(own, like, how.count_power) if how.by else None
            entries.extend([] if how.why else [(x, weight)])
        return entries

    def combine(
        self,
        entries: Sequence[Entry],
        join: Callable[[jax.Array, int], jax.Array],
        *,
        lead: int,
        nested: bool = False,
    ) -> list[Entry]:
        """Combines entries that are stacked over parts on `lead` leading dims.

        Args:
          entries: what `entries` returned for each part, stacked.
          join: puts blocks `[..., examples, ...]` of parts in the order of the batch, from them and their dim.
          lead: the number of leading dims.
          nested: whether all parts together are one of more parts.
        """
        known = [how for how in self.combinations.values() if not how.why]
        combined = []
        for how, (x, weight) in zip(known, entries, strict=True):
            parts = _Parts(x, weight, lead=lead, join=join, nested=nested)
            combined.append((parts.combined(how), None if weight is None else weight.joined()))
        return combined

    def whole(self, aux: PyTree, entries: Sequence[Entry]) -> PyTree:
        """Returns the aux of the batch, of the structure of `aux`: a dict lacks what is not known, others have None."""
        values = iter([x for x, _ in entries])
        leaves = [_MISSING if how.why else next(values) for how in self.combinations.values()]
        return _without_missing(jax.tree.unflatten(jax.tree.structure(aux), leaves))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """An entry of parts, stacked on `lead` dims; see `CombinedAux.combine`."""

    values: jax.Array
    weight: PartWeight | None
    lead: int
    join: Callable[[jax.Array, int], jax.Array]
    nested: bool

    def combined(self, how: Combination) -> jax.Array:
        """Returns the entry of the batch."""
        x, dtype, over = self.values, self.values.dtype, tuple(range(self.lead))
        if how.by == "function" and self.weight is not None:
            return self.weight.divisors()[0].astype(dtype)
        if how.kind in (Kind.MAX, Kind.MIN) and jnp.issubdtype(dtype, jnp.bool_):
            return x.any(over) if how.kind is Kind.MAX else x.all(over)
        if how.kind in (Kind.MAX, Kind.MIN):
            return x.max(over) if how.kind is Kind.MAX else x.min(over)
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        x = self.weighed(x.astype(wide(dtype)) if is_float else x)
        if how.kind is Kind.SAME:
            x = x[(0,) * self.lead]
        else:
            x = self.join(x, how.dim) if how.kind is Kind.ROWS else x.sum(over, dtype=x.dtype)
        if self.weight is not None:
            x = x / self.weight.total(nested=self.nested)
        if how.power:
            scale = math.prod(self.values.shape[: self.lead]) ** -float(how.power)
            x = x * (scale if is_float else round(scale))
        return x.astype(dtype)

    def weighed(self, x: jax.Array) -> jax.Array:
        """Returns the values times the divisors of their parts."""
        if self.weight is None:
            return x
        factor = self.weight.divisor.reshape(self.weight.divisor.shape + (1,) * (x.ndim - self.lead))
        # A part of weight 0 may be 0 / 0, and has nothing then; infinity is not dropped.
        return jnp.where((factor == 0) & jnp.isnan(x), 0, factor * x)
