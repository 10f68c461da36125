"""Kills and resumes runs at random points, for hours if asked, and compares them bit by bit with uninterrupted runs.

    python scripts/soak.py --minutes 60

Each round takes the next of several settings (stages, precisions, optimizers, one or two processes), trains it once
without interruption and once with kill -9 and SIGTERM at random moments, resuming by `--resume auto` each time. Then
every record of the two (losses, norms, learning rates, noise scales) and every leaf of their last checkpoints must be
equal. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from zero_jax.checkpoint import describe

STEPS = 300
COMMON = (
    f"--steps {STEPS} --warmup-steps 5 --seq-len 64 --num-layers 2 --d-model 64 --num-heads 2 --batch-size 16 "
    "--eval-every 60 --eval-batches 2 --log-every 50 --save-every 23 --sample-tokens 0"
).split()
SETTINGS = {
    "stage 3, bf16": ["--stage", "3"],
    "stage 2, microbatches, own documents": "--stage 2 --num-microbatches 2 --separate-documents".split(),
    "stage 1, bf16, average, lion": "--stage 1 --ema-decay 0.9 --optimizer lion".split(),
    "stage 3, muon, wsd, microbatches": "--stage 3 --optimizer muon --schedule wsd --num-microbatches 2".split(),
    "stage 0, fp32, adafactor": "--stage 0 --precision fp32 --optimizer adafactor".split(),
    "stage 3, two processes": ["--stage", "3"],
}
IGNORED = ("tokens_per_second", "mfu", "step_seconds", "data_wait_seconds", "per_device_memory_bytes")
LONGEST_KILL_SECONDS = 30.0
MOST_TRIES_WITHOUT_PROGRESS = 4


def command(setting: str, out: pathlib.Path, name: str) -> list[str]:
    zero = [sys.executable, "-m", "zero_jax"]
    train = ["train", *COMMON, *SETTINGS[setting], "--out", str(out), "--name", name, "--resume", "auto"]
    if "processes" in setting:
        return [*zero, "launch", "-n", "2", "--devices-per-process", "2", "--grace-seconds", "30", "--", *train]
    return [*zero, *train, "--devices", "4"]


def figures(folder: pathlib.Path) -> dict[str, dict]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {f"{r['kind']} {r['step']}": {k: v for k, v in r.items() if k not in IGNORED} for r in records}


def leaves(folder: pathlib.Path) -> dict[str, int]:
    """Returns the fingerprints of the last checkpoint's leaves."""
    return {name: leaf.fingerprint for name, leaf in describe(folder, step=STEPS).leaves.items()}


def compare(unbroken: pathlib.Path, broken: pathlib.Path) -> list[str]:
    different = []
    for what in (figures, leaves):
        expected, found = what(unbroken), what(broken)
        different += [
            f"{key}: {found.get(key)} instead of {expected.get(key)}"
            for key in sorted({*expected, *found})
            if expected.get(key) != found.get(key)
        ]
    return different


def run_broken(arguments: list[str], folder: pathlib.Path, log: pathlib.Path, dice: random.Random) -> dict[str, int]:
    """Runs a command until it finishes, killing it repeatedly; returns the signals and their number."""
    counts = {"SIGKILL": 0, "SIGTERM": 0, "saved and stopped": 0}
    tries, seen = 0, set()
    while True:
        with log.open("ab") as file:
            process = subprocess.Popen(arguments, stdout=file, stderr=file)
            wait_seconds = None if tries >= MOST_TRIES_WITHOUT_PROGRESS else dice.uniform(3, LONGEST_KILL_SECONDS)
            try:
                status = process.wait(wait_seconds)
            except subprocess.TimeoutExpired:
                number = dice.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
                counts[number.name] += 1
                process.send_signal(number)
                status = process.wait()
        if status == 0:
            return counts
        if status not in (-signal.SIGKILL, -signal.SIGTERM, 75, 128 + signal.SIGTERM):
            raise SystemExit(f"the run ended with status {status}: see the end of {log}")
        counts["saved and stopped"] += status == 75
        steps = set(os.listdir(folder / "checkpoints")) if (folder / "checkpoints").is_dir() else set()
        tries = tries + 1 if steps == seen else 0
        seen = steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="start no round after this time (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments of the kills (default: 0)")
    parser.add_argument("--setting", choices=SETTINGS, help="this setting alone")
    parser.add_argument("--out", help="folder of the runs, not deleted (default: a temporary one)")
    options = parser.parse_args()
    dice, started, num_different, kills = random.Random(options.seed), time.monotonic(), 0, 0
    names = [options.setting] if options.setting else list(SETTINGS)
    with tempfile.TemporaryDirectory() as temporary:
        out = pathlib.Path(options.out or temporary)
        out.mkdir(parents=True, exist_ok=True)
        rounds = 0
        while time.monotonic() - started < 60 * options.minutes:
            setting = names[rounds % len(names)]
            slug = setting.replace(", ", "-").replace(" ", "-")
            unbroken, broken = out / f"{slug}-unbroken", out / f"{slug}-broken-{rounds}"
            if not (unbroken / "loss.png").exists():
                with (out / f"{slug}.log").open("ab") as file:
                    subprocess.run(command(setting, out, unbroken.name), stdout=file, stderr=file, check=True)
            counts = run_broken(command(setting, out, broken.name), broken, out / f"{broken.name}.log", dice)
            different = compare(unbroken, broken)
            rounds, kills = rounds + 1, kills + counts["SIGKILL"] + counts["SIGTERM"]
            num_different += bool(different)
            minutes = (time.monotonic() - started) / 60
            signals = ", ".join(f"{count} {name}" for name, count in counts.items())
            print(f"{minutes:5.1f} min  {setting}: {signals}: {'DIFFERS' if different else 'equal'}", flush=True)
            for line in different[:10]:
                print(f"           {line}", flush=True)
    print(f"{rounds} rounds, {kills} kills, {num_different} different from the unbroken run")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
