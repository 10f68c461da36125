"""Optimizers by name, with a warm-up and a cosine decay, for those who do not bring their own."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from zero_jax.tree import path_name

# Leaves whose values have a meaning of their own (a gain, an offset) are not pulled towards zero, and a table of
# vectors is no matrix for Muon: a step's gradient touches single rows.
_NOT_DECAYED = ("scale", "bias", "norm")
_TABLES = ("embed", "embedding", "position")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Says which optimizer updates the params, and how fast.

    Attributes:
      optimizer: name of the optimizer: `adamw`, `sgd` (with momentum), `lion`, `adafactor` or `muon`.
      learning_rate: learning rate after the warm-up; None takes what is usual for the optimizer.
      warmup_steps: steps over which the learning rate rises from nothing.
      final_learning_rate: learning rate at the last step, as a share of `learning_rate`; it falls along a cosine.
      weight_decay: share of a matrix that each step takes away, times the learning rate.
    """

    optimizer: str = "adamw"
    learning_rate: float | None = None
    warmup_steps: int = 50
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1

    def __post_init__(self):
        """Refuses what no optimizer can use."""
        if self.optimizer not in _OPTIMIZERS:
            near = difflib.get_close_matches(self.optimizer, _OPTIMIZERS, n=1, cutoff=0)[0]
            raise ValueError(
                f"unknown optimizer {self.optimizer!r}: did you mean {near!r}? Choose one of {', '.join(_OPTIMIZERS)}"
            )
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(
                f"learning_rate={self.learning_rate}: give a positive learning rate, or None for the usual"
            )
        if self.warmup_steps < 0 or self.weight_decay < 0 or not 0 <= self.final_learning_rate <= 1:
            raise ValueError(
                f"warmup_steps={self.warmup_steps}, weight_decay={self.weight_decay}, "
                f"final_learning_rate={self.final_learning_rate}: give no negative numbers, and at most 1 for the last"
            )


def make_optimizer(config: OptimizerConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Makes the optimizer for a run of `num_steps` steps.

    Raises:
      ValueError: the warm-up is not over when the run is.
    """
    if config.warmup_steps >= num_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} leaves nothing of a run of {num_steps} steps: make it smaller, "
            f"{num_steps // 10} for example, or train for longer"
        )
    usual_learning_rate, make = _OPTIMIZERS[config.optimizer]
    peak = usual_learning_rate if config.learning_rate is None else config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        # A rate of exactly nothing would waste the first step.
        init_value=peak / (config.warmup_steps + 1),
        peak_value=peak,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=peak * config.final_learning_rate,
    )
    return make(schedule, config.weight_decay)


def decay_mask(params: Any) -> Any:
    """Returns for each param whether weight decay applies: to matrices, not to norms' scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x.ndim > 1 and not _is_named(path, _NOT_DECAYED), params)


def _muon_dims(params: Any) -> Any:
    """Returns for each param which two dims Muon makes orthogonal: the last of (stacked) matrices, none of tables."""

    def dims(path: Any, x: Any) -> MuonDimensionNumbers | None:
        is_matrix = x.ndim > 1 and not _is_named(path, _NOT_DECAYED + _TABLES)
        return MuonDimensionNumbers(reduction_axis=-2, output_axis=-1) if is_matrix else None

    return jax.tree_util.tree_map_with_path(dims, params)


def _is_named(path: tuple[Any, ...], names: tuple[str, ...]) -> bool:
    return any(part == name or part.endswith("_" + name) for part in path_name(path).split("/") for name in names)


def _adamw(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=decay_mask)


def _sgd(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(weight_decay, decay_mask), optax.sgd(schedule, momentum=0.9, nesterov=True)
    )


def _lion(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.lion(schedule, weight_decay=weight_decay, mask=decay_mask)


def _adafactor(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    # optax.adafactor's own weight decay is not scaled by the learning rate, unlike that of the others here.
    def decay(step: Any) -> Any:
        return weight_decay * schedule(step)

    return optax.adafactor(
        schedule, multiply_by_parameter_scale=False, weight_decay_rate=decay, weight_decay_mask=decay_mask
    )


def _muon(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    # With `consistent_rms` Muon takes steps as large as AdamW's, so that one learning rate serves both kinds of leaves.
    return muon(
        schedule,
        weight_decay=weight_decay,
        weight_decay_mask=decay_mask,
        muon_weight_dimension_numbers=_muon_dims,
        consistent_rms=0.2,
    )


_OPTIMIZERS: Mapping[str, tuple[float, Callable[[optax.Schedule, float], optax.GradientTransformation]]] = {
    "adamw": (3e-3, _adamw),
    "sgd": (0.3, _sgd),
    "lion": (5e-4, _lion),
    "adafactor": (3e-3, _adafactor),
    "muon": (8e-3, _muon),
}
