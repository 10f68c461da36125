"""The gradient noise scale: the batch size beyond which more examples save few steps.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018). The mean gradient of `B` examples is the true
gradient `G` plus noise of variance `tr(Sigma) / B`; the simple noise scale `tr(Sigma) / |G|^2` (equation 2.9) is the
batch at which both are equally large. Both follow from the squared norms of a batch's gradient and of its parts'
(appendix A.1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zero_jax.core.field_checks import check_value
from zero_jax.core.text_tables import Report
from zero_jax.program.jaxprs import inline_jit
from zero_jax.sharding.precision import wide
from zero_jax.sharding.spec import Dims, named, num_shards

# For each sharding, the sums of squares of the shards of arrays: `float32[shards of a dim, ...]`.
Squares = dict[Dims, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Statistics of the gradients of a batch's parts."""

    grad_norm_sq: jax.Array  # mean by weight of the squared global norms of the parts' gradients, `float32[]`
    num_parts: jax.Array  # parts with a weight above 0, `int32[]`


def squared(x: jax.Array) -> jax.Array:
    """Returns the squares of absolute values, in float32 at least: the square of a float16 overflows from 256 on."""
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    return jnp.square(x.astype(wide(x.dtype)))


def shard_squares(arrays: Sequence[jax.Array], dims: Sequence[Dims], *, mesh: Mesh) -> Squares:
    """Sums the squares of arrays that are sharded as `dims`, shard by shard, without communication."""
    squares: Squares = {}
    for x, leaf_dims in zip(arrays, dims, strict=True):
        key = tuple(dim for dim in leaf_dims if dim)
        square = _squares_of_shards(x, dims=leaf_dims, mesh=mesh)
        squares[key] = squares[key] + square if key in squares else square
    return {key: lax.with_sharding_constraint(x, named(mesh, key)) for key, x in squares.items()}


@functools.partial(inline_jit, static_argnames=("dims", "mesh"))
def _squares_of_shards(x: jax.Array, *, dims: Dims, mesh: Mesh) -> jax.Array:
    """Returns the sum of squares of each shard of an array, `[shards of a dim, ...]`."""
    # A sharded dim becomes two: of the shards, and of what is in each, which is summed where it is.
    shape, entries, local = [], [], []
    for size, dim in zip(x.shape, dims, strict=True):
        if dim:
            shards = num_shards(mesh, (dim,))
            shape.append(shards)
            entries.append(dim)
            size //= shards
        local.append(len(shape))
        shape.append(size)
        entries.append(())
    return squared(lax.with_sharding_constraint(x.reshape(shape), named(mesh, tuple(entries)))).sum(local)


def mean_of_parts(squares: Squares, weights: jax.Array, *, has_weight: bool = False) -> Parts:
    """Averages the squared norms of parts, stacked on the dims of `weights`, by weight; sends a scalar a sharding.

    A part of weight 0 is left out: its gradient may be 0 / 0. With `has_weight` the gradients are multiplied by the
    weights over their mean already.
    """
    total = jnp.float32(0)
    # Of gradients that are multiplied by w / mean(w): their squares over that squared, by w.
    factors = weights.mean() ** 2 / weights if has_weight else weights
    for x in squares.values():
        factor, weight = (y.reshape(y.shape + (1,) * (x.ndim - y.ndim)) for y in (factors, weights))
        total += jnp.where(weight == 0, 0, factor * x).sum()
    weight = weights.sum()
    return Parts(grad_norm_sq=total / jnp.where(weight == 0, 1, weight), num_parts=(weights != 0).sum(dtype=jnp.int32))


def estimate_step(
    *, grad_norm: float, small_grad_norm_sq: float, num_small_grads: int, batch_size: int
) -> tuple[float, float] | None:
    """Estimates signal and noise from one step (appendix A.1); None for a single part or a non-finite gradient.

    The signal is `|G|^2`, the squared norm of the true gradient; the noise `tr(Sigma)`, the variance of the gradient of
    one example. Both are unbiased and noisy, and may be negative.

    With parts of equal size, `small_grad_norm_sq` is `|G_small|^2` for `B_small = batch_size / num_small_grads`. With
    uneven ones it is the mean by weight, and the result is as unbiased if noise goes down as one over the weight (as it
    does for a mean over tokens): the mean by weight of `tr(Sigma) / weight` depends on the number of parts alone.
    """
    big = grad_norm * grad_norm
    if num_small_grads < 2 or not math.isfinite(big) or not math.isfinite(small_grad_norm_sq):
        return None
    # (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small), and (|G_small|^2 - |G_big|^2) / (1/B_small - 1/B_big)
    signal = (num_small_grads * big - small_grad_norm_sq) / (num_small_grads - 1)
    noise = batch_size * (small_grad_norm_sq - big) / (num_small_grads - 1)
    return signal, noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseScaleEstimate(Report):
    """The noise scale and its standard error."""

    num_examples: float  # the noise scale
    error_examples: float  # its standard error, from the variance between steps
    num_steps: int  # steps in the average, with the latest weighted most

    def __str__(self) -> str:
        return f"{self.num_examples:,.3g} ± {self.error_examples:,.2g} examples, from {self.num_steps} steps"


_SUMS = ("signal", "noise", "signal_sq", "noise_sq", "product", "weight", "weight_sq")


class NoiseScale:
    """Estimates the gradient noise scale during a run, on the host.

    Signal and noise are averaged over steps separately, and the averages are divided: the ratio of averages
    is nearly unbiased, the average of ratios is not (appendix A.1). Its standard error is that of a ratio to first
    order, from the running variances of both and their covariance.

    Example:
      >>> noise = zero.NoiseScale(min_steps=2)
      >>> for grad_norm in (1.0, 1.1):  # of each step's metrics
      ...     estimate = noise.update(grad_norm=grad_norm, small_grad_norm_sq=2.0, num_small_grads=4, batch_size=16)
      >>> estimate is not None
      True
    """

    def __init__(self, *, decay: float = 0.99, min_steps: int = 20):
        """Creates an estimator without any steps.

        Args:
          decay: decay of the exponential averages per step.
          min_steps: steps before there is an estimate.

        Raises:
          ValueError: a decay outside [0, 1), or fewer than 2 steps.
        """
        check_value("decay", decay, float)
        check_value("min_steps", min_steps, int)
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: give a number from 0 to below 1, such as 0.99")
        if min_steps < 2:
            raise ValueError(f"min_steps={min_steps}: give at least 2, fewer give no error")
        self.decay, self.min_steps = decay, min_steps
        self._num_steps = 0
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)

    def update(
        self, *, grad_norm: float, small_grad_norm_sq: float | None, num_small_grads: int | None, batch_size: int
    ) -> float | None:
        """Adds a step and returns the noise scale in examples, or None while it is unknown.

        A step with a gradient that is not finite, or with a single part, changes nothing.

        Args:
          grad_norm: `metrics.grad_norm`.
          small_grad_norm_sq: `metrics.small_grad_norm_sq`.
          num_small_grads: `metrics.num_small_grads`.
          batch_size: examples in the batch, all devices and microbatches; it may change from step to step.
        """
        if small_grad_norm_sq is not None and num_small_grads is not None:
            step = estimate_step(
                grad_norm=float(grad_norm),
                small_grad_norm_sq=float(small_grad_norm_sq),
                num_small_grads=int(num_small_grads),
                batch_size=batch_size,
            )
            if step is not None:
                self._add(*step)
        estimate = self.estimate
        return None if estimate is None else estimate.num_examples

    def _add(self, signal: float, noise: float) -> None:
        keep, new = self.decay, 1 - self.decay
        values = (signal, noise, signal**2, noise**2, signal * noise, 1.0)
        weight_sq = keep * keep * self._sums["weight_sq"] + new * new
        self._sums = {name: keep * self._sums[name] + new * value for name, value in zip(_SUMS, values, strict=False)}
        self._sums["weight_sq"] = weight_sq
        self._num_steps += 1

    @property
    def estimate(self) -> NoiseScaleEstimate | None:
        """The noise scale so far; None after too few steps, or if the signal is below the noise."""
        if self._num_steps < self.min_steps:
            return None
        weight = self._sums["weight"]
        mean = {name: value / weight for name, value in self._sums.items()}
        signal, noise = mean["signal"], mean["noise"]
        if signal <= 0:
            return None
        ratio = max(noise, 0.0) / signal
        independent_steps = weight * weight / self._sums["weight_sq"]
        spread = (
            (mean["noise_sq"] - noise * noise)
            - 2 * ratio * (mean["product"] - signal * noise)
            + ratio * ratio * (mean["signal_sq"] - signal * signal)
        )
        # Below 2 independent steps (a decay near 0) nothing is known of the error.
        error = math.inf if independent_steps < 2 else math.sqrt(max(spread, 0.0) / (independent_steps - 1)) / signal
        return NoiseScaleEstimate(num_examples=ratio, error_examples=error, num_steps=self._num_steps)

    def advice(self, batch_size: int, *, unit: str = "sequences") -> str | None:
        """Returns advice if the batch is past the point of diminishing returns; None if not, or if uncertain.

        A batch of `B` takes `1 + B_noise / B` times the fewest steps and `1 + B / B_noise` times the fewest examples
        (section 2.3). The batch is past the point if it is twice the noise scale and more, beyond two standard errors.

        Args:
          batch_size: examples in the batch.
          unit: what to call them.
        """
        estimate = self.estimate
        if estimate is None or batch_size < 2 * (estimate.num_examples + 2 * estimate.error_examples):
            return None
        share = estimate.num_examples / batch_size
        steps, examples = (1 + 2 * share) / (1 + share), (0.5 + share) / (1 + share)
        return (
            f"the batch of {batch_size:,} {unit} is past the point of diminishing returns: the gradient noise scale is "
            f"{estimate.num_examples:,.3g} ± {estimate.error_examples:,.2g} {unit}. Half the batch would take about "
            f"{steps:.2f} times the steps and {examples:.2f} times the {unit}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the state that `from_json` restores exactly."""
        return {"decay": self.decay, "min_steps": self.min_steps, "num_steps": self._num_steps, **self._sums}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> NoiseScale:
        """Restores an estimator from `to_json`.

        Raises:
          ValueError: a record with other entries.
        """
        expected = {"decay", "min_steps", "num_steps", *_SUMS}
        if set(record) != expected:
            names = sorted(set(record) ^ expected)
            raise ValueError(
                f"the record of the noise scale lacks or does not know {', '.join(names)}: give what to_json returned, "
                "or start afresh with NoiseScale()"
            )
        noise_scale = cls(decay=record["decay"], min_steps=record["min_steps"])
        noise_scale._num_steps = record["num_steps"]
        noise_scale._sums = {name: float(record[name]) for name in _SUMS}
        return noise_scale
