"""The arguments of a compiled program as leaves of the train state: groups, paths, shards, bytes on a device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.hlo import Instruction, Program, arrays, parse_shape

GROUPS = ("params", "master", "opt_state", "model_state", "batch", "other")
STATE_GROUPS = GROUPS[:4]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentLeaf:
    """An argument of a program on one device.

    Attributes:
      path: Its path, such as state/params/embed.
      group: `params`, `master`, `opt_state`, `model_state`, `batch` or `other`.
      dtype: HLO dtype.
      dims: The dims of what one device holds.
      num_bytes: Bytes on the device, with the padding of its tiles.
      unpadded_bytes: Bytes of its elements alone.
      whole_dims: The dims of the whole array, or None if neither program nor shardings tell.
      on_host: Whether it lies in host memory.
    """

    path: str
    group: str
    dtype: str
    dims: tuple[int, ...]
    num_bytes: int
    unpadded_bytes: int
    whole_dims: tuple[int, ...] | None
    on_host: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether each device is known to hold all of it."""
        return self.whole_dims == self.dims


def group_of(path: str) -> str:
    """Returns the group of a leaf by its path: the first component that is the name of one."""
    return next((part for part in path.split("/") if part in GROUPS[:-1]), GROUPS[-1])


def argument_leaves(program: Program, compiled: Any) -> tuple[ArgumentLeaf, ...]:
    """Returns the arguments that a program keeps, in order.

    Args:
      program: The program's text, read.
      compiled: What it is the text of; its `args_info` and `input_shardings` are used where the text lacks shardings.
    """
    entry = [one for one in program.computations[program.entry].values() if one.opcode == "parameter"]
    entry.sort(key=lambda one: int(one.operands[0]))
    names = [_op_name(one) for one in entry]
    wholes = _whole_dims(compiled, [(name, one.shape) for name, one in zip(names, entry, strict=True)])
    leaves = []
    for one, name in zip(entry, names, strict=True):
        path = "/".join(re.findall(r"[^.\[\]'\"\\]+", name)) or one.name
        for array in arrays(parse_shape(one.shape)):
            shards = _shards(one.line, len(array.dims))
            whole = wholes.get(name)
            if shards is not None:
                whole = tuple(dim * count for dim, count in zip(array.dims, shards, strict=True))
            leaves.append(
                ArgumentLeaf(
                    path=path,
                    group=group_of(path),
                    dtype=array.dtype,
                    dims=array.dims,
                    num_bytes=array.num_bytes,
                    unpadded_bytes=array.unpadded_bytes,
                    whole_dims=whole,
                    on_host=array.space == 5,
                )
            )
    return tuple(leaves)


def sum_by_group(leaves: Iterable[Any]) -> dict[str, int]:
    """Adds up the bytes of leaves by group, in the order of `GROUPS`."""
    totals = dict.fromkeys(GROUPS, 0)
    for leaf in leaves:
        totals[leaf.group] += leaf.num_bytes
    return {group: total for group, total in totals.items() if total}


def left_whole(leaves: Iterable[ArgumentLeaf]) -> tuple[ArgumentLeaf, ...]:
    """Returns the leaves that are whole in groups of the state that are otherwise sharded, largest first.

    Scalars, which nothing could shard, are not among them.
    """
    leaves = [leaf for leaf in leaves if leaf.group in STATE_GROUPS and leaf.dims]
    sharded = {leaf.group for leaf in leaves if leaf.whole_dims is not None and not leaf.is_whole}
    found = [leaf for leaf in leaves if leaf.group in sharded and leaf.is_whole]
    return tuple(sorted(found, key=lambda leaf: -leaf.num_bytes))


def whole_warning(leaves: Iterable[Any], whole: Iterable[Any]) -> str | None:
    """Returns a warning if leaves that are left whole take more than half of the bytes of the sharded groups."""
    whole = list(whole)
    groups = {leaf.group for leaf in whole}
    total, taken = (sum(leaf.num_bytes for leaf in some if leaf.group in groups) for some in (leaves, whole))
    if taken <= total / 2:
        return None
    return (
        f"{len(whole)} leaves left whole take {readable_bytes(taken)} of the {readable_bytes(total)} of "
        f"{', '.join(group for group in STATE_GROUPS if group in groups)} on a device, the largest {whole[0].path} "
        f"({readable_bytes(whole[0].num_bytes)}): lower min_shard_size, give an override with another dim, "
        "or choose sizes that the number of devices divides"
    )


def readable_bytes(num_bytes: float) -> str:
    """Formats bytes with three digits, such as 1.23 GiB."""
    size, unit = abs(num_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{'-' if num_bytes < 0 else ''}{size:.{digits}f} {_UNITS[unit]}"


def aligned(rows: Iterable[tuple[str, ...]]) -> str:
    """Lays rows of (name, figures ..., text) out as a table, figures to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *figures, text in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, figures, widths[1:-1]), text]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _op_name(one: Instruction) -> str:
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', one.line)
    return match[1].replace("\\'", "'") if match else ""


def _shards(line: str, rank: int) -> tuple[int, ...] | None:
    """The number of shards of each dim by a `sharding=` of the text, or None."""
    if re.search(r"sharding=\{(replicated|maximal)", line):
        return (1,) * rank
    match = re.search(r"sharding=\{devices=\[([\d,]+)\]", line)
    return tuple(map(int, match[1].split(",")))[:rank] if match else None


def _whole_dims(compiled: Any, kept: list[tuple[str, str]]) -> Mapping[str, tuple[int, ...]]:
    """The dims of whole arguments by name, from what JAX knows of the program."""
    if not hasattr(compiled, "args_info"):
        return {}
    found = jax.tree_util.tree_leaves_with_path(compiled.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    infos = [(jax.tree_util.keystr(path[2:]), info) for path, info in found]
    wholes, place = {}, 0
    for name, shape in kept:  # the program keeps a part of the arguments, in order, and adds the argument's own name
        (array,) = arrays(parse_shape(shape))
        while place < len(infos) and not (name.endswith(infos[place][0]) and _can_be(array.dims, infos[place][1])):
            place += 1
        if place == len(infos):
            break
        if not _is_key(infos[place][1]):
            wholes[name] = tuple(infos[place][1].shape)
        place += 1
    return wholes


def _is_key(info: Any) -> bool:
    """Tells whether an argument is of PRNG keys, which are arrays of integers in the program."""
    return jnp.issubdtype(info.dtype, jax.dtypes.extended)


def _can_be(dims: tuple[int, ...], info: Any) -> bool:
    """Tells whether an array of these dims can be a shard of an argument."""
    if _is_key(info):
        return True
    sizes = zip(info.shape, dims, strict=False)
    return len(dims) == len(info.shape) and all(whole % dim == 0 if dim else not whole for whole, dim in sizes)
