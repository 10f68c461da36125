"""What XLA writes of a compile on demand: its buffer assignment, and on TPUs the program before code is generated.

No figure of XLA:TPU's `memory_analysis()` is the size of the heap of temporaries: `temp_size_in_bytes` is larger, by 5%
to 60% in docs/fragmentation.md. What its buffer assignment says is exact; that of XLA:CPU as well. The program of
XLA:TPU has its schedule then: all but the code's size and the cycles of instructions, after some percent of a compile's
work.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
_RANGE = re.compile(r"^\s+(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ASSIGNMENT, _LIVES = "-buffer-assignment.txt", "-live-range.txt"
_HOST = ", color 5"  # the memory of the host, as others are on the chip


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
    assignments = sorted(pathlib.Path(folder).glob(f"*{_ASSIGNMENT}"))
    if len(assignments) != 1:
        raise ValueError(
            f"{folder} has {len(assignments)} buffer assignments: give the folder of one compile with "
            "compiler_options=layout_options(folder) that no compilation cache answered"
        )
    lives_file = assignments[0].with_name(assignments[0].name.removesuffix(_ASSIGNMENT) + _LIVES)
    lives: dict[str, tuple[int, int]] = {}  # the first and the last step at which each value is alive
    if lives_file.exists():
        text = lives_file.read_text(encoding="utf-8")
        listed = text.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
        lives = {name + index: (int(start), int(end)) for name, index, start, end in _RANGE.findall(listed)}
    allocated, live, is_known = 0, 0, True
    for size, marks, values in _allocations(assignments[0]):
        if "preallocated-temp" in marks and "color" not in marks:  # else in another memory: on the chip, or the host's
            allocated += size
            placed = [(lives.get(name), start, start + num_bytes) for name, num_bytes, start in values]
            is_known = is_known and all(life for life, *_ in placed)
            live += _most_alive((*life, first, last) for life, first, last in placed if life)
    return HeapLayout(allocated_bytes=allocated, live_bytes=live if is_known else None)


def _allocations(file: pathlib.Path) -> list[tuple[int, str, list[tuple[str, int, int]]]]:
    """Reads a buffer assignment: the bytes of each allocation, what it is for, and each value's bytes and place."""
    allocations: list[tuple[int, str, list[tuple[str, int, int]]]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := _ALLOCATION.match(line):
            allocations.append((int(match[1]), match[2], []))
        elif allocations and (match := _VALUE.match(line)):
            allocations[-1][2].append((match[1] + (match[2] or "{}"), int(match[3]), int(match[4])))
    return allocations


def _most_alive(placed: Iterable[tuple[int, int, int, int]]) -> int:
    """The most bytes of a heap that hold a value at one step; several values may share a place."""
    changes: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)
    for start, end, first, last in placed:
        changes[start].append((1, first, last))
        changes[end + 1].append((-1, first, last))
    alive: collections.Counter[tuple[int, int]] = collections.Counter()  # how many values are at each place
    most = 0
    for step in sorted(changes):
        for change, first, last in changes[step]:
            alive[first, last] += change
            if not alive[first, last]:
                del alive[first, last]
        most = max(most, _covered(alive))
    return most


def _covered(places: Iterable[tuple[int, int]]) -> int:
    """The bytes of the union of intervals, which may overlap."""
    end = total = 0
    for first, last in sorted(places):
        total += max(last - max(first, end), 0)
        end = max(end, last)
    return total


_FILE = ".after_optimizations_after_buffer_assignment.txt"
_ELEMENT = re.compile(r"%([\w.\-]+(?:#\d+)+)")
_DEFINITION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) [a-z][\w-]*\(")
_COMPUTATION = re.compile(r"%([^\s(]+) \(.*\{$")
_BEGIN = re.compile(r"(?:ENTRY )?%\S+ \(.*\{$")
_ROOT = re.compile(r"  ROOT %\S+ = .*? ([a-z][\w-]*)\([^)]*\)(.*?)(?:, metadata=.*|, backend_config=.*)?$")
_STARTED = re.compile(r" async-start\(.*, calls=%([^\s,]+)")
_ASYNC = re.compile(r"\s+(?:ROOT )?%(\S+) = .*? async-(start|update|done)\(([^)]*)\)")


def read_scheduled(folder: str | pathlib.Path) -> tuple[str, dict[str, int], HeapLayout] | None:
    """Reads text, sizes and heap layout that a compile with `layout_options` wrote; None until it is complete."""
    files = [*pathlib.Path(folder).glob(f"*{_FILE}")]
    text = files[0].read_text(encoding="utf-8", errors="replace") if len(files) == 1 else ""
    if not text.rstrip("\n").endswith("\n}") or "\nENTRY " not in text:  # the compiler is still writing it
        return None
    layout = read_layout(folder)
    return _with_calls(_with_elements(text)), _sizes(pathlib.Path(folder), layout), layout


def _sizes(folder: pathlib.Path, layout: HeapLayout) -> dict[str, int]:
    """Returns the sizes of the memory that the compiler assigned, in bytes."""
    sizes = collections.Counter[str]()
    for size, marks, _ in _allocations(next(folder.glob(f"*{_ASSIGNMENT}"))):
        if ", color" in marks and _HOST not in marks:  # on the chip
            continue
        is_argument, is_result = ", parameter" in marks, "live-out" in marks or ", output" in marks
        kinds = {"argument": is_argument, "output": is_result, "alias": is_argument and is_result}
        kinds["temp"] = "preallocated-temp" in marks
        place = "host_" if _HOST in marks else ""
        sizes.update({f"{place}{kind}_size_in_bytes": size for kind, is_it in kinds.items() if is_it})
    heap = layout.allocated_bytes if layout.live_bytes is None else layout.live_bytes
    host = sum(sizes[f"host_{kind}_size_in_bytes"] for kind in ("argument", "output", "temp"))
    # As `memory_analysis()` has it: with what is in the host's memory, and a donated array there once.
    peak = sizes["argument_size_in_bytes"] + heap + host - sizes["host_alias_size_in_bytes"]
    return {**sizes, "peak_memory_in_bytes": peak}


def _with_elements(text: str) -> str:
    """Writes out the elements of tuples, for which JAX 0.12's compiler has short names in such files: `%x#1`."""
    if not _ELEMENT.search(text):
        return text
    lines, shapes = [], dict[str, str]()
    for line in text.splitlines():
        if _BEGIN.match(line):
            shapes = {}  # of another computation
        for element in dict.fromkeys(_ELEMENT.findall(line)):
            outer, *indices = element.split("#")
            for index in indices:  # of tuples in tuples, from the outermost in
                name = f"{outer}#{index}"
                if name not in shapes:
                    shapes[name] = _elements_of(shapes[outer])[int(index)]
                    lines.append(f"  %{name} = {shapes[name]} get-tuple-element(%{outer}), index={index}")
                outer = name
        if match := _DEFINITION.match(line):
            shapes[match[1]] = match[2]
        lines.append(line)
    return "\n".join(lines) + "\n"


def _elements_of(shape: str) -> list[str]:
    """Cuts the text of a tuple's shape into those of its elements."""
    parts, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", shape.strip())[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _with_calls(text: str) -> str:
    """Writes an `async-start` of a computation with a single operation `x` as `x-start`, without that computation."""
    started = set(_STARTED.findall(text))
    lines, roots, kinds, inside = [], dict[str, re.Match](), dict[str, str](), ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            inside = match[1] if match[1] in started else ""
        if not inside:
            lines.append(_with_call(line, roots, kinds))
        elif match := _ROOT.match(line):
            roots[inside] = match
        if line.startswith("}"):
            inside = ""
    return "\n".join(lines) + "\n"


def _with_call(line: str, roots: Mapping[str, re.Match], kinds: dict[str, str]) -> str:
    """Writes a line with the operation that is started; `kinds` has those of all starts and updates until now."""
    match = _ASYNC.match(line)
    if not match:
        return line
    name, part, operands = match.groups()
    if part == "start":
        (called,) = _STARTED.findall(line)
        kinds[name] = roots[called][1]
        line = line.replace(f", calls=%{called}", roots[called][2])
    else:
        kinds[name] = next(kinds[x] for x in re.findall(r"%([^\s,()]+)", operands) if x in kinds)
    return line.replace(f" async-{part}(", f" {kinds[name]}-{part}(", 1)
