"""What the tests launch: `python launched.py WHAT [WHO]` as one of several processes, and a small `zero-jax launch`."""

import atexit
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

INDEX = int(os.environ.get("ZERO_JAX_PROCESS_ID", "0"))


def say(*words, file=sys.stdout):
    print(*words, file=file, flush=True)


def make_sum():
    """Returns a function that sums the numbers of all devices, which no process has all of."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("data",))
    place = NamedSharding(mesh, PartitionSpec("data"))
    numbers = jax.make_array_from_callback((count,), place, lambda index: np.arange(count, dtype=np.float32)[index])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    return lambda: float(total(numbers))


def joined():
    """Joins, sums over all devices, and says so."""
    from zero_jax.cluster import join

    place = join()
    import jax

    say(f"{place.process_index}/{place.num_processes} {place.source} {jax.local_device_count()} {make_sum()():g}")
    return place


def bare():
    import jax

    jax.distributed.initialize()
    say(f"{jax.process_index()}/{jax.process_count()} {jax.local_device_count()} {make_sum()():g}")


def collectives_until(who, what):
    """Sums again and again; after some time process `who` does `what`."""
    place = joined()
    total = make_sum()
    for i in range(100_000):
        if i == 20 and place.process_index == who:
            what()
        total()
        time.sleep(0.01)


def fail():
    raise RuntimeError("the disk is on fire")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def signalled_with_heartbeats(who, number, seconds):
    from zero_jax.cluster import joining

    joining._HEARTBEAT_SECONDS = seconds
    collectives_until(who, lambda: os.kill(os.getpid(), number))


def hang_at_the_exit():
    from zero_jax.cluster import joining

    joining._EXIT_SECONDS = 1
    atexit.register(time.sleep, 60)
    joined()


def leave():
    from zero_jax.cluster import Place

    Place(process_index=INDEX, num_processes=2).leave(2)


def wait(on_term):
    """Waits; on SIGTERM does as told."""
    signal.signal(signal.SIGTERM, on_term)
    if callable(on_term):
        signal.signal(signal.SIGINT, on_term)
    say("waiting", os.getpid())
    time.sleep(60)


def stubborn():
    """Process 0 fails as soon as process 1 is deaf."""
    is_deaf = pathlib.Path(os.environ["READY"])
    if INDEX:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_deaf.touch()
        time.sleep(60)
    while not is_deaf.exists():
        time.sleep(0.01)
    sys.exit(3)


def save(number, frame):
    say("saved", signal.Signals(number).name)
    sys.exit(75)


def deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait(signal.SIG_IGN)


def parent():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    say("child", child.pid)


def with_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    say("pids", os.getpid(), child.pid)
    time.sleep(60)


def one_ends(who, how):
    if who == INDEX:
        time.sleep(0.2)  # the others listen to signals by then
        say("bye", file=sys.stderr)
        how()
    wait(save)


def rounds():
    """Process 0 says how many there are; then one fails as `ROUNDS` has it for each start: who, how, and after what."""
    plan = json.loads(os.environ["ROUNDS"])
    number = int(os.environ["ZERO_JAX_RESTARTS"])
    who, how, step = plan[number] if number < len(plan) else (None, None, None)
    on_term = {"deaf": signal.SIG_IGN, "forgetful": save_and_forget}.get(who, lambda *_: sys.exit(75))
    if who not in (None, INDEX):
        signal.signal(signal.SIGTERM, on_term)
    report = pathlib.Path(os.environ["ZERO_JAX_STARTED_AFTER_FILE"])
    has_said = report.with_name(f"said-{number}")
    if INDEX == 0:
        say(os.environ["ZERO_JAX_NUM_PROCESSES"])
        if step is not None:
            report.write_text(str(step))  # as `report_start` does
        has_said.touch()
    if who is None:
        return
    if INDEX == who:
        while not has_said.exists():
            time.sleep(0.01)
        if how < 0:
            os.kill(os.getpid(), -how)
        sys.exit(how)
    time.sleep(60)


def save_and_forget(*_):
    """Saves as `zero.Trainer` does, and ends with 0."""
    pathlib.Path(os.environ["ZERO_JAX_ENDED_WITH_FILE"]).write_text("75")
    sys.exit(0)


def bar():
    for i in range(5):
        print(f"\r{i} of 4", end="", flush=True, file=sys.stderr)
        time.sleep(0.02)
    say(file=sys.stderr)
    say("[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7")
    say("é after the bar")


def talk(how_long):
    """Says more than pipes have room for."""
    for k in range(3000):
        say(f"line {k} of process {INDEX}", "x" * 100)
    time.sleep(how_long)


def command_line(arguments):
    from zero_jax.cli import build_parser

    options = build_parser().parse_args(arguments)
    sys.exit(options.run(options))


WHATS = {
    "sum": joined,
    "bare": bare,
    "raise": lambda who: collectives_until(who, fail),
    "exit hangs": hang_at_the_exit,
    "leave": lambda who: collectives_until(who, leave),
    "killed": lambda who: collectives_until(who, kill),
    "exit": lambda who, status: one_ends(who, lambda: sys.exit(status)),
    "signal": lambda who, number: one_ends(who, lambda: os.kill(os.getpid(), number)),
    "heartbeat": signalled_with_heartbeats,
    "wait": lambda: wait(save),
    "stubborn": stubborn,
    "children": with_a_child,
    "bar": bar,
    "talk": talk,
    "rounds": rounds,
    "arguments": lambda *rest: say(*rest),
    "environment": lambda: say(os.environ["XLA_FLAGS"], *sorted(name for name in os.environ if name[:6] == "SLURM_")),
    "parent": parent,
    "deaf": deaf,
}

if __name__ == "__main__":
    if sys.argv[1] == "zero-jax":
        command_line(sys.argv[2:])
    WHATS[sys.argv[1]](*map(int, sys.argv[2:]))
