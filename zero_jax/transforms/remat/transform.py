"""Rematerialization of a loss function that knows nothing of it.

The function is traced to a jaxpr. Its blocks are the bodies of scans over stacked params, the repeated blocks of Python
loops, and the model's own `jax.checkpoint` regions; each is evaluated inside a `jax.checkpoint` with the policy asked
for, and its residuals are named, sharded over `model` and offloaded as asked. docs/remat.md shows what each costs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from zero_jax.attention import mesh_context
from zero_jax.core.signatures import check_arguments, check_callable, place_of
from zero_jax.core.tree import PyTree, shapes_of
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import trace_flat
from zero_jax.program.loss import LossProgram, Traced, with_pass
from zero_jax.sharding.mesh import Axes, axes_of, on_mesh
from zero_jax.sharding.model_specs import dims_by_name
from zero_jax.transforms.remat.choice import choose_values
from zero_jax.transforms.remat.costs import BlockCosts, costs_of
from zero_jax.transforms.remat.policies import POLICIES, Remat, resolve_remat
from zero_jax.transforms.remat.regions import RematSetting
from zero_jax.transforms.remat.report import RematReport
from zero_jax.transforms.remat.values import Mark, on_model
from zero_jax.transforms.remat.walk import Log, RematFrame, RematWalk

_FUNCTION = "give a function of params and further arguments"


def rematerialize(
    loss_fn: Callable[..., Any], remat: str | Remat, *, mesh: Mesh, axes: Axes | None = None, specs: PyTree = None
) -> Callable[..., Any]:
    """Transforms `loss_fn(params, ...)` so that its blocks are rematerialized as `remat` says.

    The result computes the same values and has the same derivatives. It is ordinary traced code: `gather_on_use` of it
    gathers sharded params inside the recomputed blocks.

    Args:
      loss_fn: any traceable function of a params pytree and further arguments.
      remat: the policy, or its name in `POLICIES`.
      mesh: the mesh.
      axes: the roles of its axes; None finds them by name.
      specs: how the params are sharded over `model` (a spec for each leaf, or a prefix of the tree), if at all.

    Returns:
      A function with the signature of `loss_fn`.

    Raises:
      ValueError: residuals are to be sharded on a mesh without a `model` axis; or, when it is traced: the model has no
        block that the policy could apply to, or names to keep that it does not use.

    Example:
      >>> def layers(params, batch):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0].mean()
      >>> cheap = zero.rematerialize(layers, "full", mesh=mesh)
      >>> bool(cheap(jnp.ones((4, 64, 64)), batch) == layers(jnp.ones((4, 64, 64)), batch))
      True
    """
    check_callable("loss_fn", loss_fn, remedy=_FUNCTION)
    check_arguments(axes=axes, specs=specs)
    remat, axes = resolve_remat(remat), axes or axes_of(mesh)
    if remat.is_own:
        return loss_fn
    setting = RematSetting(remat=remat, mesh=mesh, axes=axes, batch_sizes=frozenset())
    if remat.residuals == "sharded" and setting.num_shards == 1:
        raise ValueError(
            f"remat={remat.name!r} shards residuals over `model`, but the mesh is {dict(mesh.shape)}: make it with "
            f"zero.make_mesh(model=...), or choose {dataclasses.replace(remat, residuals='device').name!r} or "
            f"{dataclasses.replace(remat, residuals='offloaded').name!r}"
        )

    return _with_regions(loss_fn, setting, specs)


def remat_report(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    remat: str | Remat,
    mesh: Mesh,
    axes: Axes | None = None,
    specs: PyTree = None,
) -> RematReport:
    """Reports the blocks that `rematerialize` finds in a function, what they keep, and what it had to leave alone.

    Args:
      loss_fn: the function, as for `rematerialize`.
      params: arrays or `ShapeDtypeStruct`s.
      *args: its further arguments, likewise.
      remat: the policy, or its name.
      mesh: the mesh.
      axes: the roles of its axes; None finds them by name.
      specs: how the params are sharded over `model`.

    Example:
      >>> def layers(params, batch):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0].mean()
      >>> report = zero.remat_report(layers, jnp.ones((4, 64, 64)), batch, remat="full", mesh=mesh)
      >>> report.regions[0].times
      4
    """
    check_callable("loss_fn", loss_fn, remedy=_FUNCTION)
    setting = RematSetting(remat=resolve_remat(remat), mesh=mesh, axes=axes or axes_of(mesh), batch_sizes=frozenset())
    program = _with_regions(LossProgram(loss_fn), setting, specs)
    with on_mesh(mesh), mesh_context(setting.mesh, setting.axes):
        (log,) = program.notes(params, *args)
    return RematReport(
        remat=log.choice.remat if log.choice else setting.remat,
        regions=tuple(log.rows),
        left=tuple(dict.fromkeys(log.left)),
        choice=log.choice,
    )


def block_costs(
    loss_fn: LossProgram, *args: Any, mesh: Mesh, axes: Axes | None = None, specs: PyTree = None
) -> tuple[BlockCosts, ...]:
    """Returns what the values of a function's blocks cost, for `choose_values`; raises `ValueError` without blocks."""
    setting = RematSetting(remat=POLICIES["full"], mesh=mesh, axes=axes or axes_of(mesh), batch_sizes=frozenset())
    with on_mesh(mesh), mesh_context(setting.mesh, setting.axes):
        (log,) = _with_regions(loss_fn, setting, specs).notes(*args)
    if not log.rows:
        raise ValueError(_nothing_found(Remat(policy="auto"), log, place_of(loss_fn)))
    return costs_of(log.regions, mesh)


def _nothing_found(remat: Remat, log: Log, place: str) -> str:
    """Says why a policy does nothing for a model, and what to do."""
    if remat.policy == "own":
        return (
            f"remat={remat.name!r} places the residuals of the model's own jax.checkpoint regions, but {place} has "
            f"none: choose {dataclasses.replace(remat, policy='full').name!r}, which makes regions of its blocks"
        )
    left = "".join(f"; left alone: {item}" for item in dict.fromkeys(log.left))
    return (
        f"remat={remat.name!r} finds nothing to recompute in {place}: no scan over stacked params, no loop that "
        "applies the same params again and again to what it carries, no repeated block that the policy applies to, "
        f"no jax.checkpoint{left}; choose remat='own', or put jax.checkpoint around what is large"
    )


def _with_regions(loss_fn: Callable[..., Any], setting: RematSetting, specs: PyTree) -> Any:
    """Returns a function whose blocks are regions, with a log of them as a note; without notes it has to have some."""
    place = place_of(loss_fn)

    def recomputed(traced: Traced) -> Traced:
        jaxpr, _ = jaxprs.open_jaxpr(traced.closed)
        avals = [var.aval for var in jaxpr.invars]
        params, values = avals[: traced.num_params], avals[traced.num_params :]
        sizes = frozenset(value.shape[0] for value in values if value.shape)
        each = dims_by_name(jax.tree.unflatten(traced.params_tree, shapes_of(params)), specs, mesh=setting.mesh)
        marks = [Mark("param", on_model(dims, setting.axes.model)) for _, dims in each]
        marks += [Mark("value", stays_alive=True) for _ in values]

        with_sizes = dataclasses.replace(setting, batch_sizes=sizes)

        def walked(setting: RematSetting, leaves: Sequence[Any], log: Log) -> list[Any]:
            walk = RematWalk(setting, log)
            walk.check_names(jaxpr, place)
            outs = walk.run(traced.closed, leaves, RematFrame(marks=marks, place=place))
            walk.check_values(place)
            return outs

        @functools.cache
        def costs() -> tuple[BlockCosts, ...]:
            log, full = Log(), dataclasses.replace(with_sizes, remat=POLICIES["full"])
            trace_flat(lambda *leaves: walked(full, leaves, log), avals)
            return costs_of(log.regions, setting.mesh)

        def run(leaves: Sequence[Any], notes: list[Log] | None) -> list[Any]:
            is_auto = setting.remat.policy == "auto"
            choice = choose_values(costs(), setting.remat, mesh=setting.mesh) if is_auto else None
            log = Log(measure=notes is not None, choice=choice)
            outs = walked(dataclasses.replace(with_sizes, remat=choice.remat) if choice else with_sizes, leaves, log)
            if notes is not None:
                notes.append(log)
            elif not log.rows and setting.remat.policy != "none":
                raise ValueError(_nothing_found(setting.remat, log, place))
            return outs

        return traced.evaluated(run)

    return with_pass(loss_fn, recomputed, functools.partial(mesh_context, setting.mesh, setting.axes))
