"""Products whose factor XLA leaves unsharded, though it is made of the batch: its examples were mixed.

After a sort, a lookup or a sum over the examples, as in a mixture of experts, each device has all of the result, and
so all of the gradient of a weight that multiplies it: no device needs to send any of it. Asked for a shard of that
gradient, XLA instead cuts the product and the activations, and sends these (docs/gather_on_use.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_jax.core.jaxprs import inner_jaxprs, is_literal, open_jaxpr
from zero_jax.core.passes import Pass
from zero_jax.core.subcalls import CALLS
from zero_jax.transforms.dim_map import CUMULATIVE, ELEMENTWISE, REDUCTIONS, dim_map
from zero_jax.transforms.passthrough import is_contraction

# How a value depends on the examples: an int is the dim of the examples, which XLA shards.
UNKNOWN, FREE, MIXED = "unknown", "free", "mixed"
State = int | str

_SAME = ELEMENTWISE | CUMULATIVE | {"convert_element_type", "optimization_barrier"}
_CARRIED = REDUCTIONS | frozenset(
    "broadcast_in_dim concatenate dot_general dynamic_slice pad slice split squeeze transpose zero_attention".split()
)


def mixed_products(jaxpr: Any, inputs: Sequence[State]) -> frozenset[int]:
    """Returns the `id`s of the products of params with unsharded values; "unknown" counts as sharded.

    Args:
      jaxpr: open or closed.
      inputs: for each input, the dim that its examples are along, or `FREE` for params, or `UNKNOWN`.
    """
    mixing = _Mixing()
    mixing.run(jaxpr, inputs)
    return frozenset(key for key, is_mixed in mixing.notes.items() if is_mixed)


class _Mixing(Pass[State]):
    """How each value depends on the examples; notes of each product, by `id`, whether every time a factor is mixed."""

    enters = CALLS | {"scan"}

    def __init__(self):
        super().__init__()
        self.results: dict[Any, list[State]] = {}

    def run(self, jaxpr: Any, inputs: Sequence[State], env: dict[Any, State] | None = None) -> list[State]:
        key = id(jaxpr), tuple(inputs)  # equal layers run one jaxpr
        if key not in self.results:
            self.results[key] = super().run(jaxpr, inputs, env)
        return self.results[key]

    def constant(self, atom: Any) -> State:
        return FREE if is_literal(atom) or not atom.aval.ndim else UNKNOWN

    def join(self, first: State, second: State) -> State:
        return first if first == second else UNKNOWN

    def slice_of(self, operand: State) -> State:
        return operand if isinstance(operand, str) else operand - 1 if operand else UNKNOWN

    def stack_of(self, result: State) -> State:
        return result + 1 if isinstance(result, int) else result

    def operation(self, eqn: Any, operands: list[State]) -> list[State]:
        if is_contraction(eqn):
            is_mixed = _is_ragged(eqn) or (MIXED in operands[:2] and set(operands[:2]) <= {MIXED, FREE})
            self.notes[id(eqn)] = is_mixed and self.notes.get(id(eqn), True)
        return [self.state(eqn, operands)] * len(eqn.outvars)

    def state(self, eqn: Any, operands: list[State]) -> State:
        """Returns the state of the results of an operation."""
        rule, inner = _RULES.get(eqn.primitive.name), inner_jaxprs(eqn)
        if inner and rule is None:
            for each in inner:  # what is in it may be called with anything
                self.run(each, [UNKNOWN] * len(open_jaxpr(each)[0].invars))
            return UNKNOWN
        if all(state == FREE for state in operands):
            return UNKNOWN if eqn.primitive.name.startswith("random") else FREE
        if _is_ragged(eqn):
            return MIXED
        return UNKNOWN if rule is None or UNKNOWN in operands else rule(eqn, operands)


def _is_ragged(eqn: Any) -> bool:
    """Tells whether it is a product over groups of rows, which XLA does not shard (unless it has batch dims)."""
    if not eqn.primitive.name.startswith("ragged_dot"):
        return False
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    return numbers is not None and not numbers.dot_dimension_numbers[1][0]


# --- rules: from the states of an equation's inputs, none of them unknown, to that of its results --------------------


def _carried(eqn: Any, states: Sequence[State]) -> State:
    """What is of examples at a place of the result is along the dim that theirs is; a reduction over it mixes them."""
    examples = [(i, state) for i, state in enumerate(states) if isinstance(state, int)]
    if not examples:
        return MIXED if MIXED in states else FREE
    known = dim_map(eqn)
    if any({*examples} <= {*dims} for dims in known.reduced):
        return MIXED
    first, *others = {known.to(dim) for dim in examples}
    return UNKNOWN if others or first is None else first


def _same(eqn: Any, states: Sequence[State]) -> State:
    """XLA shards all operands as it shards any, along whichever dim it works."""
    del eqn
    dims = {state for state in states if isinstance(state, int)}
    if dims:
        return dims.pop() if len(dims) == 1 else UNKNOWN
    return MIXED if MIXED in states else FREE


def _reshaped(eqn: Any, states: Sequence[State]) -> State:
    """Examples stay the major dim."""
    (state,), before, after = states, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not isinstance(state, int):
        return state
    is_major = all(size == 1 for size in before[:state])
    return next((i for i, size in enumerate(after) if size > 1), UNKNOWN) if is_major else UNKNOWN


def _sorted(eqn: Any, states: Sequence[State]) -> State:
    """XLA sorts a row of all examples on each device; of several rows it may give each device some."""
    is_row = eqn.invars[0].aval.ndim == 1 and any(isinstance(state, int) for state in states)
    return MIXED if is_row else _carried(eqn, states)


def _gather(eqn: Any, states: Sequence[State]) -> State:
    if eqn.params["dimension_numbers"].operand_batching_dims:
        return UNKNOWN
    found = _carried(eqn, states)
    return MIXED if found == UNKNOWN and states[1] == MIXED else found  # some of the examples, for all devices


def _scattered(eqn: Any, states: Sequence[State]) -> State:
    numbers = eqn.params["dimension_numbers"]
    operand, index, updates = states
    if numbers.operand_batching_dims or isinstance(operand, int):
        return UNKNOWN
    if isinstance(updates, int) and updates in numbers.update_window_dims:
        return UNKNOWN
    return UNKNOWN if isinstance(index, int) and not isinstance(updates, int) else MIXED


_RULES = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_CARRIED, _carried),
    "reshape": _reshaped,
    **dict.fromkeys(("sort", "top_k"), _sorted),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), _scattered),
    "gather": _gather,
}
