"""Chooses which values of blocks are kept, and where: those that save most seconds for their bytes, within a budget.

It is greedy: of the values that still fit the device, or the host and the link to it, the next is the one whose keeping
saves the backward pass most seconds for its bytes, beside those that are kept already. Where large values leave gaps
that is not the best choice, so the same is done by seconds alone, and the better of the two is taken.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import Mesh

from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.sharding.topology import hardware_of
from zero_jax.transforms.remat.costs import BlockCosts
from zero_jax.transforms.remat.policies import Remat
from zero_jax.transforms.remat.values import INPUT
from zero_jax.transforms.roofline import waited_seconds

# The share of the forward pass of blocks during which the link to the host is used at most.
_LINK_SHARE = 0.8
# Values that save less of the blocks' backward pass are recomputed: they are not worth a name.
_LEAST_SAVED = 1e-3
_PLACES = {"device": "kept", "offloaded": "host", "": "recomputed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueRow:
    """A value that blocks could keep."""

    value: str  # its label, which `Remat(save=..., offload=...)` takes
    where: str = ""  # `file:line` of the model that made it
    num_bytes: float  # its bytes on a device, of all blocks together
    seconds: float = 0.0  # of a device and microbatch to compute it again, less those of writing and reading it
    host_seconds: float  # to move it to the host, or back
    place: str = ""  # `device`, `offloaded` or `` (recomputed)
    why: str = ""  # why it is there

    @property
    def waited_seconds(self) -> float:
        """Of `host_seconds`, those that blocks wait."""
        return waited_seconds(self.host_seconds, self.num_bytes)

    @property
    def saved_seconds(self) -> float:
        """The seconds that keeping it where it is saves."""
        return self.seconds - (self.waited_seconds if self.place == "offloaded" else 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueBudget:
    """What may be kept of all blocks: bytes on a device, and what moves to its host while blocks compute."""

    device_bytes: float
    host_bytes_per_second: float = 0.0  # one direction of the link to the host; 0 where nothing is offloaded


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

    @property
    def kept_bytes(self) -> float:
        """The bytes that are kept on a device: less than the budget where further values save no time."""
        return sum(row.num_bytes for row in self.rows if row.place == "device")

    def __str__(self) -> str:
        table = [("value", "made at", "MB", "recompute ms", "host ms", "place", "why")]
        for row in self.rows:
            figures = (f"{row.num_bytes / 1e6:.3f}", f"{1e3 * row.seconds:.3f}", f"{1e3 * row.host_seconds:.3f}")
            table.append((row.value, row.where, *figures, _PLACES[row.place], row.why))
        kept, budget = map(format_bytes, (self.kept_bytes, self.budget.device_bytes))
        return f"{kept} of a budget of {budget} are kept on a device\n{aligned(table, right={2, 3, 4})}"


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
    seconds = operator.attrgetter("saved_seconds")
    by_bytes = lambda row: row.saved_seconds / max(row.num_bytes, 1)  # noqa: E731
    return max((_Greedy(blocks, budget).choice(order) for order in (by_bytes, seconds)), key=seconds)


class _Greedy:
    """A choice that is being made: the blocks, and the bytes that are left on a device and on the link to its host."""

    def __init__(self, blocks: Sequence[BlockCosts], budget: ValueBudget):
        self.blocks, self.budget = blocks, budget
        forward_seconds = sum(block.forward_seconds for block in blocks if block.is_scanned)
        self.left = {
            "device": budget.device_bytes,
            "offloaded": _LINK_SHARE * forward_seconds * budget.host_bytes_per_second,
        }

    def choice(self, order: Callable[[ValueRow], float]) -> ValueChoice:
        """Returns the choice, by the order in which values are taken."""
        rows = [self.taken(self.inputs())]
        waiting = self.gains([], dict.fromkeys(label for block in self.blocks for label in block.values))
        while fitting := [row for row in map(self.placed, waiting) if row is not None and row.saved_seconds > 0]:
            rows.append(self.taken(max(fitting, key=order)))
            waiting = self.gains([row.value for row in rows], [row.value for row in waiting])
        waiting.sort(key=order, reverse=True)
        return ValueChoice(budget=self.budget, rows=(*rows, *map(self.recomputed, waiting)))

    def taken(self, row: ValueRow) -> ValueRow:
        """Returns the row of a value that is kept where it says, which leaves less room."""
        self.left[row.place] -= row.num_bytes
        return row

    def row(self, label: str, num_bytes: float, **known: Any) -> ValueRow:
        """Returns the row of a value that has no place yet."""
        speed = self.budget.host_bytes_per_second
        return ValueRow(value=label, num_bytes=num_bytes, host_seconds=num_bytes / speed if speed else 0.0, **known)

    def inputs(self) -> ValueRow:
        """Returns the row of the blocks' inputs, which are kept in any case: slow on the host before too much here."""
        num_bytes = sum(block.input_bytes for block in self.blocks)
        row = self.row(INPUT, num_bytes, why="the inputs of blocks are kept in any case")
        if (placed := self.placed(row)) is not None:
            return placed
        if self.left["offloaded"]:
            return dataclasses.replace(row, place="offloaded", why=f"{row.why}; blocks wait for the link to the host")
        return dataclasses.replace(row, place="device", why=f"{row.why}; they are more than the budget")

    def gains(self, kept: Sequence[str], labels: Iterable[str]) -> list[ValueRow]:
        """Returns which of some values save seconds beside those that are kept, each with what it saves."""
        before, rows = [block.backward_seconds(kept) for block in self.blocks], []
        for label in [label for label in labels if label not in kept]:
            makers = [(x, seconds) for x, seconds in zip(self.blocks, before, strict=True) if label in x.values]
            saved = sum(
                seconds - x.backward_seconds([*kept, label]) - x.keeping_seconds(label) for x, seconds in makers
            )
            if saved > _LEAST_SAVED * sum(before):
                num_bytes = sum(x.values[label] for x, _ in makers)
                rows.append(self.row(label, num_bytes, seconds=saved, where=makers[0][0].lines[label]))
        return rows

    def placed(self, row: ValueRow) -> ValueRow | None:
        """Returns a row with the place where it fits, None if there is none.

        In loops alone it may be the host: elsewhere XLA:TPU keeps the device's copy, too.
        """
        makers = [block for block in self.blocks if row.value == INPUT or row.value in block.values]
        places = ("device", "offloaded") if all(block.is_scanned for block in makers) else ("device",)
        place = next((place for place in places if row.num_bytes <= self.left[place]), "")
        if not place:
            return None
        why = row.why or f"saves {1e12 * row.seconds / max(row.num_bytes, 1):.3g} ms a GB"
        if place == "offloaded":
            left = format_bytes(self.left["device"])
            why += f"; {left} are left on the device, waits {1e3 * row.waited_seconds:.3g} ms"
        return dataclasses.replace(row, place=place, why=why)

    def recomputed(self, row: ValueRow) -> ValueRow:
        """Returns the row of a value that is computed again, with the reason."""
        why = f"does not fit: {format_bytes(max(self.left['device'], 0.0))} are left on the device"
        if row.waited_seconds >= row.seconds:
            why += ", and blocks would wait longer for the host"
        elif self.left["offloaded"] > 0:
            why += f", {format_bytes(self.left['offloaded'])} on the link"
        return dataclasses.replace(row, why=why)
