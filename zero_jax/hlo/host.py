"""Lists what a program moves between the device's memory and the host's."""

import dataclasses
from typing import Any

from zero_jax.hlo.layout import Array, arrays, parse_shape
from zero_jax.hlo.opcodes import COPIES
from zero_jax.hlo.program import Instruction, parse
from zero_jax.hlo.traffic import Sent, with_executions

HOST_SPACE = 5  # of a layout
_MOVED_BY = COPIES | {"fusion"}  # fusions are XLA:GPU's


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTransfer(Sent):
    """An asynchronous copy between the memory of a device and that of its host.

    Attributes:
      name: The name of the instruction that starts it.
      computation: The name of the HLO computation that holds it.
      to_host: Whether it goes to the host, or comes from it.
      sent_bytes: The bytes of one execution.
      num_executions: Executions in a run of the program.
    """

    name: str
    computation: str
    to_host: bool
    sent_bytes: int
    num_executions: int


def host_transfers(compiled: Any) -> tuple[HostTransfer, ...]:
    """Lists what a compiled program moves to and from the host's memory, in the order of the text.

    Args:
      compiled: The program, a `jax.stages.Compiled`, or its text, as for `parse`.

    Raises:
      ValueError: A loop around a transfer has no known trip count.
    """
    program = parse(compiled)
    by_key = {
        (computation, start.name): transfer
        for computation, instructions in program.computations.items()
        for start in instructions.values()
        if start.part == "start" and start.base in _MOVED_BY and (transfer := _transfer(computation, start))
    }
    return with_executions(program, by_key, None)


def _transfer(computation: str, start: Instruction) -> HostTransfer | None:
    """Returns the transfer that an instruction starts, or None if it stays within the device's memory."""
    on_device = [array.num_bytes for array in start.arrays if array.space != HOST_SPACE]
    if len(on_device) == len(start.arrays) or not on_device:
        return None
    shape = parse_shape(start.shape)
    assert not isinstance(shape, Array)  # operands, results and a context
    result = shape[0 if start.opcode == "copy-start" else 1]
    to_host = any(array.space == HOST_SPACE for array in arrays(result))
    return HostTransfer(
        name=start.name, computation=computation, to_host=to_host, sent_bytes=max(on_device), num_executions=1
    )
