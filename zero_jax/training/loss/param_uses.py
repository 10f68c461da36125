"""How params are used in the traced gradient of a loss: where they are gathered, and what else moves of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from zero_jax.dims import Move
from zero_jax.hlo import gathered_path
from zero_jax.program.jaxprs import inner_jaxprs, name_stack, open_jaxpr, source_line
from zero_jax.program.subcalls import subcall
from zero_jax.sharding.chains import SENT, reshard_p
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import dims_of, num_shards
from zero_jax.training.state.placement import Placement


@dataclasses.dataclass(frozen=True)
class ParamUses:
    """How a param that is sharded, or whose gradient is, is used in a step."""

    gathered_in: tuple[str, ...] = ()  # the phases, `forward` and `backward`
    moves: tuple[Move, ...] = ()  # of rows that are looked up in it, not gathered, and of gradients of its copies
    is_scattered: bool = False  # whether its gradient is reduce-scattered, and not only moved so


def uses_of_params(jaxpr: Any, placement: Placement) -> dict[str, ParamUses]:
    """Returns how params are used, by the jaxpr of loss and gradient of a microbatch."""
    eqns: dict[str, list[tuple[Any, str, int]]] = {}
    for eqn, stack, times in reshards(jaxpr, times=placement.grad_plan.num_microbatches):
        path = gathered_path(stack)
        if path is not None and eqn.params["forward"].shardings and SENT not in stack:
            eqns.setdefault(path, []).append((eqn, phase_of(stack), times))
    num_axes = sum(placement.mesh.shape[axis] > 1 for axis in placement.axes.data)
    is_whole = "params" not in placement.groups
    found = {path: _uses(of_param, num_axes=num_axes, is_whole=is_whole) for path, of_param in eqns.items()}
    return {path: uses for path, uses in found.items() if uses is not None}


def _uses(eqns: Sequence[tuple[Any, str, int]], *, num_axes: int, is_whole: bool) -> ParamUses | None:
    """Returns how a param is used by the equations that move it, its rows and its gradients over some axes.

    Of one that is stored whole, what moves of its gradient if that is of rows that move, else None.
    """
    phases = {phase for eqn, phase, _ in eqns if eqn.params["forward"].barrier}  # of gathers
    moved = [each for each in eqns if not each[0].params["forward"].barrier]
    chains = [(eqn.params["forward"].shardings, eqn.params["backward"]) for eqn, *_ in moved]
    # Rows go the same way back. A copy of each device's own is gathered, and its gradient moves axis by axis.
    num_of_copies = sum(not back.barrier and 0 < len(back.shardings) < len(there) for there, back in chains)
    if is_whole:
        # Cotangents of rows have a way back, and a whole gradient has none.
        num_of_rows = sum(len(there) == len(back.shardings) > 1 for there, back in chains)
        if not num_of_rows:
            return None
        # What each of them becomes moves to the param's shards once more, and so do the gradient of copies of each
        # device's own, after it moved axis by axis, and the sum of all gradients.
        num_gradients = sum(not back.shardings for _, back in chains) - num_of_rows - 1
        is_scattered = num_gradients * num_axes > num_of_copies
    else:
        num_gradients = sum(back.barrier for _, back in chains)
        is_scattered = bool(phases) and (num_of_copies == 0 or num_gradients * num_axes > num_of_copies)
    return ParamUses(
        gathered_in=tuple(phase for phase in ("forward", "backward") if phase in phases),
        moves=tuple(move for eqn, phase, times in moved for move in _steps(eqn, phase=phase, times=times)),
        is_scattered=is_scattered,
    )


def _steps(eqn: Any, *, phase: str, times: int) -> Iterator[Move]:
    """Yields the all-to-alls of a chain of shardings, each of which moves axes from some dims to others."""
    (aval,), shardings = (var.aval for var in eqn.outvars), eqn.params["forward"].shardings
    for before, after in itertools.pairwise(shardings):
        dims = [dims_of(sharding, aval.ndim) for sharding in (before, after)]
        axes = tuple(axis for old, new in zip(*dims, strict=True) for axis in new if axis not in old)
        if sorted(itertools.chain(*dims[0])) != sorted(itertools.chain(*dims[1])) or not axes:
            continue
        sent = aval.size * aval.dtype.itemsize / num_shards(after.mesh, dims[1]) * (1 - 1 / axis_size(after.mesh, axes))
        fields = {"kind": "all-to-all", "axes": axes, "dtype": str(aval.dtype), "phase": phase}
        yield Move(**fields, sent_bytes=sent, times=times, source=source_line(eqn))


def reshards(jaxpr: Any, stack: str = "", times: int = 1) -> Iterator[tuple[Any, str, int]]:
    """Yields the equations that move params, activations and gradients, with their name stacks and times."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        of_eqn, sub = f"{stack}/{name_stack(eqn)}", subcall(eqn)
        if eqn.primitive is reshard_p:
            yield eqn, of_eqn, times
        for inner in inner_jaxprs(eqn):
            yield from reshards(inner, of_eqn, times * (1 if sub is None else sub.length))


def phase_of(stack: str) -> str:
    """Returns the phase of an equation by its name stack, `forward` or `backward`."""
    return "backward" if "transpose(" in stack else "forward"
