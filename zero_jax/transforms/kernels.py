"""The kernels that a compiler may make of a jaxpr, with their FLOPs and bytes, and their seconds by a roofline.

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
from zero_jax.sharding.topology import Hardware
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


# The launch of a GPU kernel.
KERNEL_SECONDS = 3e-6
# The share of the peak at which kernels compute. cuDNN's causal attention, measured on an H100 with heads of 128 and
# sequences of 2,048: 465 TFLOP/s forward and 351 backward, of 989 (heads of 64: 305 and 193). Of Pallas kernels on TPU
# there is no published measurement: 0.7 is assumed (docs/estimates.md shows what it makes of steps whose time is
# published).
KERNEL_SHARES = {"pallas": 0.7, "cudnn attention": 0.47, "cudnn attention backward": 0.355}

# The link to the host that XLA:TPU plans with: it ends a move of the forward pass when such a link would have, 3.6 ms
# after it began 268 MB (a layer of llama-3.1-8b on v6e, of 27.5 ms). The move back is begun early enough.
_PLANNED_HOST_BYTES_PER_SECOND = 75e9


def waited_seconds(moved: float, num_bytes: float) -> float:
    """Returns what the forward pass on a TPU waits for bytes that move to the host in so many seconds."""
    return max(moved - num_bytes / _PLANNED_HOST_BYTES_PER_SECOND, 0.0)


# What does not fit into the memory on the chip, of v5e to v6e, moves at the nominal bandwidth at most.
_ON_CHIP_BYTES = 2**27

# The share of computation that can overlap with collectives of the same duration: 0.49 of gpt-7b's on v6e:16x16.
_HIDING = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a hardware's nominal peaks that the compiler's own figures reach."""

    products: float  # of the FLOPs, by large matrix products without the options of `overlap`
    memory: float  # of the memory bandwidth, by fused elementwise work
    vector: float = 1 / 32  # the peak of elementwise operations, as a share of the FLOPs
    layout: float = 0.38  # of the memory bandwidth, by copies to another layout
    unfused: float = 0.14  # of the memory bandwidth, by sums and constants of a kernel of their own
    # Of the collectives over `data`, what computation hides, without the options of `overlap` and with
    hidden: tuple[float, float] = (0, 0)
    # The share of the time of moving a product's operands and result that adds to its FLOPs at the peak, with the
    # on-chip memory that these options give to kernels; None where they give none
    reading: float | None = None
    # Of the FLOPs and of the memory bandwidth, by kernels of a compiled program whose cycles are not known
    compiled: tuple[float, float] = (0.9, 0.4)


# By hardware: fitted to XLA:TPU's cycles of large products and of attention by XLA (docs/estimates.md has the figures;
# above 1 where it fuses more than is assumed, or keeps values in VMEM); layouts and what is not fused are its cycles of
# a transposition and of a sum over the first dim, bf16, on v4 to v6e, their means on the others; on v5e XLA hides
# gathers without options (0.45 of gpt-7b and of two programs of MaxText). `reading` is fitted to products of other
# shapes, `compiled` to the cycles of 42 whole programs.
_EFFICIENCIES = {
    "v3": Efficiency(products=0.9, memory=0.8),
    "v4": Efficiency(products=0.93, memory=0.85, unfused=0.22, compiled=(0.97, 0.38)),
    "v5e": Efficiency(products=0.93, memory=0.9, layout=0.41, unfused=0.16, hidden=(0.45, 0.45), compiled=(0.92, 0.4)),
    "v5p": Efficiency(
        products=0.88, memory=0.5, layout=0.36, unfused=0.10, hidden=(0, 0.85), reading=0.37, compiled=(0.97, 0.36)
    ),
    "v6e": Efficiency(
        products=0.75, memory=1.6, layout=0.40, unfused=0.08, hidden=(0, 0.85), reading=0.36, compiled=(0.86, 0.38)
    ),
    "tpu7x": Efficiency(products=0.81, memory=1.0, hidden=(0, 0.78), reading=0.5, compiled=(0.82, 0.42)),
}
# GPU programs are rooflines at the shares of the hardware table, and their layouts are those of the kernels.
_GPU = Efficiency(
    products=1.0, memory=1.0, compiled=(1.0, 1.0), vector=1 / 15, layout=math.inf, unfused=1.0, hidden=(0.4, 0.7)
)
# The kernels of attention by platform, as the times of compiled programs have them.
_ATTENTION = {
    "tpu": {"attention": "pallas", "attention backward": "pallas", "pallas": "pallas"},
    "cuda": {"attention": "cudnn attention", "attention backward": "cudnn attention backward"},
}


def efficiency_of(hardware: Hardware) -> Efficiency:
    """Returns what a kind of hardware reaches."""
    return _EFFICIENCIES.get(hardware.name, _GPU)


class Roofline:
    """Estimates seconds of a step on a kind of hardware, compiled with options that hide collectives (`overlaps`)."""

    def __init__(self, hardware: Hardware, *, overlaps: bool):
        self.hardware = hardware
        self.efficiency = efficiency_of(hardware)
        self.hidden = self.efficiency.hidden[overlaps]
        self.reading = self.efficiency.reading if overlaps else None

    def flops_per_second(self, engine: str) -> float:
        """Returns the FLOPs a second of matrix products, by the engine of their kernel."""
        kernel = _ATTENTION[self.hardware.platform].get(engine, "")
        products = self.efficiency.products if self.reading is None else 1.0
        share = products * self.hardware.product_share
        return self.hardware.flops_per_second * KERNEL_SHARES.get(kernel, share)

    def compute_seconds(self, kernels: Iterable[Kernel], num_parts: float) -> float:
        """Returns the seconds of kernels of all examples, on the share of one of `num_parts` parts of the batch."""
        reached, launch = self.efficiency, KERNEL_SECONDS if self.hardware.platform == "cuda" else 0.0
        vector_per_second = self.hardware.flops_per_second * reached.vector
        shares = {"layout": reached.layout, "sum": reached.unfused, "slice": reached.compiled[1]}
        total = 0.0
        for kernel in kernels:
            parts = num_parts if kernel.is_split else 1
            num_bytes = kernel.split_bytes / num_parts + kernel.other_bytes
            moved = self.moved_seconds(num_bytes, shares.get(kernel.engine))
            products = kernel.flops / parts / self.flops_per_second(kernel.engine)
            if products and not kernel.engine:
                products += (self.reading or 0.0) * num_bytes / self.hardware.memory_bytes_per_second
            busy = max(products, kernel.vector_ops / parts / vector_per_second, moved)
            total += kernel.times * (busy + (launch if busy else 0.0))
        return total

    def kept_seconds(self, num_bytes: float) -> float:
        """Returns the seconds of writing a value into the stack of a loop, and of copying it out before it is read.

        Three passes over its bytes are the mean of 37 products in programs of llama-3.1-8b, 3.2-1b and 3.2-3b on v4 to
        TPU7x, those of the MLP among them, which since take none (`BlockCosts.keeping_seconds`).
        """
        return self.moved_seconds(3 * num_bytes, self.efficiency.compiled[1])

    def moved_seconds(self, num_bytes: float, share: float | None = None) -> float:
        """Returns the seconds of moving bytes at a share of the memory bandwidth, None for that of fused work."""
        reached = self.hardware.memory_bytes_per_second * self.hardware.memory_share
        fused = self.efficiency.memory
        return num_bytes / (reached * (share or (fused if num_bytes <= _ON_CHIP_BYTES else min(fused, 1.0))))

    def with_host_seconds(self, seconds: float, num_bytes: float) -> float:
        """Returns the seconds of a step that also moves residuals to the host and back: it waits for part of that."""
        moved = num_bytes / self.hardware.host_bytes_per_second
        # Nothing runs beside the copies of a GPU.
        waited = 2 * moved if self.hardware.platform == "cuda" else waited_seconds(moved, num_bytes)
        return max(seconds + waited, 2 * moved)

    def exposed_seconds(self, comms: float, compute: float) -> float:
        """Returns the seconds that computation waits for collectives over `data`."""
        return max(comms - min(self.hidden, _HIDING) * compute, comms * (1 - self.hidden))
