"""A GPT train step with ZeRO written by hand, gather by gather: the baseline of `bench_step.py` and the tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.models import decoder, gpt


def gathered(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """Gathers a shard; the cotangent is constrained to the shard, so that it is reduce-scattered."""

    @jax.custom_vjp
    def gather(x):
        return lax.with_sharding_constraint(lax.optimization_barrier(x), NamedSharding(mesh, PartitionSpec()))

    def backward(_, cotangent):
        return (lax.with_sharding_constraint(cotangent, NamedSharding(mesh, spec)),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather(x)


def loss_with_gathers(config: gpt.GPTConfig, mesh: Mesh, specs: Any) -> Callable[..., Any]:
    """Returns the scanned model's loss with a gather written before every use of a param."""
    gather = functools.partial(gathered, mesh=mesh)
    block_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs["blocks"])

    def block(x, layer):
        gathered_layer = jax.tree.map(gather, layer, block_specs)
        return decoder.apply_block(config.decoder, x, gathered_layer, decoder.Hooks())[0], None

    def loss_fn(params, batch):
        x = gather(params["embed"], specs["embed"])[batch["inputs"]]
        if "position" in params:
            x = x + gather(params["position"], specs["position"])[: x.shape[1]]
        x, _ = lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["blocks"])
        x = decoder.rms_norm(x, gather(params["final_norm"], specs["final_norm"]))
        head = gather(params["embed"], specs["embed"]).T
        return decoder.mean_loss(decoder.whole_logits(x, head, batch["targets"]))

    return loss_fn


def make_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    params: Any,
    sharded: Any,
    opt_state: Any,
    pin: bool,
    dtype: Any = jnp.float32,
    skip_nonfinite: bool = False,
) -> Any:
    """Returns the jitted `params, opt_state, loss = step(params, opt_state, batch)`.

    Args:
      loss_fn: the loss function.
      tx: the optimizer.
      params: the shardings of the params, before and after the step.
      sharded: the shardings that gradients and the update are constrained to.
      opt_state: the shardings of the optimizer state.
      pin: constrain gradients and update by hand; else only arguments and results have shardings.
      dtype: compute dtype of the params.
      skip_nonfinite: do not change params and optimizer state where the gradients' norm is not finite.
    """
    pinned = functools.partial(jax.tree.map, lax.with_sharding_constraint) if pin else lambda tree, _: tree

    def step(params_, opt_state_, batch):
        compute = jax.tree.map(lambda p: p.astype(dtype), params_)
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(compute, batch)
        grads = pinned(jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params_), sharded)
        masters = pinned(params_, sharded)
        updates, new_opt_state = tx.update(grads, opt_state_, masters)
        new = optax.apply_updates(masters, updates), new_opt_state
        if skip_nonfinite:
            finite = jnp.isfinite(optax.global_norm(grads))
            new = jax.tree.map(lambda x, old: jnp.where(finite, x, old), new, (masters, opt_state_))
        return pinned(new[0], sharded), new[1], loss

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(params, opt_state, None))


def repeated(step: Callable[..., Any], *state: Any, batch: Any) -> Callable[[], Any]:
    """Returns a function that runs one more step on what the one before has returned, and returns its loss."""
    current = [*state]

    def run() -> Any:
        *current[:], out = step(*current, batch)
        return getattr(out, "loss", out)

    return run
