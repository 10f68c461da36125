"""What the values of a block cost: bytes where they are kept, seconds of the backward pass where they are not.

The gradient of a block is traced once, without recomputation. What its backward pass takes with some values kept is
read from that trace: these values become inputs of it, what is still needed for the gradients runs, and `kernels` and
the `Roofline` say for how long.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from zero_jax.attention import RESIDUALS
from zero_jax.dims import ALIASES, ELEMENTWISE, ValueSharding, is_activation, propagate_shardings
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened, trace_flat
from zero_jax.sharding.topology import HARDWARE, hardware_of
from zero_jax.transforms.kernels import kernels
from zero_jax.transforms.remat.regions import RematRegion
from zero_jax.transforms.remat.values import Mark, all_values, is_large, place_of
from zero_jax.transforms.roofline import Roofline

_Shardings = Mapping[Any, ValueSharding]
_IN_PLACE = ELEMENTWISE - {"add", "add_any", "sub"}
_NAME = "zero_value:"  # what begins the names of the values of the trace


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCosts:
    """The costs of a block of which there are several: all figures are of all of them together, on a device."""

    region: RematRegion  # the block
    times: int  # how often it runs in a forward pass
    roofline: Roofline  # estimates the seconds of kernels
    _known_seconds: dict[frozenset[str], float] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def values(self) -> dict[str, float]:
        """The bytes of the values that could be kept, by label: large floating ones that are no mere copies."""
        region, sizes = self.region, dict[str, float]()
        known = all_values(region.known)
        for eqn in region.jaxpr.eqns:
            made = [var for var in eqn.outvars if var in known and is_large(var.aval)]
            if made and (eqn.primitive.name not in ALIASES or eqn.primitive.name == "name"):
                label = region.labels[made[0]]
                sizes[label] = sizes.get(label, 0.0) + sum(map(self._bytes, made))
        return sizes

    @property
    def is_scanned(self) -> bool:
        """Whether the blocks are in each turn of a scan."""
        return self.region.is_scanned

    @property
    def input_bytes(self) -> float:
        """The bytes of the inputs, which are kept in any case; what is alive beside the block is not among them."""
        marks = zip(self.region.jaxpr.invars, self.region.marks, strict=True)
        return sum(self._bytes(var) for var, mark in marks if mark.kind == "value" and not mark.stays_alive)

    @functools.cached_property
    def lines(self) -> dict[str, str]:
        """For each value the line of the model that makes it."""
        eqns = [eqn for eqn in self.region.jaxpr.eqns if eqn.outvars]
        return {self.region.labels[eqn.outvars[0]]: place_of(eqn) for eqn in reversed(eqns)}

    @functools.cached_property
    def forward_seconds(self) -> float:
        """The seconds of the forward pass."""
        return self._seconds(self.region.jaxpr, self._shardings)

    def backward_seconds(self, kept: Collection[str]) -> float:
        """Returns the seconds of the backward pass that has the inputs and some values, and computes the others."""
        key = frozenset(label for label in kept if label in self.values)
        if key not in self._known_seconds:
            jaxpr, shardings, named = self._gradient
            kept_vars = [var for label in key for var in named.get(label, ())]
            eqns = [eqn for eqn in jaxpr.eqns if not (eqn.outvars and eqn.outvars[0] in kept_vars)]
            with_kept = jaxpr.replace(invars=[*jaxpr.invars, *kept_vars], eqns=eqns)
            self._known_seconds[key] = self._seconds(jaxprs.without_dead_code(with_kept), shardings)
        return self._known_seconds[key]

    def keeping_seconds(self, label: str) -> float:
        """Returns the seconds of writing a value, of a loop with its slices; what reads it counts elsewhere."""
        num_bytes, is_copied = self.values.get(label, 0.0), self.is_scanned and label not in self._written_once
        return self.roofline.kept_seconds(num_bytes) if is_copied else self.roofline.moved_seconds(num_bytes)

    @functools.cached_property
    def _written_once(self) -> frozenset[str]:
        """The products that elementwise work alone reads: kernels write and read them in the stack itself.

        Those that are added to something are not among them: kernels make the sum, and would write both.
        """
        jaxpr, labels = self.region.jaxpr, self.region.labels
        others = [x for x in jaxpr.eqns if not (x.primitive.name in _IN_PLACE or is_activation(x))]
        read = {id(atom) for atom in (*(atom for eqn in others for atom in eqn.invars), *jaxpr.outvars)}
        products = [x.outvars[0] for x in jaxpr.eqns if x.primitive.name == "dot_general"]
        return frozenset(labels[var] for var in products if id(var) not in read)

    @functools.cached_property
    def _gradient(self) -> tuple[Any, _Shardings, dict[str, list[Any]]]:
        """The gradient as a flat jaxpr of inputs and cotangents, the shardings, and the variables of each label."""
        region = self.region
        outs = [i for i, atom in enumerate(region.jaxpr.outvars) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
        avals, num_inputs = [var.aval for var in region.jaxpr.invars], len(region.jaxpr.invars)
        candidates = self.values.keys()

        def equation(eqn: Any, values: list[Any]) -> list[Any]:
            results = jaxprs.bind(eqn, values)
            label = region.labels[eqn.outvars[0]] if eqn.outvars else ""
            if label not in candidates or label == RESIDUALS or eqn.primitive.name == "name":  # these have names
                return results
            return [checkpoint_name(x, _NAME + label) for x in results]

        def forward(*inputs: Any) -> list[Any]:
            results = evaluate(region.jaxpr, region.consts, inputs, equation)
            return [results[i] for i in outs]

        def gradient(*arrays: Any) -> list[Any]:
            _, pull = jax.vjp(forward, *arrays[:num_inputs])
            return [x for x in pull([*arrays[num_inputs:]]) if x.dtype != jax.dtypes.float0]

        cotangents = [region.jaxpr.outvars[i] for i in outs]
        traced = trace_flat(gradient, [*avals, *(atom.aval for atom in cotangents)])
        jaxpr, _ = jaxprs.open_jaxpr(flattened(traced, kinds=("call", "remat")))
        marks = [*region.marks, *(Mark("value", region.known.mark(atom).dims) for atom in cotangents)]
        named: dict[str, list[Any]] = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "name":
                named.setdefault(eqn.params["name"].removeprefix(_NAME), []).extend(eqn.outvars)
        return jaxpr, self._propagated(jaxpr, marks), named

    @functools.cached_property
    def _shardings(self) -> _Shardings:
        return self._propagated(self.region.jaxpr, self.region.marks)

    def _propagated(self, jaxpr: Any, marks: Sequence[Mark]) -> _Shardings:
        """Returns the shardings of the values of a jaxpr, from the marks of its inputs."""
        setting = self.region.setting
        inputs = [setting.sharding_of(var.aval, mark) for var, mark in zip(jaxpr.invars, marks, strict=True)]
        return propagate_shardings(jaxpr, inputs, sizes=dict(setting.mesh.shape), counted=()).values

    def _bytes(self, var: Any) -> float:
        num_shards = math.prod(self.region.setting.mesh.shape[axis] for axis in self._shardings[var].axes)
        return self.times * var.aval.size * var.aval.dtype.itemsize / num_shards

    def _seconds(self, jaxpr: Any, shardings: _Shardings) -> float:
        setting = self.region.setting
        found = kernels(jaxpr, shardings, sizes=dict(setting.mesh.shape), batch_axes=setting.axes.batch)
        return self.times * self.roofline.compute_seconds(found, 1)


def costs_of(regions: Sequence[tuple[RematRegion, int]], mesh: Mesh) -> tuple[BlockCosts, ...]:
    """Returns the costs of regions, each with how often it runs, equal ones together.

    Devices whose figures are not known count as v5p.
    """
    roofline = Roofline(hardware_of(mesh.devices.flat[0]) or HARDWARE["v5p"], overlaps=True)
    classes: dict[Any, tuple[RematRegion, int]] = {}
    for region, times in regions:
        key = jaxprs.jaxpr_key(region.jaxpr), *region.marks, region.is_scanned
        first, before = classes.get(key, (region, 0))
        classes[key] = first, before + times
    return tuple(BlockCosts(region, times, roofline) for region, times in classes.values())
