"""The table of the keys of a DeepSpeed config, `keys.toml`."""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import string
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from zero_jax.cli.deepspeed.rows import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a DeepSpeed config."""

    kind: Kind  # the kind of its value; `"auto"` passes as well
    no_meaning: str = ""  # why it means nothing here, whatever its value
    differs: str = ""  # why it is not translated
    to: str = ""  # the entry of the config file that it makes, as `section.name`
    value: Any = None  # what the entry is set to; None takes the value of the key, `largest` at most
    largest: int | None = None
    note: str = ""  # what else to know of that entry
    off: tuple[Any, ...] = ()  # the values with which there is nothing to translate
    same: tuple[Any, ...] = ()  # the values with which it says what zero_jax does anyway
    switch: str = "enabled"  # the entry that turns a block on; "" for any entry
    owners: str = ""  # the optimizers or schedules that have the param
    setting: str = ""  # what to set here where another program fills in the value
    absent: str = ""  # the owners whose default matters where the file does not have it


def _read(table: Mapping[str, list[dict[str, Any]]], texts: Mapping[str, str]) -> Iterator[tuple[str, Key]]:
    for sections, rows in table.items():
        for row in rows:
            columns: dict[str, Any] = {
                column: string.Template(value).substitute(texts) if isinstance(value, str) else value
                for column, value in row.items()
            }
            for section, name in itertools.product(sections.split(), columns.pop("keys").split()):
                yield name if section == "top" else f"{section}.{name}", Key(**columns)


_FILE = importlib.resources.files("zero_jax.cli.deepspeed").joinpath("keys.toml")
_TABLE: dict[str, Any] = tomllib.loads(_FILE.read_text("utf-8"))
# The optimizers of DeepSpeed that are not translated, each with the reason.
OTHER_OPTIMIZERS = {name: reason for names, reason in _TABLE.pop("optimizers").items() for name in names.split()}
_TEXTS = _TABLE.pop("texts")
KEYS: Mapping[str, Key] = dict(_read(_TABLE, _TEXTS))
SECTIONS: frozenset[str] = frozenset(key.rpartition(".")[0] for key in KEYS) - {""}
