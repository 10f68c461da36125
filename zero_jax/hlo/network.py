"""Lists what a TPU program of one of several slices sends over the network between them.

XLA:TPU makes one program for each slice. The part of a collective that is inside the slice stays a collective; the rest
is a `send` to the host, which the Megascale runtime exchanges with the hosts of the other slices, and a `recv`.
"""

import dataclasses
import re
from typing import Any

from zero_jax.hlo.program import Instruction, integers, parse
from zero_jax.hlo.traffic import Sent, with_executions

_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# "{1,2}x{0:15}": groups x slices of a group, and the devices of each.
_GROUPS = re.compile(r'_xla_megascale_target="\{\d+,(\d+)\}')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkTransfer(Sent):
    """An exchange of a device with those of other slices.

    Attributes:
      kind: 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or another that the program names.
      name: The name of the `send`.
      computation: The name of the HLO computation that holds it.
      num_slices: The slices that take part.
      dtype: HLO dtype of what is sent.
      full_bytes: The bytes that a device hands over in one execution.
      sent_bytes: What one device sends to other slices in one execution, in the ring model of `Collective`.
      num_executions: Executions in a run of the program.
    """

    kind: str
    name: str
    computation: str
    num_slices: int
    dtype: str
    full_bytes: int
    sent_bytes: float
    num_executions: int


def network_transfers(compiled: Any, *, unknown_trip_count: int | None = None) -> tuple[NetworkTransfer, ...]:
    """Lists what a compiled program sends to other slices, in the order of the text.

    A loop whose trip count the text does not settle is executed `unknown_trip_count` times.

    Raises:
      ValueError: A loop around a transfer has no known trip count and `unknown_trip_count` is not given.
    """
    program = parse(compiled)
    sends = [
        (computation, instruction)
        for computation, instructions in program.computations.items()
        for instruction in instructions.values()
        if instruction.opcode == "send" and _KIND.search(instruction.line)
    ]
    known = [int(match[1]) for _, send in sends if (match := _GROUPS.search(send.line))]
    largest = max(known, default=2)
    by_key = {}
    for computation, send in sends:
        match = _GROUPS.search(send.line)
        transfer = _transfer(computation, send, int(match[1]) if match else largest)
        by_key[computation, send.name] = transfer
    return with_executions(program, by_key, unknown_trip_count)


def rendezvous(instruction: Instruction) -> str:
    """Returns what a `send` and the `recv` of its results have in common."""
    match = _RENDEZVOUS.search(instruction.line)
    return match[1] if match else "".join(map(str, integers(instruction.name)))


def _transfer(computation: str, send: Instruction, num_slices: int) -> NetworkTransfer:
    match = _KIND.search(send.line)
    kind = match[1].lower().replace("_", "-") if match else ""
    sent = send.arrays[0]
    others = num_slices - 1
    share = {"all-gather": others, "all-reduce": 2 * others / num_slices}
    share |= dict.fromkeys(("reduce-scatter", "all-to-all"), others / num_slices)
    return NetworkTransfer(
        kind=kind,
        name=send.name,
        computation=computation,
        num_slices=num_slices,
        dtype=sent.dtype,
        full_bytes=sent.packed_bytes,
        sent_bytes=sent.packed_bytes * share.get(kind, 1),
        num_executions=1,
    )
