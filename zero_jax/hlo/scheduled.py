"""What XLA:TPU writes of a program before it generates code: its schedule, and the memory that it assigned.

That is all but the code's size and the cycles of instructions, after some percent of a compile's work.
"""

import collections
import pathlib
import re
from collections.abc import Mapping

from zero_jax.hlo.heap_layout import ALLOCATION, FILES, HeapLayout, read_layout

_FILE = ".after_optimizations_after_buffer_assignment.txt"
_HOST = ", color 5"  # the memory of the host, as others are on the chip
_ELEMENT = re.compile(r"%([\w.\-]+(?:#\d+)+)")
_DEFINITION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) [a-z][\w-]*\(")
_COMPUTATION = re.compile(r"%([^\s(]+) \(.*\{$")
_BEGIN = re.compile(r"(?:ENTRY )?%\S+ \(.*\{$")
_ROOT = re.compile(r"  ROOT %\S+ = .*? ([a-z][\w-]*)\([^)]*\)(.*?)(?:, metadata=.*|, backend_config=.*)?$")
_STARTED = re.compile(r" async-start\(.*, calls=%([^\s,]+)")
_ASYNC = re.compile(r"\s+(?:ROOT )?%(\S+) = .*? async-(start|update|done)\(([^)]*)\)")


def read_scheduled(folder: str | pathlib.Path) -> tuple[str, dict[str, int], HeapLayout] | None:
    """Reads text, sizes and heap layout that a compile with `layout_options` wrote; None until it is complete."""
    found = [*pathlib.Path(folder).glob(f"*{_FILE}")]
    text = found[0].read_text(encoding="utf-8", errors="replace") if len(found) == 1 else ""
    if not text.rstrip("\n").endswith("\n}") or "\nENTRY " not in text:
        return None
    layout = read_layout(folder)
    return _with_calls(_with_elements(text)), _sizes(pathlib.Path(folder), layout), layout


def _sizes(folder: pathlib.Path, layout: HeapLayout) -> dict[str, int]:
    """Returns the sizes of the memory that the compiler assigned, in bytes."""
    sizes = collections.Counter[str]()
    assignment = next(folder.glob(f"*{FILES[0]}")).read_text(encoding="utf-8")
    for line in assignment.splitlines():
        match = ALLOCATION.match(line)
        if not match or (", color" in match[2] and _HOST not in match[2]):
            continue
        is_argument, is_result = ", parameter" in match[2], "live-out" in match[2] or ", output" in match[2]
        kinds = {"argument": is_argument, "output": is_result, "alias": is_argument and is_result}
        kinds["temp"] = "preallocated-temp" in match[2]
        place = "host_" if _HOST in match[2] else ""
        sizes.update({f"{place}{kind}_size_in_bytes": int(match[1]) for kind, is_it in kinds.items() if is_it})
    heap = layout.allocated_bytes if layout.live_bytes is None else layout.live_bytes
    host = sum(sizes[f"host_{kind}_size_in_bytes"] for kind in ("argument", "output", "temp"))
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
            whole, *indices = element.split("#")
            for index in indices:
                name = f"{whole}#{index}"
                if name not in shapes:
                    shapes[name] = _elements_of(shapes[whole])[int(index)]
                    lines.append(f"  %{name} = {shapes[name]} get-tuple-element(%{whole}), index={index}")
                whole = name
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
