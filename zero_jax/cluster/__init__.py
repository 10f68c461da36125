"""Processes: joining them, launching them, stopping them.

`join` finds out from the cluster which process this is and calls `jax.distributed.initialize`; `launch` starts several
processes on one machine (`processes`), merges their logs, and starts them again when some are lost.
`Preemption` stops all processes of a run at the same step, `Watchdog` ends a run that hangs.
"""

from zero_jax.cluster.joining import NUM_PROCESSES, NotJoined, Place, join, let_others_end_first
from zero_jax.cluster.launching import LaunchConfig, launch, report_end, report_start
from zero_jax.cluster.preemption import EXIT_CODE, Preemption
from zero_jax.cluster.processes import patient_flags
from zero_jax.cluster.watchdog import Watchdog
from zero_jax.core.agreement import OtherProcessFailed

__all__ = [
    "EXIT_CODE",
    "NUM_PROCESSES",
    "LaunchConfig",
    "NotJoined",
    "OtherProcessFailed",
    "Place",
    "Preemption",
    "Watchdog",
    "join",
    "launch",
    "let_others_end_first",
    "patient_flags",
    "report_end",
    "report_start",
]
