"""What a loss function returns beside the loss, of a batch, made of that of the parts of the batch."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from zero_jax.core.tree import PyTree
from zero_jax.dims import Kind, Relation
from zero_jax.sharding.precision import wide

_MISSING = object()
_MAX_NAMED = 20  # entries in a warning


def _without_missing(tree: PyTree) -> PyTree:
    if type(tree) is dict:
        return {name: _without_missing(x) for name, x in tree.items() if x is not _MISSING}
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        return None if tree is _MISSING else tree
    return jax.tree.map(_without_missing, tree, is_leaf=lambda x: x is not tree)


@dataclasses.dataclass(frozen=True)
class CombinedAux:
    """How each entry of aux is combined; those of which that is not known are left out, and not computed."""

    combinations: Mapping[str, Relation]  # how, by the path of the entry, in the order of the leaves

    def warn(self, *, num_microbatches: int, remedy: str) -> None:
        """Warns of the entries that are not returned, and says what to set so that all of them are."""
        parts = f"{num_microbatches} microbatches" if num_microbatches > 1 else "the examples of each device"
        if unknown := [f"{name!r}, because {how.why}" for name, how in self.combinations.items() if how.why]:
            more = [f"and {len(unknown) - _MAX_NAMED} more"] if len(unknown) > _MAX_NAMED else []
            named = "; ".join([*unknown[:_MAX_NAMED], *more])
            warnings.warn(
                f"aux is returned without {named}: it cannot be made of that of {parts}. {remedy} returns all of it",
                stacklevel=2,
            )

    def entries(self, aux: PyTree) -> list[jax.Array]:
        """Returns the entries of the aux of a part that are combined."""
        pairs = zip(self.combinations.values(), jax.tree.leaves(aux), strict=True)
        return [x for how, x in pairs if not how.why]

    def combine(
        self, entries: Sequence[jax.Array], join: Callable[[jax.Array, int], jax.Array], *, lead: int
    ) -> list[jax.Array]:
        """Combines entries of parts that are stacked on `lead` leading dims.

        `join` puts blocks `[..., examples, ...]` of parts in the order of the batch, from them and their dim.
        """
        known = [how for how in self.combinations.values() if not how.why]
        return [_combined(how, x, join, lead) for how, x in zip(known, entries, strict=True)]

    def unflatten(self, aux: PyTree, entries: Sequence[jax.Array]) -> PyTree:
        """Returns the aux of the batch, of the structure of `aux`: a dict lacks what is not known, others have None."""
        values = iter(entries)
        leaves = [_MISSING if how.why else next(values) for how in self.combinations.values()]
        return _without_missing(jax.tree.unflatten(jax.tree.structure(aux), leaves))


def _combined(how: Relation, x: jax.Array, join: Callable[[jax.Array, int], jax.Array], lead: int) -> jax.Array:
    """Returns an entry of the batch, of those of parts; see `CombinedAux.combine`."""
    dtype, over, num_parts = x.dtype, tuple(range(lead)), math.prod(x.shape[:lead])
    if how.kind in (Kind.MAX, Kind.MIN) and jnp.issubdtype(dtype, jnp.bool_):
        return x.any(over) if how.kind is Kind.MAX else x.all(over)
    if how.kind in (Kind.MAX, Kind.MIN):
        return x.max(over) if how.kind is Kind.MAX else x.min(over)
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    x = x.astype(wide(dtype)) if is_float else x
    if how.kind is Kind.SAME:
        x = x[(0,) * lead]
    else:
        x = join(x, how.dim) if how.kind is Kind.ROWS else x.sum(over, dtype=x.dtype)
    if how.power:  # a mean is a sum with power 1
        scale = num_parts ** -float(how.power)
        x = x * (scale if is_float else round(scale))
    return x.astype(dtype)
