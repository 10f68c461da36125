"""Reads `op_name`s: the phase of the step that an instruction belongs to, and the param that it gathers.

XLA keeps the name stack of the operation that an instruction was made from in its `op_name`.
"""

import re
from collections.abc import Callable

from zero_jax.hlo.program import Instruction, Program

_DIFFERENTIATED = "jvp("  # in the name stack of both passes
# `zero_jax.sharding.chains.gather_scope` puts the path of a param into the name stack like this.
_GATHER_SCOPE = re.compile(r"gather=([^/()\":]+)")
# The gradient of a param's gather, not the gather that is repeated in the backward pass.
GRAD_OF_GATHER = re.compile(r"transpose\([^/]*gather=")
_UPDATE = "of_update/"  # that of `zero_jax.sharding.chains.UPDATE`; `hlo/` imports nothing of zero_jax
# Where its path begins with two tildes, it continues that of `params_scope`.
_PARAMS_SCOPE = re.compile(r"params=([^/()\":]+)")


def phase_of(op_name: str) -> str:
    """Returns `forward`, `backward`, `update`, or '' for no name: JAX's name stacks have jvp( and transpose( in."""
    if not op_name:
        return ""
    return "backward" if "transpose(" in op_name else "forward" if _DIFFERENTIATED in op_name else "update"


def _is_differentiated(op_name: str) -> bool:
    """Tells whether a name stack, or an instruction with it, is of a pass."""
    return _DIFFERENTIATED in op_name


def gathered_path(op_name: str) -> str | None:
    """Returns the path in the innermost gather scope of an `op_name`, escaped, or None."""
    paths = _GATHER_SCOPE.findall(op_name)
    if paths and paths[-1].startswith("~~"):
        return "".join(_PARAMS_SCOPE.findall(op_name)[-1:]) + paths[-1][2:]
    return paths[-1] if paths else None


class Phases:
    """The phase of an instruction: by its name stack, or where that does not say by the instructions around it."""

    def __init__(self, program: Program):
        self._program = program
        self._has_gradient = any(_is_differentiated(instruction.line) for instruction in program.instructions())

    def of(self, instruction: Instruction, op_name: str) -> str:
        """Returns 'forward', 'backward' or 'update' for an instruction with this name stack."""
        phase = phase_of(op_name)
        if phase in ("forward", "backward") or _UPDATE in op_name:
            return phase
        if not self._has_gradient:
            return "forward"
        # XLA:TPU makes all-reduces of some gathers.
        if instruction.base in ("all-reduce", "reduce-scatter") and not gathered_path(op_name):
            return "update"  # of gradients, after the passes
        users = self._program.users(instruction.computation)
        # A cast of the params belongs to no pass by its name, but to the one that uses it.
        return phase_of(self._nearest(instruction, lambda x: users[x.name], _is_differentiated)) or "update"

    def op_name_before(self, instruction: Instruction) -> str:
        """Returns the nearest name among what an instruction was computed from: XLA drops names where it combines."""
        is_traced = lambda name: name.startswith("jit(") or _is_differentiated(name)  # noqa: E731 - not of an argument
        users = self._program.users(instruction.computation)

        def made_of(x: Instruction) -> list[Instruction]:
            # What newer XLA:TPU starts has no operands: its update has them.
            updates = [user for user in users[x.name] if user.opcode == "call-update"]
            return self._program.operands(x) or [y for update in updates for y in self._program.operands(update)]

        nearest = self._nearest(instruction, made_of, is_traced)
        caller = next(iter(self._program.callers[instruction.computation]), None)
        return nearest or (self.op_name_before(caller) if caller else "")

    def _nearest(
        self,
        instruction: Instruction,
        neighbours: Callable[[Instruction], list[Instruction]],
        counts: Callable[[str], bool],
    ) -> str:
        """The nearest name stack that counts, breadth first; of equally near ones that of the backward pass."""
        seen, front = set(), {instruction.name: instruction}
        while front:
            op_names = map(self._op_name, front.values())
            if found := [op_name for op_name in op_names if counts(op_name)]:
                return max(found, key=lambda op_name: ("update", "forward", "backward").index(phase_of(op_name)))
            seen |= front.keys()
            near = (x for inner in front.values() for x in neighbours(inner))
            front = {x.name: x for x in near if x.name not in seen}
        return ""

    def _op_name(self, instruction: Instruction) -> str:
        """The name stack of an instruction; of the loop over microbatches, that of a pass in it."""
        op_name = instruction.op_name
        if instruction.opcode == "while" and not _is_differentiated(op_name):
            body = self._program.computations.get(instruction.called["body"], {}).values()
            return next((self._op_name(inner) for inner in body if _is_differentiated(inner.line)), op_name)
        return op_name
