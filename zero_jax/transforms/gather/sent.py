"""Products whose param stays sharded: activations are sent to its shards and back, where that moves less than a gather.

A product with a batch dim that the param is sharded along, as of a stack of experts `[experts, d, k]`, needs of the
activations `[examples, experts, tokens, d]` only those of a device's own experts. So an all-to-all moves the devices
from the examples to the experts, and one moves them back where something else is computed than elementwise work and
further such products: expert parallelism, for a model as it is. The gradient of such a param is whole on its shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero_jax.dims import ELEMENTWISE, SHAPES, Examples, dim_map, is_activation
from zero_jax.sharding.chains import SENT, Chain, reshard
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import carries, named_along
from zero_jax.transforms.for_xla.layouts import rows_p
from zero_jax.transforms.gather.deferred import Copies, GatherOptions, Lazy, Value, gathered_array, is_unsharded

_MOVED = ELEMENTWISE | SHAPES | {"transpose", "broadcast_in_dim", rows_p.name}


@dataclasses.dataclass(frozen=True)
class SentValue(Value):
    """An activation whose devices have the shards of a dim, over `axes`, in place of examples."""

    options: GatherOptions
    examples: int  # the dim of the examples
    dim: int  # the dim that is sharded over `axes`
    axes: tuple[str, ...]  # axes of the batch, its minor ones

    @property
    def key(self) -> Hashable:
        """What is done with it, whatever its array."""
        return type(self), self.params_only, self.examples, self.dim, self.axes

    def sharding(self, num_dims: int, *, is_home: bool) -> NamedSharding:
        """Returns how it is sharded at home, by examples, or where it was sent; other dims are as XLA has them."""
        batch = self.options.axes.batch
        there = {self.examples: batch[: len(batch) - len(self.axes)], self.dim: self.axes}
        axes = {self.examples: batch, self.dim: ()} if is_home else there
        return named_along(self.options.mesh, num_dims, axes)

    def moved(self, array: jax.Array, *, is_home: bool) -> jax.Array:
        """Returns an array that is sent there or back home; its cotangent goes the other way."""
        shardings = self.sharding(array.ndim, is_home=not is_home), self.sharding(array.ndim, is_home=is_home)
        with jax.named_scope(SENT):
            return reshard(array, forward=Chain(shardings), backward=Chain(shardings[::-1]))

    def pinned(self, array: jax.Array) -> jax.Array:
        """Returns an array that was made there as a value."""
        chain = Chain((self.sharding(array.ndim, is_home=False),))
        return reshard(array, forward=chain, backward=chain)

    @property
    def home(self) -> jax.Array:
        """The array, sharded by examples."""
        return self.moved(self.array, is_home=True)

    def at_home(self) -> Value:
        """Returns the value sharded by examples."""
        return Value(self.home, self.params_only)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentProduct:
    """A product of activations with a param that stays sharded along a batch dim."""

    place: int  # the operand that is the activation
    operand: SentValue  # the activation; one that was not sent yet has the array that it has at home
    is_sent: bool  # whether it was sent before
    result: SentValue  # the result, without an array

    def operands(self, values: Sequence[Any], sent: dict[Any, tuple[Any, SentValue]]) -> list[Any]:
        """Returns the operands, the activation sent; `sent` has those that were, so that each is sent once."""
        operand, array = self.operand, self.operand.array
        if not self.is_sent:
            key = id(array), operand.key
            if key not in sent:
                there = dataclasses.replace(operand, array=operand.moved(array, is_home=False))
                sent[key] = array, there  # with the array, whose id stays its own
            operand = sent[key][1]
        return [operand if i == self.place else value for i, value in enumerate(values)]

    @property
    def num_shards(self) -> int:
        """The number of shards that activations are sent to."""
        return axis_size(self.operand.options.mesh, self.operand.axes)

    @property
    def options(self) -> GatherOptions:
        """How the param is gathered: over the axes of `data` that nothing is sent over."""
        options, sent = self.operand.options, self.operand.axes
        data = tuple(axis for axis in options.axes.data if axis not in sent)
        return dataclasses.replace(options, axes=dataclasses.replace(options.axes, data=data))

    def gathered_bytes(self, param: Lazy) -> int:
        """Returns the bytes of what is gathered of the param."""
        num_bytes = param.aval.size * param.aval.dtype.itemsize // self.num_shards
        return num_bytes if carries(param.shard, self.options.axes.data) else 0


def where_sent(options: GatherOptions, value: Any, *, dtype: Any = None) -> Any:
    """Returns the array of an operand of such a product, where it was sent to, or gathered as `SentProduct.options`."""
    return gathered_array(options, value, dtype=dtype) if isinstance(value, Lazy) else value.array


def sent_product(
    options: GatherOptions, examples: Examples | None, eqn: Any, values: Sequence[Any]
) -> SentProduct | None:
    """Returns how a product with batch dims sends its activation to the shards of its param; None if that is gathered.

    What is sent, there and back, is less than the param, for which a gather, another one in the backward pass and a
    reduce-scatter would be needed.
    """
    places = [i for i, value in enumerate(values) if isinstance(value, Lazy)]
    if len(places) != 1 or eqn.params.get("out_sharding") is not None:
        return None
    (of_param,), place = places, 1 - places[0]
    param, activation, axes = values[of_param], values[place], options.axes
    is_activation = isinstance(activation, Value) and not isinstance(activation, Copies) and not activation.params_only
    is_other = options.mapped or param.on_host or options.quantize
    is_plain_shard = param.is_shard and not (is_unsharded(options, param) or is_other)
    batch = eqn.params["dimension_numbers"][1]
    sharded = [i for i, dim in enumerate(batch[of_param]) if param.dims is not None and param.dims[dim]]
    if not is_activation or not is_plain_shard or len(sharded) != 1:
        return None
    # The axes that the param stays sharded over: an all-to-all takes the minor axes of the batch from the examples.
    stays, dim = param.shard[batch[of_param][sharded[0]]], batch[place][sharded[0]]
    if not stays or stays != axes.batch[len(axes.batch) - len(stays) :]:
        return None
    is_sent = isinstance(activation, SentValue) and (activation.dim, activation.axes) == (dim, stays)
    if isinstance(activation, SentValue) and is_sent:
        row = activation.examples
    else:
        row = None if examples is None else examples.operands.get(id(eqn), [None] * 2)[place]
    if not isinstance(row, int):
        return None
    result_row, shapes = dim_map(eqn).to((place, row)), [eqn.invars[place].aval, eqn.outvars[0].aval]
    if result_row is None or row in batch[place]:
        return None
    num_bytes = sum(x.size * x.dtype.itemsize for x in shapes) // axis_size(options.mesh, axes.batch)
    if not is_sent and num_bytes >= param.aval.size * param.aval.dtype.itemsize:
        return None
    operand = SentValue(activation.array if is_sent else activation.home, False, options, row, dim, stays)
    result = SentValue(None, False, options, result_row, sharded[0], stays)  # batch dims come first in a result
    return SentProduct(place=place, operand=operand, is_sent=is_sent, result=result)


def carried_on(eqn: Any, values: Sequence[Any]) -> tuple[SentValue, Any] | None:
    """Returns what the result of an equation of sent values is, without its array, and what computes it where they are.

    None if they have to come home.
    """
    if is_activation(eqn):
        to = lambda operand, dim: dim  # noqa: E731
    elif eqn.primitive.name in _MOVED and len(eqn.outvars) == 1:
        known = dim_map(eqn)
        to = lambda operand, dim: known.to((operand, dim))  # noqa: E731
    else:
        return None
    places = set()  # in the result, the dims of the examples and of the experts of each operand, and their axes
    for i, value in enumerate(values):
        if isinstance(value, SentValue):
            places.add((to(i, value.examples), to(i, value.dim), value.axes))
        elif not value.params_only or isinstance(value, Lazy):
            return None
    if len(places) != 1:
        return None
    ((examples, dim, _),) = places
    if None in (examples, dim):
        return None
    sent = next(value for value in values if isinstance(value, SentValue))
    result = dataclasses.replace(sent, array=None, examples=examples, dim=dim)
    if eqn.primitive is rows_p:  # which is laid out on each device
        there = result.sharding(eqn.outvars[0].aval.ndim, is_home=False)
        eqn = eqn.replace(params={**eqn.params, "sharding": there})
    return result, eqn
