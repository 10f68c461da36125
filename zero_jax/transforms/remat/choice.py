"""Chooses which values of blocks are kept, and where: those that save most seconds for their bytes, within a budget.

It is greedy: of the values that still fit the device, or the host and the link to it, the next is the one whose keeping
saves the backward pass most seconds for its bytes, beside those that are kept already. Where large values leave gaps
that is not the best choice, so the same is done by seconds alone, and the better of the two is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.sharding.topology import hardware_of
from zero_jax.transforms.remat.costs import BlockCosts
from zero_jax.transforms.remat.labels import INPUT
from zero_jax.transforms.remat.policies import Remat
from zero_jax.transforms.roofline import WAITED_SHARE

# The share of the forward pass of blocks during which the link to the host is used at most.
_LINK_SHARE = 0.8
# Values that save less of the blocks' backward pass are recomputed: they are not worth a name.
_LEAST_SAVED = 1e-3
_PLACES = {"device": "kept", "offloaded": "host", "": "recomputed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueRow:
    """A value that blocks could keep.

    Attributes:
      value: its label, which `Remat(save=..., offload=...)` takes.
      where: `file:line` of the model that made it.
      num_bytes: its bytes on a device, of all blocks together.
      seconds: seconds of a device and microbatch to compute it again, less those of writing and reading it.
      host_seconds: seconds to move it to the host, or back.
      place: `device`, `offloaded` or `` (recomputed).
      why: why it is there.
    """

    value: str
    where: str
    num_bytes: float
    seconds: float
    host_seconds: float
    place: str
    why: str

    @property
    def waited_seconds(self) -> float:
        """Of `host_seconds`, those that blocks wait."""
        return WAITED_SHARE * self.host_seconds

    @property
    def saved_seconds(self) -> float:
        """The seconds that keeping it where it is saves."""
        return self.seconds - (self.waited_seconds if self.place == "offloaded" else 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueBudget:
    """What may be kept of all blocks: bytes on a device, and what moves to its host while blocks compute.

    Attributes:
      device_bytes: bytes of a device.
      host_bytes_per_second: one direction of the link to the host; 0 where nothing is offloaded.
    """

    device_bytes: float
    host_bytes_per_second: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueChoice(Report):
    """What is kept of the blocks of a function, and what it saves; prints as a table."""

    budget: ValueBudget
    rows: tuple[ValueRow, ...]

    @property
    def remat(self) -> Remat:
        """The policy that keeps it."""
        places = {place: tuple(row.value for row in self.rows if row.place == place) for place in _PLACES}
        if not (places["device"] or places["offloaded"]):
            return Remat(policy="full")
        return Remat(policy="values", save=places["device"], offload=places["offloaded"])

    @property
    def policy_name(self) -> str:
        """The name of the policy that chooses it, with its budget."""
        return Remat(policy="auto", budget_gb=self.budget.device_bytes / 1e9).name

    @property
    def saved_seconds(self) -> float:
        """The seconds of a backward pass that keeping values saves."""
        return sum(row.saved_seconds for row in self.rows if row.place)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        table = [("value", "made at", "MB", "recompute ms", "host ms", "place", "why")]
        for row in self.rows:
            figures = (f"{row.num_bytes / 1e6:.3f}", f"{1e3 * row.seconds:.3f}", f"{1e3 * row.host_seconds:.3f}")
            table.append((row.value, row.where, *figures, _PLACES[row.place], row.why))
        kept = sum(row.num_bytes for row in self.rows if row.place == "device")
        head = f"{format_bytes(kept)} of a budget of {format_bytes(self.budget.device_bytes)} are kept on a device"
        return f"{head}\n{aligned(table, right={2, 3, 4})}"


class _Room:
    """The bytes that are left on a device and on its host while values are chosen."""

    def __init__(self, budget: ValueBudget, link_bytes: float):
        self.left = {"device": budget.device_bytes, "offloaded": link_bytes}

    def place(self, num_bytes: float, *, can_move: bool) -> str:
        """Returns the place where so many bytes fit, '' if there is none."""
        places = ("device", "offloaded") if can_move else ("device",)
        return next((place for place in places if num_bytes <= self.left[place]), "")


def choose_values(costs: Sequence[BlockCosts], remat: Remat, *, mesh: Mesh) -> ValueChoice:
    """Returns what the policy `auto` keeps of blocks, by their costs, on the devices of a mesh.

    Nothing is offloaded on devices whose figures are not known.

    Raises:
      ValueError: there is no budget.
    """
    device = mesh.devices.flat[0]
    if remat.budget_gb is None:
        raise ValueError(
            f"remat='auto': how much memory blocks may keep is not known here (of {device.device_kind!r}): give "
            "zero.Remat(policy='auto', budget_gb=...), or 'auto:<GB>', in GB of a device's memory"
        )
    hardware = hardware_of(device)
    link = hardware.host_bytes_per_second if hardware else 0.0
    return choose(costs, ValueBudget(device_bytes=1e9 * remat.budget_gb, host_bytes_per_second=link))


def choose(blocks: Sequence[BlockCosts], budget: ValueBudget) -> ValueChoice:
    """Returns what to keep of blocks under a budget."""
    return max((_greedy(blocks, budget, order) for order in (_by_bytes, _by_seconds)), key=lambda x: x.saved_seconds)


def _by_bytes(row: ValueRow) -> float:
    return row.saved_seconds / max(row.num_bytes, 1)


def _by_seconds(row: ValueRow) -> float:
    return row.saved_seconds


def _greedy(blocks: Sequence[BlockCosts], budget: ValueBudget, order: Callable[[ValueRow], float]) -> ValueChoice:
    """Returns a choice, by the order in which values are taken."""
    scanned = [block for block in blocks if block.is_scanned]
    link_bytes = _LINK_SHARE * sum(block.forward_seconds() for block in scanned) * budget.host_bytes_per_second
    room, rows = _Room(budget, link_bytes), [_inputs(blocks, budget)]
    rows[0] = _placed(rows[0], room, can_move=_can_move(INPUT, blocks)) or _over(rows[0], link_bytes)
    room.left[rows[0].place] -= rows[0].num_bytes
    found = {row.value: row for row in _gains(blocks, budget, [])}
    while found:
        placed = [_placed(row, room, can_move=_can_move(row.value, blocks)) for row in found.values()]
        fitting = [row for row in placed if row is not None and row.saved_seconds > 0]
        if not fitting:
            break
        best = max(fitting, key=order)
        room.left[best.place] -= best.num_bytes
        rows.append(best)
        found = {row.value: row for row in _gains(blocks, budget, [row.value for row in rows], among=found)}
    waiting = sorted(found.values(), key=order, reverse=True)
    return ValueChoice(budget=budget, rows=(*rows, *(_recomputed(row, room) for row in waiting)))


def _inputs(blocks: Sequence[BlockCosts], budget: ValueBudget) -> ValueRow:
    """Returns the row of the blocks' inputs, which are kept in any case."""
    num_bytes = sum(block.input_bytes for block in blocks)
    why = "the inputs of blocks are kept in any case"
    moved = _moved(num_bytes, budget)
    return ValueRow(
        value=INPUT, where="", num_bytes=num_bytes, seconds=0.0, host_seconds=moved, place="device", why=why
    )


def _over(row: ValueRow, link_bytes: float) -> ValueRow:
    """Returns the row of inputs that fit nowhere: slow on the host is better than too much on the device."""
    if link_bytes:
        return dataclasses.replace(row, place="offloaded", why=f"{row.why}; blocks wait for the link to the host")
    return dataclasses.replace(row, why=f"{row.why}; they are more than the budget")


def _gains(
    blocks: Sequence[BlockCosts], budget: ValueBudget, kept: Sequence[str], among: Mapping[str, ValueRow] | None = None
) -> list[ValueRow]:
    """Returns the values that save seconds beside those that are kept, each with what it saves."""
    labels = dict.fromkeys(label for block in blocks for label in block.values) if among is None else among
    plain = [block.backward_seconds(kept) for block in blocks]
    least, rows = _LEAST_SAVED * sum(plain), []
    for label in [label for label in labels if label not in kept]:
        having = [(block, seconds) for block, seconds in zip(blocks, plain, strict=True) if label in block.values]
        saved = sum(
            seconds - block.backward_seconds([*kept, label]) - block.keeping_seconds(label) for block, seconds in having
        )
        num_bytes = sum(block.values[label] for block, _ in having)
        if saved > least:
            where = having[0][0].lines[label]
            moved = _moved(num_bytes, budget)
            rows.append(
                ValueRow(
                    value=label, where=where, num_bytes=num_bytes, seconds=saved, host_seconds=moved, place="", why=""
                )
            )
    return rows


def _moved(num_bytes: float, budget: ValueBudget) -> float:
    return num_bytes / budget.host_bytes_per_second if budget.host_bytes_per_second else 0.0


def _can_move(label: str, blocks: Sequence[BlockCosts]) -> bool:
    """Tells whether a value may be offloaded: XLA:TPU keeps the device's copy, too, but in loops."""
    return all(block.is_scanned for block in blocks if label == INPUT or label in block.values)


def _placed(row: ValueRow, room: _Room, *, can_move: bool) -> ValueRow | None:
    """Returns a row with the place where it fits, None if there is none."""
    place = room.place(row.num_bytes, can_move=can_move)
    if not place:
        return None
    why = row.why or f"saves {1e12 * row.seconds / max(row.num_bytes, 1):.3g} ms a GB"
    if place == "offloaded":
        why += f"; {format_bytes(room.left['device'])} are left on the device, waits {1e3 * row.waited_seconds:.3g} ms"
    return dataclasses.replace(row, place=place, why=why)


def _recomputed(row: ValueRow, room: _Room) -> ValueRow:
    """Returns the row of a value that is computed again, with the reason."""
    why = f"does not fit: {format_bytes(max(room.left['device'], 0.0))} are left on the device"
    if row.waited_seconds >= row.seconds:
        why += ", and blocks would wait longer for the host"
    elif room.left["offloaded"] > 0:
        why += f", {format_bytes(room.left['offloaded'])} on the link"
    return dataclasses.replace(row, why=why)
