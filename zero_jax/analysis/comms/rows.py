"""Lists the collectives of a compiled train step with mesh axes, phase of the step, and param."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from zero_jax import hlo
from zero_jax.analysis.leaves import ArgumentLeaf, dims_key
from zero_jax.core.tracebacks import path_in_package
from zero_jax.hlo import Collective, Instruction, Phases, Program, gathered_path
from zero_jax.sharding.chains import OF_ALL, SENT, escaped
from zero_jax.sharding.device_order import slice_of

UNKNOWN_AXES = ("?",)
_MAX_NAMES = 3  # of params that a collective may move
# What zero_jax sends itself, by a scope or by the path of the module.
_PURPOSES = {
    SENT: "activations sent to shards",
    OF_ALL: "examples of other devices",
    "training/grads/norm.py": "the gradient norm",
    "training/losses.py": "the cross entropy",
    "training/optimizer/": "the optimizer",
}
_WINDOWED = re.compile(r"windowed_dot_general_body_(rs|ag)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledOverlap:
    """What an asynchronous collective overlaps with, in the order that the program is scheduled in.

    Attributes:
      instructions: The longest instructions between its start and its done, as `name (file:line)`.
      cycles: The compiler's estimate of all that is in between; None where it makes none (XLA:GPU).
    """

    instructions: tuple[str, ...]
    cycles: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A collective of a compiled program.

    Attributes:
      kind: As of `hlo.Collective`; or 'reduce-scatter (windowed)' or 'all-gather (windowed)' for the permutes that XLA
        makes of one to overlap it with a matrix product.
      name: The instruction's name.
      axes: The smallest set of mesh axes whose groups contain those of the collective; ('?',) without a mesh.
      group_size: The devices of a group.
      dtypes: HLO dtype names.
      phase: 'forward', 'backward' or 'update'.
      param: The path of the leaf that it moves; several, joined by ' | ', where shapes leave a choice; '' if unknown.
      is_named: Whether `param` comes from the name of a gather, rather than from the shape.
      sent_bytes: What one device sends in one execution; of a permute, in which some send nothing, the mean over all.
      num_executions: Executions in a step.
      full_bytes: The bytes of the gathered or unreduced buffer, as of `hlo.Collective`.
      is_async: Whether other work may run meanwhile.
      overlap: What runs meanwhile, for an asynchronous collective of a scheduled program.
      op_name: JAX's name stack, or ''.
      source: `file:line`, or ''.

    Example:
      >>> compiled = step.lower(state, batch).compile()
      >>> row = zero.comms.measure(compiled, mesh=mesh, param_shapes=state.params).rows[0]
      >>> row.axes, row.group_size
      (('data',), 8)
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    group_size: int
    dtypes: tuple[str, ...]
    phase: str
    param: str = ""
    is_named: bool = False
    sent_bytes: float
    num_executions: int
    full_bytes: int
    is_async: bool
    overlap: ScheduledOverlap | None = None
    op_name: str = ""
    source: str = ""

    @property
    def total_sent_bytes(self) -> float:
        """What one device sends in a step."""
        return self.sent_bytes * self.num_executions

    @property
    def dtype(self) -> str:
        """The dtypes in one word."""
        return "+".join(sorted(set(self.dtypes)))

    @property
    def place(self) -> str:
        """`file:line` of the model, or what zero_jax sends it for, where that does; '' if unknown."""
        own = path_in_package(self.source)
        if not own:  # a line of the model
            return self.source
        if self.is_named:
            if self.phase == "update":
                return "its new values"
            return "its gradient" if "transpose(" in self.op_name and "remat" not in self.op_name else "its gather"
        texts = (text for words, text in _PURPOSES.items() if words in f"{own} {self.op_name}")
        return next(texts, f"zero_jax.{own.partition('.py')[0].replace('/', '.')}")


def axes_name(axes: Sequence[str]) -> str:
    """Returns mesh axes as they are printed."""
    return "+".join(axes) or "-"


class SentBytes:
    """The totals of rows that have `axes`, `phase`, `dtype`, `kind` and `total_sent_bytes`."""

    rows: tuple[Any, ...]
    networks: Mapping[str, str]

    def sent_by(self, key: Callable[[Any], str]) -> dict[str, float]:
        """Returns the bytes by a key of rows, most bytes first."""
        totals: dict[str, float] = collections.defaultdict(float)
        for row in self.rows:
            totals[key(row)] += row.total_sent_bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def sent_bytes(self) -> float:
        """All bytes that one device sends."""
        return sum(row.total_sent_bytes for row in self.rows)

    @property
    def by_axes(self) -> Mapping[str, float]:
        """Bytes by mesh axes, `a+b` for a collective over both."""
        return self.sent_by(lambda row: axes_name(row.axes))

    @property
    def by_phase(self) -> Mapping[str, float]:
        """Bytes by phase of the step."""
        return self.sent_by(lambda row: row.phase)

    @property
    def by_dtype(self) -> Mapping[str, float]:
        """Bytes by HLO dtype, `a+b` for combined collectives of both."""
        return self.sent_by(lambda row: row.dtype)

    @property
    def by_kind(self) -> Mapping[str, float]:
        """Bytes by kind of collective."""
        return self.sent_by(lambda row: row.kind)

    @property
    def by_network(self) -> Mapping[str, float]:
        """Bytes by network: `ici`, `nvlink` or `host` inside a TPU slice or GPU host, `dcn` between them."""
        return self.sent_by(self.network_of)

    def network_of(self, row: Any) -> str:
        """Returns the network of a row: `dcn` for axes of both kinds, `?` for unknown axes."""
        names = {self.networks.get(axis, "?") for axis in row.axes}
        # A collective over a slow and a fast axis takes as long as the slow one.
        return next((name for name in ("?", "dcn") if name in names), min(names, default="?"))


@functools.lru_cache(maxsize=4096)  # a large program has thousands of collectives, of a few groups
def spanned_axes(groups: tuple[tuple[int, ...], ...], shape: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group (flat indices) differ; `shape` is (name, size) pairs."""
    sizes = [size for _, size in shape]
    varies = np.zeros(len(sizes), bool)
    for group in groups:
        coords = np.stack(np.unravel_index(group, sizes))
        varies |= (coords != coords[:, :1]).any(axis=1)
    return tuple(name for (name, _), differs in zip(shape, varies, strict=True) if differs)


def read_rows(
    program: Program,
    *,
    mesh: Mesh | None,
    leaves: Sequence[ArgumentLeaf],
    unknown_trip_count: int | None = None,
) -> tuple[Row, ...]:
    """Lists the collectives of a program, with the mesh axes, phase and param of each."""
    collectives = hlo.collectives(program, unknown_trip_count=unknown_trip_count)
    phases, names = Phases(program), _ParamNames(leaves)
    overlaps = _overlaps(program, collectives) if program.is_scheduled else {}
    shape = program_shape(mesh, program.num_devices)
    rows = []
    # A combined collective is a row for each of its arrays: they are of several params.
    for collective in (part for combined in collectives for part in combined.parts):
        instruction = program.computations[collective.computation][collective.name]
        op_name = collective.op_name or phases.op_name_before(instruction)
        phase = phases.of(instruction, op_name)
        kind = _label(collective, phase, op_name)
        # In programs of several slices the rows of a lookup move without a name.
        is_nameless = kind == "all-to-all" and not collective.op_name
        param, is_named = names.of(collective, program, kind, op_name if is_nameless else collective.op_name)
        pairs = collective.source_target_pairs  # of a permute, in which some devices may have nothing to send
        senders = sum(source != target for source, target in pairs) / program.num_devices if pairs else 1.0
        rows.append(
            Row(
                kind=kind,
                name=collective.name,
                axes=spanned_axes(collective.replica_groups, shape) if shape else UNKNOWN_AXES,
                group_size=collective.group_size,
                dtypes=collective.dtypes,
                phase=phase,
                param=param,
                is_named=is_named,
                sent_bytes=collective.sent_bytes * senders,
                num_executions=collective.num_executions,
                full_bytes=collective.full_bytes,
                is_async=collective.is_async,
                overlap=overlaps.get(instruction.key),
                op_name=collective.op_name,
                source=collective.source,
            )
        )
    return tuple(rows)


def program_shape(mesh: Mesh | None, num_devices: int) -> tuple[tuple[str, int], ...]:
    """Returns names and sizes of the mesh axes of a program's devices, on TPUs those of a slice; empty if unknown."""
    if mesh is None:
        return ()
    slices = np.array(list(map(slice_of, mesh.devices.flat)))
    # The program of a TPU slice counts the devices of that slice alone; all slices have the same program.
    coords = np.argwhere((slices == slices[0]).reshape(mesh.devices.shape))
    if mesh.size == num_devices:
        sizes = list(mesh.devices.shape)
    elif len(coords) == num_devices:
        sizes = [len(np.unique(values)) for values in coords.T]
    else:
        return ()
    names = map(str, mesh.axis_names)
    # Of a slice that is no block of the mesh, an axis has no size of its own.
    return tuple(zip(names, sizes, strict=True)) if math.prod(sizes) == num_devices else ()


def network_rows(program: Program, mesh: Mesh | None) -> tuple[Row, ...]:
    """Lists the transfers of XLA:TPU between slices, with their mesh axes; empty if those are unknown."""
    shape = dict(program_shape(mesh, program.num_devices))
    axes = tuple(name for name, size in shape.items() if mesh is not None and size < mesh.shape[name])
    num_devices = 1 if mesh is None else mesh.size
    phases, sends = Phases(program), lambda transfer: program.computations[transfer.computation][transfer.name]
    return tuple(
        Row(
            kind=transfer.kind,
            name=transfer.name,
            axes=axes,
            group_size=transfer.num_slices,
            dtypes=(transfer.dtype,),
            phase=phases.of(sends(transfer), phases.op_name_before(sends(transfer))),
            sent_bytes=transfer.sent_bytes * (transfer.num_senders / num_devices if transfer.num_senders else 1),
            num_executions=transfer.num_executions,
            full_bytes=transfer.full_bytes,
            is_async=True,
        )
        for transfer in (hlo.network_transfers(program, unknown_trip_count=1) if axes else ())
    )


def _label(collective: Collective, phase: str, op_name: str) -> str:
    """Returns the kind; that of a permute in a windowed einsum follows from its loop, or from its product."""
    if collective.kind != "collective-permute":
        return collective.kind
    loop = _WINDOWED.search(collective.computation)
    if not loop and not re.search(r"(dot_general|conv_general_dilated)[^/]*$", op_name):
        return collective.kind
    scatters = loop[1] == "rs" if loop else phase == "backward" and "rematted_computation" not in op_name
    return "reduce-scatter (windowed)" if scatters else "all-gather (windowed)"


def _overlaps(program: Program, collectives: Sequence[Collective]) -> Mapping[tuple[str, str], ScheduledOverlap]:
    """Simulates the schedule in cycles, or in bytes without the compiler's cycles, with collectives of no duration."""
    # Stopped before the code, the compiler has cycles of a few instructions, but of no fusion.
    instructions = [*program.instructions()]
    fusions = [instruction for instruction in instructions if instruction.opcode == "fusion"]
    has_cycles = any(hlo.cycles(instruction) is not None for instruction in fusions or instructions)

    def weight(program: Program, instruction: Instruction) -> float:
        if has_cycles:
            return hlo.cycles(instruction) or 0
        work = hlo.roofline(program, instruction)
        return max(work.bytes, work.flops / 200)  # accelerators make some 200 flops while they move a byte

    # Only the instructions between a start and its done matter, so any trip count will do.
    costs = hlo.Costs(instruction=weight, collective=lambda _: 0.0)
    timeline = hlo.play(program, collectives, costs, unknown_trip_count=1)
    return {
        key: ScheduledOverlap(instructions=overlap.instructions, cycles=round(overlap.seconds) if has_cycles else None)
        for key, overlap in timeline.overlaps.items()
    }


class _ParamNames:
    """Names the params that collectives move: by the scopes of their gathers, else by shape."""

    def __init__(self, leaves: Sequence[ArgumentLeaf]):
        params = [leaf for leaf in leaves if leaf.group == "params"]
        paths = [leaf.path_in_group for leaf in params]
        paths += [f"model_state/{leaf.path_in_group}" for leaf in leaves if leaf.group == "model_state"]
        self._by_scope = {escaped(path): path for path in paths}
        # The params, master params and moments. If params are unsharded, these show how the gradients are sharded.
        owned = [
            (leaf, param.path_in_group)
            for leaf in leaves
            for param in params
            if leaf.path_in_group.endswith(param.path_in_group) and leaf.global_dims == param.global_dims
        ]
        self._by_dims = _paths_by_dims([(leaf.global_dims, path) for leaf, path in owned])
        self._by_shard_dims = _paths_by_dims([(leaf.dims, path) for leaf, path in owned])

    def of(self, collective: Collective, program: Program, kind: str, op_name: str) -> tuple[str, bool]:
        """Returns the path (or paths) that a collective of this name stack moves, and whether it is certain."""
        scope = gathered_path(op_name)
        if scope is not None:
            return self._by_scope.get(scope, scope.replace(".", "/")), True  # escaped, where the leaves are not known
        names: list[str] = []
        # The largest first: of many names the first ones are shown.
        for dims in sorted(_moved(collective, program, kind), key=math.prod, reverse=True):
            in_shards = kind.startswith("reduce-scatter") or kind.endswith("(windowed)")  # permutes move shards
            table = self._by_shard_dims if in_shards else self._by_dims
            # What is gathered of shards may have their number in a dim of its own: [devices, m / devices, n].
            in_parts = kind == "all-gather" and dims[:1] == (collective.group_size,)
            merged = [(dims[0] * x, *dims[1:i], *dims[i + 1 :]) for i, x in enumerate(dims) if i and in_parts]
            names += next(filter(None, (table.get(dims_key(each)) for each in (dims, *merged))), [])
        names = list(dict.fromkeys(names))
        shown = names[:_MAX_NAMES] + (["..."] if len(names) > _MAX_NAMES else [])
        return " | ".join(shown), False


def _paths_by_dims(leaves: Sequence[tuple[tuple[int, ...], str]]) -> Mapping[tuple[int, ...], list[str]]:
    """Returns the paths of leaves by their dims, then by those of a layer of a stack, or of a matrix in two stacks."""
    paths: dict[tuple[int, ...], dict[str, None]] = collections.defaultdict(dict)
    for dims, path in ((dims[i:], path) for i in range(3) for dims, path in leaves if i < 2 or len(dims) > 3):
        paths[dims_key(dims)][path] = None
    return {dims: list(ordered) for dims, ordered in paths.items() if dims}


def _moved(collective: Collective, program: Program, kind: str) -> list[tuple[int, ...]]:
    """Returns the shapes of a collective's results: shards of a reduce-scatter, else gathered or reduced arrays."""
    shapes = [array.dims for array in collective.arrays]
    instruction = program.computations[collective.computation][collective.name]
    if kind == "reduce-scatter" and instruction.opcode == "all-reduce":  # the fused form has the unsharded result
        for i, dims in enumerate(shapes):
            last = next((j for j in reversed(range(len(dims))) if dims[j] % collective.group_size == 0), None)
            shapes[i] = tuple(x // collective.group_size if j == last else x for j, x in enumerate(dims))
    return shapes
