"""Measures the traffic of a compiled train step, and compares it with the estimate."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from zero_jax.analysis.comms.estimated import CommsEstimate
from zero_jax.analysis.comms.findings import ALL_REDUCED, Finding, find, num_elements
from zero_jax.analysis.comms.rows import Row, SentBytes, axes_name, network_rows, read_rows
from zero_jax.analysis.leaves import STATE_GROUPS, ArgumentLeaf, argument_leaves
from zero_jax.core.signatures import check_arguments, check_methods
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.hlo import Program, network_transfers, parse
from zero_jax.sharding.mesh import networks

_MAX_LINES = 40
_MAX_WARNINGS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommsReport(SentBytes, Report):
    """What one device sends in a run of a compiled program; prints as a table.

    Attributes:
      rows: The collectives, one for each operation of the program.
      num_params: Elements of the params that the program takes; 0 if its arguments have no such names.
      findings: What is off, most bytes first.
      networks: The network of each mesh axis, as `sharding.mesh.networks` names it; empty without a mesh.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> report = zero.comms.measure(compiled, mesh=mesh, param_shapes=state.params)
      >>> report.num_params
      8192
    """

    rows: tuple[Row, ...]
    num_params: int
    findings: tuple[Finding, ...]
    networks: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def largest_buffer(self) -> Row | None:
        """The collective with the largest buffer, or None where there are none."""
        return max(self.rows, key=lambda row: row.full_bytes, default=None)

    @property
    def largest_buffer_bytes(self) -> int:
        """Bytes of the largest buffer of a collective (the paper's C_B: it should not grow with depth)."""
        return self.largest_buffer.full_bytes if self.largest_buffer else 0

    def __str__(self) -> str:
        groups: dict[tuple, list[Row]] = {}
        for row in self.rows:
            # XLA unrolls loops, and cuts collectives into several: a reader wants one line for what moves the same.
            key = (row.kind, row.axes, row.dtype, row.phase, row.param, row.op_name, row.source)
            groups.setdefault(key, []).append(row)
        ordered = sorted(groups.values(), key=lambda rows: -_total(rows))
        table = [("kind", "axes", "dtype", "phase", "param", "times", "MB", "overlaps with", "where")]
        table += [_cells(rows) for rows in ordered[:_MAX_LINES]]
        lines = [aligned(table, right={5, 6})]
        if len(ordered) > _MAX_LINES:
            hidden_bytes = sum(_total(rows) for rows in ordered[_MAX_LINES:])
            lines.append(f"... {len(ordered) - _MAX_LINES} more, {hidden_bytes / 1e6:.3f} MB")
        per_param = f", {self.sent_bytes / self.num_params:.3f} bytes a param" if self.num_params else ""
        lines.append(f"a device sends {self.sent_bytes / 1e6:.3f} MB{per_param}")
        for name in ("axes", *(["network"] if "dcn" in self.networks.values() else []), "phase", "dtype", "kind"):
            totals = getattr(self, f"by_{name}").items()
            lines.append(f"by {name}: " + ", ".join(f"{key} {sent / 1e6:.3f} MB" for key, sent in totals))
        if self.largest_buffer:
            row = self.largest_buffer
            param = f" of {row.param!r}" if row.param else ""
            where = f" ({row.place})" if row.place else ""
            lines.append(f"largest buffer: {row.full_bytes / 1e6:.3f} MB, {row.kind}{param}{where}")
        lines += [f"warning: {finding}" for finding in self.findings[:_MAX_WARNINGS]]
        if hidden := self.findings[_MAX_WARNINGS:]:
            extra = sum(finding.extra_bytes for finding in hidden)
            lines.append(f"warning: {len(hidden)} more, of {extra / 1e6:.3f} MB")
        if ALL_REDUCED in {finding.kind for finding in self.findings} and "reduce-scatter" not in self.by_kind:
            lines.append(
                "note: XLA for CPUs makes no reduce-scatters, and sends bfloat16 as float32: look at a program of "
                "your hardware (zero.plan)"
            )
        return "\n".join(lines)


def measure(
    compiled: Any, *, mesh: Mesh | None = None, param_shapes: PyTree = None, unknown_trip_count: int | None = None
) -> CommsReport:
    """Reads what a compiled step sends: kinds, bytes, mesh axes, phases, params, and what is off.

    Params are found by the names of the program's arguments (`state.params[...]`), and the param of a collective by the
    name of its gather; if XLA dropped that, by shape, which may be ambiguous.

    Args:
      compiled: A `jax.stages.Compiled`, anything else with `as_text()`, or the text; of XLA:CPU, XLA:GPU or XLA:TPU.
      mesh: The mesh that it was compiled for; None takes it from the shardings of its arguments. Without one, axes
        show as '?'.
      param_shapes: The params (arrays or `ShapeDtypeStruct`s), where the arguments do not have their names.
      unknown_trip_count: Iterations of loops whose trip count the program does not settle.

    Raises:
      ValueError: The text is no compiled program, or a trip count is unknown.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> report = zero.comms.measure(compiled, mesh=mesh, param_shapes=state.params)
      >>> "all-gather" in {row.kind for row in report.rows}
      True
    """
    if not isinstance(compiled, str):
        check_methods(
            "compiled", compiled, ("as_text",), remedy="give what `.lower(...).compile()` returns, or its text"
        )
    check_arguments(mesh=mesh, param_shapes=param_shapes, unknown_trip_count=unknown_trip_count)
    program = parse(compiled)
    leaves = [leaf for leaf in argument_leaves(program, compiled) if leaf.group in STATE_GROUPS]
    if param_shapes is not None:
        names_and_params = zip(leaf_names(param_shapes), jax.tree.leaves(param_shapes), strict=True)
        leaves = [leaf for leaf in leaves if leaf.group != "params"] + [_param(name, x) for name, x in names_and_params]
    if mesh is None:
        shardings = jax.tree.leaves(getattr(compiled, "input_shardings", None))
        meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
        # An argument on a single device may have a mesh of that one alone.
        mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.size > 1), None)
    rows = read_rows(program, mesh=mesh, leaves=leaves, unknown_trip_count=unknown_trip_count)
    # The program of one of several slices has fewer devices than its mesh, too, but known axes.
    if mesh is not None and mesh.size != program.num_devices and any("?" in row.axes for row in rows):
        raise ValueError(
            f"the program was compiled for {program.num_devices} devices, and the mesh {dict(mesh.shape)} has "
            f"{mesh.size}: give the mesh that it was compiled for"
        )
    num_params = num_elements(leaf for leaf in leaves if leaf.group == "params")
    between = network_rows(program, mesh)
    findings = (*find(rows, leaves, mesh=mesh), *(() if between else _between_slices(program)))
    links = {} if mesh is None else networks(mesh)
    return CommsReport(rows=(*rows, *between), num_params=num_params, findings=findings, networks=links)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """Bytes that one device sends over some mesh axes in one phase."""

    axes: str
    phase: str
    estimated_bytes: float
    measured_bytes: float

    @property
    def ratio(self) -> float | None:
        """Measured over estimated; None where nothing was estimated."""
        return self.measured_bytes / self.estimated_bytes if self.estimated_bytes else None


def _sum(rows: tuple[ComparedRow, ...], *, axes: str, phase: str) -> ComparedRow:
    estimated, measured = (sum(getattr(row, f"{name}_bytes") for row in rows) for name in ("estimated", "measured"))
    return ComparedRow(axes=axes, phase=phase, estimated_bytes=estimated, measured_bytes=measured)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommsComparison(Report):
    """An estimate beside a measurement, by mesh axes and phase; prints as a table.

    Attributes:
      rows: By axes and phase.
      not_counted: What the estimate does not have; empty where it has all.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> measured = zero.comms.measure(compiled, mesh=mesh, param_shapes=state.params)
      >>> compared = zero.comms.compare(zero.comms.estimate(state, mesh=mesh, config=config), measured)
      >>> compared.rows[0].estimated_bytes > 0
      True
    """

    rows: tuple[ComparedRow, ...]
    not_counted: str = ""

    @property
    def by_axes(self) -> tuple[ComparedRow, ...]:
        """The sums over phases, for each set of mesh axes."""
        names = dict.fromkeys(row.axes for row in self.rows)
        groups = {axes: tuple(row for row in self.rows if row.axes == axes) for axes in names}
        return tuple(_sum(rows, axes=axes, phase="all") for axes, rows in groups.items())

    @property
    def total(self) -> ComparedRow:
        """All axes and phases together."""
        return _sum(self.rows, axes="total", phase="")

    def __str__(self) -> str:
        table = [("axes", "phase", "estimate MB", "measured MB", "ratio")]
        for row in (*self.rows, *(self.by_axes if len(self.by_axes) > 1 else ()), self.total):
            ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
            estimated, measured = (f"{size / 1e6:.3f}" for size in (row.estimated_bytes, row.measured_bytes))
            table.append((row.axes, row.phase, estimated, measured, ratio))
        missing = f"\nnot counted by the estimate: {self.not_counted}" if self.not_counted else ""
        return aligned(table, right={2, 3, 4}) + missing


def compare(estimated: CommsEstimate, report: CommsReport) -> CommsComparison:
    """Puts an estimate and a measurement side by side, most estimated bytes first.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> measured = zero.comms.measure(compiled, mesh=mesh, param_shapes=state.params)
      >>> compared = zero.comms.compare(zero.comms.estimate(state, mesh=mesh, config=config), measured)
      >>> all(row.axes == "data" for row in compared.rows)
      True
    """
    sums: dict[tuple[str, str], list[float]] = {}
    for column, rows in enumerate((estimated.rows, report.rows)):
        for row in rows:
            sums.setdefault((axes_name(row.axes), row.phase), [0.0, 0.0])[column] += row.total_sent_bytes
    rows = [
        ComparedRow(axes=axes, phase=phase, estimated_bytes=ideal, measured_bytes=measured)
        for (axes, phase), (ideal, measured) in sums.items()
    ]
    ordered = sorted(rows, key=lambda row: (-row.estimated_bytes, -row.measured_bytes))
    return CommsComparison(rows=tuple(ordered), not_counted=estimated.not_counted)


def _between_slices(program: Program) -> tuple[Finding, ...]:
    """Reports the traffic between slices, which the XLA:TPU program of one slice passes to the host's network."""
    sums, counts = collections.Counter[str](), collections.Counter[str]()
    for transfer in network_transfers(program, unknown_trip_count=1):  # a hint: it may be too low, but does not fail
        sums[transfer.kind] += round(transfer.total_sent_bytes)
        counts[transfer.kind] += 1
    if not counts:
        return ()
    shown = ", ".join(f"{counts[kind]} x {kind} {format_bytes(size)}" for kind, size in sums.most_common())
    message = (
        f"the program of one of several slices: a device sends {format_bytes(sums.total())} a step over the network "
        f"between them ({shown}), which are not counted in these rows: the mesh axes of the other slices are not known"
    )
    return (Finding(kind="not counted", message=message, param="", source="", extra_bytes=0.0),)


def _param(name: str, x: Any) -> ArgumentLeaf:
    """Returns the leaf of a param that the program's arguments do not name, without its bytes."""
    sharding = getattr(x, "sharding", None)
    dims = {"dims": x.shape if sharding is None else sharding.shard_shape(x.shape), "whole_dims": tuple(x.shape)}
    return ArgumentLeaf(
        path=f"params/{name}", group="params", dtype=str(x.dtype), num_bytes=0, unpadded_bytes=0, **dims
    )


def _total(rows: list[Row]) -> float:
    return sum(row.total_sent_bytes for row in rows)


def _cells(rows: list[Row]) -> tuple[str, ...]:
    row = rows[0]
    times = str(sum(row.num_executions for row in rows))
    overlap = next((row.overlap for row in rows if row.overlap), None)  # that of the first which is asynchronous
    shown = ""
    if overlap:
        cycles = "" if overlap.cycles is None else f"{overlap.cycles:,} cycles of "
        shown = f"{cycles}{overlap.instructions[0].split(' ')[0]}" if overlap.instructions else "nothing"
    sent = f"{_total(rows) / 1e6:.3f}"
    axes = f"{axes_name(row.axes)} ({row.group_size})"
    return (row.kind, axes, row.dtype, row.phase, row.param, times, sent, shown, row.place.rpartition("/")[2])
