"""Reads the time, memory and traffic of MaxText's own train step, as `zero-jax plan` reads those of zero_jax.

In an environment that has MaxText (`pip install "maxtext[tpu]==0.2.5"`) and zero_jax, with the settings of MaxText's
`configs/tpu/v5p/32b.sh` and its flags in LIBTPU_INIT_ARGS:

    python scripts/time_maxtext.py v5p:4x4x4 compile_topology=v5p-128 compile_topology_num_slices=1 \
        per_device_batch_size=6 remat_policy=minimal global_parameter_scale=32 ici_fsdp_parallelism=-1 \
        ici_tensor_parallelism=4 max_target_length=2048 use_iota_embed=true dataset_type=synthetic attention=flash \
        quantization= enable_checkpointing=false reuse_example_batch=1 steps=15 run_name=x base_output_directory=/tmp/x

`--quick` as the first argument stops the compiler before it generates code. JAX 0.10.2 lacks
`jax.experimental.xla_metadata.must_fuse_call`, which an attention of MaxText imports and these programs do not call.
"""

import os
import pathlib
import sys
import time
import traceback
from typing import Any

import jax
import jax.experimental.xla_metadata as xla_metadata

if not hasattr(xla_metadata, "must_fuse_call"):

    def _refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("must_fuse_call is not in this release of JAX")

    xla_metadata.must_fuse_call = _refuse

import maxtext
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import maxtext_utils

from zero_jax.analysis import comms, memory
from zero_jax.planning.job import CompiledText, compile_lowered
from zero_jax.planning.step_time import ModelWork, estimate_time
from zero_jax.sharding import topology


class Compiled(Exception):
    """Ends MaxText's `train_compile` when the step is compiled."""


def main(name: str, settings: list[str], *, quick: bool) -> None:
    """Compiles the step for a topology as MaxText does, and prints the estimate by both counts of attention."""
    config, mesh, compiled = compile_step(settings, quick=quick)
    _, weights, attention = maxtext_utils.calculate_tflops_training_per_device(config, log=False)
    # MaxText counts half of attention since July 2025, when it published most of its figures already.
    per_device, attention_per_device = (weights + 2 * attention) * 1e12, 2 * attention * 1e12
    work = ModelWork(
        model_flops=per_device * mesh.size,
        attention_flops=attention_per_device * mesh.size,
        num_tokens=config.global_batch_size_to_train_on * config.max_target_length,
    )
    parsed = topology.parse(name)
    estimated = estimate_time(compiled.program, work, mesh=mesh, topology=parsed, has_code=compiled.has_code)
    print(
        f"JAX {jax.__version__}, {mesh.size} devices {dict(mesh.shape)}, compiled in {compiled.compile_seconds:.0f} s"
    )
    print(f"{per_device / 1e12:,.1f} TFLOP a device and step, of which attention {attention_per_device / 1e12:,.1f}")
    print(f"{estimated}\nkernels {estimated.kernel_seconds:.3f} s, network {estimated.network_seconds:.3f} s")
    print(f"collectives {estimated.collective_seconds:.3f} s, of which exposed {estimated.exposed_seconds:.3f} s")
    print("\n".join(f"- {assumption}" for assumption in estimated.assumptions))
    print(f"{memory.measure(compiled, layout=compiled.layout)}\n\n{comms.measure(compiled, mesh=mesh)}")


def compile_step(settings: list[str], *, quick: bool) -> tuple[Any, Any, CompiledText]:
    """Returns MaxText's config, its mesh, and its compiled train step."""
    seen: dict[str, Any] = {}
    get_inputs = train_compile.get_shaped_inputs

    def inputs(mesh: Any, config: Any) -> Any:
        seen.update(mesh=mesh, config=config)
        return get_inputs(mesh, config)

    def compile(lowered: Any, compiler_options: Any = None) -> Any:
        jax.stages.Lowered.compile = compile_plainly
        start = time.perf_counter()
        saved, has_code = compile_lowered(lowered, compiler_options or {}, quick=quick)
        taken = time.perf_counter() - start
        seen["compiled"] = CompiledText(**saved, compile_seconds=taken, from_cache=False, has_code=has_code)
        raise Compiled

    def compiled(*args: Any, **kwargs: Any) -> Any:
        jax.stages.Lowered.compile = compile
        return jit_and_compile(*args, **kwargs)

    compile_plainly, jit_and_compile = jax.stages.Lowered.compile, train_compile.jit_and_compile
    train_compile.get_shaped_inputs, train_compile.jit_and_compile = inputs, compiled
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    try:
        train_compile.main(["train_compile", str(base), *settings])
    except Compiled:
        pass
    if not seen["compiled"].text:
        raise SystemExit(f"the compiler refuses it: {seen['compiled'].message}")
    return seen["config"], seen["mesh"], seen["compiled"]


if __name__ == "__main__":
    is_quick = sys.argv[1] == "--quick"
    status = 1
    try:
        main(sys.argv[1 + is_quick], sys.argv[2 + is_quick :], quick=is_quick)
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # not after a compiler that goes on
