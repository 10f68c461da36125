"""Fragmentation of a program's heap: what the compiler allocates for temporaries, and what of that is alive at once.

No figure of XLA:TPU's `memory_analysis()` is the size of that heap: `temp_size_in_bytes` is larger, by 5% to 60% in
docs/fragmentation.md. What its buffer assignment says, which it writes on demand, is exact; that of XLA:CPU as well.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping

ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
_RANGE = re.compile(r"^\s+(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
FILES = "-buffer-assignment.txt", "-live-range.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeapLayout:
    """The heap of temporaries in a device's memory, as the compiler assigned it, in bytes.

    Attributes:
      allocated_bytes: what the program allocates for it, once, when it starts.
      live_bytes: the most that is alive at one time; None if the compiler did not report the live ranges of all values.
    """

    allocated_bytes: int
    live_bytes: int | None


def layout_options(folder: str | pathlib.Path) -> dict[str, str]:
    """Returns compiler options with which a compile writes its buffer assignment to a folder.

    They change nothing of the program, and go to `Lowered.compile(compiler_options=...)`.

    Args:
      folder: an empty folder, for one compile alone.

    Example:
      >>> sorted(zero.memory.layout_options(folder))
      ['xla_dump_to']
    """
    return {"xla_dump_to": str(folder)}


def read_layout(folder: str | pathlib.Path) -> HeapLayout:
    """Reads the layout of a heap from what a compile with `layout_options` has written.

    Args:
      folder: the folder.

    Raises:
      ValueError: the folder has the buffer assignment of no program, or of several.
    """
    assignments = sorted(pathlib.Path(folder).glob(f"*{FILES[0]}"))
    if len(assignments) != 1:
        raise ValueError(
            f"{folder} has {len(assignments)} buffer assignments: give the folder of one compile with "
            "compiler_options=layout_options(folder) that no compilation cache answered"
        )
    lives_file = assignments[0].with_name(assignments[0].name.removesuffix(FILES[0]) + FILES[1])
    lives: dict[str, tuple[int, int]] = {}  # the first and the last step at which each value is alive
    if lives_file.exists():
        text = lives_file.read_text(encoding="utf-8")
        listed = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
        lives = {name + index: (int(start), int(end)) for name, index, start, end in _RANGE.findall(listed)}
    return _layout(assignments[0].read_text(encoding="utf-8").splitlines(), lives)


def _layout(lines: Iterable[str], lives: Mapping[str, tuple[int, int]]) -> HeapLayout:
    allocated, live, is_heap, is_known = 0, 0, False, True
    placed: list[tuple[int, int, int, int]] = []
    for line in lines:
        if match := ALLOCATION.match(line):
            # What has a color is in another memory: on the chip, or the host's.
            is_heap = "preallocated-temp" in match[2] and "color" not in match[2]
            allocated += int(match[1]) if is_heap else 0
            live, placed = live + _most_alive(placed), []
        elif is_heap and (match := _VALUE.match(line)):
            if life := lives.get(match[1] + (match[2] or "{}")):
                placed.append((*life, int(match[4]), int(match[4]) + int(match[3])))
            else:
                is_known = False
    live += _most_alive(placed)
    return HeapLayout(allocated_bytes=allocated, live_bytes=live if is_known else None)


def _most_alive(placed: Iterable[tuple[int, int, int, int]]) -> int:
    """The most bytes of a heap that hold a value at one step; several values may share a place."""
    changes: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)
    for start, end, first, last in placed:
        changes[start].append((1, first, last))
        changes[end + 1].append((-1, first, last))
    alive: collections.Counter[tuple[int, int]] = collections.Counter()
    most = 0
    for step in sorted(changes):
        for change, first, last in changes[step]:
            alive[first, last] += change
            if not alive[first, last]:
                del alive[first, last]
        most = max(most, _covered(alive))
    return most


def _covered(places: Iterable[tuple[int, int]]) -> int:
    end = total = 0
    for first, last in sorted(places):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total
