"""The ZeRO paper's figures and tables, and its configurations as `ZeroConfig`s.

Rajbhandari et al., arXiv 1910.02054. `scripts/paper_formulas.py` computes the tables from the paper's formulas, and
writes them to `paper_tables.json`.
"""

import dataclasses
import functools
import importlib.resources
import json
import types
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from zero_jax.core.text_tables import Report, aligned
from zero_jax.training import ZeroConfig

# The configurations of Table 3, in the paper's names.
CONFIGS: Mapping[str, tuple[str, ...]] = {
    "C1": ("P_os", "C_B", "M_D"),
    "C2": ("P_os", "C_B", "M_D", "P_a"),
    "C3": ("P_os+g", "C_B", "M_D"),
    "C4": ("P_os+g", "C_B", "M_D", "P_a"),
    "C5": ("P_os+g", "C_B", "M_D", "P_a+cpu"),
}

# The paper gives no size for its buffers.
_BUFFER_BYTES = 64 << 20

# The fields of each of the paper's names. M_D needs none: every step donates its state, and XLA lays out a program's
# memory before it runs.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "P_os": {"stage": 1},
    "P_os+g": {"stage": 2},
    "P_os+g+p": {"stage": 3},
    "C_B": {"combine_bytes": _BUFFER_BYTES},
    "M_D": {},
    "P_a": {"remat": "full_sharded"},
    "P_a+cpu": {"remat": "full_offloaded"},
}


def _config(names: tuple[str, ...]) -> ZeroConfig:
    fields: dict[str, Any] = {"precision": "bf16", "remat": "full"}
    for name in names:
        fields |= _FIELDS[name]
    return ZeroConfig(**fields)


# All rematerialize every block and train in bfloat16, where the paper trains in float16. The mesh and the model's own
# sharding are added with `dataclasses.replace(PAPER_CONFIGS["C4"], param_specs=...)`.
PAPER_CONFIGS: Mapping[str, ZeroConfig] = types.MappingProxyType(
    {name: _config(words) for name, words in CONFIGS.items()}
)


def show_gb(value: float) -> str:
    """Returns GB with about as many digits as the paper gives."""
    return _rounded(value, 2 if value < 2 else 1 if value < 100 else 0)  # as Table 1: 1.88, 31.4, 120


def show_params(value: float) -> str:
    """Returns a number of parameters as the paper writes it: `7.6B`, `0.5T`."""
    return f"{_rounded(value / 1e12, 1)}T" if value >= 5e11 else f"{_rounded(value / 1e9, 1)}B"


def show_ratio(value: float) -> str:
    """Returns a ratio with up to three decimals."""
    return _rounded(value, 3)


def _rounded(value: float, digits: int) -> str:
    # Half up, as the paper rounds; Python rounds halves to even.
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP)
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTable(Report):
    """One table of the paper; prints as such."""

    name: str  # such as `table1`
    title: str  # what it shows, with its unit
    columns: tuple[str, ...]  # names of the columns
    # Cells: names, whole numbers, or unrounded figures in the unit of the title.
    rows: tuple[tuple[str | int | float, ...], ...]
    show: Callable[[float], str]  # how a figure is printed
    note: str = ""  # what a reader has to know beside it

    def __str__(self) -> str:
        cells = [[self.show(x) if isinstance(x, float) else str(x) for x in row] for row in self.rows]
        lines = aligned([self.columns, *cells], right=range(1, len(self.columns))).splitlines()
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:], *([self.note] if self.note else [])])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperTables(Report):
    """All tables, by name; prints one after the other."""

    tables: tuple[PaperTable, ...]

    def __getitem__(self, name: str) -> PaperTable:
        return next(table for table in self.tables if table.name == name)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables))

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, by the name of the table."""
        return {table.name: table.to_json() for table in self.tables}


@functools.cache
def _read() -> dict[str, PaperTable]:
    text = importlib.resources.files("zero_jax.analysis").joinpath("paper_tables.json").read_text("utf-8")
    shows = {"gb": show_gb, "params": show_params, "ratio": show_ratio}

    def table(name: str, columns: Any, rows: Any, show: str, **texts: str) -> PaperTable:
        return PaperTable(name=name, columns=tuple(columns), rows=tuple(map(tuple, rows)), show=shows[show], **texts)

    return {name: table(name, **fields) for name, fields in json.loads(text).items()}


def tables() -> PaperTables:
    """Returns Figure 1, Tables 1 to 3, the traffic, the examples of residuals and the models, by the paper's formulas.

    Example:
      >>> len(zero.paper.tables().tables)
      7
    """
    return PaperTables(tables=tuple(_read().values()))


def figure1() -> PaperTable:
    """Returns Figure 1: model states of 7.5 billion parameters on 64 devices."""
    return _read()["figure1"]


def table1() -> PaperTable:
    """Returns Table 1: model states per device against the number of devices."""
    return _read()["table1"]


def table2() -> PaperTable:
    """Returns the theory columns of Table 2: the largest model whose states fit on devices of 32 GB."""
    return _read()["table2"]


def table3() -> PaperTable:
    """Returns Table 3: what the configurations C1 to C5 switch on."""
    return _read()["table3"]


def communication() -> PaperTable:
    """Returns sections 7 and 8: what a device sends per step."""
    return _read()["communication"]


def residuals() -> PaperTable:
    """Returns the examples of sections 3.2 and 6.1: residuals per device at batch 32, sequence 1024, 16 bits."""
    return _read()["residuals"]


def models() -> PaperTable:
    """Returns the paper's models and their parameters by the formula."""
    return _read()["models"]
