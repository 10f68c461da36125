"""The layout of `data` over the hardware, with the compiler as judge."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from zero_jax.core.signatures import check_arguments
from zero_jax.planning.report import PlanReport
from zero_jax.planning.single import plan
from zero_jax.sharding.mesh import axes_of, make_mesh
from zero_jax.sharding.topology import parse
from zero_jax.training import MeshLoss, ZeroConfig

Layout = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutPlans:
    """The plans of several layouts, fastest first; prints as a table.

    Attributes:
      plans: the plans by the sizes of the mesh axes that carry `data`.
      chosen: the layout that `make_mesh` chooses.
    """

    plans: Mapping[Layout, PlanReport]
    chosen: Layout

    @property
    def best(self) -> Layout:
        """The layout of the least estimated time among those that fit; the first if none does."""
        return next(iter(self.plans))

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        plans = [{"layout": list(layout), **report.to_json()} for layout, report in self.plans.items()]
        return {"best": list(self.best), "chosen": list(self.chosen), "plans": plans}

    def __str__(self) -> str:
        rows = [f"{'layout of data':<20}{'of ideal':>10}{'GB':>10}{'s/step':>12}"]
        for layout, report in self.plans.items():
            ratio = "" if report.traffic_ratio is None else f"{report.traffic_ratio:.3f}"
            needed = "" if report.needed_bytes is None else f"{report.needed_bytes / 1e9:.2f}"
            seconds = f"{report.time.step_seconds:.4g}" if report.time else "does not fit"
            mark = "  what make_mesh chooses" if layout == self.chosen else ""
            rows.append(f"{' x '.join(map(str, layout)):<20}{ratio:>10}{needed:>10}{seconds:>12}{mark}")
        return "\n".join(rows)


def plan_layouts(
    loss_fn: Callable[..., Any] | MeshLoss,
    init_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    topology: str,
    config: ZeroConfig,
    replica: int = 1,
    model: int = 1,
    layouts: Sequence[Layout] | None = None,
    **options: Any,
) -> LayoutPlans:
    """Compiles a step for several layouts of `data`.

    Args:
      loss_fn: as for `make_train_step`.
      init_fn: as for `init_state`.
      tx: the optimizer.
      topology: name of the hardware.
      config: stage, precision, microbatches.
      replica: size of the mesh axis `replica`.
      model: size of the mesh axis `model`.
      layouts: sizes of the mesh axes that carry `data`, major first; None tries what `make_mesh` chooses, one axis, and
        the dims of the torus with neighbours taken together.
      **options: further options of `plan`, `batch` among them.

    Raises:
      ValueError: as `plan` does.
    """
    check_arguments(loss_fn=loss_fn, init_fn=init_fn, tx=tx, config=config, layouts=layouts)
    chosen = _layout_of(make_mesh(topology=topology, replica=replica, model=model), config)
    tried = dict.fromkeys([chosen, *(layouts if layouts is not None else _merged(topology, math.prod(chosen)))])
    plans = {}
    for layout in tried:
        # What make_mesh chooses knows of slices and hosts, which sizes alone do not.
        sizes = None if layout == chosen else layout
        axes = {"replica": replica, "model": model, "data_layout": sizes}
        plans[layout] = plan(loss_fn, init_fn, tx, topology=topology, config=config, **axes, **options)

    def order(item: tuple[Layout, PlanReport]) -> tuple[bool, float]:
        report = item[1]
        return not report.fits, report.time.step_seconds if report.time else math.inf

    return LayoutPlans(plans=dict(sorted(plans.items(), key=order)), chosen=chosen)


def _layout_of(mesh: Mesh, config: ZeroConfig) -> Layout:
    return tuple(mesh.shape[axis] for axis in axes_of(mesh, data=config.data_axes).data)


def _merged(topology: str, data: int) -> Iterator[Layout]:
    """Yields the layouts that take neighbouring dims of the torus together, from one axis to one for each dim.

    Over several slices or hosts there are none: sizes alone do not say which axis crosses the network.
    """
    read = parse(topology)
    if read.num_slices > 1:
        return
    dims = [size for size in read.shape if size > 1]
    cores = data // math.prod(dims)
    dims += [cores] if cores > 1 else []
    if math.prod(dims) != data:  # `replica` or `model` take a part
        yield (data,)
        return
    for cuts in itertools.product((False, True), repeat=max(len(dims) - 1, 0)):
        layout = [dims[0]] if dims else [1]
        for size, cut in zip(dims[1:], cuts, strict=True):
            if cut:
                layout.append(size)
            else:
                layout[-1] *= size
        yield tuple(layout)
