"""Sharding rules: which dims of each leaf of a train state are sharded over which mesh axes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.tree import PathPatterns, PyTree, leaf_names, path_name
from zero_jax.core.variables import MODEL_STATE, model_state_names
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.model_specs import spec_of_each, specs_of
from zero_jax.sharding.spec import Dims, carries, checked_dims, gather_steps, named, steps_by_dim, without

# Preferred are dims whose shards still fill the accelerator's tiles: 128 lanes, 16 sublanes of 2-byte types.
_TILE = (16, 128)
# The reasons of placements, and then those of specs that are the user's own.
PARTLY_SHARDED, ONE_DEVICE = "partly sharded", "data has one device"
_OVERRIDE, _AS_GIVEN = "override", "as given"
_EXPERTS = "along its experts"


# The `rules` of the functions below are those of a `ZeroConfig`: its `min_shard_size`, `param_specs`, `axis_rules`,
# `overrides` and `experts`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafPlacement:
    """The sharding of a leaf when it is sharded over `data`, and the reason for it.

    `pipe` are the axes of pipeline stages that its layers are sharded over whether or not its group is sharded.
    `update_dims` are the dims of its master param and optimizer state, if these are sharded along its layers; the loss
    function reads and reduces shards `dims`. `of_experts` are the axes that shard the experts of a stack.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    dims: Dims
    reason: str
    pipe: tuple[str, ...] = ()
    update_dims: Dims | None = None
    of_experts: tuple[str, ...] = ()

    def along_layers(self, mesh: Mesh, axes: Axes) -> Dims | None:
        """Returns the dims of a stack of layers `[layers, ...]` with as many axes of `data` moved to them as divide.

        A gather takes as many steps as before. None where no axis can move, or where the user says how the leaf is
        sharded over `data`.
        """
        data = [axis for axis in axes.data if mesh.shape[axis] > 1 and axis not in self.pipe]
        is_users = self.reason in (_OVERRIDE, _AS_GIVEN, _EXPERTS)
        if is_users or not all(carries(self.dims[1:], (axis,)) for axis in data):
            return None
        num_steps = len(gather_steps(self.dims, data, mesh))
        for moved in (x for i in range(len(data), 0, -1) for x in itertools.combinations(data, i)):
            dims = steps_by_dim(self.dims, 0, moved)[-1]
            # Only the minor axes of a dim move by an all-to-all.
            are_minor = all(dim[: len(kept)] == kept for dim, kept in zip(self.dims[1:], dims[1:], strict=True))
            is_even = self.shape[0] % axis_size(mesh, dims[0]) == 0
            if are_minor and is_even and len(gather_steps(dims, data, mesh)) <= num_steps:
                return dims
        return None


class _Placer:
    """Applies the rules to leaves on one mesh."""

    def __init__(self, mesh: Mesh, axes: Axes, rules: Any, stacks: frozenset[str] = frozenset()):
        self.mesh, self.axes, self.rules, self.stacks = mesh, axes, rules, stacks
        self.overrides = PathPatterns("overrides", {} if rules.overrides is None else rules.overrides)
        self.experts = PathPatterns("experts", {} if rules.experts is None else {rules.experts: True})

    def place(self, name: str, leaf: Any, spec_dims: Dims | None) -> LeafPlacement:
        """Returns the placement of a leaf: an override by path, else `dims` with `data` added."""
        shape, dtype, pipe, experts = tuple(leaf.shape), leaf.dtype, (), ()
        override = self.overrides.of(name)
        if override is not None:
            dims, reason = self.checked(name, shape, override), _OVERRIDE
        elif jnp.issubdtype(dtype, jax.dtypes.extended):
            dims, reason = ((),) * len(shape), "PRNG keys are not sharded"
        else:
            dims = self.add_pipe(name, shape, spec_dims or ((),) * len(shape))
            pipe = tuple(axis for axis in self.axes.pipe if carries(dims, (axis,)))
            if self.experts.matches(name):
                dims, experts = self.along_experts(name, shape, dims)
            dims, reason = (dims, _EXPERTS) if experts else self.add_data(shape, dims)
        return LeafPlacement(**_described(name, leaf), dims=dims, reason=reason, pipe=pipe, of_experts=experts)

    def place_as(self, name: str, leaf: Any, spec: Any) -> LeafPlacement:
        """Places a leaf for which the user may have given a spec."""
        return self.place(name, leaf, None if spec is None else self.checked(name, tuple(leaf.shape), spec))

    def place_like(self, name: str, leaf: Any, params: Mapping[str, LeafPlacement]) -> LeafPlacement:
        """Places a leaf like the param whose path is the end of the leaf's path, else by its own shape."""
        path, shape = path_of_param(name, params), tuple(leaf.shape)
        if path is None:
            return self.place(name, leaf, None)
        param = params[path]
        num_lead = len(shape) - len(param.shape)
        is_stack = num_lead > 0 and shape[num_lead:] == param.shape  # as the memories of lbfgs
        is_sharded = carries(param.dims, self.axes.data) and not param.pipe
        if shape == param.shape or (is_stack and is_sharded and not self.overrides.matches(name)):
            dims, of_update = (None if x is None else ((),) * num_lead + x for x in (param.dims, param.update_dims))
            return dataclasses.replace(param, **_described(name, leaf), dims=dims, update_dims=of_update)
        # Of a factored state the dims are fewer: the axes of the model stay, `data` is added by its own shape.
        added = [axis for axis in self.axes.data if axis not in param.pipe]
        placed = self.place(name, leaf, _common_dims(without(param.dims, added), param.shape, shape))
        if param.update_dims is None or shape[:1] != param.shape[:1]:
            return placed
        return dataclasses.replace(placed, update_dims=placed.along_layers(self.mesh, self.axes))

    def checked(self, name: str, shape: tuple[int, ...], spec: Any) -> Dims:
        dims = checked_dims(f"leaf {name!r}", spec, shape, self.mesh)
        used = [axis for dim_axes in dims for axis in dim_axes]
        if len(set(used)) < len(used):
            raise ValueError(f"leaf {name!r}: spec {spec} names an axis twice; each axis can shard one dim only")
        for i, dim_axes in enumerate(dims):
            if shape[i] % axis_size(self.mesh, dim_axes):
                raise ValueError(
                    f"leaf {name!r} of shape {shape}: dim {i} is not divisible by the {axis_size(self.mesh, dim_axes)} "
                    f"devices of {dim_axes}; shard another dim or none with PartitionSpec()"
                )
        return dims

    def add_pipe(self, name: str, shape: tuple[int, ...], dims: Dims) -> Dims:
        """Adds the `pipe` axes to the layers of a stack, else to features, if nothing else is said of them."""
        num_stages = self.axes.num_stages(self.mesh)
        if num_stages == 1 or name not in self.stacks or dims[0] or carries(dims, self.axes.data):
            return dims
        dim = 0 if shape[0] % num_stages == 0 else None
        if dim is None and math.prod(shape) >= self.rules.min_shard_size:
            dim = self.best_dim(shape, dims, self.axes.pipe, minor=False, besides=0)
        return dims if dim is None else _with(dims, dim, self.axes.pipe)

    def along_experts(self, name: str, shape: tuple[int, ...], dims: Dims) -> tuple[Dims, tuple[str, ...]]:
        """Shards a stack `[..., experts, d, k]` along its experts, over as many minor axes of `data` as divide these.

        Returns:
          The dims, with the other axes of `data` on other dims, and the axes of the experts; none on one device.
        """
        data = [axis for axis in self.axes.data if self.mesh.shape[axis] > 1 and not carries(dims, (axis,))]
        if len(shape) < 3:
            raise ValueError(f"experts: leaf {name!r} of shape {shape} is no stack [..., experts, d, k]: leave it out")
        num_experts = shape[-3] // axis_size(self.mesh, dims[-3])
        minor = (tuple(data[i:]) for i in range(len(data)))
        own = next((axes for axes in minor if num_experts % axis_size(self.mesh, axes) == 0), ())
        if data and not own:
            raise ValueError(
                f"experts: leaf {name!r} of shape {shape}: {num_experts} experts are not divisible by the "
                f"{self.mesh.shape[data[-1]]} devices of {data[-1]!r}, the last axis of data: make the mesh with "
                "data_layout=(..., n), where n divides them, or leave experts out"
            )
        dims = _with(dims, len(shape) - 3, own)
        # The other axes of `data` go to d or k, as of any leaf.
        others = dataclasses.replace(self.axes, data=tuple(axis for axis in self.axes.data if axis not in own))
        return _Placer(self.mesh, others, self.rules).add_data(shape, dims)[0], own

    def add_data(self, shape: tuple[int, ...], dims: Dims) -> tuple[Dims, str]:
        """Adds the `data` axes to the best dims: all on one dim, else over several; with the reason."""
        of_layers = tuple(axis for axis in self.axes.pipe if carries(dims, (axis,)))
        data = tuple(axis for axis in self.axes.data if self.mesh.shape[axis] > 1 and axis not in of_layers)
        if carries(dims, [axis for axis in self.axes.data if axis not in of_layers]):
            return dims, _AS_GIVEN
        if not data:
            return dims, "layers over pipe" if of_layers else ONE_DEVICE
        if math.prod(shape) < max(self.rules.min_shard_size, 1):
            return dims, f"unsharded: under {self.rules.min_shard_size} elements"
        # The first two axes shard one dim, the others the last (spec.scatter_steps); those of stages are on the last,
        # too, as XLA:TPU reduce-scatters over a part of a torus to the last dim alone.
        stages = tuple(axis for axis in data if axis in self.axes.pipe)
        rest = tuple(axis for axis in data if axis not in stages)
        first, last = rest[:2], (*stages, *rest[2:])
        if first and last:
            best = self.best_dim(shape, dims, first, minor=False)
            other = self.best_dim(shape, dims, last, minor=True, besides=best)
            if best is not None and other is not None:
                return _with(_with(dims, best, first), other, last), "sharded"
        best = self.best_dim(shape, dims, data, minor=len(data) == 1)
        if best is not None:
            return _with(dims, best, data), "sharded"
        placed = []  # no dim divides over all axes: each axis by itself, the largest first
        for axis in sorted(data, key=lambda axis: -self.mesh.shape[axis]):
            best = self.best_dim(shape, dims, (axis,), minor=True)
            if best is not None:
                dims, placed = _with(dims, best, (axis,)), [*placed, axis]
        size = axis_size(self.mesh, data)
        if len(placed) == len(data):
            return dims, "sharded over several dims"
        if placed:
            return dims, f"{PARTLY_SHARDED}: no dims divisible by all of {size} devices"
        reason = f"no dim of {shape} is divisible by {size} devices (make_mesh(data_layout=...) splits them)"
        return dims, f"unsharded: {reason}"

    def best_dim(
        self, shape: tuple[int, ...], dims: Dims, data: Sequence[str], *, minor: bool, besides: int | None = None
    ) -> int | None:
        """Returns the best dim to shard over some axes, the last or (not `minor`) another, or None."""
        size = axis_size(self.mesh, data)
        local = [extent // axis_size(self.mesh, axes) for extent, axes in zip(shape, dims, strict=True)]
        fits = [i for i, extent in enumerate(local) if extent and extent % size == 0 and i != besides]

        def score(i: int) -> tuple[bool, bool, bool, int]:
            # The leading dim of a stack is scanned over, and a scan over a sharded dim needs an early gather.
            stacked = i == 0 and _is_stack(shape)
            from_last = len(shape) - 1 - i
            aligned = from_last > 1 or (local[i] // size) % _TILE[1 - from_last] == 0
            return (not stacked, aligned, (from_last == 0) == minor, local[i])

        return max(fits, key=score, default=None)


def _described(name: str, leaf: Any) -> dict[str, Any]:
    """Returns the fields of the placement of a leaf that say what it is."""
    shape, dtype = tuple(leaf.shape), leaf.dtype
    return {"path": name, "shape": shape, "dtype": str(dtype), "num_bytes": math.prod(shape) * dtype.itemsize}


def path_of_param(name: str, params: Collection[str]) -> str | None:
    """Returns the path of a param that is the end of a leaf's path; None if there is none."""
    parts = name.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts) + 1))
    return next((end for end in ends if end in params), None)


def _with(dims: Dims, i: int, axes: Sequence[str]) -> Dims:
    return (*dims[:i], (*dims[i], *axes), *dims[i + 1 :])


def place_params(params: PyTree, *, mesh: Mesh, axes: Axes, rules: Any) -> PyTree:
    """Returns a `LeafPlacement` for each param (arrays or `ShapeDtypeStruct`s), with its sharding over `data`."""
    names, (leaves, tree), specs = leaf_names(params), jax.tree.flatten(params), rules.param_specs
    placer = _Placer(mesh, axes, rules, _stacks(params, names, axes))
    placer.experts.check_matched(names)
    if of_model_state := _model_state_patterns(specs):
        specs = {pattern: spec for pattern, spec in specs.items() if pattern not in of_model_state} or None
    of_each = user_specs(params, specs if specs is not None else _carried(params, mesh, axes, rules))
    return tree.unflatten(map(placer.place_as, names, leaves, of_each))


def _stacks(tree: PyTree, names: Sequence[str], axes: Axes) -> frozenset[str]:
    """Returns the paths of the leaves that are stacks of layers, where a mesh has stages for them."""
    shapes = map(np.shape, jax.tree.leaves(tree))
    return stacked_layers(dict(zip(names, shapes, strict=True))) if axes.pipe else frozenset()


def _is_stack(shape: Sequence[int]) -> bool:
    """Tells whether the leading dim of a shape counts layers, rather than features, by how small it is.

    Kernels `[features, heads, head_dim]` of attention are no stacks: there are more features than in one head.
    """
    rest = max(shape[1:], default=0)
    return 2 * rest > shape[0] if len(shape) >= 3 else len(shape) == 2 and 4 * shape[0] <= rest


def stacked_layers(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """Returns the paths of the leaves that are stacks of layers: the leaves of a subtree have the same leading dim.

    One of them has to look like a stack, and to be one of several or to have three dims. Whether a model scans over
    them is known only when its loss is traced. A leaf that is taken for a stack, or is not taken for one, costs a
    movement of it in each step of a pipeline, never a wrong result.
    """
    # For `a/b/c` the subtrees "", "a", "a/b" and "a/b/c", which is the leaf.
    subtrees = {name: ["", *itertools.accumulate(name.split("/"), "{}/{}".format)] for name in shapes}
    members: dict[str, list[Sequence[int]]] = {}
    for name, around in subtrees.items():
        for subtree in around:
            members.setdefault(subtree, []).append(shapes[name])
    leading = {subtree: {tuple(shape[:1]) for shape in group} for subtree, group in members.items()}
    stacks: set[str] = set()
    for name, around in subtrees.items():
        # The largest subtree around it whose leaves all have one leading dim.
        group = members[next(subtree for subtree in around if len(leading[subtree]) == 1)]
        if any(_is_stack(shape) and (len(shape) > 2 or len(group) > 1) for shape in group):
            stacks.add(name)
    return frozenset(stacks)


def _carried(params: PyTree, mesh: Mesh, axes: Axes, rules: Any) -> PyTree:
    """Returns the specs in the params' own metadata, or None."""
    specs = specs_of(params, rules.axis_rules, mesh=mesh, batch_axes=axes.batch)
    if specs is None and rules.axis_rules:
        raise ValueError(
            "axis_rules were given, but no param carries names of its dims (as those of nn.with_partitioning do): "
            "say how params are sharded with param_specs, or leave axis_rules out"
        )
    return specs


def user_specs(params: PyTree, specs: PyTree) -> list[Any]:
    """Returns the user's spec of each param, or None, from `ZeroConfig.param_specs`."""
    if isinstance(specs, Mapping) and specs and all(isinstance(v, PartitionSpec) for v in specs.values()):
        names = leaf_names(params)
        if set(specs) != {name.split("/")[0] for name in names}:  # no prefix of the tree: patterns of paths
            patterns = PathPatterns("param_specs", specs)
            patterns.check_matched(sorted(names))
            return [patterns.of(name) for name in names]
    return spec_of_each(params, specs, what="param_specs is")


def place_like_params(tree: PyTree, placements: PyTree, *, mesh: Mesh, axes: Axes, rules: Any) -> PyTree:
    """Returns a `LeafPlacement` for each leaf of a tree derived from the params: optimizer state, EMA copies.

    A leaf whose path ends in a param's path and whose shape is the param's has the param's sharding; so has a stack of
    such leaves along its last dims. A leaf without some dims of the param (adafactor's rows and columns) keeps the
    model's axes on the others; any other leaf (counters) is sharded by its own shape. `optax.tree_map_params` gives
    wrong specs for factored states and raises on some optimizers.
    """
    placer, by_path = _Placer(mesh, axes, rules), {x.path: x for x in jax.tree.leaves(placements)}
    place = lambda path, leaf: placer.place_like(path_name(path), leaf, by_path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(place, tree)


def place_model_state(model_state: PyTree, placements: PyTree, *, mesh: Mesh, axes: Axes, rules: Any) -> PyTree:
    """Returns a `LeafPlacement` for each leaf of model state, with its sharding over `data`.

    In this order: an override or a pattern of `param_specs` for its path `model_state/...`, the spec in its own
    metadata, the placement of the param of the same path and shape (a target network), its own shape.
    """
    names = model_state_names(model_state)
    placer = _Placer(mesh, axes, rules, _stacks(model_state, names, axes))
    by_path = {placement.path: placement for placement in jax.tree.leaves(placements)}
    patterns = PathPatterns("param_specs", _model_state_patterns(rules.param_specs))
    patterns.check_matched(names)
    carried = specs_of(model_state, rules.axis_rules, mesh=mesh, batch_axes=axes.batch)
    tree = jax.tree.structure(model_state)
    own = [None] * tree.num_leaves if carried is None else tree.flatten_up_to(carried)

    def place(name: str, leaf: Any, own: PartitionSpec | None) -> LeafPlacement:
        spec = patterns.of(name, own if own is not None and any(own) else None)
        is_given = spec is not None or placer.overrides.matches(name)
        return placer.place_as(name, leaf, spec) if is_given else placer.place_like(name, leaf, by_path)

    return tree.unflatten([place(*leaf) for leaf in zip(names, jax.tree.leaves(model_state), own, strict=True)])


def _model_state_patterns(specs: PyTree) -> dict[str, Any]:
    if not isinstance(specs, Mapping):
        return {}
    return {pattern: spec for pattern, spec in specs.items() if str(pattern).startswith(f"{MODEL_STATE}/")}


def _common_dims(dims: Dims, shape: tuple[int, ...], smaller: tuple[int, ...]) -> Dims | None:
    """Returns the axes of the param's dims that a leaf of fewer dims has too, most axes first, or None."""
    choices = itertools.combinations(range(len(shape)), len(smaller)) if len(smaller) < len(shape) else ()
    fits = [choice for choice in choices if tuple(shape[i] for i in choice) == smaller]
    best = max(fits, key=lambda choice: sum(len(dims[i]) for i in choice), default=None)
    return None if best is None else tuple(dims[i] for i in best)


def to_shardings(placements: PyTree, *, mesh: Mesh, axes: Axes, over: Sequence[str], of_update: bool = False) -> PyTree:
    """Converts placements to `NamedSharding`s; of the axes of `data`, with those of `over` and of layers alone.

    They are those of master params and optimizer state if `of_update`.
    """

    @functools.cache  # leaves share a few specs, and making a `NamedSharding` takes time
    def sharding(dims: Dims, pipe: tuple[str, ...]) -> NamedSharding:
        return named(mesh, without(dims, [axis for axis in axes.data if axis not in (*over, *pipe)]))

    return jax.tree.map(lambda leaf: sharding((of_update and leaf.update_dims) or leaf.dims, leaf.pipe), placements)
