"""Kills and resumes runs at random points, for hours if asked, and compares them bit by bit with uninterrupted runs.

    python scripts/soak.py --minutes 60

Each round takes the next of several settings (stages, precisions, optimizers, one or two processes), trains it once
without interruption and once with kill -9 and SIGTERM at random moments, resuming by `--resume auto` each time. Then
every record of the two (losses, norms, learning rates, noise scales) and every leaf of their last checkpoints must be
equal. Exit status 1 if anything differs.

    python scripts/soak.py --minutes 20 --elastic

One command runs instead, `zero-jax launch -n 3 --min-processes 1 -- train`, of which a random process is killed or
stopped at random moments, sometimes two. The launcher goes on with other numbers of processes, which sum in another
order: the records may differ from those of an uninterrupted run by some times what two uninterrupted runs, of three
processes and of one, differ by, but for units in the last place.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

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
# Statistics of the parts of a batch, of which there are as many as devices.
IGNORED_ELASTIC = (*IGNORED, "noise_scale")
ELASTIC = "--stage 3 --precision fp32 --learning-rate 0.0003 --batch-size 12 --steps 150 --d-model 96".split()
ELASTIC += "--min-shard-size 64".split()
NUM_ELASTIC, LONGEST_ELASTIC_KILL_SECONDS = 3, 60.0  # the start of several processes takes a while
HANGS_AFTER_SECONDS = 1800.0  # longer than any time-out of a launch and its processes
TIMES_TOLERANCE, LEAST_TOLERANCE = 5.0, 2e-6  # the latter is some units in the last place of float32
LONGEST_KILL_SECONDS = 30.0
MOST_TRIES_WITHOUT_PROGRESS = 4


def command(setting: str, out: pathlib.Path, name: str) -> list[str]:
    zero = [sys.executable, "-m", "zero_jax"]
    train = ["train", *COMMON, *SETTINGS[setting], "--out", str(out), "--name", name, "--resume", "auto"]
    if "processes" in setting:
        return [*zero, "launch", "-n", "2", "--devices-per-process", "2", "--grace-seconds", "30", "--", *train]
    return [*zero, *train, "--devices", "4"]


def figures(folder: pathlib.Path, ignored: tuple[str, ...] = IGNORED) -> dict[str, dict]:
    """Returns the records of a run by kind and step; of a step that is there twice, both."""
    found: dict[str, dict] = {}
    for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        name = f"{record['kind']} {record['step']}"
        found[name + " again" if name in found else name] = {k: v for k, v in record.items() if k not in ignored}
    return found


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


def elastic_command(out: pathlib.Path, name: str, num_processes: int, *launch: str) -> list[str]:
    processes = [sys.executable, "-m", "zero_jax", "launch", "-n", str(num_processes), "--devices-per-process", "1"]
    train = ["train", *COMMON, *ELASTIC, "--out", str(out), "--name", name, "--resume", "auto", "--hang-seconds", "60"]
    return [*processes, *launch, "--", *train]


def processes_of(launcher: int) -> list[int]:
    """Returns the processes that a launcher has started, without its guard."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(launcher)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if " train " in line]


def run_elastic(arguments: list[str], folder: pathlib.Path, log: pathlib.Path, dice: random.Random) -> dict[str, int]:
    """Runs a launch until it finishes, killing some of its processes repeatedly; returns the signals and their number.

    After some kills without a new checkpoint it waits for one.
    """
    counts, tries, seen = {"SIGKILL": 0, "SIGSTOP": 0, "pairs": 0}, 0, set()
    stopped, gained_at = set(), time.monotonic()
    with log.open("ab") as file, subprocess.Popen(arguments, stdout=file, stderr=file) as launcher:
        while True:
            try:
                status = launcher.wait(dice.uniform(3, LONGEST_ELASTIC_KILL_SECONDS))
                break
            except subprocess.TimeoutExpired:
                pass
            steps = set(os.listdir(folder / "checkpoints")) if (folder / "checkpoints").is_dir() else set()
            if steps != seen:
                tries, seen, gained_at = 0, steps, time.monotonic()
            if time.monotonic() - gained_at > HANGS_AFTER_SECONDS:
                launcher.kill()
                raise SystemExit(f"no checkpoint for {HANGS_AFTER_SECONDS:.0f} s: see the end of {log}")
            processes = processes_of(launcher.pid)
            if tries > MOST_TRIES_WITHOUT_PROGRESS or not processes:
                continue
            tries += 1
            number = dice.choice((signal.SIGKILL,) * 5 + (signal.SIGSTOP,))
            most = len(processes)
            if number == signal.SIGSTOP:  # where all are stopped, by this signal or earlier ones, nobody notices it
                processes = [pid for pid in processes if pid not in stopped]
                most = max(0, len(processes) - 1)
            chosen = dice.sample(processes, min(most, dice.choice((1, 1, 1, 2))))
            for pid in chosen:
                counts[number.name] += 1
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    counts[number.name] -= 1
            stopped.update(chosen if number == signal.SIGSTOP else ())
            counts["pairs"] += len(chosen) == 2
    if status:
        raise SystemExit(f"the launch ended with status {status}: see the end of {log}")
    text = log.read_text()
    sizes = re.findall(r"restart \d+, with (\d+) of", text)
    by_size = {f"restarts with {size}": sizes.count(size) for size in sorted(set(sizes))}
    return {**counts, **by_size, "of them to grow again": text.count("a lost process is tried again: restart")}


def largest_differences(one: Mapping[str, dict], other: Mapping[str, dict]) -> dict[str, float]:
    """Returns the largest relative difference of each figure; infinite where only one has it."""
    largest: dict[str, float] = {}
    for key in one.keys() & other.keys():
        for name, value in one[key].items():
            found = other[key].get(name)
            if isinstance(value, float) and isinstance(found, float):
                difference = abs(found - value) / max(abs(value), abs(found), 1e-30)
            else:
                difference = 0.0 if found == value else float("inf")
            largest[name] = max(largest.get(name, 0.0), difference)
    return largest


def shown(differences: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.1e} in {name}" for name, value in differences.items() if value) or "nothing"


def main_elastic(minutes: float, out: pathlib.Path, dice: random.Random) -> int:
    started, unbroken, rounds, num_wrong, kills = time.monotonic(), {}, 0, 0, 0
    for num_processes in (NUM_ELASTIC, 1):
        name = f"elastic-unbroken-{num_processes}"
        with (out / f"{name}.log").open("ab") as file:
            subprocess.run(elastic_command(out, name, num_processes), stdout=file, stderr=file, check=True)
        unbroken[num_processes] = figures(out / name, IGNORED_ELASTIC)
    expected = unbroken[NUM_ELASTIC]
    tolerance = largest_differences(expected, unbroken[1])
    print(f"unbroken: {len(expected)} records, which differ with one process by {shown(tolerance)}", flush=True)
    began = time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        name = f"elastic-broken-{rounds}"
        options = "--min-processes 1 --rejoin-seconds 20 --grace-seconds 2 --max-restarts 20".split()
        command_line = elastic_command(out, name, NUM_ELASTIC, *options)
        counts = run_elastic(command_line, out / name, out / f"{name}.log", dice)
        found = figures(out / name, IGNORED_ELASTIC)
        lost, more = expected.keys() - found.keys(), found.keys() - expected.keys()
        differences = largest_differences(expected, found)
        too_large = [k for k, v in differences.items() if v > max(TIMES_TOLERANCE * tolerance[k], LEAST_TOLERANCE)]
        is_wrong = bool(lost or more or too_large)
        rounds, num_wrong, kills = rounds + 1, num_wrong + is_wrong, kills + counts["SIGKILL"] + counts["SIGSTOP"]
        words = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(
            f"{(time.monotonic() - started) / 60:5.1f} min  {words}: {len(found)} records, {len(lost)} lost, "
            f"{len(more)} too many, differing by {shown(differences)}: {'WRONG' if is_wrong else 'equal'}",
            flush=True,
        )
    print(f"{rounds} rounds, {kills} kills, {num_wrong} different from the unbroken run")
    return 1 if num_wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="start no round after this time (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments of the kills (default: 0)")
    parser.add_argument("--setting", choices=SETTINGS, help="this setting alone")
    parser.add_argument("--elastic", action="store_true", help="kill processes of `launch --min-processes` instead")
    parser.add_argument("--out", help="folder of the runs, not deleted (default: a temporary one)")
    options = parser.parse_args()
    dice, started, num_different, kills = random.Random(options.seed), time.monotonic(), 0, 0
    names = [options.setting] if options.setting else list(SETTINGS)
    with tempfile.TemporaryDirectory() as temporary:
        out = pathlib.Path(options.out or temporary)
        out.mkdir(parents=True, exist_ok=True)
        if options.elastic:
            return main_elastic(options.minutes, out, dice)
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
