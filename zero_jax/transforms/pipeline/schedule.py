"""The order in which microbatches go through the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which microbatches go through the stages of a pipeline.

    Attributes:
      num_groups: the groups of layers of a stage, which a microbatch goes through one round after another.
      is_interleaved: whether a stage takes one microbatch forward and one backward in turn (1F1B), and not all forward
        and then all backward.
    """

    num_groups: int = 1
    is_interleaved: bool = False

    def __str__(self) -> str:
        if self.is_interleaved:
            return "1f1b"
        return "gpipe" if self.num_groups == 1 else f"circular:{self.num_groups}"

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
        """Returns the microbatches that a stage keeps at most; with 1F1B those between its two passes over one."""
        return 2 * num_stages - 1 if self.is_interleaved else self.num_ticks(num_stages, num_microbatches)

    def moved_share(self, num_stages: int) -> float:
        """Returns the part of a stage's layers that is stored in other stages, which have them one after another."""
        groups = range(num_stages * self.num_groups)
        return sum(g // self.num_groups != g % num_stages for g in groups) / len(groups)


def resolve_schedule(name: str) -> Schedule:
    """Returns a schedule by its name: ``gpipe``, ``1f1b``, ``circular`` (of 2 groups) or ``circular:N`` (of N).

    Raises:
      ValueError: it has another name.
    """
    if name in ("gpipe", "1f1b"):
        return Schedule(is_interleaved=name == "1f1b")
    found = re.fullmatch(r"circular(?::([0-9]+))?", name) if isinstance(name, str) else None
    if found is None or int(found[1] or 2) < 2:
        raise ValueError(
            f"pipeline={name!r}: give 'gpipe', '1f1b', or 'circular:2' with the groups of layers of a stage, at least 2"
        )
    return Schedule(num_groups=int(found[1] or 2))
