"""Compiles a train step for hardware that is not there, and searches for its best settings.

`plan` makes a `Job`, compiles it in another process (`process`, `worker`) and returns a `PlanReport`: memory, traffic
and time of the program. `plan_auto` estimates every setting (`estimates`, by `traces` of the model), ranks them and
compiles the best (`search`); `plan_layouts` compares layouts of `data`. Compiled programs are cached by all that they
depend on (`key`).
"""

from zero_jax.planning.auto import AutoPlan, plan_auto
from zero_jax.planning.errors import CompilerCrash, ModelError, explain
from zero_jax.planning.job import Job, batch_of
from zero_jax.planning.links import model_sizes
from zero_jax.planning.plans import LayoutPlans, compile_layouts, plan, plan_layouts, split_settings
from zero_jax.planning.process import COMPILE_ONLY, CompileOptions, call_for, compile_plan
from zero_jax.planning.report import PlanReport
from zero_jax.planning.user_modules import resolve
