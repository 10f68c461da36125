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
from zero_jax.transforms.passthrough import ELEMENTWISE, REDUCTIONS, is_contraction

# How a value depends on the examples: an int is the dim of the examples, which XLA shards.
UNKNOWN, FREE, MIXED = "unknown", "free", "mixed"
State = int | str

_SAME = ELEMENTWISE | {"convert_element_type", "name", "optimization_barrier", "reduce_precision"}
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


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
        name, inner = eqn.primitive.name, inner_jaxprs(eqn)
        rule = _merge if name in _SAME else _RULES.get(name)
        if inner and rule is None:
            for each in inner:  # what is in it may be called with anything
                self.run(each, [UNKNOWN] * len(open_jaxpr(each)[0].invars))
            return UNKNOWN
        if all(state == FREE for state in operands):
            return UNKNOWN if name.startswith("random") else FREE
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


def _merge(eqn: Any, states: Sequence[State]) -> State:
    """Elementwise: XLA shards all operands as it shards any."""
    dims = {state for state in states if isinstance(state, int)}
    if dims:
        return dims.pop() if len(dims) == 1 else UNKNOWN
    return MIXED if MIXED in states else FREE


def _moved(eqn: Any, states: Sequence[State]) -> State:
    """A transpose, a reshape or a broadcast of a value."""
    state, name = states[0], eqn.primitive.name
    if not isinstance(state, int):
        return state
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "transpose":
        return eqn.params["permutation"].index(state)
    if name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"][state]
    if name == "squeeze":
        return state - sum(dim < state for dim in eqn.params["dimensions"])
    is_major = all(size == 1 for size in before[:state])  # a reshape: examples stay the major dim
    return next((i for i, size in enumerate(after) if size > 1), UNKNOWN) if is_major else UNKNOWN


def _resized(eqn: Any, states: Sequence[State]) -> State:
    """A slice, a part or a padded value, whose examples are all there."""
    state = states[0]
    if not isinstance(state, int):
        return state
    return state if all(var.aval.shape[state] == eqn.invars[0].aval.shape[state] for var in eqn.outvars) else UNKNOWN


def _joined(eqn: Any, states: Sequence[State]) -> State:
    state = _merge(eqn, states)
    return UNKNOWN if state == eqn.params["dimension"] else state


def _reduced(eqn: Any, states: Sequence[State]) -> State:
    state, axes = states[0], eqn.params["axes"]
    if not isinstance(state, int):
        return state
    return MIXED if state in axes else state - sum(axis < state for axis in axes)


def _sorted(eqn: Any, states: Sequence[State]) -> State:
    """XLA sorts a row of all examples on each device; of several rows it may give each device some."""
    state = _merge(eqn, states)
    if not isinstance(state, int):
        return state
    along = eqn.params.get("dimension", eqn.params.get("axis", eqn.invars[0].aval.ndim - 1))
    if along % eqn.invars[0].aval.ndim != state:
        return state
    return MIXED if eqn.invars[0].aval.ndim == 1 else UNKNOWN


def _product(eqn: Any, states: Sequence[State]) -> State:
    contracting, batch = eqn.params["dimension_numbers"]
    examples = [(side, state) for side, state in enumerate(states) if isinstance(state, int)]
    if not examples:
        return MIXED
    if all(state in contracting[side] for side, state in examples):
        pairs = set(zip(contracting[0], contracting[1], strict=True))
        return MIXED if len(examples) == 1 or tuple(states) in pairs else UNKNOWN
    side, state = examples[0]
    if len(examples) == 2 and tuple(states) not in set(zip(batch[0], batch[1], strict=True)):
        return UNKNOWN
    if state in batch[side]:
        return batch[side].index(state)
    free = [
        [i for i in range(eqn.invars[s].aval.ndim) if i not in contracting[s] and i not in batch[s]] for s in (0, 1)
    ]
    return len(batch[0]) + free[side].index(state) + (len(free[0]) if side else 0)


def _attention(eqn: Any, states: Sequence[State]) -> State:
    """Fused attention, of each example along the leading dims."""
    state = _merge(eqn, states)
    return state if state in (0, MIXED) else UNKNOWN


def _gather(eqn: Any, states: Sequence[State]) -> State:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, index = states[0], states[1]
    if numbers.operand_batching_dims:
        return UNKNOWN
    out = range(eqn.outvars[0].aval.ndim)
    if isinstance(operand, int):
        if sizes[operand] != eqn.invars[0].aval.shape[operand]:
            return MIXED if index == MIXED else UNKNOWN
        kept = [i for i in range(len(sizes)) if i not in numbers.collapsed_slice_dims]
        return UNKNOWN if isinstance(index, int) else numbers.offset_dims[kept.index(operand)]
    if isinstance(index, int):
        rows = [i for i in out if i not in numbers.offset_dims]
        return rows[index] if index < len(rows) else UNKNOWN
    return MIXED


def _scattered(eqn: Any, states: Sequence[State]) -> State:
    numbers = eqn.params["dimension_numbers"]
    operand, index, updates = states
    if numbers.operand_batching_dims or isinstance(operand, int):
        return UNKNOWN
    if isinstance(updates, int) and updates in numbers.update_window_dims:
        return UNKNOWN
    return UNKNOWN if isinstance(index, int) and not isinstance(updates, int) else MIXED


_RULES = {
    **dict.fromkeys(("transpose", "broadcast_in_dim", "reshape", "squeeze"), _moved),
    **dict.fromkeys(("slice", "dynamic_slice", "split", "pad"), _resized),
    "concatenate": _joined,
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(_CUMULATIVE, _merge),
    **dict.fromkeys(("sort", "top_k"), _sorted),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"), _scattered),
    "dot_general": _product,
    "zero_attention": _attention,
    "gather": _gather,
}
