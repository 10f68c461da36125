"""LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353) on any loss function: adapters by path rule, the rest frozen."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zero_jax.core.device_put import to_device
from zero_jax.core.field_checks import brief, check_fields
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree, key_shape, leaf_names, path_name, shown
from zero_jax.core.variables import MODEL_STATE, Variables
from zero_jax.finetuning.quantization import (
    DEFAULT_BLOCK_SIZE,
    QuantizedWeight,
    built,
    dequantize,
    quantize,
    quantized_dims,
)
from zero_jax.finetuning.targets import Target, check_rules, find_targets, matching
from zero_jax.libraries import with_parameters
from zero_jax.program.walk import as_it_is
from zero_jax.sharding.precision import wide
from zero_jax.sharding.rules import user_specs
from zero_jax.sharding.spec import Dims, checked_dims, partition_spec
from zero_jax.training import LossFunction, MeshLoss, TrainState, key_parameter
from zero_jax.transforms import AdaptedReport, Weight, WeightUse, evaluate_adapted

_BASE = "base"  # of the model state: the frozen params
_OWN = "model_state"  # and the model's own
_ALPHA = "alpha="  # begins the name of a leaf


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Trained:
    """Stands in the frozen params for a leaf that is trained itself."""


@brief
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters for the leaves that rules choose: `W + alpha / rank * A @ B`, with `W` frozen.

    `init` makes `zero.Variables`: the params are the adapters, the model state is the frozen base. So the optimizer has
    no state for the base, no gradient of it is computed or sent, and at stage 3 it is sharded and gathered on use.

    Attributes:
      rules: patterns of leaf paths (`layers/attention/*`, where `*` also matches `/`), or a dict from patterns to the
        dims of such leaves: `i` for in, `o` for out, `s` for a leading dim of a stack of weights. `sio` is a stack
        `[layers, in, out]`, `ioo` a kernel `[features, heads, head_dim]`, `iiio` one of a convolution. Leaves of two
        dims are `io` without that; a pattern with a `*` passes over leaves of fewer dims.
      rank: the rank of the update, the `r` of LoRA.
      alpha: the update is scaled by `alpha / rank`.
      dora: also learn the norm of each output (weight-decomposed low-rank adaptation).
      base: how frozen floating leaves are stored: `bfloat16`; `own`, as they come; `int8`, `nf4` or `nf4_double` (NF4
        whose scales are quantized too) for the adapted ones, and bfloat16 for the others.
      train: patterns of leaves that are trained as they are, such as a new head.
      block_size: of quantized leaves, the number of elements along the first side that share a scale.

    Example:
      >>> lora = zero.Lora(rules={"up": "io"}, rank=4)
      >>> adapters = lora.init(state.params, jax.random.key(0))
      >>> {name: x.shape for name, x in adapters.params["up"].items()}
      {'a': (64, 4), 'b': (4, 64)}
    """

    rules: Sequence[str] | Mapping[str, str]
    rank: int = 8
    alpha: float = 16.0
    dora: bool = False
    base: Literal["own", "bfloat16", "int8", "nf4", "nf4_double"] = "bfloat16"
    train: Sequence[str] = ()
    block_size: int = DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        check_rules(self.rules)
        check_fields(self, lowest={"rank": 1, "block_size": 1})
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha!r}: give a positive number, such as twice the rank")
        if isinstance(self.train, str) or not all(isinstance(pattern, str) for pattern in self.train):
            raise ValueError(f"train={shown(self.train)}: give a list of patterns of leaf paths")

    @property
    def scale(self) -> float:
        """The factor of `A @ B`."""
        return self.alpha / self.rank

    @property
    def _alpha_name(self) -> str:
        return f"{_ALPHA}{float(self.alpha)}"

    def targets(self, params: PyTree) -> dict[str, Target]:
        """Returns the leaves that are adapted, by path.

        Args:
          params: arrays or `ShapeDtypeStruct`s.

        Raises:
          ValueError: a rule that matches nothing, or a leaf whose dims it does not decide.
        """
        return find_targets(self.rules, params, trained=self.trained(params))

    def trained(self, params: PyTree) -> list[str]:
        """Returns the paths of the leaves that are trained as they are."""
        return matching("train", self.train, leaf_names(params))

    def init(self, params: PyTree, key: jax.Array) -> Variables:
        """Returns adapters that change nothing yet, as params, and the frozen base, as model state.

        It may be traced: `lambda key: lora.init(init_fn(key), key)` is an `init_fn` whose base is born sharded.

        Args:
          params: the params of the model; or `Variables`, for a model with state of its own.
          key: seeds the adapters.

        Raises:
          ValueError: a rule that matches nothing, or a leaf that cannot be adapted or quantized.
        """
        own = params if isinstance(params, Variables) else Variables(params=params)
        targets, trained = self.targets(own.params), self.trained(own.params)
        adapters: dict[str, Any] = {}

        def split(path: Any, leaf: Any) -> Any:
            name = path_name(path)
            if name in trained:
                adapters[name] = leaf
                return Trained()
            target = targets.get(name)
            stored = self._stored(leaf, target)
            if target is not None:
                adapters[name] = self._adapter(target, leaf, stored, key)
            return stored

        base = jax.tree_util.tree_map_with_path(split, own.params)
        # A leaf without elements, by whose name a checkpoint of another alpha is known.
        model_state = {_BASE: base, self._alpha_name: jnp.zeros(0)}
        model_state |= {} if own.model_state is None else {_OWN: own.model_state}
        return Variables(params=adapters, model_state=model_state)

    def _stored(self, leaf: Any, target: Target | None) -> Any:
        leaf = jnp.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
        if self.base == "own" or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if target is None or self.base == "bfloat16":
            return leaf.astype(jnp.bfloat16)
        sizes = {"num_stack": target.num_stack, "num_rows_dims": target.num_first, "block_size": self.block_size}
        try:
            return quantize(leaf, self.base, **sizes)
        except ValueError as error:
            raise ValueError(f"leaf {target.path!r}, base={self.base!r}: {error}") from None

    def _adapter(self, target: Target, leaf: Any, stored: Any, key: jax.Array) -> dict[str, Any]:
        # By the path: the numbers do not depend on which other leaves are adapted.
        key = jax.random.fold_in(key, zlib.crc32(target.path.encode()))
        shapes = target.adapter_dims(leaf.shape, self.rank, has_magnitude=self.dora)
        ins = [i for i, label in enumerate(target.labels) if label == "i"]
        # `B` is 0, so that nothing is changed yet; `A` as a linear layer of PyTorch begins, as in the library PEFT.
        bound = 1 / math.sqrt(math.prod(leaf.shape[i] for i in ins))
        dtype = wide(jax.dtypes.canonicalize_dtype(leaf.dtype))
        adapter = {
            "a": jax.random.uniform(key, shapes["a"], dtype, -bound, bound),
            "b": jnp.zeros(shapes["b"], dtype),
        }
        if self.dora:  # the norms of the weight as it is stored, which is the one that is used
            base = (dequantize(stored) if isinstance(stored, QuantizedWeight) else stored).astype(dtype)
            adapter["magnitude"] = jnp.linalg.norm(base, axis=tuple(ins), keepdims=False)
        return adapter

    def param_specs(self, params: PyTree, specs: PyTree, *, mesh: Mesh) -> dict[str, PartitionSpec]:
        """Returns the `ZeroConfig.param_specs` of what `init` makes: adapters and base are sharded as the params are.

        So a tensor-parallel model stays one: where a weight's outputs are sharded over the axis `model`, so is `B`, and
        where its inputs are, `A`.

        Args:
          params: the params of the model, or their shapes.
          specs: their specs, as for `ZeroConfig.param_specs`.
          mesh: the mesh.

        Raises:
          ValueError: specs that do not fit the params.
        """
        targets, trained = self.targets(params), self.trained(params)
        # Of shapes: whether a leaf is quantized, and into which arrays, is decided in `init` alone.
        variables = jax.eval_shape(lambda params: self.init(params, jax.random.key(0)), params)
        nodes = jax.tree.leaves(variables.model_state[_BASE], is_leaf=_is_node)
        each = zip(leaf_names(params), jax.tree.leaves(params), nodes, user_specs(params, specs), strict=True)
        dims_of: dict[str, Dims] = {}
        for path, leaf, node, spec in each:
            dims = checked_dims(f"param {path!r}", spec, leaf.shape, mesh)
            base, target = f"{MODEL_STATE}/{_BASE}/{path}", targets.get(path)
            if target is not None:
                arrays = target.adapter_dims(dims, (), has_magnitude=self.dora)  # the rank is not sharded
                dims_of |= {f"{path}/{name}": axes for name, axes in arrays.items()}
            if target is not None and isinstance(node, QuantizedWeight):
                sizes = {"num_stack": target.num_stack, "num_rows_dims": target.num_first}
                arrays = quantized_dims(node, dims, **sizes, mesh=mesh)
                dims_of |= {f"{base}/{name}": axes for name, axes in arrays.items()}
            else:
                dims_of[path if path in trained else base] = dims
        # Names may have characters of regular expressions.
        return {re.escape(path): partition_spec(dims) for path, dims in dims_of.items()}

    def loss_fn(self, loss_fn: Callable[..., Any] | MeshLoss) -> Callable[..., Any] | MeshLoss:
        """Returns the loss function of `Variables` that `init` made, from the unmodified one of plain params.

        The frozen leaves are seen in the dtype of the adapters, which is the compute dtype of the precision policy.

        Args:
          loss_fn: as for `zero.make_train_step`.
        """
        if isinstance(loss_fn, MeshLoss):
            return MeshLoss(lambda mesh: self._adapted(loss_fn.make(mesh), []))
        # The uses are collected for `report` alone.
        return self._adapted(loss_fn, [])

    def _adapted(self, loss_fn: Callable[..., Any], uses: list[WeightUse]) -> Callable[..., Any]:
        function = LossFunction.of(loss_fn)

        def call(variables: Variables, batch: PyTree, key: Any) -> Any:
            model_state = variables.model_state
            base = self._base_of(model_state)
            own = model_state.get(_OWN)
            leaves, tree = self._leaves(variables.params, base)

            def plain(params: PyTree, own: PyTree, batch: PyTree, key: Any) -> Any:
                variables = params if own is None else Variables(params=params, model_state=own)
                return function(variables, batch, key)

            loss, (aux, own) = evaluate_adapted(plain, leaves, tree, (own, batch, key), uses)
            return loss, aux, model_state if own is None else {**model_state, _OWN: own}

        return with_parameters(function, call, has_state=True)

    def report(self, loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> AdaptedReport:
        """Reports where a loss function uses adapted weights, and whether on the factors or merged.

        Args:
          loss_fn: the unmodified loss function.
          params: its params, or their shapes.
          batch: a batch, or its shapes.
        """
        uses: list[WeightUse] = []
        adapted = self._adapted(loss_fn, uses)

        def call(params: PyTree, batch: PyTree, key: jax.Array) -> Any:
            variables = self.init(params, key)
            keys = (key,) if key_parameter(loss_fn) is not None else ()
            return adapted(variables.params, batch, *keys, model_state=variables.model_state)

        jax.eval_shape(call, params, batch, key_shape())
        return AdaptedReport(tuple(dict.fromkeys(uses)))

    def _leaves(self, adapters: Mapping[str, Any], base: PyTree) -> tuple[list[Any], Any]:
        """Returns the leaves of the params, with frozen ones as `Weight`s, and their tree."""
        nodes, tree = jax.tree_util.tree_flatten_with_path(base, is_leaf=_is_node)
        named = {path_name(path): node for path, node in nodes}
        targets = self.targets({name: _shape_of(node, adapters.get(name)) for name, node in named.items()})
        self._check_adapters(adapters, named, targets)
        # Adapters are mappings; what is trained as it is is a leaf.
        dtypes = {name: x["a"].dtype for name, x in adapters.items() if isinstance(x, Mapping)}
        widest = jnp.result_type(*dtypes.values())
        leaves = []
        for name, node in named.items():
            if isinstance(node, Trained):
                leaves.append(adapters[name])
            elif isinstance(node, QuantizedWeight) or jnp.issubdtype(node.dtype, jnp.floating):
                dtype = dtypes.get(name, widest)
                leaves.append(self._weight(name, node, targets.get(name), adapters.get(name), dtype))
            else:
                leaves.append(node)
        return leaves, tree

    def _check_adapters(
        self, adapters: Mapping[str, Any], base: Mapping[str, Any], targets: Mapping[str, Target]
    ) -> None:
        """Raises `ValueError` for adapters of other rules or settings, which would be left out or scaled wrongly."""
        for name in {**base, **adapters}:
            adapter, target = adapters.get(name), targets.get(name)
            if isinstance(base.get(name), Trained):
                continue
            have = {x: tuple(y.shape) for x, y in adapter.items()} if isinstance(adapter, Mapping) else None
            is_array = adapter is not None and have is None
            makes = target and target.adapter_dims(base[name].shape, self.rank, has_magnitude=self.dora)
            # Shapes say all: rules and dims, the rank by which alpha is divided, and whether there are magnitudes.
            if is_array or have != makes:
                what = "an array" if is_array else "no adapter" if have is None else f"the adapter {have}"
                raise ValueError(
                    f"leaf {name!r} has {what}, and this Lora makes {makes or 'no adapter'} for it: give the rules, "
                    "rank, dora and train that the adapters were made with"
                )

    def _weight(self, path: str, node: Any, target: Target | None, adapter: Any, dtype: Any) -> Any:
        if target is None:
            # A plain leaf: nothing has to be deferred to its use.
            if node.dtype == dtype:
                return node
            labels = "s" * node.ndim  # no target: it is cast where it is used, and that is all
            return Weight(path=path, roots=(node,), build=as_it_is, labels=labels, shape=node.shape, dtype=dtype)
        is_quantized = isinstance(node, QuantizedWeight)
        return Weight(
            path=path,
            roots=node.arrays if is_quantized else (node,),
            build=functools.partial(built, node.format, node.dims) if is_quantized else as_it_is,
            labels=target.labels,
            shape=tuple(node.shape),
            dtype=dtype,
            factors=tuple(adapter[name] for name in ("a", "b", *(["magnitude"] if self.dora else []))),
            scale=self.scale,
        )

    def _base_of(self, model_state: Any) -> PyTree:
        if not isinstance(model_state, Mapping) or _BASE not in model_state:
            raise ValueError(
                "the state has no frozen base: make it with Lora.init, as "
                "zero.init_state(lambda key: lora.init(init_fn(key), key), tx, key, mesh=mesh, config=config)"
            )
        others = [name for name in model_state if name.startswith(_ALPHA) and name != self._alpha_name]
        if others:
            raise ValueError(
                f"the adapters are of a Lora of {others[0]}, and this one has {self._alpha_name}, which makes another "
                "model of them: give it that alpha"
            )
        return model_state[_BASE]

    def merge(self, state: TrainState | Variables, *, dtype: Any = None) -> PyTree:
        """Returns plain params, in the structure that `init` was given: `W + alpha / rank * A @ B`, in float32.

        In float64 for adapters of float64.

        Args:
          state: the train state, or `Variables`; arrays on any devices.
          dtype: the dtype of floating leaves; None: as they are stored, quantized ones in bfloat16.

        Raises:
          ValueError: a state of another `Lora`, or a dtype that is not a floating one.
        """
        check_arguments(dtype=dtype)
        adapters = state.masters if isinstance(state, TrainState) else state.params
        base = self._base_of(state.model_state)
        leaves, tree = self._leaves(adapters, base)
        nodes = jax.tree.leaves(base, is_leaf=_is_node)

        def merged(leaf: Any, node: Any) -> Any:
            if not isinstance(leaf, Weight):
                leaf = _fetched(leaf)
                is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
                return leaf.astype(dtype) if dtype is not None and is_float else leaf
            own = jnp.bfloat16 if isinstance(node, QuantizedWeight) else node.dtype
            return _merged(leaf.arrays, weight=_Recipe(leaf.cast(own if dtype is None else dtype)))

        return tree.unflatten([merged(*pair) for pair in zip(leaves, nodes, strict=True)])


class _Recipe:
    """A `Weight` without its arrays, as a static argument: equal for equal layers, which are compiled once."""

    def __init__(self, weight: Weight):
        self.weight = weight.with_arrays([None] * len(weight.arrays))
        factors = len(self.weight.factors), self.weight.scale
        build = getattr(weight.build, "args", None)  # of a `functools.partial`, two of which are never equal
        self.key = (len(self.weight.roots), build, weight.labels, weight.shape, str(jnp.dtype(weight.dtype)), factors)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Recipe) and self.key == other.key


@functools.partial(jax.jit, static_argnames="weight")
def _merged(arrays: tuple[Any, ...], *, weight: _Recipe) -> jax.Array:
    # Of an offloaded state the arrays are on the host, from where those of one leaf at a time come.
    return weight.weight.with_arrays([*map(to_device, arrays)]).merged()


_fetched = jax.jit(to_device)


def _is_node(x: Any) -> bool:
    return isinstance(x, QuantizedWeight | Trained)


def _shape_of(node: Any, adapter: Any) -> Any:
    """Returns the shape of a leaf of the params."""
    if isinstance(node, Trained):
        return jax.ShapeDtypeStruct(adapter.shape, adapter.dtype)
    dtype = jnp.float32 if isinstance(node, QuantizedWeight) else node.dtype
    return jax.ShapeDtypeStruct(node.shape, dtype)
