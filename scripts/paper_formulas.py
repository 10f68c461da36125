"""The formulas of the ZeRO paper for memory and traffic, and its tables by them.

    python scripts/paper_formulas.py

writes the tables to `zero_jax/analysis/paper_tables.json`, which `zero.paper` and `zero-jax memory --paper` print.

Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054). Nothing here looks at a model or a mesh; `zero.memory.estimate` does. A stage is the set of groups that it
shards: `params`, `grads` and `opt_state`. As in the paper, `opt_state` includes the master params, so `master` adds
nothing. GB are 1e9 bytes, as there.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping

from zero_jax.analysis import paper
from zero_jax.analysis.memory import TransformerResiduals
from zero_jax.analysis.paper import CONFIGS, PaperTable, show_gb, show_params, show_ratio

_FILE = pathlib.Path(paper.__file__).with_name("paper_tables.json")

# Which groups each of the paper's cases shards (section 5).
PAPER_CASES: Mapping[str, frozenset[str]] = {
    "baseline": frozenset(),
    "P_os": frozenset({"opt_state"}),
    "P_os+g": frozenset({"opt_state", "grads"}),
    "P_os+g+p": frozenset({"opt_state", "grads", "params"}),
}

# P_a moves each block's input over `model` once more. Megatron's model parallelism moves 12 times that: two all-reduces
# of two moves each in the forward pass, in the recomputation and in the backward pass (section 8.1).
SHARDED_RESIDUAL_OVERHEAD = 1 / 12

# Remat adds a forward pass to a step of one forward pass and a backward pass of twice its cost (section 3.2).
REMAT_EXTRA_COMPUTE = 1 / 3

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


def model_state_bytes(
    num_params: float,
    *,
    sharded: Collection[str],
    num_devices: int,
    optimizer_bytes: float = 12,
    param_bytes: float = 2,
    grad_bytes: float = 2,
) -> dict[str, float]:
    """Returns the bytes of params, gradients and optimizer state on each device (sections 3.1 and 5).

    Args:
      num_params: parameters (psi); with model parallelism those of one of its parts.
      sharded: the groups that are sharded, of `params`, `grads`, `opt_state`.
      num_devices: devices that they are sharded over (N_d).
      optimizer_bytes: bytes a parameter of master params and optimizer state (K): 12 for Adam in mixed precision.
      param_bytes: bytes of a low-precision parameter.
      grad_bytes: bytes of a gradient.
    """
    sizes = {"params": param_bytes, "grads": grad_bytes, "opt_state": optimizer_bytes}
    return {group: size * num_params / (num_devices if group in sharded else 1) for group, size in sizes.items()}


def max_params(capacity_bytes: float, *, sharded: Collection[str], num_devices: int, model: int = 1) -> float:
    """Returns the parameters of the largest model whose model states fit on devices of some size (section 5.4).

    Args:
      capacity_bytes: bytes of a device that are there for model states.
      sharded: the groups that are sharded.
      num_devices: devices that they are sharded over (N_d).
      model: model-parallel degree, which divides every group.
    """
    each = model_state_bytes(1, sharded=sharded, num_devices=num_devices)
    return capacity_bytes * model / sum(each.values())


def moved_elements(num_params: float, *, sharded: Collection[str]) -> float:
    """Returns the elements that a device sends per step on behalf of the params, on very many devices (section 7).

    Gradients are reduce-scattered, params all-gathered: once after the update, or, where they are sharded, once for
    the forward and once for the backward pass. Data parallelism's all-reduce is made of the same two halves. On `n`
    devices it is (n - 1) / n of it.
    """
    return (3 if "params" in sharded else 2) * num_params


def transformer_params(*, num_layers: int, d_model: int, vocab_size: int = 50257, seq_len: int = 1024) -> int:
    """Returns the parameters of a GPT-2: 12 `d_model`^2 a block, and the tables of tokens and positions.

    Biases and norms, some 13 x `d_model` a block, are left out.
    """
    return 12 * num_layers * d_model**2 + (vocab_size + seq_len) * d_model


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


def tables() -> dict[str, PaperTable]:
    """Returns Figure 1, Tables 1 to 3, the traffic, the examples of residuals and the models, by name."""
    made = (figure1(), table1(), table2(), table3(), communication(), residuals(), models())
    return {table.name: table for table in made}


def as_text(tables: Mapping[str, PaperTable]) -> str:
    """Returns tables as the file has them, a row a line."""
    parts = []
    for table in tables.values():
        record = table.to_json()
        del record["name"]
        rows = ",\n".join(f"   {json.dumps(row)}" for row in record.pop("rows"))
        record["show"] = table.show.__name__.removeprefix("show_")
        fields = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in record.items())
        parts.append(f' {json.dumps(table.name)}: {{\n{fields}  "rows": [\n{rows}\n  ]\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    _FILE.write_text(as_text(tables()), encoding="utf-8")
