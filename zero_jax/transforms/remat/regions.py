"""A region of a function that is recomputed: what of it is kept for the backward pass, and where."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.interpreters import batching, partial_eval
from jax.sharding import Mesh

from zero_jax.attention import RESIDUALS
from zero_jax.dims import ValueSharding
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import define_tangents, is_literal, new_primitive
from zero_jax.sharding.chains import Chain, lifted, reshard, reshard_p
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import named_along
from zero_jax.transforms.remat.policies import Remat
from zero_jax.transforms.remat.values import (
    ATTENTION,
    INPUT,
    PRODUCTS,
    Mark,
    MarkedValues,
    all_values,
    attention_cores,
    is_large,
    labels_of,
    products_with_weights,
    selects,
)

# `join` is the identity on a value of which a copy is kept: `x, kept -> x`. Under `jax.checkpoint` the forward pass
# uses `x`, and the recomputation makes it again from `kept`. Without it the forward pass would use the copy, too, and
# XLA would move that there and back: JAX puts a `reduce_precision` on what is saved, and no move cancels through it.

join_p = new_primitive("zero_join")


def keep(x: jax.Array, *, name: str, shard: Chain, unshard: Chain) -> jax.Array:
    """Returns `x`, with a copy for a remat policy to keep by its name; the cotangent of `x` passes as it is.

    The copy is moved through `shard` to where it is kept, and through `unshard` to become `x` again.
    """
    kept = checkpoint_name(reshard(x, forward=shard, backward=Chain()), name)
    return join_p.bind(x, kept, unshard=unshard)


def _join_partial_eval(
    _: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any | None, Any, list[bool], list[bool], list[Any]]:
    """Splits an equation into what the forward pass runs and what the recomputation does."""
    # As JAX asks of a rule: the equation of the forward pass and that of the recomputation, which of its results only
    # the recomputation has, which the recomputation makes, and what this reads that is not there yet.
    missing = [v for v, is_there in zip(eqn.invars, instantiated, strict=True) if not (is_there or is_literal(v))]
    if any(unknown):
        return None, eqn, [True], [True], missing
    _, kept = eqn.invars
    params = {"forward": eqn.params["unshard"], "backward": Chain()}
    made_again = eqn.replace(primitive=reshard_p, invars=[kept], params=params)
    return eqn, made_again, [False], [True], [v for v in missing if v is kept]


def _join_batch(args: Any, dims: Any, *, unshard: Chain) -> tuple[Any, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    x, kept = (batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
    return join_p.bind(x, kept, unshard=lifted(unshard)), 0


define_tangents(join_p, join_p.bind, lambda dot, *_, **__: dot)
batching.primitive_batchers[join_p] = _join_batch
partial_eval.partial_eval_jaxpr_custom_rules[join_p] = _join_partial_eval


def keep_names(
    *, on_device: Sequence[str] = (), on_host: Sequence[str] = (), otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Returns a remat policy that keeps values by their names, between the passes in host memory where it says so.

    `otherwise` is the policy for everything else; None keeps nothing else.
    """
    named = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(on_device),
        names_which_can_be_offloaded=list(on_host),
        offload_src="device",
        offload_dst="pinned_host",
    )
    ours = {*on_device, *on_host}

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in args if hasattr(aval, "dtype")):
            return False  # jax.checkpoint rounds what it keeps by `reduce_precision`, which takes no complex numbers
        if otherwise is None or (primitive.name == "name" and params["name"] in ours):
            return named(primitive, *args, **params)
        return otherwise(primitive, *args, **params)

    return policy


def is_kept(policy: Callable[..., Any] | None, eqn: Any) -> bool:
    """Tells whether a remat policy keeps the results of an equation on the device; what it offloads it keeps itself."""
    if policy is None:
        return False
    choice = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return choice if isinstance(choice, bool) else type(choice).__name__ == "SaveableType"


# The names of what is kept, by where.
_NAMES = {"device": "zero_kept", "sharded": "zero_residual_shard", "offloaded": "zero_residual"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematSetting:
    """What a transform is to do, and for which mesh; `batch_sizes` tell the dims of examples."""

    remat: Remat
    mesh: Mesh
    axes: Axes
    batch_sizes: frozenset[int]

    @property
    def num_shards(self) -> int:
        """Devices along the axes of the model."""
        return axis_size(self.mesh, self.axes.model)

    def sharding_of(self, aval: Any, mark: Mark) -> ValueSharding:
        """Returns the sharding of an input of a block: as it is marked, and examples over the axes of the batch."""
        shape = getattr(aval, "shape", ())
        dims, of_examples = list(mark.dims or [()] * len(shape)), []
        if mark.kind == "value":
            of_examples = [i for i, size in enumerate(shape) if size in self.batch_sizes]
            # Examples may be merged with the dim that follows them.
            of_examples += [0] if shape and any(size and shape[0] % size == 0 for size in self.batch_sizes) else []
        if of_examples and shape[of_examples[0]] % axis_size(self.mesh, self.axes.batch) == 0:
            dims[of_examples[0]] = (*self.axes.batch, *dims[of_examples[0]])
        return ValueSharding(dims=tuple(dims), varies=mark.kind == "value")

    def marked(self, jaxpr: Any, marks: Sequence[Mark]) -> MarkedValues:
        """Returns what is known of the values of an open jaxpr, from the marks of its inputs."""
        return MarkedValues(jaxpr, marks, mesh=self.mesh, model=self.axes.model)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RematRegion:
    """A flat jaxpr that is to be recomputed."""

    setting: RematSetting  # what to do
    jaxpr: Any  # the open jaxpr
    consts: Sequence[Any]  # its constants
    # What is known of its inputs; what stays alive beside the region is not kept elsewhere
    marks: Sequence[Mark]
    kind: str  # what it is to a user
    is_scanned: bool = False  # whether it is in each turn of a scan over layers
    prevent_cse: bool = True  # as of `jax.checkpoint`
    own_policy: Callable[..., Any] | None = None  # that of the model's `jax.checkpoint` that this is, with `own`

    @functools.cached_property
    def known(self) -> MarkedValues:
        """What is known of its values; inputs that the region itself shards over the model are marked so."""
        known = self.setting.marked(self.jaxpr, self.marks)
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name in ("sharding_constraint", "zero_reshard"):
                (var,), dims = eqn.invars, known.mark(eqn.outvars[0]).dims
                if dims is not None and known.mark(var).dims is None:
                    known.marks[var] = dataclasses.replace(known.marks[var], dims=dims)
        return known

    @functools.cached_property
    def places(self) -> dict[Any, str]:
        """What the policy keeps of what the region makes, each with its place of `Remat.residuals`."""
        if self.setting.remat.policy != "values":
            return dict.fromkeys(_KEEPS[self.setting.remat.policy](self), self.setting.remat.residuals)
        kept = {var: self.chosen_place(label) for var, label in self.labels.items()}
        kinds = {PRODUCTS: products_with_weights(self.known), ATTENTION: self.cores[1]}
        kept |= {var: place for kind, found in kinds.items() if (place := self.chosen_place(kind)) for var in found}
        known = all_values(self.known) - self.fused  # what fused attention makes has a name of its own
        return {var: place for var, place in kept.items() if place and var in known}

    def chosen_place(self, label: str) -> str:
        """Returns where the policy `values` keeps the values of a label, '' if it does not."""
        remat = self.setting.remat
        of_each = {"offloaded": remat.offload, "device": remat.save}
        return next((place for place, chosen in of_each.items() if any(selects(x, label) for x in chosen)), "")

    @functools.cached_property
    def labels(self) -> dict[Any, str]:
        """What each value is called that the region makes."""
        return labels_of(self.jaxpr)

    def made_by(self, is_chosen: Callable[[Any], bool]) -> set[Any]:
        """Returns what the equations that are chosen make."""
        return {var for eqn in self.jaxpr.eqns if is_chosen(eqn) for var in eqn.outvars}

    def around_attention(self) -> set[Any]:
        """Returns what the policy `attention` keeps."""
        inner, results = self.cores
        if self.setting.remat.residuals == "device":
            return all_values(self.known) - inner - self.fused
        # What is between the products is cheap to compute again, and would have to be gathered otherwise.
        return (products_with_weights(self.known) | results) - inner

    @functools.cached_property
    def fused(self) -> set[Any]:
        """What fused attention makes, with the log-sum-exps: it has a name of its own (`RESIDUALS`)."""
        return {var for eqn in self.jaxpr.eqns if eqn.primitive.name == "zero_attention" for var in eqn.outvars}

    @functools.cached_property
    def cores(self) -> tuple[set[Any], set[Any]]:
        """What is within the cores of attention in the region, and their results."""
        return attention_cores(self.known)

    @property
    def policy(self) -> Callable[..., Any] | None:
        """The policy for `jax.checkpoint`."""
        remat = self.setting.remat
        named = {place: [name] for place, name in _NAMES.items()}
        # Names and products may also be in loops within the region, where nothing is placed.
        fused = [RESIDUALS] if remat.policy in ("dots", "attention") else []
        named[remat.residuals] += [*remat.names, *fused]
        for place, values in (("device", remat.save), ("offloaded", remat.offload)):
            named[place] += [RESIDUALS if value == ATTENTION else value for value in values]
        ours = [*named["device"], *named["sharded"]]
        return keep_names(on_device=ours, on_host=named["offloaded"], otherwise=self.own_policy)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Evaluates the region with its residuals named and placed."""
        inputs = [
            self.place(var, array, self.place_of_inputs) if not mark.stays_alive and self.is_moved(var) else array
            for var, array, mark in zip(self.jaxpr.invars, arrays, self.marks, strict=True)
        ]

        def equation(eqn: Any, values: list[Any]) -> list[Any]:
            outs = zip(eqn.outvars, jaxprs.bind(eqn, values), strict=True)
            return [self.place(var, out, self.places[var]) if var in self.places else out for var, out in outs]

        return evaluate(self.jaxpr, self.consts, inputs, equation)

    def plain(self, *arrays: Any) -> list[Any]:
        """Evaluates the region without recomputation."""
        return evaluate(self.jaxpr, self.consts, arrays)

    def not_sharded(self) -> list[str]:
        """Says for each input that would be kept sharded, but is not, why."""
        if self.setting.remat.residuals != "sharded":
            return []
        inputs = [var for var, mark in zip(self.jaxpr.invars, self.marks, strict=True) if not mark.stays_alive]
        large = [var for var in inputs if self.known.kind(var) == "value" and is_large(var.aval)]
        sharded = {var for var in large if self.known.marks[var].dims is not None}
        return [
            "already sharded over `model`" if var in sharded else f"no dim of {var.aval.shape} divides"
            for var in large
            if not self.is_moved(var)
        ]

    def is_moved(self, var: Any) -> bool:
        """Tells whether an input is worth keeping elsewhere than where it is."""
        place = self.place_of_inputs
        if place == "device" or self.known.kind(var) != "value" or not is_large(var.aval):
            return False
        return place == "offloaded" or self.dim(var) is not None

    @property
    def place_of_inputs(self) -> str:
        """Where the inputs of the region are kept."""
        return "offloaded" if INPUT in self.setting.remat.offload else self.setting.remat.residuals

    def dim(self, var: Any) -> int | None:
        """Returns the dim that a residual is sharded on over the model: the first that divides and is no batch dim."""
        num_shards, shape = self.setting.num_shards, var.aval.shape
        if num_shards == 1 or self.known.marks[var].dims is not None:
            return None
        batch = {i for i, size in enumerate(shape) if size in self.setting.batch_sizes} or {0}
        return next((i for i, size in enumerate(shape) if i not in batch and size and size % num_shards == 0), None)

    def place(self, var: Any, array: Any, place: str) -> Any:
        """Names a value for the policy to keep, and says where."""
        if place == "device" or not is_large(var.aval):
            return checkpoint_name(array, _NAMES["device"])
        dim = self.dim(var)
        if dim is None:
            return checkpoint_name(array, _NAMES["offloaded" if place == "offloaded" else "device"])
        # Every other dim stays as it is. Both sides need both pins: without them the partitioner gathers the copy, or
        # shards what is computed like the copy. It takes the last of a chain of pins for all that uses the value, so
        # the value has a pin of its own, and a barrier ends the chain.
        shard, unsharded = (
            named_along(self.setting.mesh, array.ndim, {dim: axes}) for axes in (self.setting.axes.model, ())
        )
        array = reshard(array, forward=Chain((unsharded,)), backward=Chain((unsharded,)))
        return keep(array, name=_NAMES[place], shard=Chain((shard,), barrier=True), unshard=Chain((shard, unsharded)))


# What each policy keeps of what a region makes, all of it in the place of `Remat.residuals`. The values of policy
# `values` have places of their own (`RematRegion.places`); `none` makes no regions, and `auto` becomes another policy.
_KEEPS: Mapping[str, Callable[[RematRegion], set[Any]]] = {
    "own": lambda region: region.made_by(lambda eqn: is_kept(region.own_policy, eqn)),
    "full": lambda _: set(),
    "dots": lambda region: products_with_weights(region.known),
    "attention": RematRegion.around_attention,
    "names": lambda region: region.made_by(
        lambda eqn: eqn.primitive.name == "name" and eqn.params["name"] in region.setting.remat.names
    ),
}
