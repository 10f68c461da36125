"""Warnings about the traffic of a compiled step: collectives that ZeRO does not need, or that move too much."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax.sharding import Mesh

from zero_jax.analysis.comms.rows import UNKNOWN_AXES, Row, axes_name
from zero_jax.analysis.leaves import ArgumentLeaf
from zero_jax.core.text_tables import Report, format_bytes
from zero_jax.core.variables import MODEL_STATE
from zero_jax.sharding.chains import OF_ALL, SENT

_WIDE, _NARROW = {"f32", "f64"}, {"bf16", "f16"}
_ITEM_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
# Of a model of unknown size, this is what counts as large.
_LARGE_BYTES = 1e6
_LARGE_SHARE = 0.01
# The kind of a finding that every program of CPUs has.
ALL_REDUCED = "all-reduced gradient"
_MIXED = (
    "no param: either examples are mixed there, as by a sort, a lookup or a product over the batch, of which XLA gives "
    "each device all of the result (mix those of each device by jax.shard_map, or a dim of groups under jax.vmap), or "
    "a value is made of params alone, as a bias of positions is, and each device has made a part of it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Report):
    """Traffic of a program that ZeRO does not need.

    Attributes:
      kind: 'all-reduced gradient', 'emulated gather', 'wide', 'gathered often' or 'moved activations'.
      message: The collective, its place, and what was expected.
      param: The path of the leaf, or ''.
      source: `file:line`, or ''.
      extra_bytes: Excess bytes that a device sends in a step.
    """

    kind: str
    message: str
    param: str
    source: str
    extra_bytes: float

    def __str__(self) -> str:
        return self.message


def find(rows: Sequence[Row], leaves: Sequence[ArgumentLeaf], *, mesh: Mesh | None = None) -> tuple[Finding, ...]:
    """Returns the collectives that ZeRO does not need, most bytes first; `leaves` and `mesh` of the state say more."""
    params = [leaf for leaf in leaves if leaf.group == "params"]
    # A share of the bytes of the params in 16 bits.
    large = _LARGE_SHARE * 2 * num_elements(params) if params else _LARGE_BYTES
    model = math.prod(size for axis, size in mesh.shape.items() if not carries_batch((axis,))) if mesh else 1
    parts = (math.prod(leaf.global_dims) / max(math.prod(leaf.dims), 1) for leaf in leaves)
    # A program that shards no more than the model's own axes do is no ZeRO: its all-reduces are what is wanted.
    sharded = not leaves or max(parts, default=1) > model
    data = math.prod(size for axis, size in mesh.shape.items() if carries_data((axis,))) if mesh else 1
    wholes = {leaf.path_in_group: _num_gathered(leaf, data, model) for leaf in params}
    states = (leaf for leaf in leaves if leaf.group == MODEL_STATE)
    wholes |= {f"{MODEL_STATE}/{leaf.path_in_group}": _num_gathered(leaf, data, model) for leaf in states}
    findings = [*_wide(rows, large / 10), *_gathered_often(rows, wholes, large)]
    if sharded:
        findings += _all_reduced(rows, large, has_params=bool(params))
        findings += _moved_activations(rows, large, has_params=bool(params))
    merged: dict[str, Finding] = {}  # by message, such as those of the permutes of one ring
    for finding in findings:
        extra = finding.extra_bytes + (merged[finding.message].extra_bytes if finding.message in merged else 0)
        merged[finding.message] = dataclasses.replace(finding, extra_bytes=extra)
    return tuple(sorted(merged.values(), key=lambda finding: -finding.extra_bytes))


def num_elements(leaves: Iterable[ArgumentLeaf]) -> int:
    """Returns the elements of the global arrays."""
    return sum(math.prod(leaf.global_dims) for leaf in leaves)


def carries_data(axes: Sequence[str]) -> bool:
    """Returns whether `data` is, or may be, among mesh axes."""
    return tuple(axes) == UNKNOWN_AXES or any(axis != "replica" and carries_batch((axis,)) for axis in axes)


def carries_batch(axes: Sequence[str]) -> bool:
    """Returns whether `data` or `replica` may be among mesh axes, by their names: any but the model's own."""
    # The axes of a role may have numbers, as `model_0` and `model_1`.
    return any(axis != "model" and not axis.startswith("model_") for axis in axes)


def _all_reduced(rows: Sequence[Row], large: float, *, has_params: bool) -> Iterator[Finding]:
    for row in rows:
        if row.kind != "all-reduce" or not carries_data(row.axes) or row.full_bytes < large:
            continue
        # In the backward pass it is a gradient, unless that recomputes a part of the forward pass.
        gathers = row.phase != "backward" or "rematted_computation" in row.op_name
        if has_params and _mixes_examples(row, is_gradient=not gathers):
            yield _finding("moved activations", row, _MIXED, extra=1)
            continue
        expected = "expected a reduce-scatter, which sends half"
        if gathers:
            expected = (
                "expected an all-gather, which sends half (XLA emulates one over three torus dims at once: "
                "zero.make_mesh gives `data` a mesh axis for each)"
            )
        yield _finding("emulated gather" if gathers else ALL_REDUCED, row, expected, extra=0.5)


def _mixes_examples(row: Row, *, is_gradient: bool) -> bool:
    """Returns whether an all-reduce is of activations, by the operation that it stands for."""
    operation = row.op_name.rpartition("/")[2]
    if row.is_named or (row.param and is_gradient):  # the scope of a gather, or the shape of a param, says what it is
        return False
    return OF_ALL in row.op_name or operation.startswith(("gather", "scatter", "sort", "ragged_dot", "dot_general"))


def _wide(rows: Sequence[Row], large: float) -> Iterator[Finding]:
    moved = [row for row in rows if row.param and row.full_bytes >= large]
    # Where all params move in 32 bits it is the precision that was asked for.
    if not any(_NARROW & set(row.dtypes) for row in moved):
        return
    # Beside codes move their scales, whose dtype is the format's.
    coded = {row.param.rpartition("/")[0] for row in moved if not set(row.dtypes) & (_WIDE | _NARROW)}
    for row in moved:
        # Gradients are summed in the dtype of the policy, which may be float32 where a model casts its params itself.
        is_gather = row.kind.startswith("all-gather") or (row.kind == "all-reduce" and row.phase == "forward")
        if _WIDE & set(row.dtypes) and is_gather and row.param.rpartition("/")[0] not in coded:
            yield _finding("wide", row, "other params move in 16 bits: cast before the gather, not after", extra=0.5)


def _num_gathered(leaf: ArgumentLeaf, data: int, model: int) -> float:
    """Returns the elements of a leaf that is gathered over `data`: those of a shard over axes of the model."""
    whole = math.prod(leaf.global_dims)
    return whole / model if whole == math.prod(leaf.dims) * data * model else whole


def _gathered_often(rows: Sequence[Row], wholes: Mapping[str, float], large: float) -> Iterator[Finding]:
    """Finds params that are gathered more than twice as often as the median param, by the names of gathers."""
    gathers: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_named and row.kind.startswith("all-gather") and row.full_bytes >= large / 10:
            gathers.setdefault(row.param, []).append(row)
    times = {param: _num_gathers(group, wholes.get(param, 0)) for param, group in gathers.items()}
    usual = statistics.median(times.values()) if times else 0
    for param, count in times.items():
        row = max(gathers[param], key=lambda row: row.full_bytes)
        extra = (count - usual) * row.full_bytes
        if count > 2 * usual and extra >= large:  # a tied embedding is used twice as often as the others
            message = (
                f"{param!r} is gathered {count:g} times in a step ({format_bytes(row.full_bytes, decimals=1)} each), "
                f"others {usual:g} times: expected one gather in the forward and one in the backward pass"
            )
            yield Finding(kind="gathered often", message=message, param=param, source=row.source, extra_bytes=extra)


def _num_gathers(rows: Sequence[Row], whole: float) -> float:
    """Returns how often a leaf of so many elements is gathered: a stack of layers by layer, a head by a part of it."""
    # Of gathers in stages, the last results in the full leaf.
    row = max(rows, key=lambda row: row.full_bytes)
    gathered = row.full_bytes / _ITEM_BYTES.get(row.dtype, 1)  # or several leaves, which are gathered together
    count = sum(r.num_executions for r in rows if r.full_bytes == row.full_bytes)
    return count * min(gathered / whole, 1) if whole else count


def _moved_activations(rows: Sequence[Row], large: float, *, has_params: bool) -> Iterator[Finding]:
    for row in rows:
        # Over the stages of a pipeline activations have to move.
        between_stages = all(axis == "pipe" or axis.startswith("pipe_") for axis in row.axes)
        exchange = row.kind == "all-to-all" or (row.kind == "collective-permute" and not between_stages)
        # Without the names of params a gather may be of any; integers are tokens, or codes of quantized params.
        gather = row.kind == "all-gather" and has_params and set(row.dtypes) <= _WIDE | _NARROW
        is_meant = row.is_named or row.phase == "update" or SENT in row.op_name
        if not (exchange or gather) or is_meant or not carries_data(row.axes):
            continue
        if row.total_sent_bytes >= large and not (gather and row.param):
            expected = (
                "it moves no param, and activations need not move over `data`: zero.gather_on_use moves params, "
                "and jax.lax.with_sharding_constraint shards what is not sharded as the batch"
            )
            if has_params and _mixes_examples(row, is_gradient=False):
                expected = _MIXED
            yield _finding("moved activations", row, expected, extra=1)


def _finding(kind: str, row: Row, expected: str, *, extra: float) -> Finding:
    where = f" of {row.param!r}" if row.param else ""
    place = f" ({row.place.rpartition('/')[2]})" if row.place else ""
    times = f", {row.num_executions} times" if row.num_executions > 1 else ""
    phase = "update" if row.phase == "update" else f"{row.phase} pass"
    size = f"{format_bytes(row.full_bytes, decimals=1)} ({row.dtype})"
    message = f"{row.kind} of {size} over {axes_name(row.axes)} in the {phase}{where}{place}{times}: {expected}"
    extra_bytes = extra * row.total_sent_bytes
    return Finding(kind=kind, message=message, param=row.param, source=row.source, extra_bytes=extra_bytes)
