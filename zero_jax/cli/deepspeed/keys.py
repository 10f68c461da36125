"""The table of the keys of a DeepSpeed config, `keys.toml`."""

from __future__ import annotations

import dataclasses
import importlib.resources
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
    off: tuple[Any, ...] = ()
    same: tuple[Any, ...] = ()
    switch: str = "enabled"
    owners: str = ""
    setting: str = ""
    absent: str = ""


def _read() -> Iterator[tuple[str, Key]]:
    table = tomllib.loads(importlib.resources.files("zero_jax.cli.deepspeed").joinpath("keys.toml").read_text("utf-8"))
    texts = table.pop("texts")
    for sections, rows in table.items():
        for section in sections.split():
            for row in rows:
                columns: dict[str, Any] = {
                    column: string.Template(value).substitute(texts) if isinstance(value, str) else value
                    for column, value in row.items()
                }
                for name in columns.pop("keys").split():
                    yield name if section == "top" else f"{section}.{name}", Key(**columns)


KEYS: Mapping[str, Key] = dict(_read())
SECTIONS: frozenset[str] = frozenset(key.rpartition(".")[0] for key in KEYS) - {""}
