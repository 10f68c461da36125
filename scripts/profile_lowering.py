"""Counts what making and lowering a plain stage-3 step enters (files, functions, lines), and traces of the loss.

Run: `python scripts/profile_lowering.py`; with `--files` it lists the files. A function counts
once, with all of its lines, whatever the number of its calls. The model is the decoder of `bench_lowering.py`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import inspect
import pathlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import bench_lowering as bench  # sets the flags of eight devices, before JAX
import jax
import jax.numpy as jnp
import optax

import zero_jax as zero

ROOT = pathlib.Path(zero.__file__).parent


def codes_entered(call: Any) -> set[CodeType]:
    """Returns the code of the library's functions that a call enters."""
    codes: set[CodeType] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    is_function = lambda code: code.co_flags & inspect.CO_OPTIMIZED  # noqa: E731 - bodies of classes are not
    return {code for code in codes if code.co_filename.startswith(str(ROOT)) and is_function(code)}


def spans(codes: set[CodeType]) -> dict[str, list[tuple[int, int, str]]]:
    """Returns the first and last line of each function, and its name, by file."""
    found = collections.defaultdict(list)
    for code in codes:
        lines = [line for *_, line in code.co_lines() if line]
        found[code.co_filename].append((code.co_firstlineno, max(lines), code.co_qualname))
    return found


def num_lines(of_file: list[tuple[int, int, str]]) -> int:
    """Returns the number of lines in functions of a file."""
    return len({line for first, last, _ in of_file for line in range(first, last + 1)})


def traces_of(loss_fn: Any, **fields: Any) -> collections.Counter[tuple[int, ...]]:
    """Returns how often making and lowering a step traces a loss function, by the shape of its batch."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()

    @functools.wraps(loss_fn)
    def counted(params: Any, batch: Any) -> Any:
        counts[batch["inputs"].shape] += 1
        return loss_fn(params, batch)

    lowering(counted, **fields)()
    return counts


def lowering(loss_fn: Any, layers: int = 4, model: int = 1, **fields: Any) -> Callable[[], Any]:
    """Returns what makes and lowers a step."""
    tx, mesh = optax.adamw(1e-3), zero.make_mesh(model=model)
    config = zero.ZeroConfig(**fields)
    state = zero.abstract_state(functools.partial(bench.init, num_layers=layers), tx, mesh=mesh, config=config)
    shape = jax.ShapeDtypeStruct((bench.BATCH, bench.SEQUENCE), jnp.int32)
    batch = {"inputs": shape, "targets": shape}
    make = functools.partial(zero.make_train_step, loss_fn, tx, mesh=mesh, config=config)
    return lambda: make().lower(state, batch)


SETTINGS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16"},
    {"stage": 1, "num_microbatches": 4},
    {"stage": 3, "num_microbatches": 4, "remat": "full", "attention": "fused"},
    {"stage": 3, "remat": "full_sharded", "model": 2},
]


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true")
    options = parser.parse_args()
    loss_fn = bench.loss_of(checkpoint=False)
    by_file = spans(codes_entered(lowering(loss_fn, stage=3, precision="bf16")))
    names = [name.rpartition(".")[2] for of_file in by_file.values() for *_, name in of_file]
    inner = sum(name.endswith(("comp>", "genexpr>")) for name in names)  # comprehensions: before Python 3.12 functions
    lines = sum(map(num_lines, by_file.values()))
    print(f"stage 3, bf16: {len(by_file)} files, {len(names)} functions ({inner} comprehensions), {lines} lines")
    if options.files:
        for name, of_file in sorted(by_file.items(), key=lambda item: -num_lines(item[1])):
            print(f"{num_lines(of_file):>6} {len(of_file):>4}  {pathlib.Path(name).relative_to(ROOT)}")
    for fields in SETTINGS:
        counts = traces_of(loss_fn, **fields)
        listed = ", ".join(f"{n} of a batch of {shape[0]}" for shape, n in counts.items())
        print(f"traces of the loss with {inspect.cleandoc(str(fields))}: {listed}")


if __name__ == "__main__":
    main()
