"""The kernels that a compiler may make of a jaxpr, with their FLOPs and bytes.

Elementwise work counts as fused into the products, reductions and lookups that read its results, and is done again for
each of them, unless writing a result once moves fewer bytes. A product writes what the chain of elementwise work that
follows it makes of its result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from zero_jax.attention import attention_work
from zero_jax.core.device_put import is_on_host
from zero_jax.dims import ALIASES, HEAVY, PARTS, PLACES, ValueSharding
from zero_jax.program.dataflow import Dataflow
from zero_jax.program.jaxprs import is_literal, open_jaxpr
from zero_jax.program.subcalls import CALLS, Subcall, subcall
from zero_jax.transforms.flops import equation_flops

# Operations of the vector units for an element of the result, where they are not 1; none for a change of shape.
_VECTOR_OPS = {
    **dict.fromkeys(("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "pow", "sin", "cos"), 8),
    **dict.fromkeys(("div", "rsqrt", "sqrt", "cbrt", "integer_pow"), 3),
    **dict.fromkeys(("broadcast_in_dim", "iota", "slice", "split", "concatenate", "pad"), 0),
}
_SAME_VALUE = (ALIASES | PLACES) - {"device_put"}
_LOOPS = frozenset({"scan", "while"})
_ENGINES = {
    "zero_attention": "attention",
    "zero_attention_tangent": "attention",
    "zero_attention_cotangents": "attention backward",
    "pallas_call": "pallas",
    **dict.fromkeys(("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"), "attention"),  # cuDNN's
    **dict.fromkeys(("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"), "attention backward"),
}
_REDUCTIONS = ("reduce_", "arg", "cum")
_NO_AXES: frozenset[str] = frozenset()
_IN_MEMORY = HEAVY | _ENGINES.keys() | {"dynamic_update_slice", "fft", "random_bits", "select_and_scatter_add"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one execution of a kernel does on a device, and how much of it is divided over the batch's devices."""

    flops: float = 0.0  # floating-point operations of products and convolutions
    vector_ops: float = 0.0  # elementwise operations
    split_bytes: float = 0.0  # bytes moved of values that have a dim of the batch
    other_bytes: float = 0.0  # bytes moved of other values, such as params and their gradients
    is_split: bool = False  # whether `flops` and `vector_ops` grow with the batch
    times: int = 1  # how often it runs
    # "attention", "attention backward" or "pallas" for a kernel that is written by hand, "layout" for a copy to another
    # layout, "slice" for one out of the stack of a loop, "sum" for a sum that is not fused; empty for the others
    engine: str = ""


def kernels(
    jaxpr: Any, shardings: Mapping[Any, ValueSharding], *, sizes: Mapping[str, int], batch_axes: Collection[str]
) -> tuple[Kernel, ...]:
    """Returns the kernels of a function that leaves its results in memory.

    `shardings` are those of its values, as `Propagation.values` has them; a value without one is as its shape is.
    """
    return _Body(shardings, sizes, frozenset(batch_axes)).kernels(jaxpr, splits=False)


@dataclasses.dataclass(eq=False)
class _Value:
    """A value on a device; what is not in memory is made again by what reads it."""

    num_bytes: float
    num_elements: float
    axes: frozenset[str] = frozenset()  # the mesh axes that it is sharded over
    is_split: bool = False  # whether it has a dim of the batch
    is_stored: bool = False  # whether it is in memory
    readers: list[_Operation] = dataclasses.field(default_factory=list)
    # The bytes that are read of values in memory where it is made again, and the operations that this takes
    sources: dict[_Value, float] = dataclasses.field(default_factory=dict)
    vector_ops: float = 0.0
    anchors: int = 0  # a bit for each kernel that reads it, or what elementwise work makes of it


@dataclasses.dataclass(eq=False)
class _Operation:
    """An equation of a flattened body, with the values that it reads and makes."""

    eqn: Any
    sub: Subcall | None
    reads: list[_Value]
    makes: list[_Value]

    def __post_init__(self):
        self.name = name = self.eqn.primitive.name
        self.is_reduction = name.startswith(_REDUCTIONS) and name != "reduce_precision"
        in_memory = name in _IN_MEMORY or name.startswith("scatter")
        self.is_elementwise = not (self.sub or in_memory or self.is_reduction)

    @property
    def share(self) -> float:
        """The share of its operands that a slice reads."""
        if self.name not in PARTS or not self.reads[0].num_elements:
            return 1.0
        return min(1.0, self.makes[0].num_elements / self.reads[0].num_elements)


class _Body(Dataflow[_Value]):
    """The flattened equations of a function, or of an iteration of a loop, and the kernels that they become."""

    enters = CALLS | {"custom_vmap", "shard_map"}

    def __init__(self, shardings: Mapping[Any, ValueSharding], sizes: Mapping[str, int], batch_axes: frozenset[str]):
        super().__init__()
        self.shardings, self.sizes, self.batch_axes = shardings, sizes, batch_axes
        self.operations: list[_Operation] = []
        self.copies: list[Kernel] = []
        self.inputs: list[_Value] = []
        self.relaid: set[_Value] = set()  # what hand-written kernels take, which require layouts of their own

    def kernels(self, jaxpr: Any, *, splits: bool, consts: Sequence[_Value] = ()) -> tuple[Kernel, ...]:
        """Returns the kernels of a jaxpr, whose first inputs are `consts` outside of a loop.

        Values whose sharding is not known count as having a dim of the batch if it `splits`.
        """
        opened, _ = open_jaxpr(jaxpr)
        self.inputs = inputs = [self.value(var, splits, is_stored=True) for var in opened.invars]
        for value, outer in zip(inputs, consts, strict=False):
            if not outer.is_stored:  # cheaper to make in each iteration than to read
                value.num_bytes = sum(outer.sources.values())
        outputs = self.run(opened, inputs)
        self.fuse({*outputs, *(x for op in self.operations if op.sub for x in _needed(op))})
        made = [kernel for operation in self.operations for kernel in self.kernels_of(operation)]
        copied = [_kernel({x: x.num_bytes}, [x]) for i, x in enumerate(outputs) if x in inputs and inputs.index(x) != i]
        return (*made, *copied, *self.copies)

    def value(self, var: Any, splits: bool, *, is_stored: bool = False) -> _Value:
        """Returns a new value of the size of a variable."""
        sharding = self.shardings.get(var)
        axes = sharding.axes if sharding else _NO_AXES
        num = math.prod(getattr(var.aval, "shape", ())) / math.prod(self.sizes[axis] for axis in axes)
        itemsize = 0 if is_on_host(var.aval) else getattr(getattr(var.aval, "dtype", None), "itemsize", 0)
        is_split = bool(axes & self.batch_axes) if sharding else splits
        value = _Value(num * itemsize, num, axes, is_split, is_stored)
        value.sources = {value: value.num_bytes}
        return value

    def constant(self, atom: Any) -> _Value:
        return _Value(0, 1) if is_literal(atom) else self.value(atom, False, is_stored=True)

    def operation(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        if eqn.primitive.name in _SAME_VALUE:
            if operands[0].is_split and _changes_tiles(eqn):
                self.copies.append(_copy(operands[0], "layout"))
            return operands[: len(eqn.outvars)]
        splits = any(value.is_split for value in operands)
        made = [self.value(var, splits) for var in eqn.outvars]
        operation = _Operation(eqn, subcall(eqn), operands, made)
        for value in dict.fromkeys(operands):
            value.readers.append(operation)
        self.operations.append(operation)
        return made

    def fuse(self, needed: Collection[_Value]) -> None:
        """Decides which values are in memory, and what making the others again takes."""
        bits = {id(operation): 1 << i for i, operation in enumerate(self.operations)}
        # Backwards, as a value's anchors are those of what elementwise work makes of it, and its readers.
        for operation in reversed(self.operations):
            for value in operation.makes:
                value.anchors = bits[id(operation)] if value in needed else 0
                for reader in value.readers:
                    ends = (x.anchors for x in reader.makes) if reader.is_elementwise else (bits[id(reader)],)
                    value.anchors = functools.reduce(operator.or_, ends, value.anchors)
        for operation in self.operations:
            sources, ops = _made_of(operation.reads, operation.share)
            for value in operation.makes:
                if not operation.is_elementwise:
                    end = self.end_of(value, needed) if operation.name == "dot_general" else value
                    end.is_stored = True
                    continue
                value.sources = sources
                value.vector_ops = ops + _VECTOR_OPS.get(operation.name, 1) * value.num_elements
                again, times = sum(sources.values()), value.anchors.bit_count()
                is_link = len(value.readers) == 1 and value.readers[0].is_elementwise  # the end of its chain is written
                # Made again for each of its anchors, or made and written once and read by each.
                pays = not is_link and again * times > again + value.num_bytes * (1 + times)
                value.is_stored = value.is_stored or value in needed or pays

    def end_of(self, value: _Value, needed: Collection[_Value]) -> _Value:
        """Returns the end of the chain of elementwise work on a product's result, which the product's kernel writes."""
        end = value
        while end not in needed and len(end.readers) == 1 and end.readers[0].is_elementwise:
            makes = end.readers[0].makes
            if len(makes) != 1 or makes[0].num_elements > value.num_elements:
                break
            end = makes[0]
        return end

    def kernels_of(self, operation: _Operation) -> Iterable[Kernel]:
        if operation.sub:
            return self.inner(operation, operation.sub)
        written = [value for value in operation.makes if value.is_stored]
        if operation.is_elementwise:
            # What is made of a product's result that is not in memory is written by the product.
            ends = any(not source.is_stored for value in written for source in value.sources)
            made = [_kernel(value.sources, [value], vector_ops=value.vector_ops) for value in written[:1]]
            return [] if ends else made
        if moved := _moved(operation):
            return [_kernel({moved: moved.num_bytes}, [moved])]
        sources, ops = _made_of(operation.reads, 1.0)
        if not written:  # a product: its kernel does the chain of elementwise work that follows, and writes its end
            (value,) = operation.makes
            end = self.end_of(value, ())
            while not end.is_stored:
                end = end.readers[0].makes[0]
            sources = {**sources, **{x: num for x, num in end.sources.items() if x is not value}}
            ops, written = ops + end.vector_ops, [end]
        if operation.is_reduction:
            ops += operation.reads[0].num_elements
        axes = frozenset().union(*(value.axes for value in (*operation.reads, *operation.makes)))
        num_parts = math.prod(self.sizes[axis] for axis in axes)
        flops, summed_bytes = _work(operation)
        kernel = _kernel(sources, written, vector_ops=ops, flops=flops / num_parts, reads=operation.reads)
        kernel = dataclasses.replace(kernel, engine=_ENGINES.get(operation.name, ""))
        if kernel.engine:
            relaid = dict.fromkeys(x for x in (*operation.reads, *written) if x not in self.relaid)
            self.copies += [_copy(value, "layout") for value in relaid]
            self.relaid.update(relaid)
        if not summed_bytes:
            return [kernel]
        sums = Kernel(is_split=kernel.is_split, engine="sum")
        moved = "split_bytes" if kernel.is_split else "other_bytes"
        return [kernel, dataclasses.replace(sums, **{moved: summed_bytes / num_parts})]

    def inner(self, operation: _Operation, sub: Subcall) -> Iterable[Kernel]:
        """Returns the kernels of all iterations of a loop, or of the branch that moves most."""
        splits = any(value.is_split for value in operation.reads)
        new = lambda: _Body(self.shardings, self.sizes, self.batch_axes)  # noqa: E731
        if sub.kind in _LOOPS:
            consts, carry, _ = sub.split(operation.reads)
            new_body = new()
            body = new_body.kernels(sub.jaxpr, splits=splits, consts=consts)
            sliced = [_copy(x, "slice") for x in new_body.inputs[len(consts) + len(carry) :] if x.is_split]
            return [dataclasses.replace(kernel, times=kernel.times * sub.length) for kernel in (*body, *sliced)]
        branches = [new().kernels(branch, splits=splits) for branch in sub.branches]
        return max(branches, key=lambda found: sum(x.split_bytes + x.other_bytes for x in found), default=())


def _work(operation: _Operation) -> tuple[float, float]:
    """Returns the operations of the products of a kernel, and the bytes that are moved to add parts of its results."""
    if not operation.name.startswith("zero_attention"):
        return equation_flops(operation.eqn), 0.0
    operands = [atom.aval for atom in operation.eqn.invars[:3]]
    is_backward = _ENGINES[operation.name] == "attention backward"
    return attention_work(*operands, call=operation.eqn.params["call"], backward=is_backward)


def _changes_tiles(eqn: Any) -> bool:
    """Tells whether a reshape splits or merges the minor dim: an array is stored in tiles of its two minor dims."""
    if eqn.primitive.name != "reshape":
        return False
    before, after = (x.aval.shape for x in (eqn.invars[0], eqn.outvars[0]))
    return bool(before and after) and before[-1] != after[-1] and 1 not in (before[-1], after[-1])


def _needed(operation: _Operation) -> Iterable[_Value]:
    """Returns what a loop or a branch takes from memory, the constants of a loop left out."""
    assert operation.sub
    if operation.sub.kind not in _LOOPS:
        return operation.reads
    _, carry, slices = operation.sub.split(operation.reads)
    return [*carry, *slices]


def _made_of(reads: Iterable[_Value], share: float) -> tuple[dict[_Value, float], float]:
    """Returns the bytes that are read of values in memory, and the vector operations, to make some values."""
    sources: dict[_Value, float] = {}
    ops = 0.0
    for value in dict.fromkeys(reads):
        parts = {value: value.num_bytes} if value.is_stored else value.sources
        ops += 0.0 if value.is_stored else value.vector_ops * share
        for source, num in parts.items():
            sources[source] = min(source.num_bytes, sources.get(source, 0.0) + num * share)
    return sources, ops


def _moved(operation: _Operation) -> _Value | None:
    """Returns the value that a lookup or an update in place reads and writes."""
    if operation.name == "gather":
        return operation.makes[0]
    if operation.name.startswith("scatter"):
        return operation.reads[-1]
    return operation.reads[1] if operation.name == "dynamic_update_slice" else None


def _copy(value: _Value, engine: str) -> Kernel:
    return dataclasses.replace(_kernel({value: value.num_bytes}, [value]), engine=engine)


def _kernel(
    sources: Mapping[_Value, float],
    written: Iterable[_Value],
    *,
    reads: Iterable[_Value] = (),
    vector_ops: float = 0.0,
    flops: float = 0.0,
) -> Kernel:
    moved = [*sources.items(), *((value, value.num_bytes) for value in written)]
    return Kernel(
        flops=flops,
        vector_ops=vector_ops,
        split_bytes=sum(num for value, num in moved if value.is_split),
        other_bytes=sum(num for value, num in moved if not value.is_split),
        is_split=any(value.is_split for value in (*reads, *(value for value, _ in moved))),
    )
