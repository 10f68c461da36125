"""The cache key of a compiled program: a hash of everything that it depends on."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from zero_jax.sharding.topology import compiler_target, parse
from zero_jax.training import flag_words

# The format of the cache's entries: entries of another number are ignored.
SCHEMA = 3
# Environment variables that XLA, its compilers and their libraries read. JAX's own are in `jax.config`.
COMPILER_VARIABLES = re.compile(
    r"(XLA|TF|LIBTPU|TPU|PJRT|MEGASCALE|CUDA|CUDNN|CUBLAS|NVIDIA|NVVM|PTXAS|LLVM|MLIR|TRITON|ROCM|HIP|HSA|AMD)_.*"
    r"|LD_LIBRARY_PATH|LD_PRELOAD"
)
# Of these, the ones on running, logging and output folders, which do not change the program.
IRRELEVANT_VARIABLES = re.compile(
    r"XLA_PYTHON_CLIENT_.*|TF_CPP_(MIN|MAX)_.*LOG_LEVEL|(TPU|CUDA)_VISIBLE_.*|TPU_.*LOG.*"
)
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
IRRELEVANT_FLAGS = re.compile(
    r"--(\w+_)?(log|logging|vmodule|verbose|verbosity|stderrthreshold)(_\w+)?|--xla_force_host_platform_device_count"
)
# The folder does not matter, but whether the user dumps at all: the compiler then reports no heap layout to us.
_DUMP_FLAGS = re.compile(r"--xla_(\w+_)?dump(_\w+)?")
# Settings of JAX on where it runs, and what it checks, prints and caches; all others are part of the key.
IRRELEVANT_SETTINGS = re.compile(
    r"jax_(platforms|platform_name|xla_backend|num_cpu_devices|default_device|\w*visible_devices|cpu_\w*|distributed_\w*"
    r"|enable_recoverability|enable_preemption_service|\w*compilation_cache\w*|\w*persistent_cache\w*"
    r"|share_binary_\w*|(debug_|compiler_detailed_)?log(ging)?_\w*|dump_\w*|include_debug_info_in_dumps|pprint_\w*|traceback_\w*|tracer_error_\w*"
    r"|explain_cache_misses|transfer_guard\w*|array_garbage_collection_guard|thread_guard|check_\w*|debug_leaked_\w*"
    r"|check_proxy_envs|cross_host_\w*|captured_constants_\w*|raise_\w*)|mock_\w*"
)
_COMPILERS = re.compile(
    r"(jax|jaxlib|libtpu|jax[-_.](cuda|rocm)\w*([-_.]\w+)*|nvidia[-_.].*|libtpu[-_.]nightly)", re.IGNORECASE
)
_GPU_TOOLS = ("bin/ptxas", "bin/nvlink", "bin/fatbinary", "nvvm/libdevice/*", "nvvm/lib64/*", "nvvm/bin/*")


def digest(inputs: Mapping[str, Any]) -> str:
    """Returns the hash of the values of `compile_inputs`."""
    return hashlib.sha256(repr(sorted(inputs.items())).encode()).hexdigest()[:32]


def compile_inputs(lowered: Any, job: Any, mesh: Any) -> dict[str, Any]:
    """Returns all that a compiled program depends on by name, of the job what the lowered text does not contain."""
    topology = parse(job.topology)
    platform = topology.hardware.platform
    return {
        "schema": SCHEMA,
        "program": lowered.as_text(),
        "names": program_names(lowered.as_text(debug_info=True)),
        "topology": compiler_target(topology),
        "devices": [getattr(device, "coords", device.id) for device in mesh.devices.flat],
        "options": sorted((name, repr(value)) for name, value in job.options(mesh).values.items()),
        "variables": variables(os.environ),
        "settings": [(name, str(value)) for name, value in program_settings().items()],
        "packages": packages(),
        "tools": tools(platform, os.environ),
    }


def program_names(debug_text: str) -> str:
    """Returns a hash of a program's names and source lines, for reports, but for callers of the step: these vary."""
    locations = dict(re.findall(r"^#(loc\d*) = loc\((.*)\)$", debug_text, re.MULTILINE))

    def innermost(text: str) -> str:
        while match := re.match(r"callsite\(#(loc\d*) at ", text):
            text = locations.get(match[1], "")
        name, _, reference = text.rpartition("(#")
        return f"{name} {innermost(locations.get(reference[:-1], ''))}" if name else text

    innermost_names = {name: innermost(text) for name, text in locations.items()}
    used = re.findall(r"loc\(#(loc\d*)\)", debug_text)
    return hashlib.sha256(repr([innermost_names.get(name, "") for name in used]).encode()).hexdigest()


def variables(environment: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Returns the environment variables that change the program, with flags as lists."""
    return [
        (name, flags(value) if name in _FLAG_VARIABLES else value)
        for name, value in sorted(environment.items())
        if COMPILER_VARIABLES.fullmatch(name) and not IRRELEVANT_VARIABLES.fullmatch(name)
    ]


def flags(text: str) -> list[str]:
    """Returns the flags of `XLA_FLAGS`, a text or the name of a file, without those that do not change the program."""
    all_flags = flag_words(text)
    names = [word.partition("=")[0] for word in all_flags]
    dumps = ["--xla_dump"] if any(map(_DUMP_FLAGS.fullmatch, names)) else []
    named_flags = zip(all_flags, names, strict=True)
    return [
        flag for flag, name in named_flags if not (IRRELEVANT_FLAGS.fullmatch(name) or _DUMP_FLAGS.fullmatch(name))
    ] + dumps


def program_settings() -> dict[str, Any]:
    """Returns the settings of JAX that may change the program."""
    values = sorted(jax.config.values.items())
    return {name: value for name, value in values if not IRRELEVANT_SETTINGS.fullmatch(name)}


def packages() -> list[tuple[str, str, str]]:
    """Returns the installed packages of compilers: name, version, and a hash of their `RECORD`."""
    compilers = set()
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if _COMPILERS.fullmatch(name):
            record = hashlib.sha256((package.read_text("RECORD") or "").encode()).hexdigest()
            compilers.add((name.lower(), package.version, record))
    return sorted(compilers)


def tools(platform: str, environment: Mapping[str, str]) -> list[tuple[str, int, int]]:
    """Returns the files that a compiler reads from outside its package: path, size and time of change."""
    paths = [pathlib.Path(library)] if (library := environment.get("TPU_LIBRARY_PATH")) else []
    if platform != "tpu":
        paths = [path for folder in _toolkits(environment) for tool in _GPU_TOOLS for path in folder.glob(tool)]
    files = set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            files.add((str(path), status.st_size, status.st_mtime_ns))
    return sorted(files)


def _toolkits(environment: Mapping[str, str]) -> Iterable[pathlib.Path]:
    """Returns the folders in which XLA:GPU looks for NVIDIA's tools."""
    prefix = "--xla_gpu_cuda_data_dir="
    named = [flag.removeprefix(prefix) for flag in flags(environment.get("XLA_FLAGS", "")) if flag.startswith(prefix)]
    ptxas = shutil.which("ptxas", path=environment.get("PATH"))
    on_path = [str(pathlib.Path(ptxas).resolve().parent.parent)] if ptxas else []
    return [pathlib.Path(folder) for folder in (*named, *on_path, environment.get("CUDA_HOME") or "/usr/local/cuda")]
