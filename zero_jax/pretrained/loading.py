"""Reads checkpoints of the hub onto a mesh: each process its own shards, leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from zero_jax.attention import dot_product_attention
from zero_jax.core.agreement import Agreement
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.signatures import check_arguments
from zero_jax.core.text_tables import Report
from zero_jax.core.tree import PyTree, key_shape, leaves_by_name
from zero_jax.data import Tokenizer, load_tokenizer
from zero_jax.models import decoder
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.hub_families import tensor_names
from zero_jax.models.huggingface import decoder_config
from zero_jax.models.tensor_name import TensorName
from zero_jax.pretrained.folder import TOKENIZER, read_config, read_tensors
from zero_jax.pretrained.mapping import LeafTensors, match
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.precision import resolve_precision
from zero_jax.training import ZeroConfig, make_placement, nonfinite_counts

_SHOWN = 4  # leaves of a warning


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFModel:
    """A folder of the hub that was checked against its model; no tensor of it is read yet.

    Attributes:
      folder: the folder.
      hf_config: the content of its `config.json`.
      config: the shape of the decoder.
      leaves: the tensors of each param, by its path.

    Example:
      >>> zero.pretrained.open_hf(hf).hf_config["model_type"]
      'llama'
    """

    folder: str
    hf_config: Mapping[str, Any]
    config: DecoderConfig
    leaves: Mapping[str, LeafTensors] = dataclasses.field(repr=False)

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor, by the name that the family has for it."""
        return {leaf.name.of(i): tensor.dtype for leaf in self.leaves.values() for i, tensor in leaf.tensors.items()}

    def load(self, mesh: Mesh, config: ZeroConfig, *, dtype: Any = None) -> PyTree:
        """Reads the params onto a mesh, as `load_hf` does."""
        shapes = jax.eval_shape(functools.partial(decoder.init, self.config), key_shape())
        config = self.with_specs(mesh, config)
        return _load(self.folder, shapes, self.leaves, mesh=mesh, config=config, dtype=dtype)

    def with_specs(self, mesh: Mesh, config: ZeroConfig) -> ZeroConfig:
        """Returns a config with the decoder's specs, where the mesh has an axis `model` and the config no specs."""
        model = axis_size(mesh, config.axes_of(mesh).model)
        if model == 1 or config.param_specs is not None:
            return config
        # A vocabulary that the axis does not divide, as GPT-2's 50,257, is left unsharded over it.
        specs = decoder.param_specs(self.config, vocab=self.config.vocab_size % model == 0, model_size=model)
        return dataclasses.replace(config, param_specs=specs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained(Report):
    """A checkpoint of the hub on a mesh.

    Attributes:
      source: the folder, its `config.json` and the decoder's shape.
      params: the params, sharded as the config's master params are.
      config: the config to go on with: the one given, with the specs of the axis `model` where the mesh has one.
      loss_fn: `loss_fn(params, batch) -> (loss, aux)`; a batch has `inputs` and `targets` `[batch, seq_len]`, and maybe
        `weights` and `segments`.

    Example:
      >>> model = zero.load_hf(hf, mesh=mesh, config=config)
      >>> model.apply(model.params, jnp.array([[1, 2, 3]])).shape
      (1, 3, 64)
    """

    source: HFModel
    params: PyTree
    config: ZeroConfig
    loss_fn: Callable[..., Any]

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        return f"{self.source.folder}: {self.source.config}, {sum(x.size for x in leaves):,} params"

    def apply(self, params: PyTree, tokens: Array, segments: Array | None = None) -> Array:
        """Returns the logits `[batch, seq_len, vocab_size]` of the token after each of `tokens` `[batch, seq_len]`.

        `params` are those of the checkpoint (`loaded.params`) or of a state that was trained from them; `segments`, of
        the same shape as the tokens, number documents that do not see each other.
        """
        return decoder.apply(self.source.config, params, tokens, segments)

    def generate(
        self,
        params: PyTree,
        prompt: Any,
        *,
        num_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        key: Array | None = None,
    ) -> Any:
        """Samples what follows a prompt, for looking at a model: there is no cache of keys and values.

            print(loaded.generate(loaded.params, "Once upon a time", num_tokens=40, temperature=0.8))

        Args:
          params: as for `apply`.
          prompt: text, or tokens `[length]`.
          num_tokens: tokens to add.
          temperature: below 1 sharpens the choice, above 1 flattens it; 0 always takes the likeliest token.
          top_k: choose among this many of the likeliest tokens; None means among all.
          key: PRNG key; None stands for `jax.random.key(0)`.

        Returns:
          The text that follows a text, or tokens `[num_tokens]`, int32.

        Raises:
          ValueError: a prompt without tokens, a number out of its range, or text for a folder without `tokenizer.json`.
        """
        tokenizer = self._tokenizer if isinstance(prompt, str) else None
        tokens = jnp.asarray(prompt if tokenizer is None else tokenizer.encode(prompt), jnp.int32)
        run = _generator(self.source.config, num_tokens, temperature, top_k)
        made = run(params, tokens, jax.random.key(0) if key is None else key)
        if tokenizer is None:
            return made
        # Tables of the hub are often padded: a model may choose tokens that its tokenizer does not have.
        return tokenizer.decode(np.asarray(made)[np.asarray(made) < tokenizer.vocab_size])

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        path = user_path(self.source.folder) / TOKENIZER
        if not path.is_file():
            raise ValueError(f"{self.source.folder} has no {TOKENIZER}: give tokens instead of text")
        return load_tokenizer(path)


@functools.lru_cache(maxsize=8)
def _generator(config: DecoderConfig, num_tokens: int, temperature: float, top_k: int | None) -> Callable[..., Array]:
    settings = {"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k}
    # Kept by `lru_cache`: JAX would compile a new `partial` at each call.
    return jax.jit(functools.partial(decoder.generate, config, **settings))


def read_decoder(folder: str | os.PathLike[str], *, seq_len: int | None = None) -> DecoderConfig:
    """Returns the decoder that a folder's `config.json` describes, for `seq_len` tokens or its longest context.

    A `ValueError` says that there is no such file, what the decoder does not have, or that sequences are too long.
    """
    hf_config = read_config(folder)
    try:
        config = decoder_config(hf_config)
    # A config from outside has values of any type in any field, and numbers of any size.
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{os.fspath(folder)}/config.json: {error}") from error
    if config.num_extra_tokens and not _has_extra_layers(folder):
        config = dataclasses.replace(config, num_extra_tokens=0)
    if seq_len is None:
        return config
    if seq_len > config.seq_len:
        longest = f"{config.seq_len:,}"
        raise ValueError(f"seq_len={seq_len}: the model in {os.fspath(folder)} has contexts of {longest} at most")
    return dataclasses.replace(config, seq_len=seq_len)


def _has_extra_layers(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoint has the layers that its config names, which transformers does not save."""
    try:
        # The product that only layers of this kind have.
        return any(".eh_proj." in name for name in read_tensors(folder))
    except ValueError:  # which is the error of who needs the tensors
        return True


def open_hf(folder: str | os.PathLike[str], *, seq_len: int | None = None) -> HFModel:
    """Checks a folder of the hub: config, index, the files' headers and sizes, all tensors' names, shapes and dtypes.

    Args:
      folder: a folder with `config.json` and `model.safetensors`, or several files with an index.
      seq_len: tokens in a training sequence; None takes the model's longest context.

    Raises:
      ValueError: a family or setting that the decoder does not have, or tensors that are missing, left over, mis-shaped
        or cut off.

    Example:
      >>> zero.pretrained.open_hf(hf).config.num_layers
      2
    """
    hf_config, config = read_config(folder), read_decoder(folder, seq_len=seq_len)
    names = tensor_names(config, model_type=hf_config["model_type"])
    tensors, optional = read_tensors(folder), {"lm_head.weight"} if config.tie_embedding else set()
    if optional & tensors.keys():  # it is the table, if that has no name of its own
        tensors = {names["embed"].template: tensors["lm_head.weight"], **tensors}
    for layer in range(config.num_layers, config.num_layers + max(config.num_extra_tokens, 1)):  # copies
        optional |= {f"model.layers.{layer}.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    leaves = match(folder, tensors, config.shapes, names, may_be_left=optional)
    return HFModel(folder=os.fspath(folder), hf_config=hf_config, config=config, leaves=leaves)


def load_hf(
    folder: str | os.PathLike[str], *, mesh: Mesh, config: ZeroConfig, seq_len: int | None = None, dtype: Any = None
) -> Pretrained:
    """Loads a checkpoint of the Hugging Face hub (a decoder of the families in docs/huggingface.md) on any mesh.

    Each process reads the slices of its own shards, one param at a time. Before the first one all files are checked.

        loaded = zero.load_hf("Llama-3.2-1B", mesh=mesh, config=config)
        state = zero.init_state(loaded.params, tx, key, mesh=mesh, config=loaded.config)
        step = zero.make_train_step(loaded.loss_fn, tx, mesh=mesh, config=loaded.config)

    Args:
      folder: a folder with `config.json` and `model.safetensors`, or several files with an index.
      mesh: the mesh.
      config: stage, precision and rules; `init_state` casts the params as its precision says.
      seq_len: tokens in a training sequence; None takes the model's longest context.
      dtype: floating dtype of the params; None keeps that of the files, or float32 if the precision has no master
        params of a dtype of their own.

    Raises:
      ValueError: as `open_hf`.

    Example:
      >>> model = zero.load_hf(hf, mesh=mesh, config=config)  # hf: a folder with config.json and *.safetensors
      >>> model.params["blocks"]["query"].shape
      (2, 32, 32)
    """
    check_arguments(folder=folder, mesh=mesh, config=config, seq_len=seq_len, dtype=dtype)
    # All files are checked in all processes before any reads: gigabytes are not read for an error at the end.
    with Agreement(lambda failed: ValueError(f"process {failed} cannot read {os.fspath(folder)}: see its log")):
        source = open_hf(folder, seq_len=seq_len)
        config = source.with_specs(mesh, config)
    return Pretrained(
        source=source,
        params=source.load(mesh, config, dtype=dtype),
        config=config,
        loss_fn=decoder.loss_fn(source.config, attend=attend),
    )


def load_tensors(
    folder: str | os.PathLike[str],
    shapes: PyTree,
    names: Mapping[str, TensorName],
    *,
    mesh: Mesh,
    config: ZeroConfig,
    dtype: Any = None,
) -> PyTree:
    """Loads the params of any model from safetensors files, by the names of their tensors.

    Args:
      folder: a folder with `model.safetensors`, or several files with an index.
      shapes: the params' shapes, as `jax.eval_shape(init_fn, key)` returns them.
      names: the tensors of each param, by its path (`a/b/c`).
      mesh: the mesh.
      config: stage, precision and rules.
      dtype: as for `load_hf`.

    Raises:
      ValueError: params without names, or tensors that are missing, left over, mis-shaped or cut off.
    """
    check_arguments(folder=folder, param_shapes=shapes, mesh=mesh, config=config, dtype=dtype)
    paths = {path: tuple(x.shape) for path, x in leaves_by_name(shapes).items()}
    with Agreement(lambda failed: ValueError(f"process {failed} cannot read {os.fspath(folder)}: see its log")):
        leaves = match(folder, read_tensors(folder), paths, names)
    return _load(folder, shapes, leaves, mesh=mesh, config=config, dtype=dtype)


def _load(
    folder: str | os.PathLike[str],
    shapes: PyTree,
    leaves: Mapping[str, LeafTensors],
    *,
    mesh: Mesh,
    config: ZeroConfig,
    dtype: Any,
) -> PyTree:
    placement = make_placement(shapes, mesh=mesh, config=config)
    # Without master params of a dtype of their own the optimizer would update in that of the files, such as bfloat16.
    if dtype is None and resolve_precision(config.precision).master is None:
        dtype = jnp.float32
    shardings = jax.tree.leaves(placement.param_shardings("master"))
    with Agreement(lambda failed: ValueError(f"process {failed} cannot read the tensors: see its log")):
        arrays = [
            load_leaf(leaves[path], sharding, leaves[path].dtype if dtype is None else dtype)
            for path, sharding in zip(leaves_by_name(shapes), shardings, strict=True)
        ]
        for tensor in {tensor.path: tensor for leaf in leaves.values() for tensor in leaf.tensors.values()}.values():
            tensor.check()  # or values of two versions of a file are mixed
    params = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    warn_of_nonfinite(folder, params, nonfinite_counts(params, mesh=mesh))
    return params


def warn_of_nonfinite(folder: str | os.PathLike[str], params: PyTree, counts: Mapping[str, int]) -> None:
    """Warns of params that were read with NaN or infinities, by their number in each leaf."""
    if not counts:
        return
    leaves = leaves_by_name(params)
    shown = [f"{count:,} of {leaves[path].size:,} elements of {path!r}" for path, count in counts.items()]
    more = f", and some of {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    dtypes = {str(leaves[path].dtype) for path in counts if float(jnp.finfo(leaves[path].dtype).max) < 1e38}
    cast = f". {' and '.join(sorted(dtypes))} has no room for larger values: take bfloat16 or float32" * bool(dtypes)
    warnings.warn(
        f"{os.fspath(folder)}: {', '.join(shown[:_SHOWN])}{more} are NaN or infinite: so is the loss where the model "
        f"uses them. Download the files again; where they are so at their source, take another checkpoint{cast}",
        stacklevel=3,
    )


def load_leaf(leaf: LeafTensors, sharding: NamedSharding, dtype: Any) -> Array:
    """Reads this process's shards of a param, one after the other: one is in host memory at a time."""
    devices_of: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        # Slices have no hash before Python 3.12.
        key = tuple((at.start, at.stop) for at in index or ())
        devices_of.setdefault(key, []).append(device)
    arrays = []
    for key, devices in devices_of.items():
        values = leaf.read(tuple(slice(*ends) for ends in key), jnp.dtype(dtype))
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        # Waited for: a transfer that is under way keeps its shard in host memory.
        arrays += jax.block_until_ready([jax.device_put(values, place) for place in places])
        del values  # before the next shard is read
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def attend(query: Array, key: Array, value: Array, segments: Array | None, **settings: Any) -> Array:
    """Runs causal attention by the kernel of the hardware that the step is for, if it has one."""
    return dot_product_attention(query, key, value, is_causal=True, segment_ids=segments, **settings)
