"""What a use of gathered params computes: products as those of matrices, and gradients in the dtype to sum them in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.dims import has_wrong_gradient, is_float
from zero_jax.program.walk import Packed
from zero_jax.sharding.chains import Chain, reshard, reshard_p
from zero_jax.transforms.gather.deferred import GatherOptions, Lazy, gathered_array, gathered_copies
from zero_jax.transforms.gather.products import Bind, by_rows, flat_product, is_by_rows, is_partitioned_wrongly
from zero_jax.transforms.gather.sent import SentProduct, where_sent
from zero_jax.transforms.weight_grads import is_summed_narrow, needs_dtype, with_weights


def gathered_use(
    options: GatherOptions,
    eqn: Any,
    values: Sequence[Any],
    *,
    is_mixed: bool,
    sent: SentProduct | None,
    bind: Bind,
    shared: NamedSharding | None = None,
) -> Callable[..., list[Any]]:
    """Returns an equation on gathered params as a function of the arrays that its inputs are made of.

    `is_mixed` says that a factor is unsharded, as its examples were mixed; `bind` evaluates equations. The result, and
    its cotangent, is sharded as `shared` says.
    """
    inputs, evaluate = flat_product(eqn, values)
    lazy = {i: value for i, value in enumerate(inputs) if isinstance(value, Lazy)}
    in_shares = is_mixed and _in_shares(options, eqn, inputs)
    # Where a factor is replicated, a shard of the gradient would be asked of the product itself: XLA would shard
    # that, and send activations. So the gradient is computed whole first, and what it shards wrongly, too.
    pin = (is_mixed and not in_shares) or has_wrong_gradient(eqn)
    grads = _own_grads(options, eqn, lazy, sent)
    largest = max(atom.aval.size for atom in eqn.invars)
    bare = Packed(inputs).without_arrays()  # the region is cached
    array_of_use = functools.partial(gathered_array, options, pin=pin)
    if sent is not None:
        array_of_use = functools.partial(where_sent, sent.options)

    def region(*arrays: Any) -> list[Any]:
        inputs = bare.values_of(arrays)
        if in_shares:
            rows, weight, sizes = inputs
            copies = gathered_copies(options, weight, dtype=grads.dtype if grads.places else None)
            return [by_rows(eqn, [*map(array_of_use, (rows, sizes))], copies, mesh=options.mesh, axes=options.axes)]
        factors = [array_of_use(value) for value in inputs]
        evaluated_by = bind
        if grads.places:
            weights = {i: array_of_use(inputs[i], dtype=grads.dtype) for i in grads.places}
            evaluated_by = lambda eqn, inputs: with_weights(eqn, inputs, weights, **grads.how)  # noqa: E731
        results = evaluate(factors, evaluated_by)
        return results if shared is None else [_shared_out(x, shared, largest) for x in results]

    return region


def _shared_out(x: jax.Array, shared: NamedSharding, largest: int) -> jax.Array:
    """Shares a value out over devices, and its cotangent; it is gathered where it is no larger than its factors."""
    x, unsharded = lax.with_sharding_constraint(x, shared), NamedSharding(shared.mesh, PartitionSpec())
    return x if x.size > largest else reshard(x, forward=Chain((unsharded,)), backward=Chain((shared,)))


@dataclasses.dataclass(frozen=True)
class OwnGrads:
    """The operands of an equation whose gradients are made in a way of their own."""

    places: Sequence[int]
    dtype: Any  # the dtype that these are summed in
    how: Mapping[str, Any]  # further arguments of `product`


def _own_grads(options: GatherOptions, eqn: Any, lazy: Mapping[int, Lazy], sent: SentProduct | None) -> OwnGrads:
    """Returns which operands, of those in `lazy` by their places, have gradients that are not as JAX makes them."""
    dtype, own, stages = options.product_dtype, options.conv_batch, options.stages
    if own and 1 in lazy and is_partitioned_wrongly(eqn, lazy[1].dims):
        return OwnGrads([1], dtype or lazy[1].aval.dtype, {"own": own})
    places = [i for i, value in lazy.items() if is_summed_narrow(eqn, value.aval, dtype)]
    places += [i for i, x in lazy.items() if dtype is not None and needs_dtype(eqn, i, x.aval.dtype, dtype)]
    shards = [i for i, value in lazy.items() if value.is_shard and is_float(value.aval)]
    is_plain = sent is None and eqn.primitive.name == "dot_general"
    # Mapped over stages, a gradient has three dims, and large ones are all-reduced (docs/pipeline.md).
    if stages is not None and is_plain and shards and places in ([], shards):
        dtype = dtype if places else lazy[shards[0]].aval.dtype
        return OwnGrads(shards, dtype, {"apart": stages.by_itself})
    return OwnGrads(places, dtype, {})


def _in_shares(options: GatherOptions, eqn: Any, values: Sequence[Any]) -> bool:
    """Tells whether each device computes a share of a product of all examples with a param."""
    if options.mapped or [isinstance(value, Lazy) for value in values] != [False, True, False]:
        return False
    # Sizes of groups of each device's own rows have two dims.
    return values[2].array.ndim == 2 or (values[1].is_shard and is_by_rows(eqn, options.mesh, options.axes))


def refuse_gathered(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns a remat policy which never saves a gathered param and otherwise is the one given."""
    if policy is None:
        return None

    def refusing(primitive: Any, *args: Any, **params: Any) -> Any:
        return False if primitive is reshard_p else policy(primitive, *args, **params)

    return refusing
