"""What a compiled step's collectives are for: the leaves of the train state, and the phases of the step, by name."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence

import jax

from zero_jax.core.gather_names import escaped
from zero_jax.core.tree import PyTree
from zero_jax.hlo import Collective, Instruction, Program, dtypes_and_dims, gathered_path, integers

_MAX_NAMES = 3
_STATE = re.compile(r"(?:\w+(?:\[\d+\])?[.\[']*)??(params|master|opt_state|model_state)(?:'\])?(?=[.\[]|$)(.*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramLeaf:
    """A leaf of the train state as a compiled program takes it.

    Attributes:
      group: 'params', 'master', 'opt_state' or 'model_state'.
      path: Its path in the group, as `a/b/c`.
      dtype: HLO dtype name.
      shape: The global shape.
      local_shape: The shape of the shard that one device holds.
    """

    group: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]


def state_leaves(program: Program, arguments: PyTree = None) -> tuple[ProgramLeaf, ...]:
    """Reads the leaves of the train state from the names of the program's arguments, such as `state.params['w']`.

    Args:
      program: The program.
      arguments: The `in_avals` of what was compiled, if it is at hand: since JAX 0.12 the text does not say how the
        arguments are cut.
    """
    given = jax.tree_util.tree_flatten_with_path(arguments)[0]
    # The place of an argument is no part of its name in the program.
    shapes = [(jax.tree_util.keystr(key_path[2:]), tuple(aval.shape)) for key_path, aval in given]
    leaves = []
    for instruction in program.computations[program.entry].values():
        name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.line)
        path = name[1].replace("\\'", "'") if name else ""
        match = _STATE.match(path) if instruction.opcode == "parameter" else None
        if match:
            (dtype, dims), *_ = dtypes_and_dims(instruction.shape)
            named = [(len(key), whole) for key, whole in shapes if key and path.endswith(key) and _is_cut(whole, dims)]
            whole = max(named)[1] if named else _global_shape(dims, instruction.line)
            path = re.sub(r"\['?([^\]']*)'?\]|\.", lambda m: f"/{m[1] or ''}", match[2]).strip("/")
            leaves.append(
                ProgramLeaf(
                    group=match[1],
                    path=path,
                    dtype=dtype,
                    shape=whole,
                    local_shape=dims,
                )
            )
    return tuple(leaves)


def num_elements(leaves: Iterable[ProgramLeaf]) -> int:
    """Returns the elements of leaves, whole."""
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _is_cut(whole: tuple[int, ...], local: tuple[int, ...]) -> bool:
    """Tells whether a shape may be that of a shard."""
    return len(whole) == len(local) and all(
        not part or all_ % part == 0 for all_, part in zip(whole, local, strict=True)
    )


def _global_shape(local: tuple[int, ...], line: str) -> tuple[int, ...]:
    tiles = re.search(r"sharding=\{devices=\[([\d,]+)\]", line)
    sizes = integers(tiles[1])[: len(local)] if tiles else [1] * len(local)
    return tuple(extent * size for extent, size in zip(local, sizes, strict=True))


class Phases:
    """Tells the phases of a step apart: by the name stack, or where that says nothing by what is near."""

    def __init__(self, program: Program):
        self.program = program
        self.users: dict[str, dict[str, list[str]]] = {}
        self.has_gradient = any(
            "jvp(" in one.line for instructions in program.computations.values() for one in instructions.values()
        )

    def of(self, computation: str, name: str, op_name: str) -> str:
        """Returns 'forward', 'backward' or 'update' for an instruction of this name stack."""
        if "transpose(" in op_name:
            return "backward"
        if "jvp(" in op_name or not self.has_gradient:
            return "forward"
        # A cast of the params belongs to no pass by its name, but to the one that uses it.
        later = self.search(computation, name, self.used_by)
        return self.of(computation, name, later) if later else "update"

    def op_name_before(self, computation: str, name: str) -> str:
        """Returns the nearest name among what an instruction was computed from: XLA drops names where it combines."""
        found = self.search(computation, name, self.made_of)
        caller = next(iter(self.program.callers[computation]), None)
        return found or (self.op_name_before(caller[0], caller[1].name) if caller else "")

    def search(self, computation: str, name: str, neighbours: Callable[[str, str], list[str]]) -> str:
        """The nearest name stack of a pass, breadth first; of equally near ones that of the backward pass."""
        instructions = self.program.computations[computation]
        seen, front = set(), [name]
        while front:
            known = [self.op_name(instructions[one]) for one in front]
            if passes := [one for one in known if "jvp(" in one]:
                return next((one for one in passes if "transpose(" in one), passes[0])
            seen.update(front)
            near = [one for place in front for one in neighbours(computation, place)]
            front = [one for one in dict.fromkeys(near) if one in instructions and one not in seen]
        return ""

    def made_of(self, computation: str, name: str) -> list[str]:
        """The operands of an instruction."""
        instruction = self.program.computations[computation][name]
        return [] if instruction.opcode in ("parameter", "constant") else instruction.operands

    def used_by(self, computation: str, name: str) -> list[str]:
        """The users of an instruction."""
        if computation not in self.users:
            users = self.users[computation] = collections.defaultdict(list)
            for one in self.program.computations[computation]:
                for operand in self.made_of(computation, one):
                    users[operand].append(one)
        return self.users[computation].get(name, [])

    def op_name(self, instruction: Instruction) -> str:
        """The name stack of an instruction; of the loop over microbatches, that of a pass in it."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.line)
        if instruction.opcode == "while" and not (match and "jvp(" in match[1]):
            body = self.program.computations.get(instruction.called["body"], {}).values()
            return next((self.op_name(one) for one in body if "jvp(" in one.line), "")
        return match[1] if match else ""


class Names:
    """Finds the params that a collective moves."""

    def __init__(self, leaves: Sequence[ProgramLeaf]):
        params = [leaf for leaf in leaves if leaf.group == "params"]
        others = [f"model_state/{leaf.path}" for leaf in leaves if leaf.group == "model_state"]
        self.by_scope = {escaped(path): path for path in (*(leaf.path for leaf in params), *others)}
        self.whole: dict[tuple[int, ...], list[str]] = collections.defaultdict(list)
        self.shards: dict[tuple[int, ...], list[str]] = collections.defaultdict(list)
        for leaf in leaves:
            # Of params that are kept whole, the master params and moments show how the gradients are cut.
            param = next((one for one in params if leaf.path.endswith(one.path) and leaf.shape == one.shape), None)
            if param is not None:
                for table, dims in ((self.whole, leaf.shape), (self.shards, leaf.local_shape)):
                    for key in {_dims_key(dims), _dims_key(dims[1:])} - {()}:
                        table[key] += [] if param.path in table[key] else [param.path]

    def of(self, one: Collective, program: Program, op_name: str, kind: str) -> tuple[str, bool]:
        """Returns the path (or paths), and whether it is certain."""
        scope = gathered_path(one.op_name)
        if scope is not None:
            return self.by_scope.get(scope, scope.replace(".", "/")), True
        instruction = program.computations[one.computation][one.name]
        names: list[str] = []
        for dims in sorted(_moved(instruction, one, kind), key=math.prod, reverse=True):
            in_shards = kind.startswith("reduce-scatter") or kind.endswith("(windowed)")
            table = self.shards if in_shards else self.whole
            names += table.get(_dims_key(dims), [])
        names = list(dict.fromkeys(names))
        shown = names[:_MAX_NAMES] + (["..."] if len(names) > _MAX_NAMES else [])
        return " | ".join(shown), False


def _dims_key(dims: Sequence[int]) -> tuple[int, ...]:
    """What is left of a shape when dims are permuted, or of size 1."""
    return tuple(sorted(extent for extent in dims if extent > 1))


def _moved(instruction: Instruction, one: Collective, kind: str) -> list[tuple[int, ...]]:
    """The shapes of a collective's results: whole ones of a gather or all-reduce, shards of a reduce-scatter."""
    shapes = [dims for _, dims in dtypes_and_dims(instruction.shape)]
    if instruction.opcode.endswith("-start"):  # the operands come first
        shapes = shapes[1:2] if kind.endswith("(windowed)") else shapes[-len(one.dtypes) :]
    if kind == "reduce-scatter" and instruction.opcode == "all-reduce":  # the fused form holds the whole result
        shapes = [_cut(dims, one.group_size) for dims in shapes]
    return shapes


def _cut(dims: tuple[int, ...], size: int) -> tuple[int, ...]:
    place = next((i for i in reversed(range(len(dims))) if dims[i] % size == 0), None)
    return dims if place is None else (*dims[:place], dims[place] // size, *dims[place + 1 :])
