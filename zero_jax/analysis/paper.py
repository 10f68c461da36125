"""The ZeRO paper's figures and tables, computed from its formulas, and its configurations as `ZeroConfig`s.

Rajbhandari et al., arXiv 1910.02054. GB are 1e9 bytes, as there.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from zero_jax.analysis.formulas import (
    PAPER_CASES,
    REMAT_EXTRA_COMPUTE,
    SHARDED_RESIDUAL_OVERHEAD,
    TransformerResiduals,
    max_params,
    model_state_bytes,
    moved_elements,
    transformer_params,
)
from zero_jax.core.text_tables import Report, aligned
from zero_jax.training import ZeroConfig

_DEVICE_BYTES = 32e9
_NUM_DEVICES = (1, 4, 16, 64, 256, 1024)
_TABLE_1_PARAMS = (7.5e9, 128e9, 1e12)
_MODEL_DEGREES = (1, 2, 4, 8, 16)

# Layers x width of the GPT-2-like models of the paper's tables 4 to 10.
_MODELS: Mapping[str, tuple[int, int]] = {
    "1.5B": (48, 1600),
    "4B": (64, 2304),
    "8B": (72, 3072),
    "13B": (62, 4096),
    "60B": (75, 8192),
    "100B": (125, 8192),
    "170B": (212, 8192),
    "1T": (128, 25600),
}

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
    return _rounded(value, 2 if value < 2 else 1 if value < 100 else 0)


def show_params(value: float) -> str:
    """Returns a number of parameters as the paper writes it: `7.6B`, `0.5T`."""
    return f"{_rounded(value / 1e12, 1)}T" if value >= 5e11 else f"{_rounded(value / 1e9, 1)}B"


def show_ratio(value: float) -> str:
    """Returns a ratio with up to three decimals."""
    return _rounded(value, 3)


def _rounded(value: float, digits: int) -> str:
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


def tables() -> PaperTables:
    """Returns Figure 1, Tables 1 to 3, the traffic, the examples of residuals and the models, from the formulas.

    Example:
      >>> len(zero.paper.tables().tables)
      7
    """
    return PaperTables(tables=(figure1(), table1(), table2(), table3(), communication(), residuals(), models()))


def figure1() -> PaperTable:
    """Returns Figure 1: model states of 7.5 billion parameters on 64 devices."""
    rows = []
    for case, sharded in PAPER_CASES.items():
        states = model_state_bytes(7.5e9, sharded=sharded, num_devices=64)
        rows.append((case, *(float(size) / 1e9 for size in (*states.values(), sum(states.values())))))
    return PaperTable(
        name="figure1",
        title="Figure 1: model states per device (GB), psi = 7.5B, N = 64, K = 12",
        columns=("", "params", "grads", "optimizer", "total"),
        rows=tuple(rows),
        show=show_gb,
    )


def table1() -> PaperTable:
    """Returns Table 1: model states per device against the number of devices."""
    partitions = [(case, sharded) for case, sharded in PAPER_CASES.items() if sharded]
    columns = [f"{show_params(psi)} {case}" for psi in _TABLE_1_PARAMS for case, _ in partitions]
    rows = []
    for n in _NUM_DEVICES:
        pairs = ((psi, sharded) for psi in _TABLE_1_PARAMS for _, sharded in partitions)
        states = (model_state_bytes(psi, sharded=sharded, num_devices=n) for psi, sharded in pairs)
        rows.append((n, *(sum(each.values()) / 1e9 for each in states)))
    return PaperTable(
        name="table1",
        title="Table 1: model states per device (GB) on N devices, K = 12",
        columns=("N", *columns),
        rows=tuple(rows),
        show=show_gb,
    )


def table2() -> PaperTable:
    """Returns the theory columns of Table 2: the largest model whose states fit on devices of 32 GB."""
    sizes = {"capacity_bytes": _DEVICE_BYTES, "num_devices": 64}
    rows = [
        (model, 64 * model, *(max_params(**sizes, sharded=sharded, model=model) for sharded in PAPER_CASES.values()))
        for model in _MODEL_DEGREES
    ]
    return PaperTable(
        name="table2",
        title="Table 2: parameters of the largest model in theory (devices of 32 GB, N = 64)",
        columns=("model", "devices", *PAPER_CASES),
        rows=tuple(rows),
        show=show_params,
        note="The paper prints multiples of its rounded first row where this table computes each: 121.6B for 122.3B.",
    )


def table3() -> PaperTable:
    """Returns Table 3: what the configurations C1 to C5 switch on."""
    return PaperTable(
        name="table3",
        title="Table 3: configurations",
        columns=("", "ZeRO-DP", "ZeRO-R"),
        rows=tuple((name, parts[0], " + ".join(parts[1:])) for name, parts in CONFIGS.items()),
        show=show_ratio,
        note="P_a shards residuals over `model`, P_a+cpu keeps them in host memory; C_B: buffers of constant size; "
        "M_D: no fragmentation.",
    )


def communication() -> PaperTable:
    """Returns sections 7 and 8: what a device sends per step."""
    rows = [(case, moved_elements(1.0, sharded=sharded)) for case, sharded in PAPER_CASES.items()]
    return PaperTable(
        name="communication",
        title="Sections 7, 8: elements that a device sends per step, in multiples of psi, on many devices",
        columns=("", "psi"),
        rows=(*rows, ("P_a, of the traffic of model parallelism", SHARDED_RESIDUAL_OVERHEAD)),
        show=show_ratio,
        note="On N devices, (N - 1) / N of it. P_a adds one all-gather of seq x hidden per block and example.",
    )


def residuals() -> PaperTable:
    """Returns the examples of sections 3.2 and 6.1: residuals per device at batch 32, sequence 1024, 16 bits."""
    kinds = {
        "no remat": {"remat": False},
        "remat": {},
        "P_a": {"model": 16},
        "P_a+cpu": {"model": 16, "offload": True},
        "P_a+cpu, host": {"model": 16, "offload": True},
    }
    rows = []
    for name in ("1.5B", "100B"):
        num_layers, d_model = _MODELS[name]
        sizes = {"num_layers": num_layers, "d_model": d_model, "batch_size": 32, "seq_len": 1024}
        cells = []
        for kind, options in kinds.items():
            saved = TransformerResiduals(**sizes, **options)
            cells.append(float(saved.host_bytes if kind.endswith("host") else saved.device_bytes) / 1e9)
        rows.append((name, *cells))
    return PaperTable(
        name="residuals",
        title="Sections 3.2, 6.1: residuals per device (GB), batch 32, sequence 1024, 2 bytes an element, model = 16",
        columns=("model", *kinds),
        rows=tuple(rows),
        show=show_gb,
        note=f"Remat adds {100 * REMAT_EXTRA_COMPUTE:.0f}% of computation. The paper has about 8 GB for 1.5B with "
        "remat (5.0 by its rule of one input a block), and 33 and 2 GB for 100B (the elements, or one byte each).",
    )


def models() -> PaperTable:
    """Returns the paper's models and their parameters by the formula."""
    rows = [
        (name, num_layers, d_model, float(transformer_params(num_layers=num_layers, d_model=d_model)))
        for name, (num_layers, d_model) in _MODELS.items()
    ]
    return PaperTable(
        name="models",
        title="Tables 4 to 10: GPT-2-like models (sequence 1024, 50,257 tokens)",
        columns=("model", "layers", "hidden", "parameters"),
        rows=tuple(rows),
        show=show_params,
    )
