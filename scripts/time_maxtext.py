"""Estimates the step time of MaxText's own train step, to be compared with what MaxText publishes.

In an environment that has MaxText (`pip install "maxtext[tpu]==0.2.5"`) and zero_jax, with the settings of MaxText's
`configs/tpu/v5p/32b.sh` and its flags in LIBTPU_INIT_ARGS:

    python scripts/time_maxtext.py v5p:4x4x4 compile_topology=v5p-128 compile_topology_num_slices=1 \
        per_device_batch_size=6 remat_policy=minimal global_parameter_scale=32 ici_fsdp_parallelism=-1 \
        ici_tensor_parallelism=4 max_target_length=2048 use_iota_embed=true dataset_type=synthetic attention=flash \
        quantization= enable_checkpointing=false reuse_example_batch=1 steps=15 run_name=x base_output_directory=/tmp/x
"""

import pathlib
import sys
from typing import Any

import maxtext
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import maxtext_utils

from zero_jax.hlo import Program
from zero_jax.planning.kernel_text import program_text
from zero_jax.planning.step_time import estimate_time
from zero_jax.sharding import topology


def main(name: str, settings: list[str]) -> None:
    """Compiles the step for a topology as MaxText does, and prints the estimate by both counts of attention."""
    config, mesh, compiled = compile_step(settings)
    _, weights, attention = maxtext_utils.calculate_tflops_training_per_device(config, log=False)
    # MaxText counts half of attention since July 2025, when it published most of its figures already.
    per_device, attention_per_device = (weights + 2 * attention) * 1e12, 2 * attention * 1e12
    estimated = estimate_time(
        Program(program_text(compiled)),
        mesh=mesh,
        topology=topology.parse(name),
        model_flops=per_device * mesh.size,
        attention_flops=attention_per_device * mesh.size,
        num_tokens=config.global_batch_size_to_train_on * config.max_target_length,
    )
    print(f"{per_device / 1e12:,.1f} TFLOP a device and step, of which attention {attention_per_device / 1e12:,.1f}")
    print(f"{estimated}\nkernels {estimated.kernel_seconds:.3f} s, network {estimated.network_seconds:.3f} s")
    print(f"collectives {estimated.collective_seconds:.3f} s, of which exposed {estimated.exposed_seconds:.3f} s")
    print("\n".join(f"- {assumption}" for assumption in estimated.assumptions))


def compile_step(settings: list[str]) -> tuple[Any, Any, Any]:
    """Returns MaxText's config, its mesh and its compiled train step."""
    seen: dict[str, Any] = {}
    get_inputs, compile_with = train_compile.get_shaped_inputs, train_compile.jit_and_compile

    def inputs(mesh: Any, config: Any) -> Any:
        seen.update(mesh=mesh, config=config)
        return get_inputs(mesh, config)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        seen["compiled"] = compile_with(*args, **kwargs)
        return seen["compiled"]

    train_compile.get_shaped_inputs, train_compile.jit_and_compile = inputs, compiled
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    train_compile.main(["train_compile", str(base), *settings])
    return seen["config"], seen["mesh"], seen["compiled"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
