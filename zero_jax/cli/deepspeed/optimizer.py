"""Translates the optimizer and the learning-rate schedule of a DeepSpeed config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zero_jax.cli.deepspeed.keys import KEYS
from zero_jax.cli.deepspeed.rows import DeepSpeedKeys, KeyRow, check
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import shown
from zero_jax.trainer import OptimizerConfig

_PARAMS = "optimizer.params."
_SCHEDULE = "scheduler.params."
_ONE_BIT = (
    "zero.quantize_grads sends gradients as int8 or int4 for any optimizer, with zero.quantize_error_feedback between "
    "replicas"
)
# The names that DeepSpeed knows and zero_jax does not have with the same meaning.
_OTHERS: Mapping[str, str] = {
    "lamb": "`zero-jax train` has no LAMB; a loop of your own takes optax.lamb, whose trust ratio has no max_coeff and "
    "min_coeff",
    "fusedlamb": "as Lamb",
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "muon": "optimizer = 'muon' here scales updates as AdamW does (consistent_rms), and chooses its matrices by path",
    "muadam": "zero_jax has no muP",
    "muadamw": "zero_jax has no muP",
    "musgd": "zero_jax has no muP",
    "adagrad": "a loop of your own takes optax.adagrad",
    "rmsprop": "a loop of your own takes optax.rmsprop",
    "adafactor": "optimizer = 'adafactor' here does not scale by the params' size, and has other defaults",
}
_ADAM = ("adam", "adamw")
_TRANSLATED = (*_ADAM, "lion", "sgd")
_IMPLEMENTATION = "set_grad_none fused foreach capturable differentiable".split()
_DECAY = (
    "vectors, scales, biases and norms are not decayed here (optimizer.no_decay adds more); DeepSpeed decays all of a "
    "param group"
)
_NESTEROV = "the momentum of 'sgd' is Nesterov's here"
_SHIFT = "it rises along a line, 2 steps earlier than DeepSpeed's"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def optimizer_rows(keys: DeepSpeedKeys) -> Iterator[KeyRow]:
    """Makes the rows of all keys of `optimizer` and `scheduler`."""
    kind = keys.get("optimizer.type")
    name = kind.lower() if isinstance(kind, str) else None
    if name in _TRANSLATED:
        yield from _translated(keys, name)
    else:
        note = "the optimizer is of the program that reads this file: set [optimizer]"
        if name is not None:
            hint = did_you_mean(name, (*_OTHERS, *_TRANSLATED))
            note = _OTHERS.get(name, f"no optimizer of DeepSpeed's own: {hint}set [optimizer]")
        yield keys.row("optimizer.type", "not translated", note)
        yield from _untranslated(keys, _PARAMS, f"of {kind or 'an optimizer without a type'}")
    yield from _schedule(keys, has_optimizer=name in _TRANSLATED)


def _untranslated(keys: DeepSpeedKeys, prefix: str, reason: str) -> Iterator[KeyRow]:
    """Makes the rows of the keys of an optimizer or scheduler that is not translated."""
    for key in keys.values:
        if key.startswith(prefix) and key in KEYS:
            yield keys.row(key, "not translated", reason)


def _translated(keys: DeepSpeedKeys, name: str) -> Iterator[KeyRow]:
    """Makes the rows of an optimizer that both have."""
    params = {key.removeprefix(_PARAMS): keys.get(key) for key in keys.values if key.startswith(_PARAMS)}
    options: dict[str, Any] = {}
    rows: list[KeyRow] = []
    for param, row in ((p, _param_rows(keys, name, p, params)) for p in [*params, *_defaults(name, params)]):
        if row is not None:
            rows.append(row)
            options |= {setting.removeprefix("optimizer."): value for setting, value in row.settings.items()}
        assert row is not None or _PARAMS + param not in KEYS, param
    blocking = [row for row in rows if row.status == "not translated" and row.key.rpartition(".")[2] in _BLOCKING]
    if blocking:
        names = ", ".join(row.key for row in blocking)
        yield keys.row("optimizer.type", "not translated", f"with {names} it is another optimizer than those here")
        present = [row for row in rows if row.key in keys]
        yield from (keys.row(row.key, "not translated", row.reason or "of that optimizer") for row in present)
        return
    kind = "adamw" if name in _ADAM else name
    check("optimizer.params", lambda: OptimizerConfig(**{"optimizer": kind, **options}))
    note = "DeepSpeed's Adam is AdamW unless adam_w_mode is false" if name == "adam" else ""
    yield keys.row("optimizer.type", "translated", note, optimizer__optimizer=kind)
    yield from rows


# Params whose value can make an optimizer another one.
_BLOCKING = {"bias_correction", "adam_w_mode", "amsgrad", "nesterov", "dampening", "maximize", "momentum"}


def _defaults(name: str, params: Mapping[str, Any]) -> list[str]:
    """Returns the params that the file leaves at DeepSpeed's default, which is not that of zero_jax."""
    params_of = {"adam": ["lr", "betas", "weight_decay"], "lion": ["lr", "weight_decay"]}
    params_of["sgd"] = ["lr", "weight_decay", "momentum"]
    return [param for param in params_of["adam" if name in _ADAM else name] if param not in params]


def _param_rows(keys: DeepSpeedKeys, name: str, param: str, params: Mapping[str, Any]) -> KeyRow | None:
    """Makes the row of a param of the optimizer, or None for one that the table of keys does not have."""
    key = _PARAMS + param
    if key not in KEYS:
        return None
    if keys.is_auto(key):
        return keys.auto(key, _SETTINGS.get(param, "it has no counterpart"))
    if name not in _OWNERS.get(param, (name,)):
        return keys.row(key, "not translated", f"it is not of {keys.get('optimizer.type')}")
    if param in _READERS:
        return _READERS[param](keys, name, params)
    if param in _IMPLEMENTATION or param == "torch_adam":
        return keys.row(key, "no meaning", "an implementation of PyTorch or CUDA")
    if param == "max_grad_norm":
        status = "not translated" if params[param] else "off"
        return keys.row(key, status, "DeepSpeed refuses it: it is gradient_clipping there, zero.clip_norm here")
    if param == "fp32_optimizer_states":
        return keys.row(key, "same" if params[param] else "not translated", "the optimizer's state is float32 here")
    return keys.row(key, "not translated", f"it is not of {keys.get('optimizer.type')}")


def _learning_rate(keys: DeepSpeedKeys, name: str, params: Mapping[str, Any]) -> KeyRow:
    key = _PARAMS + "lr"
    if keys.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR") and _max_rate(keys)[0] is not None:
        return keys.row(key, "no meaning", "the scheduler sets the rate")
    rate = float(params.get("lr", 1e-3))
    return keys.row(key, "translated", keys.default_of(key), optimizer__learning_rate=rate)


def _betas(keys: DeepSpeedKeys, name: str, params: Mapping[str, Any]) -> KeyRow:
    key, value = _PARAMS + "betas", params.get("betas", (0.9, 0.999))
    if len(value) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in value):
        raise ValueError(f"{key} = {shown(value)}: give two numbers, such as [0.9, 0.999]")
    beta1, beta2 = map(float, value)
    return keys.row(key, "translated", keys.default_of(key), optimizer__beta1=beta1, optimizer__beta2=beta2)


def _weight_decay(keys: DeepSpeedKeys, name: str, params: Mapping[str, Any]) -> KeyRow:
    key = _PARAMS + "weight_decay"
    usual = 0.01 if name == "adamw" and params.get("torch_adam") is True else 0.0
    value = float(params.get("weight_decay", usual))
    return keys.row(key, "translated", _DECAY if value else keys.default_of(key), optimizer__weight_decay=value)


def _momentum(keys: DeepSpeedKeys, name: str, params: Mapping[str, Any]) -> KeyRow:
    key, value = _PARAMS + "momentum", params.get("momentum", 0.0)
    if value and params.get("nesterov") is not True:
        return keys.row(key, "not translated", _NESTEROV)
    return keys.row(key, "translated", keys.default_of(key, "PyTorch"), optimizer__momentum=float(value))


def _adam_w_mode(keys: DeepSpeedKeys, name: str, params: Mapping[str, Any]) -> KeyRow:
    key = _PARAMS + "adam_w_mode"
    if name == "adamw" or params["adam_w_mode"] is not False:
        return keys.row(key, "same", "weight decay is decoupled")
    if not params.get("weight_decay"):
        return keys.row(key, "same", "without weight decay, Adam and AdamW are one")
    return keys.row(key, "not translated", "weight decay in the gradient (L2) does not exist here")


def _only(value: Any, param: str, reason: str) -> Callable[..., KeyRow]:
    """Returns a reader of a param that has one value here."""
    return lambda keys, name, params: keys.same_if(params[param] == value, _PARAMS + param, reason)


def _nesterov(keys: DeepSpeedKeys, name: str, params: Mapping[str, Any]) -> KeyRow:
    is_same = params["nesterov"] is True or not params.get("momentum")
    return keys.same_if(is_same, _PARAMS + "nesterov", _NESTEROV)


# The optimizers of a param that others do not have.
_OWNERS = {"betas": (*_ADAM, "lion"), "eps": _ADAM, "momentum": ("sgd",)}
_READERS: Mapping[str, Callable[..., KeyRow]] = {
    "lr": _learning_rate,
    "betas": _betas,
    "eps": lambda keys, name, params: keys.row(_PARAMS + "eps", "translated", optimizer__epsilon=float(params["eps"])),
    "weight_decay": _weight_decay,
    "momentum": _momentum,
    "adam_w_mode": _adam_w_mode,
    "nesterov": _nesterov,
    "bias_correction": _only(True, "bias_correction", "moments are always corrected for their bias here"),
    "amsgrad": _only(False, "amsgrad", "there is no AMSGrad here"),
    "dampening": _only(0, "dampening", "there is no dampening here"),
    "maximize": _only(False, "maximize", "losses are minimized here"),
}
_SETTINGS = {
    "lr": "optimizer.learning_rate",
    "betas": "optimizer.beta1 and beta2",
    "eps": "optimizer.epsilon",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
}


def _max_rate(keys: DeepSpeedKeys) -> tuple[float | None, str]:
    """Returns the highest rate of a scheduler that sets it, or None and why not."""
    key, rate = _SCHEDULE + "warmup_max_lr", keys.get(_SCHEDULE + "warmup_max_lr")
    if isinstance(rate, list):
        return None, "a rate for each param group; here is one for all: set optimizer.learning_rate"
    if rate is not None and not keys.is_auto(key):
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ValueError(f"{key} = {shown(rate)}: give a number")
        return float(rate), ""
    if rate is None and (keys.get("scheduler.type") == "WarmupDecayLR" or keys.get(_PARAMS + "lr") in (None, 1e-3)):
        return 1e-3, "DeepSpeed's default"
    if rate is None:
        return None, "0.001 in DeepSpeed's older releases, the optimizer's rate in newer ones: set it"
    return None, "auto"


def _schedule(keys: DeepSpeedKeys, *, has_optimizer: bool) -> Iterator[KeyRow]:
    """Makes the rows of the scheduler."""
    kind, key = keys.get("scheduler.type"), "scheduler.type"
    if kind not in _SCHEDULES or not has_optimizer:
        if kind is None:
            note = "a rate that stays, unless the program has a scheduler: set optimizer.schedule and warmup_steps"
        elif not has_optimizer and kind in _SCHEDULES:
            note = "it goes with the optimizer: set optimizer.schedule, learning_rate and warmup_steps"
        else:
            hint = "" if kind in ("OneCycle", "LRRangeTest") else did_you_mean(kind, _SCHEDULES)
            note = f"{hint}zero_jax has no such schedule: set optimizer.schedule"
        yield keys.row(key, "not translated", note)
        yield from _untranslated(keys, _SCHEDULE, f"of {kind}")
        return
    end: dict[str, Any] = {"optimizer__final_learning_rate": 0.0} if kind == "WarmupDecayLR" else {}
    yield keys.row(key, "translated", optimizer__schedule=_SCHEDULES[kind], **end)
    done = set()
    for name, (kinds, setting, read) in _SCHEDULE_READERS.items():
        key = _SCHEDULE + name
        if kind in kinds or (not kinds and key in keys):
            yield keys.auto(key, setting) if setting and keys.is_auto(key) else read(keys, key)
            done.add(key)
    yield from (row for row in _untranslated(keys, _SCHEDULE, f"it is not of {kind}") if row.key not in done)


def _is_linear(keys: DeepSpeedKeys) -> bool:
    return keys.get(_SCHEDULE + "warmup_type", "log") == "linear"


def _warmup_steps(keys: DeepSpeedKeys, key: str) -> KeyRow:
    steps = keys.get(key, 1000)
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps")
    if not _is_linear(keys):
        note = "DeepSpeed rises along a logarithm unless warmup_type is 'linear', zero_jax along a line: set {}"
        return keys.row(key, "not translated", note.format("optimizer.warmup_steps"))
    if any(keys.get(_SCHEDULE + name) not in (None, 0) for name in ("warmup_min_lr", "warmup_min_ratio")):
        return keys.row(key, "not translated", "the rise starts at 0 here: set optimizer.warmup_steps")
    return keys.row(key, "translated", _SHIFT, optimizer__warmup_steps=max(2, steps))


def _peak(keys: DeepSpeedKeys, key: str) -> KeyRow:
    rate, why = _max_rate(keys)
    if rate is None:
        return keys.row(key, "not translated", why)
    if not rate > 0:
        raise ValueError(f"{key} = {rate}: give a positive rate")
    return keys.row(key, "translated", why, optimizer__learning_rate=rate)


def _total_steps(keys: DeepSpeedKeys, key: str) -> KeyRow:
    steps = keys.get(key)
    if not isinstance(steps, int) or steps < 1:
        kind = keys.get("scheduler.type")
        raise ValueError(f"{key} = {shown(steps)}: give a number of steps, which {kind} needs")
    return keys.row(key, "translated", "the rate falls until the last step", run__steps=steps)


def _final_rate(keys: DeepSpeedKeys, key: str) -> KeyRow:
    share = keys.get(key, 1e-4)
    if not 0 <= share <= 1:
        raise ValueError(f"{key} = {share}: give a share of the rate, at least 0 and at most 1")
    return keys.row(key, "translated", keys.default_of(key), optimizer__final_learning_rate=float(share))


def _start(keys: DeepSpeedKeys, key: str) -> KeyRow:
    return keys.row(key, "same" if not keys.get(key) else "not translated", "the rise starts at 0 here")


def _type_of_warmup(keys: DeepSpeedKeys, key: str) -> KeyRow:
    return keys.row(key, "same" if _is_linear(keys) else "not translated", "the rise is linear here")


def _last_iteration(keys: DeepSpeedKeys, key: str) -> KeyRow:
    is_new = keys.get(key) == -1
    return keys.row(key, "off" if is_new else "not translated", "" if is_new else "a resumed run knows its step")


# The schedules for which an absent key has a row, too (none: only a key of the file has one); what to set here if
# another program fills in the value; and the function that makes the row.
_SCHEDULE_READERS: Mapping[str, tuple[Sequence[str], str, Callable[[DeepSpeedKeys, str], KeyRow]]] = {
    "warmup_num_steps": (tuple(_SCHEDULES), "optimizer.warmup_steps", _warmup_steps),
    "warmup_max_lr": (("WarmupLR", "WarmupDecayLR"), "optimizer.learning_rate", _peak),
    "total_num_steps": (("WarmupDecayLR", "WarmupCosineLR"), "run.steps", _total_steps),
    "cos_min_ratio": (("WarmupCosineLR",), "optimizer.final_learning_rate", _final_rate),
    "warmup_min_lr": ((), "the rise starts at 0", _start),
    "warmup_min_ratio": ((), "the rise starts at 0", _start),
    "warmup_type": ((), "", _type_of_warmup),
    "last_batch_iteration": ((), "", _last_iteration),
}
