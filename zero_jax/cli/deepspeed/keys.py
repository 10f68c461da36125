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
    """A key of a DeepSpeed config.

    Attributes:
      kind: the kind of its value; `"auto"` passes as well.
      no_meaning: why it means nothing here, whatever its value.
      differs: why it is not translated.
      to: the entry of the config file that it makes, as `section.name`.
      value: what the entry is set to; None takes the value of the key, `largest` at most.
      note: what else to know of that entry.
      off: the values with which there is nothing to translate.
      same: the values with which it says what zero_jax does anyway.
      switch: the entry that turns a block on; "" for any entry.
      owners: the optimizers or schedules that have the param.
      setting: what to set here where another program fills in the value.
      absent: the owners whose default matters where the file does not have it.
    """

    kind: Kind
    no_meaning: str = ""
    differs: str = ""
    to: str = ""
    value: Any = None
    largest: int | None = None
    note: str = ""
    off: tuple[Any, ...] = ()
    same: tuple[Any, ...] = ()
    switch: str = "enabled"
    owners: str = ""
    setting: str = ""
    absent: str = ""


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
