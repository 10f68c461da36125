"""Lists what a program sends beside collectives: to and from the memory of its host, and to other slices.

XLA:TPU makes one program for each slice. The part of a collective that is inside the slice stays a collective; the rest
is a `send` to the host, which the Megascale runtime exchanges with the hosts of the other slices, and a `recv`.
"""

import dataclasses
import re
from typing import Any

from zero_jax.hlo.layout import Array, arrays, parse_shape
from zero_jax.hlo.opcodes import COPIES
from zero_jax.hlo.program import Instruction, integers, parse
from zero_jax.hlo.traffic import Sent, with_executions

HOST_SPACE = 5  # of a layout
_MOVED_BY = COPIES | {"fusion"}  # fusions are XLA:GPU's
_KNOWN_OFFSET = "dynamic_slice_config"
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# "{1,2}x{0:15}": groups x slices of a group, and the devices of each.
_GROUPS = re.compile(r'_xla_megascale_target="\{\d+,(\d+)\}')
_PAIR = re.compile(r"\{\d+->\d+\}")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTransfer(Sent):
    """A copy between the memory of a device and that of its host."""

    to_host: bool  # the direction
    # Whether an engine of its own makes it. XLA:GPU makes slices whose offset it does not know from a loop's counter by
    # a kernel that reads or writes the host's memory, between the kernels that compute (seen on an H100).
    is_async: bool


def host_transfers(compiled: Any) -> tuple[HostTransfer, ...]:
    """Lists what a compiled program moves to and from the host's memory, in the order of the text."""
    program = parse(compiled)
    by_key = {
        start.key: transfer
        for start in program.instructions()
        if start.part == "start" and start.base in _MOVED_BY and (transfer := _host_transfer(start))
    }
    return with_executions(program, by_key, None)


def _host_transfer(start: Instruction) -> HostTransfer | None:
    """Returns the transfer that an instruction starts, or None if it stays within the device's memory."""
    on_device = [array.num_bytes for array in start.arrays if array.space != HOST_SPACE]
    if len(on_device) == len(start.arrays) or not on_device:
        return None
    shape = parse_shape(start.shape)
    assert not isinstance(shape, Array)  # operands, results and a context
    result = shape[0 if start.opcode == "copy-start" else 1]
    to_host = any(array.space == HOST_SPACE for array in arrays(result))
    return HostTransfer(
        name=start.name,
        computation=start.computation,
        to_host=to_host,
        is_async=start.base != "fusion" or _KNOWN_OFFSET in start.line,
        sent_bytes=max(on_device),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkTransfer(Sent):
    """An exchange of a device with those of other slices, from a `send` on, in the ring model of `Collective`."""

    kind: str  # 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' or another that the program names
    num_slices: int  # the slices that take part
    dtype: str  # HLO dtype of what is sent
    full_bytes: int  # the bytes that a device hands over in one execution
    # The devices of all slices that send, where the program names pairs, as of a permute; else 0.
    num_senders: int = 0


def network_transfers(compiled: Any, *, unknown_trip_count: int | None = None) -> tuple[NetworkTransfer, ...]:
    """Lists what a program sends to other slices; loops of unknown length are executed `unknown_trip_count` times."""
    program = parse(compiled)
    sends = [send for send in program.instructions() if send.opcode == "send" and _KIND.search(send.line)]
    num_slices = {send.key: int(match[1]) for send in sends if (match := _GROUPS.search(send.line))}
    # Those that name no groups, such as permutes, are taken to be between all slices.
    largest = max(num_slices.values(), default=2)
    by_key = {send.key: _network_transfer(send, num_slices.get(send.key, largest)) for send in sends}
    return with_executions(program, by_key, unknown_trip_count)


def rendezvous(instruction: Instruction) -> str:
    """Returns what a `send` and the `recv` of its results have in common."""
    match = _RENDEZVOUS.search(instruction.line)
    return match[1] if match else "".join(map(str, integers(instruction.name)))


def _network_transfer(send: Instruction, num_slices: int) -> NetworkTransfer:
    match = _KIND.search(send.line)
    kind = match[1].lower().replace("_", "-") if match else ""
    sent = send.arrays[0]
    others = num_slices - 1
    # Of an all-gather a device hands over its shard, which goes to all others; of the rest the whole array.
    share = {"all-gather": others, "all-reduce": 2 * others / num_slices}
    share |= dict.fromkeys(("reduce-scatter", "all-to-all"), others / num_slices)
    return NetworkTransfer(
        kind=kind,
        name=send.name,
        computation=send.computation,
        num_slices=num_slices,
        dtype=sent.dtype,
        full_bytes=sent.packed_bytes,
        sent_bytes=sent.packed_bytes * share.get(kind, 1),
        num_senders=len(_PAIR.findall(send.line)),
    )
