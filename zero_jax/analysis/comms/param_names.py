"""Names the params that the collectives of a compiled step move: by the scopes of their gathers, else by shape."""

import collections
import math
from collections.abc import Mapping, Sequence

from zero_jax.analysis.leaves import ArgumentLeaf
from zero_jax.core.gather_names import escaped
from zero_jax.hlo import Collective, Program, arrays, gathered_path, parse_shape

_MAX_NAMES = 3


class ParamNames:
    """The params of a program, by the scopes of their gathers and by the shapes of collectives."""

    def __init__(self, leaves: Sequence[ArgumentLeaf]):
        params = [leaf for leaf in leaves if leaf.group == "params"]
        paths = [leaf.path_in_group for leaf in params]
        paths += [f"model_state/{leaf.path_in_group}" for leaf in leaves if leaf.group == "model_state"]
        self._by_scope = {escaped(path): path for path in paths}
        # Where params are unsharded, the master params and moments show how the gradients are sharded.
        of_params = [(leaf, param.path_in_group) for leaf in leaves for param in params if _is_of(leaf, param)]
        self._by_dims = _paths_by_dims([(leaf.global_dims, path) for leaf, path in of_params])
        self._by_shard_dims = _paths_by_dims([(leaf.dims, path) for leaf, path in of_params])

    def of(self, collective: Collective, program: Program, kind: str) -> tuple[str, bool]:
        """Returns the path (or paths) that a collective moves, and whether it is certain."""
        scope = gathered_path(collective.op_name)
        if scope is not None:
            return self._by_scope.get(scope, scope.replace(".", "/")), True
        names: list[str] = []
        for dims in sorted(_moved(collective, program, kind), key=math.prod, reverse=True):
            in_shards = kind.startswith("reduce-scatter") or kind.endswith("(windowed)")
            table = self._by_shard_dims if in_shards else self._by_dims
            names += table.get(_dims_key(dims), [])
        names = list(dict.fromkeys(names))
        shown = names[:_MAX_NAMES] + (["..."] if len(names) > _MAX_NAMES else [])
        return " | ".join(shown), False


def _paths_by_dims(leaves: Sequence[tuple[tuple[int, ...], str]]) -> Mapping[tuple[int, ...], list[str]]:
    """The paths of leaves by their dims, and after these by the dims of one layer of a stack."""
    paths: dict[tuple[int, ...], dict[str, None]] = collections.defaultdict(dict)
    for dims, path in [*leaves, *((dims[1:], path) for dims, path in leaves)]:
        paths[_dims_key(dims)][path] = None
    return {dims: list(ordered) for dims, ordered in paths.items() if dims}


def _is_of(leaf: ArgumentLeaf, param: ArgumentLeaf) -> bool:
    """Returns whether a leaf of the state is the param, or a master param or moment of it."""
    return leaf.path_in_group.endswith(param.path_in_group) and leaf.global_dims == param.global_dims


def _dims_key(dims: Sequence[int]) -> tuple[int, ...]:
    """What is left of a shape when dims are permuted, or of size 1."""
    return tuple(sorted(extent for extent in dims if extent > 1))


def _moved(collective: Collective, program: Program, kind: str) -> list[tuple[int, ...]]:
    """The shapes of a collective's results: shards of a reduce-scatter, else the gathered or reduced arrays."""
    instruction = program.computations[collective.computation][collective.name]
    shapes = [array.dims for array in arrays(parse_shape(instruction.shape))]
    if instruction.opcode.endswith("-start"):  # the operands come first
        shapes = shapes[1:2] if kind.endswith("(windowed)") else shapes[-len(collective.dtypes) :]
    if kind == "reduce-scatter" and instruction.opcode == "all-reduce":  # the fused form has the unsharded result
        shapes = [_shard_of(dims, collective.group_size) for dims in shapes]
    return shapes


def _shard_of(dims: tuple[int, ...], size: int) -> tuple[int, ...]:
    place = next((i for i in reversed(range(len(dims))) if dims[i] % size == 0), None)
    return dims if place is None else (*dims[:place], dims[place] // size, *dims[place + 1 :])
