"""A library leaves the process as it was: no hook, filter, setting or thread of it outlasts, or even sees, its use."""

import asyncio
import atexit
import gc
import logging
import os
import resource
import signal
import sys
import threading
import warnings

import jax
import numpy as np
import optax
import pytest
import reference

from zero_jax.checkpoint import Checkpointer, describe, restore
from zero_jax.checkpoint.exporting import export
from zero_jax.training.evaluation import make_eval_step

TX = optax.sgd(1e-2)


def process_state():
    """Returns all that code of other people sees in this process and a library might change."""
    loggers = {name: one for name, one in logging.Logger.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    loggers["root"] = logging.getLogger()
    umask = os.umask(0)
    os.umask(umask)
    return {
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace()),
        "streams": (sys.stdout, sys.stderr, sys.path[:], sys.getrecursionlimit()),
        "loggers": {
            name: (one.level, one.disabled, one.propagate, tuple(one.filters), tuple(one.handlers))
            for name, one in loggers.items()
            # A logger that is made by an import has nothing of its own.
            if one.level or one.disabled or one.filters or one.handlers or not one.propagate
        },
        "logging": (logging.root.manager.disable, logging.raiseExceptions, logging.getLoggerClass()),
        "warnings": (tuple(warnings.filters), warnings.showwarning),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "jax": {name: value for name, value in jax.config.values.items()},
        "asyncio": asyncio.events._event_loop_policy,  # pyright: ignore[reportAttributeAccessIssue]
        "place": (os.getcwd(), umask, resource.getrlimit(resource.RLIMIT_NOFILE)),
        "atexit": atexit._ncallbacks(),  # pyright: ignore[reportAttributeAccessIssue]
        "numpy": (np.geterr(), str(np.random.get_state())),
        "gc": (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)),
        "threads": sorted(thread.name for thread in threading.enumerate() if "checkpoint" in thread.name),
    }


def assert_unchanged(before):
    after = process_state() if before else {}
    for name, value in (before or {}).items():
        assert after[name] == value, name


def use_everything(folder, *, before):
    state, step = reference.make_trainer(reference.loss_fn, TX, mesh=reference.mesh_of("8"), stage=3)
    state, _ = step(state, reference.make_batch(0))
    make_eval_step(reference.loss_fn, mesh=reference.mesh_of("8"), config=reference.make_config(stage=3))
    lines = []
    with Checkpointer(folder, log=lines.append) as checkpointer:
        assert_unchanged(before)
        checkpointer.save(1, state)
        checkpointer.wait()
        assert_unchanged(before)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            checkpointer.save(2, state)
            checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert checkpointer.num_failed == 1 and "NOT saved" in lines[0]
        assert_unchanged(before)
    options = {"mesh": reference.mesh_of("8"), "config": reference.make_config(stage=3)}
    restore(folder, init_fn=reference.init_params, tx=TX, **options)
    describe(folder, verify_leaves=True)
    export(folder, folder / "out")


@pytest.mark.slow
def test_using_the_library_changes_nothing_in_the_process(tmp_path, capfd):
    use_everything(tmp_path / "first", before=None)  # what JAX and others set up at their first use
    before = process_state()
    num_open = len(os.listdir("/proc/self/fd"))
    use_everything(tmp_path / "second", before=before)
    gc.collect()
    assert_unchanged(before)
    assert len(os.listdir("/proc/self/fd")) <= num_open
    assert capfd.readouterr() == ("", "")
