"""Estimates the memory of all stages by formula, as DeepSpeed's `estimate_zero3_model_states_mem_needs_all_live`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

from zero_jax.analysis.memory.estimated import MemoryEstimate, estimate
from zero_jax.core.field_checks import check_value
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import traceable_init
from zero_jax.sharding.precision import precision_name
from zero_jax.sharding.stages import sharded_groups
from zero_jax.training import ZeroConfig, abstract_state

_STAGES = (0, 1, 2, 3)
_SHOWN_GROUPS = ("params", "master", "grads", "opt_state", "model_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageEstimates(Report):
    """Bytes per device of params, gradients and optimizer state at each stage; prints as a table.

    Attributes:
      num_hosts: hosts.
      num_devices_per_host: devices of a host.
      num_params: parameters that gradients are taken for.
      largest_leaf: elements of the largest of them.
      precision: name of the precision, or its dtypes.
      by_stage: the estimate of each stage.

    Example:
      >>> estimates = zero.memory.estimate_stages(init_fn, tx, num_devices_per_host=8)
      >>> estimates.num_params
      8192
    """

    num_hosts: int
    num_devices_per_host: int
    num_params: int
    largest_leaf: int
    precision: str
    by_stage: dict[int, MemoryEstimate]

    def __str__(self) -> str:
        hosts, devices = _counted(self.num_hosts, "host"), _counted(self.num_devices_per_host, "device")
        groups = [name for name in _SHOWN_GROUPS if any(x.by_group.get(name) for x in self.by_stage.values())]
        on_host = any(estimated.host_bytes for estimated in self.by_stage.values())
        table: list[tuple[str, ...]] = [
            ("stage", "per device", "per host", *["in host memory, per host"] * on_host, *groups)
        ]
        for stage, estimated in self.by_stage.items():
            sizes = [estimated.total_bytes, estimated.total_bytes * self.num_devices_per_host]
            sizes += [estimated.host_bytes * self.num_devices_per_host] * on_host
            parts = (estimated.by_group.get(name, 0) for name in groups)
            table.append((str(stage), *map(format_bytes, (*sizes, *parts))))
        sizes = f"{self.num_params / 1e6:,.1f}M params, {self.largest_leaf / 1e6:,.1f}M in the largest leaf"
        windows = "The update holds two windows of chunks besides."
        lines = [
            "Estimated memory for params, gradients and optimizer state:",
            f"HW: {hosts}, {devices} per host",
            f"SW: {sizes}, {self.precision}",
            aligned(table, right=range(1, len(table[0]))),
            "Without activations, gathered params and temporaries: zero.plan compiles the step and has them. "
            + (windows if on_host else "Nothing of this is in host memory."),
        ]
        return "\n".join(lines)


def estimate_stages(
    params: Callable[[jax.Array], PyTree] | PyTree,
    tx: optax.GradientTransformation | None = None,
    *,
    num_devices_per_host: int = 1,
    num_hosts: int = 1,
    config: ZeroConfig = ZeroConfig(precision="bf16"),
) -> StageEstimates:
    """Estimates the bytes of params, gradients and optimizer state on a device, at each stage.

    It is the counterpart of DeepSpeed's `estimate_zero2_model_states_mem_needs_all_live` and `estimate_zero3_...`: from
    the params' shapes, on devices that need not be there. All devices are on the axis `data`. Nothing is compiled, and
    no array is made.

    Args:
      params: a function of a key that makes the params, or the params: arrays or `ShapeDtypeStruct`s.
      tx: the optimizer; None takes Adam.
      num_devices_per_host: devices of a host.
      num_hosts: hosts.
      config: precision, microbatches, rules and what is in host memory; its stage does not matter. Params are in host
        memory at stage 3 alone.

    Raises:
      ValueError: fewer than one host or device.

    Example:
      >>> estimates = zero.memory.estimate_stages(init_fn, tx, num_devices_per_host=8, num_hosts=2)
      >>> print(str(estimates).splitlines()[-2])  # of stage 3
      3         7.19 KB   57.50 KB   2.05 KB   0 bytes   1.02 KB    4.10 KB
    """
    check_arguments(config=config)
    for name, value in {"num_devices_per_host": num_devices_per_host, "num_hosts": num_hosts}.items():
        check_value(name, value, int)
        if value < 1:
            raise ValueError(f"{name}={value}: give at least 1")
    tx = optax.adam(1e-3) if tx is None else tx
    # An abstract mesh, as the devices need not be there.
    mesh: Any = AbstractMesh((num_hosts * num_devices_per_host,), ("data",), axis_types=(AxisType.Auto,))
    by_stage, state = {}, None  # the last state has the params' sizes, which no stage changes
    for stage in _STAGES:
        staged = _at_stage(config, stage)
        state = abstract_state(traceable_init(params), tx, mesh=mesh, config=staged)
        by_stage[stage] = estimate(state, mesh=mesh, config=staged, tx=tx)
    assert state is not None
    sizes = [x.size for x in jax.tree.leaves(state.params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return StageEstimates(
        num_hosts=num_hosts,
        num_devices_per_host=num_devices_per_host,
        num_params=sum(sizes),
        largest_leaf=max(sizes, default=0),
        precision=precision_name(config.precision) or "a precision of your own",
        by_stage=by_stage,
    )


def _at_stage(config: ZeroConfig, stage: int) -> ZeroConfig:
    """Returns the config of a stage; params are kept in host memory only if the stage shards them."""
    offload: Any = config.resolved_offload()
    if offload is not None and offload.what == "all" and "params" not in sharded_groups(stage):
        # In the form that it was given in: a word, or an `Offload` with settings of its own.
        offload = "state" if isinstance(config.offload, str) else dataclasses.replace(offload, what="state")
        config = dataclasses.replace(config, offload=offload)
    return dataclasses.replace(config, stage=stage)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
