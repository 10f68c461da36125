"""Which params a state has beside its master params, as copies of them in low precision.

An update starts from the master params, so other values for the copies alone would be lost without a word.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import jax

from zero_jax.core.tree import leaf_names
from zero_jax.program.jaxprs import is_array
from zero_jax.training.state.train_state import TrainState

# Of states with copies that the library returned: by the `id` of a master param that lives, those of all, and of copies
_ids: dict[int, tuple[weakref.ref[Any], list[int]]] = {}


def remember_copies(state: TrainState) -> TrainState:
    """Returns a state, of which `warn_of_lost_copies` knows which arrays belong together."""
    if state.master is not None and is_array((leaves := jax.tree.leaves((state.master, state.params)))[0]):
        ids = list(map(id, leaves))
        # Forgotten with the first of them: Python gives the `id` of what is gone to another object.
        _ids[ids[0]] = weakref.ref(leaves[0], lambda _: _ids.pop(ids[0], None)), ids
    return state


def warn_of_lost_copies(state: TrainState, *, who: str) -> None:
    """Warns of params that have been replaced since the library returned them, and their master params have not.

    Args:
      state: a state, whose arrays may come from anywhere.
      who: what has to do with the master params alone, such as "a step updates".

    Warns:
      UserWarning: names the first of these params.
    """
    if state.master is None:
        return
    ids = list(map(id, jax.tree.leaves((state.master, state.params))))
    _, before = _ids.get(ids[0], (None, []))
    if len(before) != len(ids):
        return
    num_params = len(ids) // 2
    is_same = [now == then for now, then in zip(ids, before, strict=True)]
    replaced = [i for i in range(num_params) if is_same[i] and not is_same[num_params + i]]
    if replaced:
        more = f" and {len(replaced) - 1} more were" if len(replaced) > 1 else " was"
        warnings.warn(
            f"leaf {leaf_names(state.params)[replaced[0]]!r} of state.params{more} replaced, and state.master was not: "
            f"{who} the master params alone, and the new values are lost. Write both: "
            "zero.write_leaves(state, {'params/...': value}), or dataclasses.replace(state, params=..., master=...)",
            stacklevel=3,
        )
