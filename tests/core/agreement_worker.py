"""One process of two that agree on things; see test_agreement.py. Usage: agreement_worker.py ADDRESS INDEX FOLDER."""
# ruff: noqa: E402 (what JAX runs on is settled before it is imported)

import os
import resource
import sys

ADDRESS, INDEX, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax

jax.distributed.initialize(ADDRESS, 2, INDEX, initialization_timeout=60)

import optax
import reference
from etils import epath
from processes import report

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer
from zero_jax.core.agreement import Agreement, from_all_processes, from_first_process
from zero_jax.core.files.folder_lock import FolderLock

result = {}


def attempt(name, what):
    try:
        result[name] = what()
    except Exception as error:
        result[name] = f"{type(error).__name__}: {error}"


def never_called():
    raise AssertionError("called in the second process")


def fail():
    raise ValueError(f"no such name: {'x' * 5000}")


def fail_in_first():
    with Agreement(lambda processes: RuntimeError(f"process {processes} failed")):
        if INDEX == 0:
            raise OSError("the disk is on fire")


texts = {"megabyte": "é" * 500_000, "empty": "", "zeros": "a\0\0", "path": os.fsdecode(b"/caf\xe9")}
for name, text in texts.items():
    attempt(name, lambda text=text: from_first_process(text if INDEX == 0 else "mine") == text)
attempt("called", lambda: from_first_process((lambda: "made") if INDEX == 0 else never_called))
attempt("all", lambda: from_all_processes(["é" * 3, "a\0"][INDEX]))
attempt("raised", lambda: from_first_process(fail if INDEX == 0 else never_called))
attempt("agreement", fail_in_first)

mesh = zero.make_mesh(data=jax.device_count())
config = reference.make_config(stage=3)
state = zero.init_state(reference.init_params, optax.sgd(1e-2), jax.random.key(0), mesh=mesh, config=config)
if INDEX == 0:  # checkpointers of one process alone do not put the others off their count
    Checkpointer(FOLDER + "/alone").close()


def save():
    lines = []
    with Checkpointer(FOLDER + "/steps", log=lines.append) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        first = checkpointer.steps()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10 if INDEX == 1 else soft, hard))
        checkpointer.save(2, state)
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpointer.save(3, state)
    return [first, checkpointer.num_failed, checkpointer.steps(), sorted(os.listdir(FOLDER + "/steps")), lines]


def save_where_another_run_is():
    with Checkpointer(FOLDER + "/taken") as checkpointer:
        checkpointer.save(1, state)


attempt("saves", save)
os.makedirs(FOLDER + "/taken", exist_ok=True)
with FolderLock(epath.Path(FOLDER) / "taken" / "zero_jax.lock", run="other") if INDEX == 0 else jax.disable_jit(False):
    attempt("taken", save_where_another_run_is)
from_first_process("the lock is held until here")
report(result)
