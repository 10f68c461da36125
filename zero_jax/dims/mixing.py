"""Finds which dim of each value holds the examples of the batch, and matmuls whose activation is replicated.

An earlier sort, lookup or sum over the examples mixed them, as in a mixture of experts. XLA then computes the result on
every device, and with it the whole gradient of a weight that multiplies it: nothing has to be sent. Asked for a shard
of that gradient, XLA instead cuts the product and the activations, and sends these (docs/gather_on_use.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zero_jax.dims.dim_map import reshape_groups
from zero_jax.dims.primitives import ELEMENTWISE, dim_map, is_contraction, is_float, known_primitives
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.jaxprs import inner_jaxprs, is_literal, is_traced, open_jaxpr
from zero_jax.program.subcalls import CALLS, Subcall, subcall
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import dims_of

# How a value depends on the examples: an int is the dim of the examples, which XLA shards. What is made of no example
# is free; random numbers are sharded as what they are used with.
UNKNOWN, FREE, MIXED, RANDOM = "unknown", "free", "mixed", "random"
State = int | str

_EACH_ITS_OWN = frozenset({"optimization_barrier", "zero_order", "zero_rows"})
LOOPS = frozenset({"scan", "while"})
# What may mix examples and be sharded otherwise, and what takes some of them or has them behind others
_MIXING = frozenset({"concatenate", "dot_general", "gather", "scatter-add", "top_k"})
_PLACED_ANEW = frozenset({"dynamic_slice", "reshape", "slice", "split"})


@dataclasses.dataclass(frozen=True)
class MixedSharding:
    """How an operation that mixes examples, or follows one that does, is best sharded; XLA may choose another way."""

    dim: int | None  # the dim of its results to shard as the batch; None for a sum over examples
    summed: tuple[int, ...] = ()  # for a sum, the dims of both factors that it is over
    # For what is looked up in all examples, or added to them, the dim of the places that each device has a share of;
    # and that of what is added
    places: int | None = None
    rows: int = 0
    # The dim of examples in the first operand where they are placed anew: its cotangent is sharded so, too
    operand: int | None = None
    chunks: int = 0  # the number of chunks of the batch, if the result is a stack of them


class Examples(Dataflow[State]):
    """How each value depends on the examples; what is "unknown" counts as sharded."""

    enters = CALLS | {"cond"} | LOOPS

    def __init__(self, mesh: Mesh, axes: Axes, sizes: frozenset[int] = frozenset()):
        """Takes the sizes that dims of examples have in the batch."""
        super().__init__()
        self.batch_axes, self.num_shards = axes.batch, axis_size(mesh, axes.batch)
        # With other axes XLA may have a use for them that sends less
        is_alone = axes.size_beside_batch(mesh) == 1 < self.num_shards
        self.row_sizes = sizes if is_alone else frozenset[int]()
        self.results: dict[Any, list[State]] = {}
        self.loops: dict[tuple[int, int], set[tuple[State, State]]] = {}
        self.operands: dict[int, list[State]] = {}
        self.moves: dict[int, MixedSharding | None] = {}
        self.chunks: dict[Any, int] = {}  # values of which each slice is a chunk of the batch: the reshape they are of
        self.unsharded: set[Any] = set()  # constants that each device has all of, such as tables of rotary angles
        self.mixes = False

    @property
    def mixed(self) -> frozenset[int]:
        """The `id`s of the products of params with unsharded values."""
        return frozenset(key for key, is_mixed in self.notes.items() if is_mixed)

    def carries(self, eqn: Any) -> dict[int, int]:
        """Returns the carries of a loop that begin without a dim of examples and then have one, and which."""
        sub, found = subcall(eqn), {}
        for i in range(sub.num_carry if sub is not None else 0):
            pairs = self.loops.get((id(eqn), i), set())
            dims = {after for _, after in pairs} - {FREE}
            begins_without = any(isinstance(after, int) and before != after for before, after in pairs)
            if len(dims) == 1 and begins_without:
                found[i] = dims.pop()
        return found

    def run(self, jaxpr: Any, inputs: Sequence[State], env: dict[Any, State] | None = None) -> list[State]:
        """Returns the states of the results of a jaxpr, open or closed."""
        key = id(jaxpr), tuple(inputs)  # equal layers run one jaxpr
        if key not in self.results:
            opened, consts = open_jaxpr(jaxpr)
            self.unsharded.update(var for var, x in zip(opened.constvars, consts, strict=False) if _is_unsharded(x))
            self.results[key] = super().run(jaxpr, inputs, env)
        return self.results[key]

    def constant(self, atom: Any) -> State:
        """Returns the state of a constant; an array may be of examples."""
        return FREE if is_literal(atom) or not atom.aval.ndim or atom in self.unsharded else UNKNOWN

    def join(self, first: State, second: State) -> State:
        """Returns the state of what is one of two: XLA shards both as it shards any."""
        if first == second or second == FREE:
            return first
        if first == FREE:
            return second
        dims = {state for state in (first, second) if isinstance(state, int)}
        return dims.pop() if len(dims) == 1 and UNKNOWN not in (first, second) else UNKNOWN  # beside mixed or random

    def slice_of(self, operand: State) -> State:
        """Returns the state of a slice of an operand."""
        return operand if isinstance(operand, str) else operand - 1 if operand else UNKNOWN

    def stack_of(self, result: State) -> State:
        """Returns the state of a stack of results."""
        return result + 1 if isinstance(result, int) else result

    def of_jaxprs(self, eqn: Any, sub: Subcall, operands: list[State]) -> Sequence[State]:
        """Returns the states of the results of an equation, and notes those of loops and of own derivatives."""
        operands = self.in_chunks(eqn, sub, operands) if sub.kind == "scan" else operands
        results = super().of_jaxprs(eqn, sub, operands)
        if sub.kind in LOOPS:
            for i, pair in enumerate(zip(sub.split(operands)[1], results, strict=False)):
                self.loops.setdefault((id(eqn), i), set()).add(pair)
        elif sub.kind == "custom_vjp":
            self.note_operands(eqn, operands)
        return results

    def in_chunks(self, eqn: Any, sub: Subcall, operands: list[State]) -> list[State]:
        """Returns the states of the operands of a scan, chunks of the batch among them sharded within each chunk.

        The slices of a dim that is sharded would each be on few devices, and so would the work on them.
        """
        first, states = len(operands) - len(sub.split(operands)[2]), [*operands]
        for i, atom in enumerate(eqn.invars[first:], first):
            if not is_literal(atom) and atom in self.chunks:
                move = MixedSharding(1, operand=0, chunks=atom.aval.shape[0])
                self.moves[self.chunks[atom]], states[i] = move, 1
        return states

    def note_chunks(self, eqn: Any, state: State) -> None:
        """Notes a reshape that splits the dim of the examples in two, and values of it element by element."""
        if len(eqn.outvars) != 1 or not (self.chunks or eqn.primitive.name == "reshape"):
            return
        (made,), shape = eqn.outvars, eqn.outvars[0].aval.shape
        self.chunks.pop(made, None)
        if eqn.primitive.name in ELEMENTWISE:
            of = (atom for atom in eqn.invars if not is_literal(atom) and atom.aval.shape == shape)
            self.chunks.update((made, self.chunks[atom]) for atom in of if atom in self.chunks)
        elif eqn.primitive.name == "reshape" and state == 0 and self.row_sizes and len(shape) > 1:
            is_split = shape[1] > 1 and not dim_map(eqn).blocks[1]  # both are of one run
            if is_split and shape[1] % self.num_shards == 0:
                self.chunks[made] = id(eqn)

    def note_operands(self, eqn: Any, operands: list[State]) -> None:
        """Notes the states of the operands of an equation, joined where it is evaluated several times."""
        known = zip(operands, self.operands.get(id(eqn), operands), strict=True)
        self.operands[id(eqn)] = [self.join(*pair) for pair in known]

    def operation(self, eqn: Any, operands: list[State]) -> list[State]:
        """Returns the states of the results of an operation, and notes what it mixes."""
        if is_product := is_contraction(eqn):
            is_mixed = _is_ragged(eqn) or (MIXED in operands[:2] and set(operands[:2]) <= {MIXED, FREE})
            self.notes[id(eqn)] = is_mixed and self.notes.get(id(eqn), True)  # each time that it is run
        is_joint = eqn.primitive.name in ELEMENTWISE and FREE in operands and len({*operands}) == 2
        if is_joint or is_product or eqn.primitive.name == "sort":
            self.note_operands(eqn, operands)
        if eqn.primitive.name in _EACH_ITS_OWN:
            return operands
        if eqn.primitive.name == "zero_pipeline":
            return [FREE if dim is None else dim for dim in eqn.params["loop"].dims]
        move = self.move(eqn, operands)
        if self.moves.setdefault(id(eqn), move) is not move and self.moves[id(eqn)] != move:  # not the same each time
            self.moves[id(eqn)] = None
        state = self.state(eqn, operands) if move is None or move.dim is None else move.dim
        self.note_chunks(eqn, state)
        if not isinstance(state, int):
            return [state] * len(eqn.outvars)
        # Parts of a dim that are too few for all devices are sharded in ways of their own.
        return [UNKNOWN if var.aval.shape[state] % self.num_shards else state for var in eqn.outvars]

    def move(self, eqn: Any, operands: list[State]) -> MixedSharding | None:
        """Returns how an operation is best sharded, if it mixes examples or follows one that does."""
        name = eqn.primitive.name
        if name in _PLACED_ANEW:
            return self.placed_anew(eqn, operands)
        if not (self.mixes or name in _MIXING):
            return None
        examples = [(i, x) for i, x in enumerate(operands) if isinstance(x, int)]
        dims = {dim for _, dim in examples}
        if self.mixes and name in ELEMENTWISE and UNKNOWN in operands and len(dims) == 1:
            # Examples and what was made of all: a place of the result belongs to the example that is there.
            return MixedSharding(dims.pop())
        if name == "dot_general" and len(examples) == 2 and any({*examples} == {*x} for x in dim_map(eqn).reduced):
            return MixedSharding(None, tuple(dim for _, dim in examples))
        if name in ("gather", "scatter-add"):
            return self.exchange(eqn, operands)
        if name == "concatenate" and dims and {*operands} == {eqn.params["dimension"]}:
            # Examples behind others, as answers that were chosen and rejected ones, are a batch of so many.
            (dim,), (result,) = dims, eqn.outvars
            is_even = bool(self.row_sizes) and result.aval.shape[dim] % self.num_shards == 0
            return MixedSharding(dim) if is_even and len(operands) > 1 else None
        if name != "top_k" or not dims or dim_map(eqn).to(*examples) is not None:
            return None
        # XLA may give each device some of several rows. What is chosen stands for the examples that it is of.
        (dim,), shape = dims, eqn.outvars[0].aval.shape
        can_be_sharded = math.prod(shape) > shape[dim] and shape[dim] % self.num_shards == 0
        self.mixes = self.mixes or can_be_sharded
        return MixedSharding(dim) if can_be_sharded else None

    def placed_anew(self, eqn: Any, operands: list[State]) -> MixedSharding | None:
        """Returns that examples which are no longer where their shards are, as half of them, are a batch of so many."""
        operand = operands[0]
        if not (self.row_sizes and isinstance(operand, int)) or dim_map(eqn).block((0, operand)) is not None:
            return None
        dim, shapes = operand, [var.aval.shape for var in (eqn.invars[0], *eqn.outvars)]
        if eqn.primitive.name == "reshape":  # they are behind others in a run of dims that are merged
            runs = (after for before, after in reshape_groups(*shapes) if dim in before)
            targets = [i for after in runs for i in after if shapes[1][i] > 1]
            if len(targets) != 1 or eqn.params.get("dimensions"):
                return None
            dim = targets[0]
        is_even = all(shape[dim] % self.num_shards == 0 for shape in shapes[1:])
        return MixedSharding(dim, operand=operand) if is_even else None

    def exchange(self, eqn: Any, operands: list[State]) -> MixedSharding | None:
        """Returns how examples at given places of all are best read, or sums of them written, as of a graph's nodes.

        They are rows of one dim, whole ones, and each device has a share of the places.
        """
        numbers, (rows, index, *updates) = eqn.params["dimension_numbers"], operands
        shapes = [var.aval.shape for var in (*eqn.invars, *eqn.outvars)]
        if not isinstance(index, int) or numbers.operand_batching_dims:
            return None
        if eqn.primitive.name == "gather":
            at, removed, kept = numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims
        else:
            at, removed = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
            kept = numbers.update_window_dims
        few = shapes[2]  # the result of a lookup, or the updates
        places = [dim for dim in range(len(few)) if dim not in kept]
        is_whole = [few[dim] for dim in kept] == [size for dim, size in enumerate(shapes[0]) if dim not in at]
        if at != (0,) or removed != at or not is_whole or index >= len(places):
            return None
        num_rows, share = shapes[0][0], few[places[index]]
        if num_rows not in self.row_sizes or num_rows % self.num_shards or share % self.num_shards:
            return None
        if updates:
            fits = rows == FREE and updates == [places[index]] and is_float(eqn.outvars[0].aval)
            return MixedSharding(0, places=index, rows=places[index]) if fits else None
        # Of few rows each device may rather send those that it has.
        is_many = math.prod(few[i] for i in places) >= num_rows
        return MixedSharding(places[index], places=index) if rows == 0 and is_many else None

    def state(self, eqn: Any, operands: list[State]) -> State:
        """Returns the state of the results of an operation."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None and (inner := inner_jaxprs(eqn)):
            for each in inner:  # what is in it may be called with anything
                self.run(each, [UNKNOWN] * len(open_jaxpr(each)[0].invars))
            return UNKNOWN
        states = {*operands}
        if states <= {FREE, RANDOM}:
            return RANDOM if RANDOM in states or eqn.primitive.name.startswith("random") else FREE
        if _is_ragged(eqn):
            return MIXED
        if eqn.primitive.name == "zero_reshard" and (dim := self.sharded_dim(eqn)) is not None:
            return dim
        if RANDOM in states and any(isinstance(state, int) for state in states):  # sharded as the examples are
            operands = [FREE if state == RANDOM else state for state in operands]
        return UNKNOWN if rule is None or UNKNOWN in operands or RANDOM in operands else rule(eqn, operands)

    def sharded_dim(self, eqn: Any) -> int | None:
        """Returns the dim that a `zero_reshard` shards a value along as the batch is, if it does."""
        of_last = [dims_of(x, eqn.outvars[0].aval.ndim) for x in eqn.params["forward"].shardings[-1:]]
        return next((i for dims in of_last for i, axes in enumerate(dims) if axes == self.batch_axes), None)


def _is_unsharded(constant: Any) -> bool:
    if is_traced(constant):
        return False
    return not isinstance(constant, jax.Array) or constant.sharding.is_fully_replicated


def _is_ragged(eqn: Any) -> bool:
    """Tells whether it is a product over groups of rows, which XLA does not shard (unless it has batch dims)."""
    if not eqn.primitive.name.startswith("ragged_dot"):
        return False
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    return numbers is not None and not numbers.dot_dimension_numbers[1][0]


def _carried(eqn: Any, states: Sequence[State]) -> State:
    """What is of examples at a place of the result is along the dim that theirs is; a reduction over it mixes them."""
    examples = [(i, state) for i, state in enumerate(states) if isinstance(state, int)]
    if not examples:
        return MIXED if MIXED in states else FREE
    known = dim_map(eqn)
    if any({*examples} <= {*dims} for dims in known.reduced):
        return MIXED
    first, *others = {known.block(dim) for dim in examples}
    return UNKNOWN if others or first is None else first


def _same(_: Any, states: Sequence[State]) -> State:
    """XLA shards all operands as it shards any, along whichever dim it works."""
    dims = {state for state in states if isinstance(state, int)}
    if dims:
        return dims.pop() if len(dims) == 1 else UNKNOWN
    return MIXED if MIXED in states else FREE


def _sorted(eqn: Any, states: Sequence[State]) -> State:
    """XLA sorts a row of all examples on each device; of several rows it may give each device some."""
    is_row = eqn.invars[0].aval.ndim == 1 and any(isinstance(state, int) for state in states)
    return MIXED if is_row else _carried(eqn, states)


def _gather(eqn: Any, states: Sequence[State]) -> State:
    found = _carried(eqn, states)
    if isinstance(found, int) or eqn.params["dimension_numbers"].operand_batching_dims:
        return found if isinstance(found, int) else UNKNOWN
    return MIXED if found == UNKNOWN and states[1] == MIXED else found  # some of the examples, for all devices


def _scattered(eqn: Any, states: Sequence[State]) -> State:
    """Examples that keep their dim, or else all of them: what they are written to is then on all devices."""
    numbers = eqn.params["dimension_numbers"]
    operand, index, updates = states
    if isinstance(found := _carried(eqn, states), int):
        return found
    if numbers.operand_batching_dims or isinstance(operand, int):
        return UNKNOWN
    if isinstance(updates, int) and updates in numbers.update_window_dims:
        return UNKNOWN
    return UNKNOWN if isinstance(index, int) and not isinstance(updates, int) else MIXED


_OF_KIND = {
    **dict.fromkeys(("elementwise", "copy", "cast", "cumulative"), _same),
    "sort": _sorted,
    "scatter": _scattered,
}
# XLA does not look into calls of libraries, and what is placed is sharded as that says.
_RULES = {
    **{
        name: _OF_KIND.get(x.kind, _carried)
        for name, x in known_primitives().items()
        if x.kind not in ("factorization", "library", "place")
    },
    "gather": _gather,
    "zero_reshard": _carried,
}
