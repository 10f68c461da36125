"""Compares what `zero-jax plan --auto` finds with ten settings chosen by hand, for several models and topologies.

    python scripts/auto_by_hand.py                  # all cases
    python scripts/auto_by_hand.py --only v5e moe   # those whose names have one of these

All programs are compiled for TPUs without their code (`--quick`), so that both sides have the same kind of estimate.
Each answer is kept in the results file, so that the script goes on where it was stopped; `--again` asks for all anew.
It prints the table of docs/planning.md; the exit status is 1 where `--auto` is more than 3% slower than the best.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from published_runs import Results, options_of, table

from zero_jax.core.files.user_cache import cache_folder

TOLERANCE = 0.03
CASES = {
    "0.35B, v5e": "--topology v5e:4x4 --model gpt-medium --batch-size 256 --seq-len 1024",
    "1.2B long, v6e": "--topology v6e:8x8 --model llama-3.2-1b --batch-size 128 --seq-len 32768",
    "7B, two slices": "--topology 2xv5e:8x8 --model llama-2-7b --batch-size 512 --seq-len 4096",
    "8B, v6e": "--topology v6e:8x8 --model qwen-3-8b --batch-size 256 --seq-len 4096",
    "47B moe, v6e": "--topology v6e:8x8 --model mixtral-8x7b --expert-capacity 1.25 --batch-size 256 --seq-len 4096",
    "70B, v5p": "--topology v5p:4x4x4 --model llama-3-70b --batch-size 128 --seq-len 4096",
}
# What someone tries who knows the options; `auto` keeps what there is memory for.
BY_HAND = (
    "--stage 3",
    "--stage 3 --remat dots",
    "--stage 3 --remat auto",
    "--stage 3 --remat full --loss-chunk 8192",
    "--stage 3 --remat auto --loss-chunk 8192",
    "--stage 3 --remat dots --num-microbatches 2",
    "--stage 2 --remat full --num-microbatches 2",
    "--stage 3 --remat full_offloaded --loss-chunk 8192",
    "--stage 3 --remat full --replica 2",
    "--stage 3 --remat full --model-axis 4 --sequence-parallel",
)


def seconds_of(results: Results, command: str) -> float | None:
    """Returns the seconds of a step; None if it does not fit, or the model cannot be trained with the setting."""
    try:
        answer = results.of(command)
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return None
    return answer["step_seconds"] if answer else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a search found a setting that is slower than the best by more than 3%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="only cases whose names have it")
    parser.add_argument("--max-compiles", type=int, default=4, help="of the search (default: 4)")
    parser.add_argument("--results", type=pathlib.Path, default=cache_folder("published") / "auto_by_hand.json")
    parser.add_argument("--again", action="store_true", help="ask for all anew")
    options = parser.parse_args(arguments)
    results = Results(options.results, again=options.again)
    cases = [name for name in CASES if any(text in name for text in options.only)]
    by_hand = {
        setting: [seconds_of(results, f"plan {CASES[name]} {setting} --quick") for name in cases]
        for setting in BY_HAND
    }  # fmt: skip
    rows = [(f"`{setting}`", *(f"{x:.4g}" if x else "no" for x in found)) for setting, found in by_hand.items()]
    best = [min(filter(None, column), default=float("inf")) for column in zip(*by_hand.values(), strict=True)]
    search = f"--auto --quick --max-compiles {options.max_compiles}"
    found = [results.of(f"plan {CASES[name]} {search}") or {} for name in cases]
    # Where nothing fits, neither side has a time.
    times = [answer["quick_seconds"] or float("inf") for answer in found]
    ratios = [seconds / least for seconds, least in zip(times, best, strict=True)]
    rows.append(("`--auto`", *(f"{seconds:.4g}" for seconds in times)))
    rows.append(("over the best by hand", *(f"{ratio:.3f}" for ratio in ratios)))
    print(table(("setting", *cases), rows), end="\n\n")
    chosen = [" ".join([f"--stage {x['setting']['stage']}", *options_of(x["setting"])]) for x in found]
    lines = [(name, f"`zero-jax plan {CASES[name]}`", f"`{x}`") for name, x in zip(cases, chosen, strict=True)]
    print(table(("case", "command", "found by `--auto`"), lines))
    return int(any(ratio > 1 + TOLERANCE for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
