"""Operations that XLA partitions wrongly: windows, writes and mapped convolutions; and sums of complex numbers on TPUs.

Max-pooling has a wrong gradient along every sharded dim: that of the examples, of a sequence over `model`, of a param.
So has a write to one place of a sharded dim, as `x.at[:, 3].set(0.0)` to features over `model`.
A convolution along the dim of the examples has a multiple of its kernel's gradient where the mesh has other axes, too.
Both are given values that are whole along these dims. Of a convolution that `jax.vmap` maps over examples, kernels and
all, each device computes its own examples (docs/xla_faults.md).

XLA:TPU makes pairs of complex numbers, and gathers what devices have of a sum of pairs: as many copies as devices. Such
sums, and those that the gradients of broadcasts are, are made of the real and of the imaginary parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zero_jax.dims import ELEMENTWISE
from zero_jax.program.dataflow import Dependence
from zero_jax.program.jaxprs import bind, open_jaxpr, source_context
from zero_jax.program.loss import Traced, pass_of
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import named_along
from zero_jax.transforms.for_xla.own_examples import by_device

_POOLS = frozenset("reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add".split())
_WRITES = frozenset("scatter scatter-mul scatter-min scatter-max".split())  # the gradient of a sum is right
_CONVOLUTION = "conv_general_dilated"


@pass_of(_POOLS | _WRITES | {_CONVOLUTION})
def unsharded_windows(traced: Traced, *, mesh: Mesh, axes: Axes) -> Traced:
    """Transforms `loss_fn(params, batch, ...)` so that XLA partitions no window, write or mapped convolution wrongly.

    The result computes the same values and has the same derivatives; other operations stay as they are. What is in a
    `jax.shard_map` is not partitioned; functions with derivatives of their own are not looked into.
    """
    closed = traced.closed
    if mesh.size == 1 or jax.sharding.get_abstract_mesh().manual_axes:  # each device has its own values already
        return traced.rewritten(closed)
    data = open_jaxpr(closed)[0].invars[traced.num_params :]
    of_examples = _OfExamples()
    of_examples.run(closed, [frozenset[int]()] * traced.num_params + [frozenset([0])] * len(data))
    windows = _Windows(mesh, axes, {x.aval.shape[0] for x in data if x.aval.shape}, of_examples.notes)
    return traced.rewritten(windows.rewritten(closed))


class _OfExamples(Dependence):
    """Notes of each convolution, by `id`, whether its kernel is made of the batch."""

    enters = Rewriting.entered

    def operation(self, eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        if eqn.primitive.name == _CONVOLUTION:
            self.notes[id(eqn)] = bool(operands[1]) or self.notes.get(id(eqn), False)
        return super().operation(eqn, operands)


class _Windows(Rewriting):
    """Evaluates equations, those that XLA partitions wrongly otherwise."""

    def __init__(self, mesh: Mesh, axes: Axes, sizes: set[int], kernels_of_examples: dict[int, bool]):
        super().__init__()
        self.mesh, self.batch_axes, self.sizes = mesh, axes.batch, sizes
        self.kernels_of_examples = kernels_of_examples
        self.num_shards, self.has_others = axis_size(mesh, axes.batch), axes.size_beside_batch(mesh) > 1

    def changes(self, eqn: Any) -> bool:
        return self.is_mapped(eqn) or bool(self.windows(eqn))

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        if self.is_mapped(eqn):
            return self.mapped(eqn, *values)
        windows = self.windows(eqn)
        values = [self.whole(x, dims) for x, dims in zip(values, windows, strict=False)]
        return [self.whole(x, windows[-1]) for x in bind(eqn, values)]

    def windows(self, eqn: Any) -> list[set[int]]:
        """Returns the dims that have to be unsharded, of each operand and then of the result; empty if none has any."""
        params = eqn.params
        if eqn.primitive.name in _POOLS:
            window = zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True)
            dims = {i for i, (size, stride, pads) in enumerate(window) if (size, stride, *pads) != (1, 1, 0, 0)}
            return [dims] * (len(eqn.invars) + 1) if dims else []
        if eqn.primitive.name in _WRITES:
            dims = _written_at_one_place(eqn)
            return [dims, set(), set(), dims] if dims else []
        if eqn.primitive.name != _CONVOLUTION or not self.has_others:
            return []
        numbers, shape = params["dimension_numbers"], eqn.invars[0].aval.shape
        has_examples = shape[numbers.lhs_spec[0]] % self.num_shards == 0
        # The size of a dim is all that tells whether it has the examples (docs/xla_faults.md).
        if has_examples and self.sizes.isdisjoint(shape[i] for i in numbers.lhs_spec[2:]):
            return []
        return [{*numbers.lhs_spec[2:]}, set(), {*numbers.out_spec[2:]}]

    def whole(self, x: jax.Array, dims: set[int]) -> jax.Array:
        """Returns a value, and takes its cotangent, unsharded along some dims; others are sharded as XLA has them."""
        if not dims:
            return x
        return lax.with_sharding_constraint(x, named_along(self.mesh, x.ndim, dict.fromkeys(dims, ())))

    def is_mapped(self, eqn: Any) -> bool:
        """Tells whether a convolution may be one of `jax.vmap` over examples: in as many groups, by kernels of them."""
        if eqn.primitive.name != _CONVOLUTION or not self.kernels_of_examples.get(id(eqn), False):
            return False
        groups = max(eqn.params["feature_group_count"], eqn.params["batch_group_count"])
        is_cut = self.num_shards > 1 and groups % self.num_shards == 0
        return is_cut and any(size > 1 and groups % size == 0 for size in self.sizes)

    def mapped(self, eqn: Any, x: jax.Array, kernel: jax.Array) -> Sequence[Any]:
        """Evaluates a convolution with each device's own groups on it."""
        numbers, counts = eqn.params["dimension_numbers"], ("feature_group_count", "batch_group_count")
        params = eqn.params | {n: eqn.params[n] // self.num_shards for n in counts if eqn.params[n] > 1}
        # `jax.vmap` merges the examples into the features of the operand, or with batch groups into its batch, and into
        # the features out of the kernel and of the result.
        of_operand = numbers.lhs_spec[1 if eqn.params["batch_group_count"] == 1 else 0]
        dims, results, own = [of_operand, numbers.rhs_spec[0]], [numbers.out_spec[1]], eqn.replace(params=params)
        return by_device(own, [x, kernel], dims, results, mesh=self.mesh, over=self.batch_axes)


def _written_at_one_place(eqn: Any) -> set[int]:
    """Returns the dims of an array that is written to along which a single place is, out of many."""
    if eqn.invars[1].aval.ndim > 1:  # several places, each with indices of its own
        return set()
    shape, dims = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"].inserted_window_dims
    return {i for i in dims if shape[i] > 1}


# What sums complex numbers, or broadcasts them.
_SUMMED = ELEMENTWISE | {"broadcast_in_dim", "reduce_sum"}


@pass_of(_SUMMED)
def complex_sums_by_part(traced: Traced) -> Traced:
    """Transforms `loss_fn(params, batch, ...)` so that TPUs all-reduce sums of complex numbers, as they do real ones.

    The result computes the same values and has the same derivatives. Only sums and broadcasts of complex values change,
    as of the spectrum of a filter that all examples are convolved with.
    """
    return traced.rewritten(_ComplexSums().rewritten(traced.closed))


class _ComplexSums(Rewriting):
    """Evaluates equations, sums and broadcasts of complex numbers by part."""

    def changes(self, eqn: Any) -> bool:
        return bool(self.summed(eqn))

    def summed(self, eqn: Any) -> list[int]:
        """Returns the complex operands that an equation sums, or whose gradients are sums: it broadcasts them."""
        if eqn.primitive.name not in _SUMMED:
            return []
        shape = eqn.outvars[0].aval.shape
        avals = [(i, atom.aval) for i, atom in enumerate(eqn.invars) if atom.aval.shape not in ((), shape)]
        return [i for i, aval in avals if jnp.issubdtype(aval.dtype, jnp.complexfloating)]

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        by_part = lambda fn, x: lax.complex(fn(lax.real(x)), fn(lax.imag(x)))  # noqa: E731
        with source_context(eqn):
            if eqn.primitive.name not in ELEMENTWISE:
                return [by_part(lambda part: bind(eqn, [part, *values[1:]])[0], values[0])]
            broadcast = functools.partial(jnp.broadcast_to, shape=eqn.outvars[0].aval.shape)
            operands = {i: by_part(broadcast, values[i]) for i in self.summed(eqn)}
            return bind(eqn, [operands.get(i, x) for i, x in enumerate(values)])
