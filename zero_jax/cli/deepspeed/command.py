"""Reads a DeepSpeed config file, checks it against the table of known keys, and translates it: the command itself."""

import argparse
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from zero_jax.cli.config_file import format_config, write_file
from zero_jax.cli.deepspeed import rules
from zero_jax.cli.deepspeed.rows import KEYS, SECTIONS, DeepSpeedValues, KeyRow, Kind, Translation
from zero_jax.cli.options import check_value
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.files.untrusted import read_json, unique_keys
from zero_jax.core.text_tables import printable_lines
from zero_jax.core.tree import shown


def from_deepspeed(options: argparse.Namespace) -> int:
    """Runs `zero-jax from-deepspeed`."""
    if options.force and not options.out:
        raise ValueError("--force is for --out: give --out FILE too")
    out = pathlib.Path(options.out) if options.out else None
    if out is not None and out.exists() and not (options.force and out.is_file()):
        raise ValueError(f"--out {out} exists: give another name" + (", or --force" if out.is_file() else ""))
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no such folder, make it first")
    reading = {"object_pairs_hook": unique_keys, "parse_constant": _refuse_constant}
    remedy = "give an object of keys in JSON, without comments"
    config = read_json(options.path, "the DeepSpeed config", remedy=remedy, limit_bytes=1 << 20, **reading)
    translation = translate(config, devices=options.devices, per_device_batch_size=options.per_device_batch_size)
    has_unknown = bool(translation.of("unknown"))  # a misspelled key would train with another value in silence
    title = f"translated from {options.path} by zero-jax from-deepspeed"
    written = str(out) if out is not None and not has_unknown else None
    if out is not None and written:
        undecided = [f"  {line}" for line in translation.undecided]
        head = ["", "Not translated, decide yourself:", *undecided] if undecided else []
        write_file(out, translation.sections, title="\n".join([title, *head]))
    if options.json:
        print(json.dumps(translation.to_json() | {"written": written}))
    elif out is None:
        text = format_config(translation.sections, title=title)
        print(printable_lines("\n".join([text, *(f"# {line}" for line in str(translation).splitlines())])))
    else:
        print(printable_lines(translation))
        print(f"\nwrote {out}: {translation.command(out)}" if written else f"\nunknown keys: {out} is not written")
    return 1 if has_unknown else 0


# What each kind of value is called, and its types; an integer may also be a number that is whole.
_KINDS: Mapping[Kind, tuple[str, Any]] = {
    "bool": ("true or false", bool),
    "int": ("an integer", ()),
    "number": ("a number", int | float),
    "text": ("text", str),
    "list": ("a list", list),
    "block": ("an object of keys", Mapping | bool),
}
# The keys whose absence says something, or whose default is not that of zero_jax, in the order of their rows.
_ABSENT = (
    *("zero_optimization.stage", "bf16 and fp16", "gradient_clipping", "train_batch_size"),
    *("gradient_accumulation_steps", "optimizer.type", *(key for key in KEYS if key.startswith(rules.PARAMS))),
    *("scheduler.type", *(key for key in KEYS if key.startswith(rules.SCHEDULE))),
)
_WORDS = {"true": True, "false": False}  # which DeepSpeed reads as booleans, too


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def translate(
    config: Mapping[str, Any], *, devices: int | None = None, per_device_batch_size: int | None = None
) -> Translation:
    """Translates a DeepSpeed config by the table of its keys.

    Without the number of devices that it is for, what depends on that is left to the reader. `per_device_batch_size` is
    the Hugging Face Trainer's per_device_train_batch_size, for batch sizes that are "auto".
    """
    if devices is not None and devices < 1:
        raise ValueError(f"devices={devices}: give at least 1")
    entries = {key: _checked(key, value, KEYS[key].kind) if key in KEYS else value for key, value in _entries(config)}
    values = DeepSpeedValues((key, value) for key, value in entries.items() if value is not None)
    values.devices, values.per_device_batch_size = devices, per_device_batch_size
    keys = [*(key for key in values if key in KEYS), *(key for key in _ABSENT if key not in values)]
    made = [row for key in keys if (row := rules.row_of(values, key)) is not None]
    row_by_key = {row.key: row for row in made}  # rows are printed in the order of the file, then what it leaves out
    for key, value in entries.items():
        if key not in KEYS:
            row_by_key[key] = KeyRow(key=key, value=value, status="unknown", reason=_nearest(key))
        elif value is None:
            row_by_key.setdefault(key, KeyRow(key=key, value=None, status="off"))
    in_file = [row_by_key.pop(key) for key in entries]
    return Translation(rows=(*in_file, *row_by_key.values()))


def _entries(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        key = prefix + name
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _entries(value, f"{key}.")
        elif key in KEYS:  # a section that may also be a value, such as "zero_optimization": true
            yield key, value
        elif value is not None:
            raise ValueError(f"{key} = {shown(value)}: give an object of keys")


def _nearest(key: str) -> str:
    """Returns a hint with the nearest known key: of the same section first, then of any."""
    section, _, name = key.rpartition(".")
    known = [*KEYS, *SECTIONS]
    for names in ([other for other in known if other.rpartition(".")[0] == section], known):
        key_by_name = {other.rpartition(".")[2]: other for other in names}
        if hint := did_you_mean(name, key_by_name, "{}", cutoff=0.75):
            return f"did you mean {key_by_name[hint]!r}?"
    return "DeepSpeed documents no such key"


def _checked(key: str, value: Any, kind: Kind) -> Any:
    """Returns a value of the kind that a key takes; numbers that are whole pass as integers."""
    if kind == "any" or value is None or (value == "auto" and kind != "block"):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:  # JSON has numbers of any size
        try:
            check_value(value)  # Python's integers may be larger than any float
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    if kind == "bool" and isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if kind == "int" and is_number and float(value).is_integer():
        return int(value)
    wanted, types = _KINDS[kind]
    if not isinstance(value, types) or (kind == "number" and not is_number):
        raise ValueError(f"{key} = {shown(value)}: give {wanted}")
    return value
