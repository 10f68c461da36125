"""Compares transformed random loss functions with the originals.

    python scripts/fuzz_losses.py --mode gather --seeds 0:500  # programs of random primitives: tests/fuzzing.py
    python scripts/fuzz_losses.py --mode model --seeds 0:500   # whole steps of random models: tests/model_fuzzing.py

Prints the program of each seed that differs or fails, and of each that XLA gets wrong (`fuzzing.Comparison`).
If XLA aborts a process, another continues with the next seed. Exit status 1 if anything differs.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import traceback

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
CHUNK = 60  # programs per process: compiled programs are never freed


def run_here(mode: str, first: int, last: int) -> None:
    """Compares the programs of some seeds in this process and prints a line for each."""
    sys.path.insert(0, str(TESTS))
    import conftest  # noqa: F401 (sets JAX's platform before JAX is imported)
    import fuzzing
    import jax
    import model_fuzzing

    compare = model_fuzzing.compare if mode == "model" else lambda seed: fuzzing.compare(seed, mode)
    for seed in range(first, last):
        print(f"seed {seed}", flush=True)
        try:
            found = compare(seed)
        except Exception:
            print("outcome failed", flush=True)
            lines = traceback.format_exc().splitlines()
            print("\n".join([f"--- seed {seed}, {mode}: fails", *lines[-8:]]), flush=True)
            continue
        print(f"outcome {found.outcome}", flush=True)
        if found.outcome in ("differs", "XLA"):
            print(f"--- seed {seed}, {found.mode}: {found.outcome}, by {found.apart:.1e}\n{found.text}")
            print(found.program.source, jax.tree.map(lambda leaf: leaf.shape, found.program.params), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", required=True, help="a key of fuzzing.MODES, or model")
    parser.add_argument("--seeds", default="0:100", help="first:last, the last not included")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    seed, last = map(int, args.seeds.split(":"))
    if args.here:
        run_here(args.mode, seed, last)
        return 0
    outcomes: collections.Counter[str] = collections.Counter()
    while seed < last:
        stop = min(seed + CHUNK, last)
        command = [sys.executable, __file__, "--mode", args.mode, "--seeds", f"{seed}:{stop}", "--here"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
        ) as process:
            at = seed
            for line in process.stdout or ():
                if line.startswith("seed "):
                    at = int(line.split()[1])
                elif line.startswith("outcome "):
                    outcomes[line.split()[1]] += 1
                else:
                    print(line, end="", flush=True)
        if process.returncode:
            outcomes["ended"] += 1
            print(f"--- seed {at}, {args.mode}: the process ended with {process.returncode}", flush=True)
            stop = at + 1
        seed = stop
    print(args.mode, dict(outcomes))
    return int(any(outcomes[bad] for bad in ("differs", "failed", "ended")))


if __name__ == "__main__":
    raise SystemExit(main())
