"""Per-device gradients that are sent quantized and summed at each use of a param."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.core.tree import PyTree
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.precision import wide
from zero_jax.training.grads.accumulator import Accumulator, GradFn, GradInputs, mean, over
from zero_jax.training.grads.choice import JudgedLoss
from zero_jax.training.grads.plan import refuse_coded
from zero_jax.transforms import PartWeight, weight_alone


def quantized_grads(
    accumulator: Accumulator, loss_fn: Callable[..., Any], judged: JudgedLoss, arguments: Any, *, axes: Axes
) -> GradFn:
    """Returns a `GradFn` of a microbatch, or of that of a copy of the params.

    It is a `jax.vmap` over the devices of a copy of the params, each of which sees its own examples only; `axes` are
    the roles of the mesh axes within a copy. `loss_fn(params, model_state, batch, key)` returns
    `(loss, (aux, model_state, weight))`; devices' gradients of it are summed at each use of a param
    (`GatherOptions.mapped`). `judged` is it with its weight, and takes `arguments` for a whole batch.

    Raises:
      ValueError: devices cannot have gradients of their own.
    """
    plan = accumulator.plan
    if judged.separable.convolves:
        refuse_coded("XLA partitions each device's own convolutions wrongly")
    try:
        weigh = weight_alone(judged.weighted, *arguments, power=judged.separable.count_power)
    except NotImplementedError as error:
        refuse_coded(str(error))
    nested = plan.num_microbatches > 1 or bool(plan.once_over)
    of_microbatch = dataclasses.replace(plan, num_microbatches=1, batch_axes=axes.batch, once_over=axes.batch)
    within = dataclasses.replace(accumulator, axes=axes, plan=of_microbatch)

    def grads(*inputs: Any) -> Any:
        try:
            return _mapped(within, loss_fn, weigh, GradInputs(*inputs), nested=nested)
        except NotImplementedError as error:
            refuse_coded(str(error))

    return grads


def _mapped(
    accumulator: Accumulator,
    loss_fn: Callable[..., Any],
    weigh: Callable[..., Any] | None,
    inputs: GradInputs,
    *,
    nested: bool,
) -> Any:
    """Returns loss and gradients of one microbatch; `weigh` is the weight of a part, None if all weigh the same."""
    params, model_state, batch, key, _ = inputs  # the loss function closes over the frozen params

    @functools.partial(jax.value_and_grad, has_aux=True)
    def share_of_loss(params: PyTree, batch: PyTree, key: jax.Array, share: jax.Array) -> Any:
        loss, (aux, *_) = loss_fn(params, model_state, batch, key)
        return loss * share, (loss, aux)

    n, batch_axes = accumulator.num_shards, accumulator.axes.batch
    parts = jax.tree.map(lambda x: x[0] if x.ndim else x, accumulator.split(batch))
    each = jax.tree.map(lambda x: 0 if x.ndim else None, parts)
    keys = jax.random.split(key, n)
    over_devices = functools.partial(jax.vmap, spmd_axis_name=batch_axes, axis_size=n)
    weights = PartWeight(jnp.ones(n), jnp.ones(n))
    if weigh is not None:
        weights = over_devices(weigh, in_axes=(each, 0))(parts, keys)
        # A part that weighs nothing may have a loss of 0 / 0: its device takes the heaviest part, for no share.
        heaviest, is_empty = jnp.argmax(weights.divisor), weights.divisor == 0
        parts = jax.tree.map(lambda x: jnp.where(over(is_empty, x), x[heaviest], x) if x.ndim else x, parts)
    total = weights.total(of_grads=True, nested=nested)
    shares = jnp.where((weights.divisor == 0).all(), 1, weights.divisor * n / total)
    shares = lax.with_sharding_constraint(shares, NamedSharding(accumulator.mesh, PartitionSpec(batch_axes)))
    in_axes, out_axes = (None, each, 0, 0), ((0, (0, 0)), None)
    (_, (losses, auxes)), sums = over_devices(share_of_loss, in_axes=in_axes, out_axes=out_axes)(
        params, parts, keys, shares
    )
    auxes = jax.tree.map(lambda x: x[None], auxes)
    aux = accumulator.aux.combine(auxes, accumulator.joined, lead=2, nested=nested)
    grads = [(x.astype(wide(x.dtype)) / n).astype(x.dtype) for x in sums]
    return (mean(losses, weights, nested=nested), (aux, model_state, weights.joined())), grads
