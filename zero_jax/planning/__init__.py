"""Compiles a train step for hardware that is not there, and searches for its best settings.

`plan` writes a job, a process of its own compiles it (`process`, `worker`), and a `PlanReport` says what the program
holds, sends and how long it may take. `plan_auto` estimates every setting (`guess`), ranks them and compiles the best;
`plan_layouts` compares meshes. Compiled programs are cached by all that they depend on (`key`).
"""

from zero_jax.planning.auto import AutoPlan, plan_auto
from zero_jax.planning.errors import CompilerCrash, ModelError, explain
from zero_jax.planning.guess import model_sizes
from zero_jax.planning.job import Job, batch_of
from zero_jax.planning.layouts import LayoutPlans, plan_layouts
from zero_jax.planning.process import COMPILE_ONLY
from zero_jax.planning.report import PlanReport
from zero_jax.planning.single import plan
from zero_jax.planning.user_modules import resolve

__all__ = [
    "COMPILE_ONLY",
    "AutoPlan",
    "CompilerCrash",
    "Job",
    "LayoutPlans",
    "ModelError",
    "PlanReport",
    "batch_of",
    "explain",
    "model_sizes",
    "plan",
    "plan_auto",
    "plan_layouts",
    "resolve",
]
