"""Translates a DeepSpeed config: stage, precision, clipping, batch, mesh, remat, logging; `optimizer` has the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_jax.cli.deepspeed.keys import KEYS
from zero_jax.cli.deepspeed.optimizer import optimizer_rows
from zero_jax.cli.deepspeed.reading import flatten
from zero_jax.cli.deepspeed.rows import Given, Row, Translation, check
from zero_jax.core.tree import shown
from zero_jax.training import ZeroConfig

_BF16 = ("bf16.enabled", "bfloat16.enabled")
_FP16 = "fp16.enabled"
_AUTOCAST = ("torch_autocast", "amp")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_REMAT = ("activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing")


def translate(config: Mapping[str, Any], *, devices: int | None = None) -> Translation:
    """Translates a DeepSpeed config.

    Args:
      config: the config, as in its JSON file.
      devices: number of devices that it is for; without it, what depends on that is left to the reader.

    Raises:
      ValueError: a value of the wrong kind, or values that contradict each other.
    """
    values, unknown = flatten(config)
    given = Given({key: value for key, value in values.items() if value is not None}, devices=devices)
    if devices is not None and devices < 1:
        raise ValueError(f"devices={devices}: give at least 1")
    rows = [Row(key=key, value=values[key], status="unknown", reason=hint) for key, hint in unknown.items()]
    rows += [row for key in given.values if key not in unknown for row in _by_table(given, key)]
    sections = _stage, _offload, _quantize, _precision, _clipping, _mesh, _batch, _remat, _logging, optimizer_rows
    rows += [row for translator in sections for row in translator(given)]
    nulls = {key for key, value in values.items() if value is None} - {row.key for row in rows}
    rows += [Row(key=key, value=None, status="off") for key in nulls]
    places = {key: place for place, key in enumerate(values)}
    translation = Translation(rows=tuple(sorted(rows, key=lambda row: places.get(row.key, len(places)))))
    missing = {*values} - {row.key for row in translation.rows}
    assert not missing, f"keys without a row: {missing}"
    return translation


def _is_on(given: Given, key: str) -> bool:
    """Returns whether a block of keys is switched on."""
    value, switch = given.get(key), KEYS[key].switch
    if value is None or isinstance(value, bool) or switch is None:
        return bool(value)
    return value.get(switch) not in (None, False, "false", "none")


def _by_table(given: Given, key: str) -> Iterator[Row]:
    """Makes the row of a key that no translator reads."""
    entry, value = KEYS[key], given.get(key)
    if entry.fate == "read":
        return
    is_off = value is None or value in entry.off if entry.kind != "block" else not _is_on(given, key)
    is_fp16 = given.get(_FP16) is True or (given.is_auto(_FP16) and True not in map(given.get, _BF16))
    if entry.fate == "not translated" and key.startswith("fp16.") and not is_fp16:
        yield given.row(key, "off", "fp16 is off")
    elif entry.fate == "not translated" and is_off:
        yield given.row(key, "off")
    elif entry.fate == "not translated" and given.is_auto(key):
        yield given.auto(key, entry.reason)
    else:
        yield given.row(key, entry.fate, entry.reason)


def _stage(given: Given) -> Iterator[Row]:
    key, old = "zero_optimization.stage", "zero_optimization"
    if old in given:
        stage = int(bool(given.get(old)))
        yield given.row(old, "translated", "the deprecated form of stage 1" if stage else "", zero__stage=stage)
    elif key not in given or given.get(key) is None:
        yield given.row(key, "translated", "DeepSpeed's default is no ZeRO", zero__stage=0)
    elif given.is_auto(key):
        yield given.auto(key, "zero.stage")
    else:
        check(key, lambda: ZeroConfig(stage=given.get(key)))
        yield given.row(key, "translated", zero__stage=given.get(key))
    overlap = "zero_optimization.overlap_comm"
    if overlap in given:
        if isinstance(given.get(overlap), bool):
            note = "of gathers too, where the hardware has options for it (docs/overlap.md)"
            yield given.row(overlap, "translated", note, zero__overlap=given.get(overlap))
        else:
            yield given.row(overlap, "off", "zero.overlap is true by default")


def _offload(given: Given) -> Iterator[Row]:
    """Translates the offloading of the optimizer's state, and of the master params that DeepSpeed counts to it."""
    key, old = "zero_optimization.offload_optimizer", "zero_optimization.cpu_offload"
    value, is_old = given.get(key), given.get(old) is True
    note = "the update runs on the devices, not on the CPU; at stage 3 the master params are the params, and stay there"
    if old in given:
        is_new = key in given and _is_on(given, key)
        settings: dict[str, Any] = {"zero__offload": "state"} if is_old and not is_new else {}
        yield given.row(old, "translated" if settings else "off", note if settings else "", **settings)
    if key not in given:
        return
    device, ratio = (value.get("device"), value.get("ratio", 1)) if isinstance(value, Mapping) else (None, 1)
    if not _is_on(given, key):
        yield given.row(key, "off")
    elif device != "cpu":
        yield given.row(key, "not translated", "zero.offload keeps state in host memory, nowhere else")
    elif ratio != 1:
        yield given.row(key, "translated", note, zero__offload="state", zero__offload_fraction=ratio)
    else:
        yield given.row(key, "translated", note, zero__offload="state")


def _quantize(given: Given) -> Iterator[Row]:
    """Translates quantized gathers and gradients (ZeRO++), which DeepSpeed has at stage 3."""
    fields = {"zero_quantized_weights": "quantize_gathers", "zero_quantized_gradients": "quantize_grads"}
    for name, field in fields.items():
        key = f"zero_optimization.{name}"
        if key not in given:
            continue
        if given.get(key) is not True:
            yield given.row(key, "off")
        elif given.get("zero_optimization.stage") != 3:
            yield given.row(key, "not translated", "DeepSpeed sends them quantized at stage 3 alone")
        else:
            yield given.row(key, "translated", "in blocks of int8 (docs/quantized.md)", **{f"zero__{field}": "int8"})


def _precision(given: Given) -> Iterator[Row]:
    present = [key for key in (*_BF16, _FP16) if key in given]
    chosen = [key for key in present if given.get(key) is True]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are both true: DeepSpeed takes one of them; set one to false")
    casts = [key for key in _AUTOCAST if key in given and _is_on(given, key)]
    for key in present:
        if key in chosen:
            name = "fp16" if key == _FP16 else "bf16"
            yield given.row(key, "translated", zero__precision=name)
        elif given.is_auto(key) and not chosen:
            yield given.auto(key, "zero.precision = 'bf16', 'fp16' or 'fp32'")
        else:
            yield given.row(key, "off")
    if not (chosen or casts or any(given.is_auto(key) for key in present)):
        yield Row(
            key="bf16 and fp16", value=None, status="translated", settings={"zero.precision": "fp32"},
            reason="neither is on, so that DeepSpeed trains in the model's dtype", is_absent=True,
        )  # fmt: skip


def _clipping(given: Given) -> Iterator[Row]:
    key = "gradient_clipping"
    value = given.get(key)
    if given.is_auto(key):
        yield given.auto(key, "zero.clip_norm")
    elif not value:
        note = "" if key in given else "DeepSpeed's default is no clipping"
        yield given.row(key, "translated", note, zero__clip_norm=None)
    else:
        check(key, lambda: ZeroConfig(clip_norm=float(value)))
        yield given.row(key, "translated", "of the global norm", zero__clip_norm=float(value))


def _model_size(given: Given) -> int:
    size = given.get("tensor_parallel.autotp_size")
    return size if isinstance(size, int) and size > 1 else 1


def _mesh(given: Given) -> Iterator[Row]:
    key = "tensor_parallel.autotp_size"
    if key in given:
        size = _model_size(given)
        if size > 1:
            yield given.row(key, "translated", "the model needs specs for that axis", run__model_axis=size)
        else:
            yield given.row(key, "off")
    key = "zero_optimization.mics_shard_size"
    size = given.get(key)
    if key not in given:
        return
    if not isinstance(size, int) or size < 1:
        yield given.row(key, "off")
    elif given.devices is None:
        note = f"set run.replica to the number of devices / {size}, or give --devices"
        yield given.row(key, "not translated", note)
    else:
        copies = _divided(given.devices, size * _model_size(given), f"{key} = {size}")
        yield given.row(key, "translated", f"full copies on groups of {size} devices", run__replica=copies)


def _divided(whole: int, part: int, what: str) -> int:
    if whole % part:
        raise ValueError(f"{what}: {whole} does not divide by {part}: correct it, or --devices")
    return whole // part


def _batch(given: Given) -> Iterator[Row]:
    """Translates the three keys of the batch, of which DeepSpeed infers one."""
    for key in _BATCH:
        value = given.get(key)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key} = {value}: give at least 1")
    devices = given.devices
    parts = None if devices is None else _divided(devices, _model_size(given), "tensor_parallel.autotp_size")
    batch, micro, steps = _BATCH
    if not any(key in given for key in _BATCH):
        return
    size, micro_size, num = (None if given.is_auto(key) else given.get(key) for key in _BATCH)
    has_auto = any(given.is_auto(key) for key in _BATCH)
    if not has_auto:
        size, num = _inferred(size, micro_size, num, parts)
    needed = f"DeepSpeed infers it by {batch} = {micro} x {steps} x devices: give --devices, or set"
    for key, value, setting in ((batch, size, "run.batch_size"), (steps, num, "zero.num_microbatches")):
        if given.is_auto(key):
            yield given.auto(key, setting)
        elif value is not None:
            note = "" if key in given else "as DeepSpeed infers it"
            if key == steps and value > 1:
                note += "; microbatches are weighted by their tokens here, and equally there: the same in packed rows"
            section, name = setting.split(".")
            yield given.row(key, "translated", note.removeprefix("; "), **{f"{section}__{name}": value})
        elif not has_auto or key in given:
            yield given.row(key, "not translated", f"{needed} {setting}")
    if given.is_auto(micro):
        yield given.auto(micro, "it follows from run.batch_size and zero.num_microbatches")
    elif micro in given:
        yield given.row(micro, "same", "it follows: batch_size / (num_microbatches x data-parallel devices)")


def _inferred(
    size: int | None, micro_size: int | None, num: int | None, parts: int | None
) -> tuple[int | None, int | None]:
    """Returns batch size and microbatches as DeepSpeed infers them, as far as they are known, and checks them."""
    what = f"{_BATCH[0]} = {size}, {_BATCH[1]} = {micro_size}, {_BATCH[2]} = {num}"
    if num is None and (size is None or micro_size is None):
        num = 1
    elif num is None and size is not None and micro_size is not None and parts is not None:
        num = _divided(size, micro_size * parts, what)
    if size is None and micro_size is not None and num is not None and parts is not None:
        size = micro_size * num * parts
    if size is not None and num is not None:
        found = _divided(size, num * (micro_size or 1), what)
        if parts is not None and micro_size is not None and parts != found:
            raise ValueError(f"{what} are for {found} data-parallel devices, not {parts}")
        if parts is not None:
            _divided(size, num * parts, what)
    return size, num


def _remat(given: Given) -> Iterator[Row]:
    partition, offload = _REMAT
    where = "DeepSpeed does so where the model calls its checkpoint function, and zero_jax in each block"
    if offload in given:
        if given.get(offload) is True:
            yield given.row(offload, "translated", where, zero__remat="full_offloaded")
        else:
            yield given.row(offload, "off")
    if partition in given:
        if given.get(partition) is not True:
            yield given.row(partition, "off")
        elif given.get(offload) is True:
            yield given.row(partition, "same", "'full_offloaded' shards them over an axis `model`, too")
        elif _model_size(given) > 1:
            yield given.row(partition, "translated", where, zero__remat="full_sharded")
        else:
            note = "set zero.remat = 'full_sharded' and run.model_axis together: residuals are sharded over that axis"
            yield given.row(partition, "not translated", note)


def _logging(given: Given) -> Iterator[Row]:
    if "steps_per_print" in given:
        value = given.get("steps_per_print")
        if isinstance(value, int) and value >= 1:
            yield given.row("steps_per_print", "translated", run__log_every=min(value, 2**31 - 1))
        else:
            yield given.row("steps_per_print", "off")
    for name in ("tensorboard", "wandb"):
        if name not in given:
            continue
        if not _is_on(given, name):
            yield given.row(name, "off")
        elif name == "tensorboard":
            yield given.row(name, "translated", "records go to the run's own folder", log__tensorboard=True)
        else:
            value = given.get(name)
            project = value.get("project", "deepspeed") if isinstance(value, Mapping) else "deepspeed"
            if not isinstance(project, str):
                raise ValueError(f"wandb.project = {shown(project)}: give text")
            yield given.row(name, "translated", "group and team are those of wandb's settings", log__wandb=project)
