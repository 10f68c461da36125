"""The table of the keys of a DeepSpeed config, `keys.toml`, and the result: a row for each key, and a config file."""

import dataclasses
import importlib.resources
import itertools
import json
import string
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from zero_jax.core.text_tables import aligned, printable
from zero_jax.trainer import TrainConfig

# A block is an object whose keys DeepSpeed checks itself.
Kind = Literal["bool", "int", "number", "text", "list", "block", "any"]
Status = Literal["translated", "not translated", "auto", "same", "off", "no meaning", "unknown"]
TITLES: Mapping[Status, str] = {
    "translated": "translated",
    "not translated": "NOT translated, because it means something else here or does not exist: decide yourself",
    "auto": "NOT translated, because another program fills in 'auto': set it yourself",
    "same": "zero_jax does so anyway",
    "off": "off, or what DeepSpeed does by default: nothing to translate",
    "no meaning": "no meaning here, and no effect on the trained params",
    "unknown": "UNKNOWN keys: correct or remove them",
}
_SHOWN = 40
_DEFAULT_STEPS = TrainConfig.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyRow:
    """What became of one key."""

    key: str  # the key, with the keys around it, such as `zero_optimization.stage`
    value: Any  # its value; None with `is_absent` for a key that is not in the file but has a default that matters
    status: Status  # what became of it
    # The entries of the config file that it makes, by `section.name`
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why, and what else to know
    is_absent: bool = False  # whether the file does not have the key

    @property
    def shown(self) -> str:
        """The key and its value as text."""
        key = printable(self.key)
        if self.is_absent:
            return f"{key} (absent)"
        text = json.dumps(self.value)
        return f"{key} = {text if len(text) <= _SHOWN else f'{text[: _SHOWN - 3]}...'}"

    @property
    def becomes(self) -> str:
        """The settings and the reason as text."""
        shown = {name: "none" if value is None else value for name, value in self.settings.items()}
        settings = ", ".join(f"{name} = {json.dumps(value)}" for name, value in shown.items())
        return "; ".join(filter(None, (settings, self.reason)))


class DeepSpeedValues(dict[str, Any]):
    """The checked values of a DeepSpeed config by dotted key, without nulls; makes the rows of their keys."""

    devices: int | None = None  # the number of devices that they are for, if known
    per_device_batch_size: int | None = None  # the Hugging Face Trainer's per_device_train_batch_size, likewise

    def is_auto(self, key: str) -> bool:
        """Returns whether another program fills in the value."""
        return self.get(key) == "auto"

    def row(self, key: str, status: Status, reason: str = "", settings: Mapping[str, Any] | None = None) -> KeyRow:
        """Makes the row of a key."""
        value, is_absent = self.get(key), key not in self
        return KeyRow(key=key, value=value, status=status, settings=settings or {}, reason=reason, is_absent=is_absent)

    def auto(self, key: str, setting: str) -> KeyRow:
        """Makes the row of a key that another program fills in."""
        return self.row(key, "auto", f"the Hugging Face Trainer takes it from its own arguments; here: {setting}")

    def default_of(self, key: str, owner: str = "DeepSpeed") -> str:
        """Returns the note for a default that the file leaves out; empty for a key that it has."""
        return "" if key in self else f"{owner}'s default"


def check(key: str, make: Callable[[], Any]) -> None:
    """Raises the error of a config class with the name of the key before it."""
    try:
        make()
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation:
    """A translated config; prints as lists by what became of the keys."""

    # A row for each key of the file, and for absent ones whose default is not that of zero_jax
    rows: tuple[KeyRow, ...]

    def __post_init__(self) -> None:
        keys = [row.key for row in self.rows]
        names = [name for row in self.rows for name in row.settings]
        assert len({*keys}) == len(keys) and len({*names}) == len(names), (keys, names)

    def of(self, *statuses: Status) -> list[KeyRow]:
        """Returns the rows of some statuses."""
        return [row for row in self.rows if row.status in statuses]

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The entries of the config file, by section."""
        sections: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            for name, value in row.settings.items():
                section, _, field = name.partition(".")
                sections.setdefault(section, {})[field] = value
        return sections

    def command(self, path: object) -> str:
        """Returns the command that trains by the config file, with as many steps as a warm-up needs."""
        sections = self.sections
        warmup, steps = sections.get("optimizer", {}).get("warmup_steps", 0), sections.get("run", {}).get("steps")
        more = f" --steps {10 * warmup}" if steps is None and 4 * warmup > _DEFAULT_STEPS else ""
        return f"zero-jax train --config {path} --data TEXT{more}"

    @property
    def undecided(self) -> list[str]:
        """A line for each key that its reader has to decide on."""
        return [f"{row.shown}: {row.reason}" for row in self.of("not translated", "auto")]

    def __str__(self) -> str:
        parts = []
        for status, title in TITLES.items():
            rows = [(f"  {row.shown}", row.becomes) for row in self.of(status)]
            parts += [f"{title}\n{aligned(rows)}"] if rows else []
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data: the config by sections, and the rows."""
        return {"config": self.sections, "rows": [dataclasses.asdict(row) for row in self.rows]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a DeepSpeed config."""

    kind: Kind  # the kind of its value; `"auto"` passes as well
    no_meaning: str = ""  # why it means nothing here, whatever its value
    differs: str = ""  # why it is not translated
    to: str = ""  # the entry of the config file that it makes, as `section.name`
    value: Any = None  # what the entry is set to; None takes the value of the key, `largest` at most
    largest: int | None = None
    default: Any = None  # DeepSpeed's default, of a param that the file leaves out
    note: str = ""  # what else to know of that entry
    off: tuple[Any, ...] = ()  # the values with which there is nothing to translate
    same: tuple[Any, ...] = ()  # the values with which it says what zero_jax does anyway
    switch: str = "enabled"  # the entry that turns a block on; "" for any entry
    owners: str = ""  # the optimizers or schedules that have the param
    setting: str = ""  # what to set here where another program fills in the value
    rule: str = "by_table"  # the function of `rules` that makes its row, without the underscore
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
