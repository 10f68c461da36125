"""Arguments of a compiled program as leaves of the train state: groups, paths, shards, bytes on a device."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from zero_jax.core.text_tables import format_bytes
from zero_jax.core.tree import is_key
from zero_jax.hlo import HOST_SPACE, Instruction, Program

GROUPS = ("params", "master", "opt_state", "model_state", "grad_errors", "batch", "other")
STATE_GROUPS = GROUPS[:5]  # those that stay from step to step
# As JAX names arguments: keys of dicts in quotes, attributes behind dots, numbers in brackets.
_KEY = re.compile(r"\['([^']*)'\]|([^.\[\]'\"\\]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentLeaf:
    """An argument of a program on one device.

    Attributes:
      path: Its path, such as state/params/embed.
      group: `params`, `master`, `opt_state`, `model_state`, `grad_errors`, `batch` or `other`.
      dtype: HLO dtype.
      dims: The dims of the shard that one device holds.
      num_bytes: Bytes on the device, with the padding of its tiles.
      unpadded_bytes: Bytes of its elements alone.
      whole_dims: The dims of the global array, or None if neither program nor shardings say.
      on_host: Whether it is in host memory.
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

    @property
    def global_dims(self) -> tuple[int, ...]:
        """The dims of the global array, those of the shard where it is not known."""
        return self.dims if self.whole_dims is None else self.whole_dims

    @property
    def path_in_group(self) -> str:
        """Its path below the name of the group, such as embed."""
        parts = self.path.split("/")
        return "/".join(parts[parts.index(self.group) + 1 :]) if self.group in parts else self.path


def dims_key(dims: Sequence[int]) -> tuple[int, ...]:
    """Returns sorted dims without those of size 1: XLA transposes and reshapes params and gradients."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def path_of(name: str) -> str:
    """Returns the name of an argument as a path: `state.params['embed']` becomes state/params/embed."""
    return "/".join(quoted or plain for quoted, plain in _KEY.findall(name))


def group_of(path: str) -> str:
    """Returns the group of a leaf by its path: the first component that is the name of a group."""
    return next((part for part in path.split("/") if part in GROUPS[:-1]), GROUPS[-1])


def host_memory_kind(sharding: Any) -> str | None:
    """Returns the kind of host memory of a sharding; None for its devices' default memory, also on CPUs."""
    kind = getattr(sharding, "memory_kind", None)  # None of shardings that do not say
    if kind is None or "host" not in kind:
        return None
    try:
        default = next(iter(sharding.device_set)).default_memory().kind
    except (ValueError, NotImplementedError, AttributeError):  # devices that are not there
        return kind
    return None if kind == default else kind


def argument_leaves(program: Program, compiled: Any) -> tuple[ArgumentLeaf, ...]:
    """Returns the arguments of a program, in order; shardings that its text lacks are those of `compiled.args_info`."""
    parameters = program.parameters(program.entry)
    known_dims = _global_dims(compiled, parameters)
    leaves = []
    for parameter in parameters:
        path = path_of(parameter.op_name) or parameter.name
        for array in parameter.arrays:
            shards = _shards(parameter.line, len(array.dims))
            global_dims = known_dims.get(parameter.op_name)
            if shards is not None:  # what XLA compiled, where the text has it
                global_dims = tuple(dim * count for dim, count in zip(array.dims, shards, strict=True))
            leaves.append(
                ArgumentLeaf(
                    path=path,
                    group=group_of(path),
                    dtype=array.dtype,
                    dims=array.dims,
                    num_bytes=array.num_bytes,
                    unpadded_bytes=array.unpadded_bytes,
                    whole_dims=global_dims,
                    on_host=array.space == HOST_SPACE,
                )
            )
    return tuple(leaves)


def sum_by_group(leaves: Iterable[ArgumentLeaf]) -> dict[str, int]:
    """Adds up the bytes of leaves by group, in the order of `GROUPS`."""
    totals: dict[str, int] = dict.fromkeys(GROUPS, 0)
    for leaf in leaves:
        totals[leaf.group] += leaf.num_bytes
    return {group: total for group, total in totals.items() if total}


def unsharded_leaves(leaves: Iterable[ArgumentLeaf]) -> tuple[ArgumentLeaf, ...]:
    """Returns the unsharded leaves, but scalars, of groups of the state that are otherwise sharded, largest first."""
    leaves = [leaf for leaf in leaves if leaf.group in STATE_GROUPS and leaf.dims]
    # Of a group that no stage shards, as params at stage 2, unsharded leaves are what is wanted.
    sharded = {leaf.group for leaf in leaves if leaf.whole_dims is not None and not leaf.is_whole}
    unsharded = [leaf for leaf in leaves if leaf.group in sharded and leaf.is_whole]
    return tuple(sorted(unsharded, key=lambda leaf: -leaf.num_bytes))


def unsharded_warning(leaves: Iterable[ArgumentLeaf], unsharded: Iterable[ArgumentLeaf]) -> str | None:
    """Returns a warning if unsharded leaves take more than half of the bytes of the sharded groups."""
    unsharded = list(unsharded)
    groups = {leaf.group for leaf in unsharded}
    total, unsharded_bytes = (
        sum(leaf.num_bytes for leaf in some if leaf.group in groups) for some in (leaves, unsharded)
    )
    if unsharded_bytes <= total / 2:  # norms and biases are unsharded in every model
        return None
    return (
        f"{len(unsharded)} unsharded leaves take {format_bytes(unsharded_bytes)} of the {format_bytes(total)} of "
        f"{', '.join(group for group in STATE_GROUPS if group in groups)} on a device, the largest {unsharded[0].path} "
        f"({format_bytes(unsharded[0].num_bytes)}): lower min_shard_size, give an override with another dim, "
        "or choose sizes that the number of devices divides"
    )


def not_donated(program: Program, leaves: Sequence[ArgumentLeaf], donated: Sequence[bool]) -> tuple[ArgumentLeaf, ...]:
    """Returns the leaves of the state that are not `donated`, and that the program returns anew, largest first."""
    root = program.root(program.entry)
    assert root is not None
    # By dtype and dims, as results have no names in the text.
    returned = collections.Counter((array.dtype, array.dims) for array in root.arrays)
    leaves_and_donated = list(zip(leaves, donated, strict=True))
    returned -= collections.Counter((leaf.dtype, leaf.dims) for leaf, is_donated in leaves_and_donated if is_donated)
    copied = []
    for leaf, is_donated in leaves_and_donated:
        # One result explains one argument: of several leaves alike, as many are copied as are returned.
        if leaf.group in STATE_GROUPS and not is_donated and returned[leaf.dtype, leaf.dims] > 0:
            returned[leaf.dtype, leaf.dims] -= 1
            copied.append(leaf)
    return tuple(sorted(copied, key=lambda leaf: -leaf.num_bytes))


def _shards(line: str, rank: int) -> tuple[int, ...] | None:
    """Returns the number of shards of each dim by a `sharding=` of the text, or None."""
    if re.search(r"sharding=\{(replicated|maximal)", line):
        return (1,) * rank
    match = re.search(r"sharding=\{devices=\[([\d,]+)\]", line)
    # Behind the leaf's own dims the text has those of devices that hold the same shard.
    return tuple(map(int, match[1].split(",")))[:rank] if match else None


def _global_dims(compiled: Any, parameters: list[Instruction]) -> Mapping[str, tuple[int, ...]]:
    """Returns the dims of global arguments by name, from `compiled.args_info`."""
    if not hasattr(compiled, "args_info"):
        return {}
    with_paths = jax.tree_util.tree_leaves_with_path(compiled.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    # A path begins with args or kwargs, and the argument's number or name there, for which the program has a name.
    infos = [(jax.tree_util.keystr(path[2:]), info) for path, info in with_paths]
    dims, index = {}, 0
    for parameter in parameters:  # some of the arguments, in order, each with the name of the function's argument
        name, (array,) = parameter.op_name, parameter.arrays
        while index < len(infos) and not (name.endswith(infos[index][0]) and _can_be(array.dims, infos[index][1])):
            index += 1
        if index == len(infos):
            break
        # A key is an argument of its words, whose dims are not those of `args_info`.
        if not is_key(infos[index][1]):
            dims[name] = tuple(infos[index][1].shape)
        index += 1
    return dims


def _can_be(dims: tuple[int, ...], info: Any) -> bool:
    """Returns whether an array of these dims can be a shard of an argument."""
    if is_key(info):
        return True
    sizes = zip(info.shape, dims, strict=False)
    return len(dims) == len(info.shape) and all(size % dim == 0 if dim else not size for size, dim in sizes)
