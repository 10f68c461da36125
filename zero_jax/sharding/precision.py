"""Dtypes of a train step, and dynamic loss scaling for float16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.field_checks import brief, check_fields, check_word
from zero_jax.core.tree import PyTree


@brief
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", section 3.2).

    Attributes:
      initial: the scale of the first step.
      growth_interval_steps: finite steps in a row after which the scale grows.
      growth_factor: factor of growth.
      backoff_factor: factor after a step with a non-finite gradient, which is skipped.
      floor: the smallest scale.

    Example:
      >>> policy = zero.Precision(compute=jnp.float16, loss_scale=zero.LossScaleConfig(initial=1024.0))
      >>> policy.loss_scale.growth_interval_steps
      2000
    """

    initial: float = 2.0**15
    growth_interval_steps: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    floor: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.growth_interval_steps < 1 or self.growth_factor < 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(f"{self}: needs growth_interval_steps >= 1, growth_factor >= 1, 0 < backoff_factor < 1")
        if not 0 < self.floor <= self.initial < float("inf"):
            raise ValueError(f"{self}: needs 0 < floor <= initial, and a finite initial")


def floating_dtype(value: Any) -> Any:
    """Returns the floating dtype that a value stands for, such as `jnp.bfloat16` or its name; None if there is none."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        return None
    return dtype if jnp.issubdtype(dtype, jnp.floating) else None


@brief
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a train step; None leaves a leaf's dtype as `init_fn` made it.

    Attributes:
      param: dtype of unsharded params, and of what is gathered after an update.
      compute: dtype of the params that the loss function sees.
      reduce: dtype in which gradients are summed across devices.
      master: dtype of the master params that the optimizer updates, and of the gradients that it gets.
      loss_scale: dynamic loss scaling, or None.
      rounding: how new master params are rounded to `master`. With `stochastic` the optimizer computes in float32, its
        state too, and each new value is one of the two nearest numbers, at random, so that it is right on average:
        updates too small for the dtype are not lost. For a `master` of fewer bits than float32 (docs/low_precision.md).

    Example:
      >>> print(zero.Precision(compute=jnp.bfloat16, reduce=jnp.float32).compute)
      bfloat16
    """

    param: Any = None
    compute: Any = None
    reduce: Any = None
    master: Any = None
    loss_scale: LossScaleConfig | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce", "master"):
            value = getattr(self, name)
            if value is None:
                continue
            dtype = floating_dtype(value)
            if dtype is None:
                raise ValueError(f"Precision({name}={value!r}): give a floating dtype such as jnp.bfloat16, or None")
            object.__setattr__(self, name, dtype)  # so that `jnp.bfloat16` and its name make equal policies
        check_word("Precision: rounding", self.rounding, ("nearest", "stochastic"))
        if self.rounds_stochastically and (self.master is None or self.master.itemsize >= 4):
            raise ValueError(
                f"Precision(rounding='stochastic', master={self.shown('master')}): the optimizer computes in float32, "
                "and there is nothing to round to: give a smaller master, such as jnp.bfloat16, or rounding='nearest'"
            )

    @property
    def rounds_stochastically(self) -> bool:
        """Whether new master params are rounded stochastically."""
        return self.rounding == "stochastic"

    def for_optimizer(self, masters: PyTree) -> PyTree:
        """Returns master params, or their shapes, as the optimizer gets them: in float32 if they are rounded after."""
        return cast_floating(masters, jnp.float32) if self.rounds_stochastically else masters

    def shown(self, name: str) -> str:
        """Returns a dtype by the name of its field, as text."""
        return str(getattr(self, name) or "as initialized")

    @property
    def has_master(self) -> bool:
        """Whether the params that the optimizer updates differ in dtype from those that the loss sees."""
        return self.master != self.param

    def __str__(self) -> str:
        shown = {name: self.shown(name) for name in ("param", "compute", "reduce", "master")}
        shown["optimizer"] = f"{shown['master']} (as the optimizer makes it)"
        if self.rounds_stochastically:
            shown["master"] += ", rounded stochastically"
            shown["optimizer"] = "float32 (as the optimizer makes it)"
        return "\n".join(f"{name:<10}{value}" for name, value in shown.items())


def _narrow(dtype: Any, *, master: Any = jnp.float32, **rest: Any) -> Precision:
    return Precision(param=dtype, compute=dtype, reduce=dtype, master=master, **rest)


_NAMED: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": _narrow(jnp.bfloat16),
    "fp16": _narrow(jnp.float16, loss_scale=LossScaleConfig()),
    "bf16-stochastic": _narrow(jnp.bfloat16, master=jnp.bfloat16, rounding="stochastic"),
}


def precision_name(precision: str | Precision) -> str | None:
    """Returns the name of a policy, or None for one of the user's own; `auto` is `fp32` where nobody has chosen."""
    return None if isinstance(precision, Precision) else "fp32" if precision == "auto" else precision


def resolve_precision(precision: str | Precision) -> Precision:
    """Returns the policy for a name; raises `ValueError` if there is no policy of that name."""
    if isinstance(precision, Precision):
        return precision
    name = precision_name(precision)
    if name is None or name not in _NAMED:
        hint = did_you_mean(precision, _NAMED)
        raise ValueError(
            f"unknown precision {precision!r}: {hint}choose one of {', '.join(_NAMED)} or a zero.Precision"
        )
    return _NAMED[name]


def explain_float16(error: Exception, *, platform: str) -> None:
    """Adds to an error of an operation that a platform does not have in float16 what to do about it."""
    if "F16" in str(error) and "not supported" in str(error) and platform not in ("cuda", "gpu", "rocm"):
        error.add_note(
            f"A {platform.upper()} has not all operations in float16 ('fp16'): take 'bf16' or 'fp32', or cast the "
            "operands of that one to float32 in the model"
        )


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating leaves of a tree, or of their shapes; None leaves them as they are."""

    def cast(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, np.floating):
            return x
        return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    return tree if dtype is None else jax.tree.map(cast, tree)


def as_multiplied(params: PyTree, compute: Any, *, on_tpu: bool) -> PyTree:
    """Returns shapes of params in the dtype that products read, of which a loop over layers has a copy.

    TPUs round float32 to bfloat16: before a loop, XLA does so for all of its layers.
    """
    cast = cast_floating(params, compute)
    return jax.tree.map(lambda x: cast_floating(x, jnp.bfloat16) if on_tpu and x.dtype == jnp.float32 else x, cast)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """The loss scale (`float32[]`) and the finite steps since it last changed (`int32[]`)."""

    scale: jax.Array
    num_finite_steps: jax.Array


def init_loss_scale(config: LossScaleConfig | None) -> LossScale | None:
    """Returns the loss scale of the first step."""
    if config is None:
        return None
    return LossScale(scale=jnp.float32(config.initial), num_finite_steps=jnp.int32(0))


def update_loss_scale(state: LossScale, finite: jax.Array, config: LossScaleConfig) -> LossScale:
    """Grows the scale after enough finite steps in a row, backs off after a non-finite one, never below the floor."""
    count = state.num_finite_steps + 1
    grows = count >= config.growth_interval_steps
    grown = jnp.where(grows, state.scale * config.growth_factor, state.scale)
    grown = jnp.where(jnp.isfinite(grown), grown, state.scale)  # with infinity all gradients would be NaN
    backed_off = jnp.maximum(state.scale * config.backoff_factor, config.floor)
    return LossScale(
        scale=jnp.where(finite, grown, backed_off),
        num_finite_steps=jnp.where(finite & ~grows, count, 0),
    )


def promoted(*dtypes: Any) -> Any:
    """Returns the dtype that JAX promotes to.

    JAX promotes floats of 8 bits and fewer, and integers of fewer, to no other dtype. They stand for bfloat16, int8 and
    uint8 here, which have all their values. The user's `jax_numpy_dtype_promotion="strict"` is for the user's own code.
    """
    if len(set(map(jnp.dtype, dtypes))) == 1:
        return jnp.dtype(dtypes[0])
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, map(_promotable, dtypes))


def _promotable(dtype: Any) -> Any:
    """Returns the dtype that stands for one that JAX does not promote."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1:
        return jnp.bfloat16
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    return dtype


def wide(dtype: Any) -> Any:
    """Returns the dtype that numbers of a dtype are summed in: float32, or their own where that is wider."""
    return promoted(dtype, jnp.float32)


def summed_dtype(own: Any, reduce: Any) -> Any:
    """Returns the dtype that gradients of a dtype are summed in across devices; complex ones are in their own."""
    return reduce if reduce is not None and jnp.issubdtype(own, jnp.floating) else own
