"""Settles what the tests run on before any imports JAX: 8 simulated CPU devices, and the TPU compiler without a TPU."""

import atexit
import collections
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# The programs are tiny, and compiling them is what takes the time: half of it without LLVM's optimizations, and half of
# the rest with the emitters of old and one piece of code. The newest releases have only the new emitters. With
# ZERO_JAX_TESTS_OPTIMIZED=1 programs are compiled as users compile them: CI runs the parity tests so, too.
_is_fast = os.environ.get("ZERO_JAX_TESTS_OPTIMIZED") != "1"
_flags = ["--xla_backend_optimization_level=0"] if _is_fast else []
# On a busy machine, simulated devices may reach a collective further apart than the 40 s after which XLA aborts.
_flags += ["--xla_cpu_collective_call_terminate_timeout_seconds=600"]
if _is_fast and importlib.metadata.version("jaxlib").startswith("0.10."):
    _flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    _flags += ["--xla_llvm_disable_expensive_passes=true"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags]).strip()
# On few cores XLA has a thread for each device, and a device may wait in several collectives (docs/xla_faults.md).
os.environ.setdefault("NPROC", "32")
# OpenBLAS's threads wait in loops: those of eight devices that factorize matrices take four times the CPU of the work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tracing makes many small objects that live, and Python would look through all of them again for every 700 new ones.
gc.set_threshold(50_000, 20, 50)
# `nohup` and shells that start this in the background ignore signals that tests send; processes inherit that.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)
# Of the ten frames that JAX has in each operation's metadata one is read: the rest is a twentieth of lowering and XLA.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "1"
# Tests have a folder for compiled programs (`kept_programs`), and processes that they start none, unless told.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# libtpu asks the machine which TPU it is, and locks it for one process, unless it is told this.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5p-16"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

# Programs that tests start import the package and the tests' helpers from here, too.
_tests = pathlib.Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_tests.parent), str(_tests), os.environ.get("PYTHONPATH")])
)

# They start hundreds of processes, which would each compile the package's 300 files anew (0.6 of their 2 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What runs keep in the user's cache folder (tokens, plans) is not for tests to find or to leave.
_cache = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="zero-jax-tests-")

import pytest  # noqa: E402 (what JAX runs on is settled before it is imported)
from _pytest import unraisableexception  # noqa: E402

atexit.register(shutil.rmtree, _cache, ignore_errors=True)
pytest.register_assert_rewrite("faults")
_PROGRAMS = pytest.StashKey[pathlib.Path]()
_MOST_BYTES = 10**9


@pytest.fixture(scope="session")
def kept_programs(pytestconfig: pytest.Config) -> pathlib.Path:
    """The folder in which programs that were compiled for CPUs are kept, for other tests and the next run of them."""
    return pytestconfig.stash[_PROGRAMS]


@pytest.fixture(scope="module")
def all_frames() -> Iterator[None]:
    """Has as many callers in the metadata of operations as users have by default."""
    import jax

    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.fixture
def compiled_anew() -> None:
    """Has all programs compiled, as for what the compiler writes beside them."""
    _keep_programs(None)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the run of `faults.py` that nothing happened to."""
    import faults

    return faults.unbroken_run(tmp_path_factory.getbasetemp())


@pytest.fixture
def tamper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], None]]:
    """Lets something happen to batches by the step; the next run of the test is whole again."""
    import faults

    from zero_jax.trainer.inputs import text

    def start(at: dict) -> Callable[[], None]:
        monkeypatch.setattr(text.data, "train_batches", faults.tampering(at))
        return lambda: monkeypatch.setattr(text.data, "train_batches", faults.real_train_batches)

    return start


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw nothing."""
    from zero_jax.trainer import loop as trainer

    monkeypatch.setattr(trainer, "draw_losses", lambda *_, **__: None)


def pytest_configure(config: pytest.Config) -> None:
    """Has compiled programs kept: a sixth of them are compiled twice in one run, and nearly all again in the next.

    A program is found by its StableHLO, the options and the version of the compiler: it is the one that would be made.
    """
    import jax

    kept = getattr(config, "cache", None)  # None with `-p no:cacheprovider`
    folder = config.stash[_PROGRAMS] = kept.mkdir("programs") if kept else pathlib.Path(tempfile.mkdtemp(dir=_cache))
    if not hasattr(config, "workerinput") and sum(file.stat().st_size for file in folder.iterdir()) > _MOST_BYTES:
        shutil.rmtree(folder, ignore_errors=True)  # another run may be writing there
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if jax.__version_info__ < (0, 12):
        _reuse_contexts_of_mlir()
    # What destructors raise shows in one collection; five are for PyPy, and take seconds of a process with many arrays.
    if key := getattr(unraisableexception, "gc_collect_iterations_key", None):  # new in pytest 8.4
        config.stash[key] = 1


def _reuse_contexts_of_mlir() -> None:
    """Has ten programs of a thread lowered in one context, as JAX 0.12 does: to make one takes 8 ms."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    contexts, make = threading.local(), mlir.make_ir_context

    def reused() -> object:
        if ir.Context.current:  # within the lowering of another program, in which the module of this one would be put
            return make()
        if not getattr(contexts, "left", 0):
            contexts.context, contexts.left = make(), 10
        contexts.left -= 1
        return contexts.context

    mlir.make_ir_context = reused


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles for TPUs with the least effort, unless a test is marked `full_effort`; keeps programs for CPUs.

    It takes a seventh of the time. Collectives, their bytes and the memory of arguments are those of a program of full
    effort, temporaries within some percent; the schedule and the kernels are slow ones, so times mean nothing.
    """
    import jax

    is_light = "tpu_compiler" in item.keywords and "full_effort" not in item.keywords
    level = "O0" if is_light else "UNKNOWN"  # JAX's default
    jax.config.update("jax_optimization_level", level)
    os.environ["JAX_OPTIMIZATION_LEVEL"] = level  # for processes that a test starts
    # A program for a TPU that is not there can be kept, and not be read.
    _keep_programs(None if "tpu_compiler" in item.keywords else str(item.config.stash[_PROGRAMS]))


def _keep_programs(folder: str | None) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes the longest comes first, so that processes that share the tests end together.
    compiling = {item.path for item in items if "tpu_compiler" in item.keywords}
    num_slow = collections.Counter(item.path for item in items if "slow" in item.keywords)
    items.sort(key=lambda item: (item.path not in compiling, -num_slow[item.path]))
    if importlib.util.find_spec("libtpu"):
        return
    reason = "no TPU compiler here: `pip install 'jax[tpu]'` brings it to any machine, no TPU needed"
    for item in items:
        if "tpu_compiler" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
