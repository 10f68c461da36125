"""Rules of the table: what becomes of a key of the optimizer or the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping

from zero_jax.cli.deepspeed.rows import KEYS, OTHER_OPTIMIZERS, DeepSpeedValues, KeyRow, Rule, check
from zero_jax.cli.deepspeed.rules import by_table
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import shown
from zero_jax.trainer import OptimizerConfig

PARAMS = "optimizer.params."
SCHEDULE = "scheduler.params."
_ADAM = ("adam", "adamw")
_TRANSLATED = (*_ADAM, "lion", "sgd")
# Params whose value can make an optimizer another one.
_BLOCKING = {"bias_correction", "adam_w_mode", "amsgrad", "nesterov", "dampening", "maximize", "momentum"}
_NESTEROV = "the momentum of 'sgd' is Nesterov's here"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _name(values: DeepSpeedValues) -> str | None:
    kind = values.get("optimizer.type")
    return kind.lower() if isinstance(kind, str) else None


def optimizer_type(values: DeepSpeedValues, key: str) -> KeyRow:
    """The optimizer; it is translated where all its params are."""
    name = _name(values)
    if name not in _TRANSLATED:
        note = "the optimizer is of the program that reads this file: set [optimizer]"
        if name is not None:
            hint = did_you_mean(name, (*OTHER_OPTIMIZERS, *_TRANSLATED))
            note = OTHER_OPTIMIZERS.get(name, f"no optimizer of DeepSpeed's own: {hint}set [optimizer]")
        return values.row(key, "not translated", note)
    blocking = _blocking(values)
    if blocking:
        return values.row(key, "not translated", f"with {', '.join(blocking)} it is another optimizer than those here")
    kind = "adamw" if name in _ADAM else name
    settings = {name.removeprefix("optimizer."): value for row in _rows(values) for name, value in row.settings.items()}
    check("optimizer.params", lambda: OptimizerConfig(**{"optimizer": kind, **settings}))
    note = "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if name == "adam" else ""
    return values.row(key, "translated", note, {"optimizer.optimizer": kind})


def _param(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """Makes the row of a param, whose optimizer or schedule both have, whatever its other params."""
    entry, kind = KEYS[key], values.get(f"{key.partition('.')[0]}.type")
    owner = _name(values) if key.startswith(PARAMS) else kind
    if key not in values and owner not in entry.absent.split():
        return None
    if owner not in entry.owners.split():
        return values.row(key, "not translated", f"it is not of {kind}")
    if values.is_auto(key):
        return values.auto(key, entry.setting or entry.differs or "it has no counterpart")
    return _RULES.get(key, by_table)(values, key)


def optimizer_param(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """A param of the optimizer."""
    if _name(values) not in _TRANSLATED:
        return _untranslated(values, key, f"of {values.get('optimizer.type') or 'an optimizer without a type'}")
    row = _param(values, key)
    if row is not None and _blocking(values):
        return _untranslated(values, key, row.reason or "of that optimizer")
    return row


def scheduler_param(values: DeepSpeedValues, key: str) -> KeyRow | None:
    """A param of the schedule."""
    kind = values.get("scheduler.type")
    if kind not in _SCHEDULES or _name(values) not in _TRANSLATED:
        return _untranslated(values, key, f"of {kind or 'a scheduler without a type'}")
    return _param(values, key)


def _untranslated(values: DeepSpeedValues, key: str, reason: str) -> KeyRow | None:
    return values.row(key, "not translated", reason) if key in values else None


def _rows(values: DeepSpeedValues) -> list[KeyRow]:
    """Makes the rows of the optimizer's params, those of the file first."""
    keys = [key for key in values.by_key if key in _PARAMS] + [key for key in _PARAMS if key not in values]
    return [row for key in keys if (row := _param(values, key)) is not None]


def _blocking(values: DeepSpeedValues) -> list[str]:
    """Returns the params that make the optimizer another one than those here."""
    rows = [row for row in _rows(values) if row.status == "not translated" and not values.is_auto(row.key)]
    return [row.key for row in rows if row.key.removeprefix(PARAMS) in _BLOCKING]


def _learning_rate(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR") and _max_rate(values)[0] is not None:
        return values.row(key, "no meaning", "the scheduler sets the rate")
    rate = float(values.get(key, 1e-3))
    return values.row(key, "translated", values.default_of(key), {"optimizer.learning_rate": rate})


def _betas(values: DeepSpeedValues, key: str) -> KeyRow:
    betas = values.get(key, (0.9, 0.999))
    if len(betas) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in betas):
        raise ValueError(f"{key} = {shown(betas)}: give two numbers, such as [0.9, 0.999]")
    beta1, beta2 = map(float, betas)
    return values.row(key, "translated", values.default_of(key), {"optimizer.beta1": beta1, "optimizer.beta2": beta2})


def _weight_decay(values: DeepSpeedValues, key: str) -> KeyRow:
    is_torch = _name(values) == "adamw" and values.get(f"{PARAMS}torch_adam") is True
    decay = float(values.get(key, 0.01 if is_torch else 0.0))
    note = (
        "vectors, scales, biases and norms are not decayed here (optimizer.no_decay adds more); DeepSpeed decays all "
        "of a param group"
    )
    return values.row(key, "translated", note if decay else values.default_of(key), {"optimizer.weight_decay": decay})


def _momentum(values: DeepSpeedValues, key: str) -> KeyRow:
    momentum = values.get(key, 0.0)
    if momentum and values.get(f"{PARAMS}nesterov") is not True:
        return values.row(key, "not translated", _NESTEROV)
    return values.row(key, "translated", values.default_of(key, "PyTorch"), {"optimizer.momentum": float(momentum)})


def _adam_w_mode(values: DeepSpeedValues, key: str) -> KeyRow:
    if _name(values) == "adamw" or values.get(key) is not False:
        return values.row(key, "same", "weight decay is decoupled")
    if not values.get(f"{PARAMS}weight_decay"):
        return values.row(key, "same", "without weight decay, Adam and AdamW are one")
    return values.row(key, "not translated", "weight decay in the gradient (L2) does not exist here")


def _max_grad_norm(values: DeepSpeedValues, key: str) -> KeyRow:
    note = "DeepSpeed refuses it: it is gradient_clipping there, zero.clip_norm here"
    return values.row(key, "not translated" if values.get(key) else "off", note)


def _nesterov(values: DeepSpeedValues, key: str) -> KeyRow:
    if values.get(key) is True or not values.get(f"{PARAMS}momentum"):
        return values.row(key, "same")
    return values.row(key, "not translated", _NESTEROV)


def _max_rate(values: DeepSpeedValues) -> tuple[float | None, str]:
    """Returns the highest rate of a scheduler that sets it, or None and why not."""
    key, rate = f"{SCHEDULE}warmup_max_lr", values.get(f"{SCHEDULE}warmup_max_lr")
    if isinstance(rate, list):
        return None, "a rate for each param group; here is one for all: set optimizer.learning_rate"
    if rate is not None and not values.is_auto(key):
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ValueError(f"{key} = {shown(rate)}: give a number")
        return float(rate), ""
    if rate is not None:
        return None, "auto"
    if values.get("scheduler.type") == "WarmupDecayLR" or values.get(f"{PARAMS}lr") in (None, 1e-3):
        return 1e-3, "DeepSpeed's default"
    return None, "0.001 in DeepSpeed's older releases, the optimizer's rate in newer ones: set it"


def scheduler_type(values: DeepSpeedValues, key: str) -> KeyRow:
    """The schedule, which goes with an optimizer that is translated."""
    kind = values.get(key)
    if kind in _SCHEDULES and _name(values) in _TRANSLATED:
        end = {"optimizer.final_learning_rate": 0.0} if kind == "WarmupDecayLR" else {}
        return values.row(key, "translated", "", {"optimizer.schedule": _SCHEDULES[kind], **end})
    if kind is None:
        note = "a rate that stays, unless the program has a scheduler: set optimizer.schedule and warmup_steps"
    elif kind in _SCHEDULES:
        note = "it goes with the optimizer: set optimizer.schedule, learning_rate and warmup_steps"
    else:
        hint = "" if kind in ("OneCycle", "LRRangeTest") else did_you_mean(kind, _SCHEDULES)
        note = f"{hint}zero_jax has no such schedule: set optimizer.schedule"
    return values.row(key, "not translated", note)


def _warmup_steps(values: DeepSpeedValues, key: str) -> KeyRow:
    steps = values.get(key, 1000)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps")
    note = "it rises along a line, 2 steps earlier than DeepSpeed's"
    if values.get(f"{SCHEDULE}warmup_type") != "linear":
        note = "it rises along a line from 0, and DeepSpeed's along a logarithm unless warmup_type is 'linear'"
    return values.row(key, "translated", note, {"optimizer.warmup_steps": max(2, steps)})


def _peak(values: DeepSpeedValues, key: str) -> KeyRow:
    rate, why = _max_rate(values)
    if rate is None:
        return values.row(key, "not translated", why)
    if not rate > 0:
        raise ValueError(f"{key} = {rate}: give a positive rate")
    return values.row(key, "translated", why, {"optimizer.learning_rate": rate})


def _total_steps(values: DeepSpeedValues, key: str) -> KeyRow:
    steps = values.get(key)
    if not isinstance(steps, int) or steps < 1:
        kind = values.get("scheduler.type")
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps, which {kind} needs")
    return values.row(key, "translated", "the rate falls until the last step", {"run.steps": steps})


def _final_rate(values: DeepSpeedValues, key: str) -> KeyRow:
    share = values.get(key, 1e-4)
    if not 0 <= share <= 1:
        raise ValueError(f"{key} = {share}: give a share of the rate, at least 0 and at most 1")
    return values.row(key, "translated", values.default_of(key), {"optimizer.final_learning_rate": float(share)})


_RULES: Mapping[str, Rule] = {
    f"{PARAMS}lr": _learning_rate,
    f"{PARAMS}betas": _betas,
    f"{PARAMS}weight_decay": _weight_decay,
    f"{PARAMS}momentum": _momentum,
    f"{PARAMS}nesterov": _nesterov,
    f"{PARAMS}adam_w_mode": _adam_w_mode,
    f"{PARAMS}max_grad_norm": _max_grad_norm,
    f"{SCHEDULE}warmup_num_steps": _warmup_steps,
    f"{SCHEDULE}warmup_max_lr": _peak,
    f"{SCHEDULE}total_num_steps": _total_steps,
    f"{SCHEDULE}cos_min_ratio": _final_rate,
}
_PARAMS = [key for key in KEYS if key.startswith(PARAMS)]
# The rules of optimizer and schedule, in the order of their rows.
RULES: Mapping[str, Rule] = {
    "optimizer.type": optimizer_type,
    **dict.fromkeys(_PARAMS, optimizer_param),
    "scheduler.type": scheduler_type,
    **dict.fromkeys((key for key in KEYS if key.startswith(SCHEDULE)), scheduler_param),
}
