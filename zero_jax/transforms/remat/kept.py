"""Values that a remat policy keeps for the backward pass by their names, and the copies of them that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir, partial_eval

from zero_jax.program.jaxprs import define_tangents, is_literal
from zero_jax.sharding.chains import Chain, lifted, reshard, reshard_p

# `join` is the identity on a value of which a copy is kept: `x, kept -> x`. Under `jax.checkpoint` the forward pass
# uses `x`, and the recomputation makes it again from `kept`. Without it the forward pass would use the copy, too, and
# XLA would move that there and back: JAX puts a `reduce_precision` on what is saved, and no move cancels through it.

join_p = jex_core.Primitive("zero_join")


def keep(x: jax.Array, *, name: str, shard: Chain, unshard: Chain) -> jax.Array:
    """Returns `x`, with a copy for a remat policy to keep by its name; the cotangent of `x` passes as it is.

    Args:
      x: an array.
      name: the name of the copy.
      shard: what the copy is moved through to where it is kept.
      unshard: what it is moved through to become `x` again.
    """
    kept = checkpoint_name(reshard(lax.stop_gradient(x), forward=shard, backward=Chain()), name)
    return join_p.bind(x, kept, unshard=unshard)


def _join_partial_eval(
    saveable: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any | None, Any, list[bool], list[bool], list[Any]]:
    """Splits an equation into what the forward pass runs and what the recomputation does."""
    del saveable
    missing = [v for v, is_there in zip(eqn.invars, instantiated, strict=True) if not (is_there or is_literal(v))]
    if any(unknown):
        return None, eqn, [True], [True], missing
    _, kept = eqn.invars
    params = {"forward": eqn.params["unshard"], "backward": Chain()}
    remade = eqn.replace(primitive=reshard_p, invars=[kept], params=params)
    return eqn, remade, [False], [True], [v for v in missing if v is kept]


def _join_batch(args: Any, dims: Any, *, unshard: Chain) -> tuple[Any, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    x, kept = (batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
    return join_p.bind(x, kept, unshard=lifted(unshard)), 0


join_p.def_abstract_eval(lambda x, kept, **_: x)
join_p.def_impl(lambda x, kept, **_: x)
define_tangents(join_p, join_p.bind, lambda dot, *_, **__: dot)
batching.primitive_batchers[join_p] = _join_batch
mlir.register_lowering(join_p, lambda ctx, x, kept, **_: [x])
partial_eval.partial_eval_jaxpr_custom_rules[join_p] = _join_partial_eval


def keep_names(
    *, on_device: Sequence[str] = (), on_host: Sequence[str] = (), otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns a remat policy that keeps values by their names, some of them in pinned host memory.

    Args:
      on_device: names of values that stay where they are.
      on_host: names of values that move to the host after the forward pass, and back for the backward pass.
      otherwise: the policy for everything else; None keeps nothing else.
    """
    named = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(on_device),
        names_which_can_be_offloaded=list(on_host),
        offload_src="device",
        offload_dst="pinned_host",
    )
    ours = {*on_device, *on_host}

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in args if hasattr(aval, "dtype")):
            return False  # jax.checkpoint rounds what it keeps by `reduce_precision`, which takes no complex numbers
        if otherwise is None or (primitive.name == "name" and params["name"] in ours):
            return named(primitive, *args, **params)
        return otherwise(primitive, *args, **params)

    return policy


def is_kept(policy: Callable[..., Any] | None, eqn: Any) -> bool:
    """Tells whether a remat policy keeps the results of an equation on the device; what it offloads it keeps itself."""
    if policy is None:
        return False
    choice = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return choice if isinstance(choice, bool) else type(choice).__name__ == "SaveableType"
