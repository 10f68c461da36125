"""Maps slices of params to slices of the tensors in files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.device_put import aligned_empty
from zero_jax.core.files.safetensors import StoredTensor
from zero_jax.core.text_tables import printable
from zero_jax.core.tree import cast_values
from zero_jax.models.tensor_name import TensorName

Index = tuple[slice, ...]
_READABLE = ("float32", "float16", "bfloat16")
_NUM_THREADS = 4  # that copy tensors at once; NumPy copies without the lock of the interpreter
_STRIP = 16  # rows of a tensor that are transposed at a time: more of them share sets of a cache, and evict another
_SHOWN = 4
_MAX_TENSORS = 1 << 20  # of a param
_MAX_MISSING = 10_000  # more than that are counted, and not named
_SEARCHED = 10_000  # names that are compared with one that is missing
# Tensors that transformers does not read either: frequencies, and the causal mask of GPT-2 and GPT-NeoX.
_UNUSED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafTensors:
    """A param as tensors in files: `tensors` by the index of its leading dims."""

    path: str
    shape: tuple[int, ...]
    name: TensorName
    tensors: Mapping[tuple[int, ...], StoredTensor]

    @property
    def dtype(self) -> Any:
        """The dtype that holds the values of all tensors."""
        # Of float16 and bfloat16, as of float32 and either, only float32 has all values.
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        return jnp.dtype(dtypes.pop()) if len(dtypes) == 1 else jnp.dtype(jnp.float32)

    def read(self, index: Index, dtype: Any) -> np.ndarray:
        """Reads a slice of the param as a new array; no other part of the files is read."""
        out = aligned_empty([len(range(*at.indices(size))) for at, size in zip(index, self.shape, strict=True)], dtype)

        def copy(part: tuple[tuple[int, ...], StoredTensor, Index]) -> None:
            position, tensor, tensor_index = part
            # With `...` it is a view also where the index is complete, which would else give a number.
            _copy(self._view(tensor, "r")[self._features(tensor_index)], out[*position, ...])

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            # Iterated over for the errors of the threads.
            for _ in threads.map(copy, self._parts(index)):
                pass
        return out

    def write(self, index: Index, values: np.ndarray, written: Mapping[str, str]) -> None:
        """Writes a slice of the param to the files; tensors that are `written`, of params by name, have to be equal."""
        # One after another: each slice is cast in host memory, which threads would multiply.
        for position, tensor, tensor_index in self._parts(index):
            remedy = "save it as bfloat16 or float32"
            cast = cast_values(values[position], tensor.dtype, leaf=self.path, remedy=remedy)
            place, other = self._features(tensor_index), written.get(tensor.name)
            if other is None:
                self._view(tensor, "r+")[place] = cast
            elif self._view(tensor, "r")[place].tobytes() != cast.tobytes():
                raise ValueError(
                    f"params {other!r} and {self.path!r} have one tensor, {tensor.name!r}, and differ: give each a "
                    "name of its own"
                )

    def _parts(self, index: Index) -> Iterator[tuple[tuple[int, ...], StoredTensor, Index]]:
        """Yields the tensors of a slice, each with its index in the slice and the slice of the tensor."""
        num = self.name.num_indices
        leading = [range(*a.indices(size)) for a, size in zip(index[:num], self.shape[:num], strict=True)]
        for place in np.ndindex(*map(len, leading)):
            yield place, self.tensors[tuple(a[i] for a, i in zip(leading, place, strict=True))], index[num:]

    def _view(self, tensor: StoredTensor, mode: str) -> np.ndarray:
        """Returns a map of the file in the dims of the param: reversed and divided dims need no copy."""
        mapped = tensor.open(mode)
        mapped = mapped.T if self.name.is_transposed else mapped
        if self.name.part is not None:
            return mapped
        return mapped.reshape(self.shape[self.name.num_indices :])

    def _features(self, index: Index) -> tuple[Any, ...]:
        """Returns the index in a tensor's dims of one in those of the param, which may have a part of the features."""
        if self.name.part is None:
            return index
        start, stop, period = self.name.part
        # Numbers and not a slice: the features of a part are not next to each other in the tensor.
        features = np.arange(self.shape[-1])[index[-1]]
        # Feature f of the param is in the period f // width of the tensor, there at start + f % width.
        return (*index[:-1], features // (stop - start) * period + start + features % (stop - start))


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies an array to a contiguous one; what is transposed in strips, or most elements would be cache misses."""
    if source.ndim < 2 or source.strides[0] >= source.strides[1]:
        target[...] = source
        return
    step = max(1, _STRIP // max(1, math.prod(source.shape[2:])))
    for start in range(0, source.shape[1], step):
        target[:, start : start + step] = source[:, start : start + step]


def tensor_shape(path: str, shape: tuple[int, ...], name: TensorName) -> tuple[int, ...]:
    """Returns the shape that a param's tensors have in the files; raises `ValueError` for a name that does not fit."""
    dims = shape[name.num_indices :]
    if name.num_indices > len(shape):
        raise ValueError(f"{path}: {name.template!r} has {name.num_indices} indices, and the param {len(shape)} dims")
    if name.part is not None:
        start, stop, period = name.part
        if not 0 <= start < stop <= period or not dims or dims[-1] % (stop - start) or name.shape is not None:
            raise ValueError(
                f"{path}: part={name.part} does not fit the dims {list(dims)}: give (start, stop, period) of the last "
                "dim, which is a multiple of stop - start, and no shape"
            )
        dims = (*dims[:-1], dims[-1] // (stop - start) * period)
    if name.shape is None:
        return dims[::-1] if name.is_transposed else dims
    tensor_dims = name.shape[::-1] if name.is_transposed else name.shape
    if not _divides(tensor_dims, dims):
        raise ValueError(
            f"{path}: dims {list(dims)} of the param do not divide the dims {list(tensor_dims)} of its tensor"
        )
    return name.shape


def _divides(dims: tuple[int, ...], parts: tuple[int, ...]) -> bool:
    """Returns whether each dim is the product of the next parts, in order."""
    remaining = list(parts)
    for dim in dims:
        size = 1
        while remaining and size < dim:
            size *= remaining.pop(0)
        if size != dim:
            return False
    # What is left may be dims of one element.
    return math.prod(remaining) == 1


def indices(shape: tuple[int, ...], name: TensorName) -> Iterator[tuple[int, ...]]:
    """Yields the index of each tensor of a param, which may not be more than any checkpoint has."""
    num_tensors = math.prod(shape[: name.num_indices])
    if num_tensors > _MAX_TENSORS:
        raise ValueError(
            f"{name.template!r} would be {num_tensors:,} tensors, and {_MAX_TENSORS:,} are the most of a param: give a "
            "config with fewer layers or experts"
        )
    return np.ndindex(*shape[: name.num_indices])


def match(
    where: object,
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, TensorName],
    *,
    may_be_left: Collection[str] = (),
) -> dict[str, LeafTensors]:
    """Returns the tensors of each param, by its path, in the folder `where`, all but those that `may_be_left`."""
    check_paths(shapes, names)
    # Counted before names are made: a config from outside may have more layers than their names have room.
    num_expected = sum(math.prod(shape[: names[path].num_indices]) for path, shape in shapes.items())
    if num_expected > len(tensors) + _MAX_MISSING:
        raise ValueError(
            f"{where} does not fit the model, which has {num_expected:,} tensors, and the files have {len(tensors):,}: "
            "take another folder"
        )
    leaves: dict[str, LeafTensors] = {}
    problems: list[str] = []
    check_parts(names)
    expected: dict[tuple[str, tuple[int, ...]], str] = {}  # params may share a tensor
    for path, shape in shapes.items():
        expected_shape = tensor_shape(path, shape, names[path])
        names_of_leaf = {index: names[path].of(index) for index in indices(shape, names[path])}
        expected |= {(name, expected_shape): path for name in names_of_leaf.values()}
        stored = {index: tensors[name] for index, name in names_of_leaf.items() if name in tensors}
        leaves[path] = LeafTensors(path=path, shape=shape, name=names[path], tensors=stored)
    used = {name for name, _ in expected}
    surplus = [name for name in tensors if name not in used and name not in may_be_left]
    surplus = [name for name in surplus if not name.endswith(_UNUSED)]
    for (name, expected_shape), path in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            # A search through many names takes time: only for the problems that are shown.
            hint = did_you_mean(name, surplus[:_SEARCHED], "; is it {!r}?") if len(problems) < _SHOWN else ""
            problems.append(f"{printable(name)} of the param {path!r} is missing{hint}")
        elif tensor.shape != expected_shape:
            problems.append(f"{printable(name)} has shape {list(tensor.shape)}, the model needs {list(expected_shape)}")
        elif tensor.dtype not in _READABLE:
            problems.append(f"{printable(name)} is {tensor.dtype}: only {', '.join(_READABLE)} are read")
    problems += [f"{printable(name)} is in the files, and the model has no such tensor" for name in surplus]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{where} does not fit the model: {'; '.join(problems[:_SHOWN])}{more}: take another folder")
    return leaves


def check_paths(shapes: Collection[str], names: Collection[str]) -> None:
    """Raises `ValueError` if the params and the names differ."""
    for path in shapes:
        if path not in names:
            raise ValueError(f"param {path!r} has no tensor's name: {did_you_mean(path, names)}add it to the names")
    for path in names:
        if path not in shapes:
            raise ValueError(f"{path!r} has a tensor's name and is no param: {did_you_mean(path, shapes)}leave it out")


def check_parts(names: Mapping[str, TensorName]) -> None:
    """Raises `ValueError` where the params that share a tensor leave features of it out, or have some twice."""
    parts: dict[tuple[str, int], list[tuple[tuple[int, int, int], str]]] = {}
    for path, name in names.items():
        if name.part is not None:
            # By the first index too: of layers that are divided over several params each has tensors of its own.
            parts.setdefault((name.template, name.first), []).append((name.part, path))
    for (template, _), of_tensor in parts.items():
        end = 0
        (_, _, period), _ = of_tensor[0]
        for (start, stop, own_period), path in sorted(of_tensor):
            if start != end or own_period != period:
                raise ValueError(f"{path}: part={(start, stop, own_period)} of {template!r} does not follow on {end}")
            end = stop
        if end != period:
            raise ValueError(f"{template!r} has {period} features in a period, and its params take {end}: add the rest")
