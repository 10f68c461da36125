"""What a loss function reads that differs from microbatch to microbatch: model state that it changes, and its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zero_jax.core.tree import PyTree, leaves_by_name
from zero_jax.core.variables import as_variables, model_state_names
from zero_jax.dims import Kind
from zero_jax.program.loss import LossProgram
from zero_jax.program.passes import Dependence
from zero_jax.program.subcalls import CALLS
from zero_jax.training.loss.function import model_state_changes
from zero_jax.transforms import Combination

_DRAWN, _REPEATED = -1, -2  # by the key or by model state; by a key of its own, which all parts have


@dataclasses.dataclass(frozen=True)
class Reads:
    """What the results of a loss function are made of.

    Attributes:
      passes_state: whether model state is changed.
      loss: for each leaf of model state that the loss is made of and that the loss function changes, its path and the
        line of the change.
      aux: for each leaf of aux by its path why it may be another one in each microbatch; empty if it is not.
      drawn: the leaves of aux that random numbers are in.
      repeated: those of numbers that are the same in each microbatch.
    """

    passes_state: bool
    loss: tuple[str, ...]
    aux: Mapping[str, str]
    drawn: frozenset[str]
    repeated: frozenset[str]

    @property
    def another_loss(self) -> str:
        """Says why the loss on microbatches may be another one; empty if model state does not make it one."""
        more = f" (and {len(self.loss) - 1} more)" if len(self.loss) > 1 else ""
        return f"it reads {self.loss[0]}{more}: a microbatch reads what the one before made" if self.loss else ""

    def combinations(self, known: Mapping[str, Combination]) -> dict[str, Combination]:
        """Returns how entries of aux are combined, given how they are if all parts read the same."""
        return {name: self._combination(name, how) for name, how in known.items()}

    def _combination(self, name: str, how: Combination) -> Combination:
        if how.why or how.kind is Kind.SAME:  # that of the first microbatch, which reads what the batch does
            is_own = not how.why and name in self.drawn
            return Combination(why="it is drawn with the key of each microbatch") if is_own else how
        why = "it is drawn with a key that all microbatches have" if name in self.repeated else self.aux[name]
        return Combination(why=why) if why else how


def reads_of(program: LossProgram, variables: PyTree, batch: PyTree, key: jax.Array) -> Reads:
    """Returns what the results of a loss function are made of, by its trace; what is not known counts as read.

    The program is `(variables, batch, key) -> (loss, (aux, model_state, ...))`.
    """
    traced = program.trace(variables, batch, key)
    lines = model_state_changes(program, variables, batch, key)
    num_params = traced.num_params - len(lines)
    made_of = [frozenset[int]()] * num_params
    made_of += [frozenset() if line is None else frozenset({i}) for i, line in enumerate(lines)]
    made_of += [frozenset()] * len(jax.tree.leaves(batch)) + [frozenset({_DRAWN})] * len(jax.tree.leaves(key))
    results = jax.tree.unflatten(jax.tree.structure(traced.out_shape), _Reads().run(traced.closed, made_of))
    names = model_state_names(as_variables(variables).model_state)

    def told(marks: frozenset[int]) -> tuple[str, ...]:
        changes = [(names[i], lines[i]) for i in sorted(marks - {_DRAWN, _REPEATED})]
        return tuple(f"{name!r}, which it changes" + (f" at {line}" if line else "") for name, line in changes)

    loss, (aux, *_) = results
    leaves = leaves_by_name(aux)
    return Reads(
        passes_state=any(line is not None for line in lines),
        loss=told(loss),
        aux={name: "".join(f"it reads {x}" for x in told(marks)[:1]) for name, marks in leaves.items()},
        drawn=frozenset(name for name, marks in leaves.items() if _DRAWN in marks),
        repeated=frozenset(name for name, marks in leaves.items() if _REPEATED in marks),
    )


class _Reads(Dependence):
    """Which marked inputs each value is made of; numbers that are drawn by model state (a count) are as random."""

    enters = (CALLS - {"custom_vjp"}) | {"cond", "scan"}

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        made_of = frozenset().union(*operands)
        if eqn.primitive.name.startswith(("random_", "rng_", "threefry")):
            made_of = frozenset({_DRAWN if made_of - {_REPEATED} else _REPEATED})
        return [made_of] * len(eqn.outvars)
