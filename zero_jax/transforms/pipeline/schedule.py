"""The order in which microbatches go through the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which microbatches go through the stages of a pipeline."""

    num_groups: int = 1  # the groups of layers of a stage, which a microbatch goes through one round after another
    # Whether a stage takes one microbatch forward and one backward in turn (1F1B), and not all forward and then all
    # backward
    is_interleaved: bool = False

    def __str__(self) -> str:
        name = "1f1b" if self.is_interleaved else "gpipe" if self.num_groups == 1 else "circular"
        return name if self.num_groups == 1 else f"{name}:{self.num_groups}"

    def num_ticks(self, num_stages: int, num_microbatches: int) -> int:
        """Returns the ticks of a pass, in each of which a stage runs a group of its layers on a microbatch."""
        return num_microbatches * self.num_groups + num_stages - 1

    def num_places(self, num_stages: int, num_layers: int) -> int:
        """Returns the places for layers of all stages, as many in each group; those behind the last layer are idle."""
        num_groups = num_stages * self.num_groups
        return -(-num_layers // num_groups) * num_groups

    def num_runs(self, num_stages: int, num_microbatches: int, num_layers: int) -> float:
        """Returns how often a stage runs as many layers as it has on average, those that it waits in counted."""
        times = self.num_ticks(num_stages, num_microbatches) / self.num_groups
        return times * self.num_places(num_stages, num_layers) / num_layers

    def num_kept(self, num_stages: int, num_microbatches: int) -> int:
        """Returns the microbatches that a stage keeps at most, for a group each; with 1F1B those between two passes."""
        return (
            2 * num_stages * self.num_groups - 1
            if self.is_interleaved
            else self.num_ticks(num_stages, num_microbatches)
        )

    def moved_share(self, num_stages: int) -> float:
        """Returns the part of a stage's layers that is stored in other stages, which have them one after another."""
        groups = range(num_stages * self.num_groups)
        return sum(g // self.num_groups != g % num_stages for g in groups) / len(groups)


def resolve_schedule(name: str) -> Schedule:
    """Returns a schedule by its name: ``gpipe``, ``1f1b``, ``circular`` (of 2 groups), ``circular:N`` or ``1f1b:N``.

    Raises:
      ValueError: it has another name.
    """
    found = re.fullmatch(r"(gpipe|1f1b|circular)(?::([0-9]+))?", name) if isinstance(name, str) else None
    kind, number = found.groups() if found else ("gpipe", "0")
    if number is not None and (kind == "gpipe" or int(number) < 2):
        raise ValueError(
            f"pipeline={name!r}: give 'gpipe', '1f1b', or 'circular:2' or '1f1b:2' with the groups of layers of a "
            "stage, at least 2"
        )
    return Schedule(num_groups=int(number or (2 if kind == "circular" else 1)), is_interleaved=kind == "1f1b")
