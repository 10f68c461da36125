"""An exponential moving average of the params, as part of the optimizer's state."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zero_jax.core.tree import PyTree
from zero_jax.sharding.precision import wide


class ParamsEmaState(NamedTuple):
    """The state of `params_ema`.

    Attributes:
      count: updates that the average is over, `int32[]`.
      ema: the average, a tree like the params, in float32 or wider; the params themselves before the first update.
    """

    count: jax.Array
    ema: PyTree


def params_ema(decay: float) -> optax.GradientTransformationExtraArgs:
    """Returns an optax transformation that tracks an exponential moving average (EMA) of the params.

    Put it at the end of a chain, where the updates are added to the params; it does not change them. ZeRO shards the
    average like the rest of the optimizer state, and a skipped step does not change it.

    The average is debiased as Adam's moments are (Kingma and Ba 2015, section 3), so that the initial params have no
    weight in it: `sum_i decay^(t-i) p_i / sum_i decay^(t-i)` over the params after update i = 1 to t. What is stored is
    the debiased value, which can be read, saved and evaluated as it is:
    `ema_t = ema_(t-1) + (1 - decay) / (1 - decay^t) (p_t - ema_(t-1))`.

    Args:
      decay: weight of the past, above 0 and below 1; the average is over some `1 / (1 - decay)` steps.

    Raises:
      ValueError: an invalid decay.

    Example:
      >>> averaged = optax.chain(tx, zero.params_ema(decay=0.999))
      >>> state = zero.init_state(init_fn, averaged, jax.random.key(0), mesh=mesh, config=config)
      >>> sorted(zero.ema_params(state.opt_state))
      ['down', 'up']
    """
    check_decay(decay)

    def init(params: PyTree) -> ParamsEmaState:
        # Copies, because a state's memory is donated leaf by leaf.
        return ParamsEmaState(jnp.int32(0), jax.tree.map(lambda x: jnp.array(_widened(x), copy=True), params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **_: Any) -> tuple[PyTree, ParamsEmaState]:
        if params is None:
            raise ValueError("params_ema averages params: call update(updates, state, params)")
        count = jnp.asarray(optax.safe_increment(state.count))
        # 1 - decay^t by expm1: subtracted from 1, a decay near 1 would lose most digits.
        share = (1 - decay) / -jnp.expm1(count.astype(jnp.float32) * jnp.log1p(jnp.float32(decay - 1)))
        new = optax.apply_updates(params, updates)
        return updates, ParamsEmaState(count, jax.tree.map(lambda e, p: e + share * (_widened(p) - e), state.ema, new))

    return optax.GradientTransformationExtraArgs(init, update)


def check_decay(decay: float) -> None:
    """Raises `ValueError` for a decay that is not between 0 and 1."""
    if not (isinstance(decay, numbers.Real) and not isinstance(decay, bool) and 0 < decay < 1):
        raise ValueError(
            f"ema_decay={decay!r}: give a number above 0 and below 1, such as 0.999, or None for no average"
        )


def ema_params(opt_state: PyTree) -> PyTree:
    """Returns the EMA of a `params_ema` anywhere in an optimizer state, or None if there is none.

    Params that are not trained (integers) have no average, as they have no optimizer state.

    Raises:
      ValueError: several of them.

    Example:
      >>> averaged = optax.chain(tx, zero.params_ema(decay=0.999))
      >>> state = zero.init_state(init_fn, averaged, jax.random.key(0), mesh=mesh, config=config)
      >>> evaluate = zero.make_eval_step(loss_fn, mesh=mesh, config=config)
      >>> evaluate(zero.ema_params(state.opt_state), batch).loss.shape
      ()
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, ParamsEmaState))
    averages = [leaf for leaf in leaves if isinstance(leaf, ParamsEmaState)]
    if len(averages) > 1:
        raise ValueError(f"the optimizer keeps {len(averages)} averages of params: leave one params_ema in the chain")
    return averages[0].ema if averages else None


def _widened(x: jax.Array) -> jax.Array:
    return jnp.asarray(x).astype(wide(x.dtype))
