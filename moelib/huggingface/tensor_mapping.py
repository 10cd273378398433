"""Mapping between the tensors of a Hugging Face checkpoint and parameters of moelib.

A `Table` lists, for each parameter of one layer, the tensors that make it up and the view that
relates them. `expand` writes the table out for a whole model: each layer, expert and part.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import einops
import numpy as np

from moelib.core import tree
from moelib.core.param import ParameterSpec, is_spec
from moelib.layers.adapter import is_adapter
from moelib.layers.transformer import BaseStack
from moelib.models.multi_token_prediction import MULTI_TOKEN

Index = tuple[int | None, ...]


class Part(NamedTuple):
    """One tensor of Hugging Face as a part of one parameter."""

    tensor: str  # Name of the tensor, relative to the layer; "{e}" stands for the expert's number.
    view: str  # einops pattern from the tensor to the parameter, such as "(h k) d -> d h k".
    # Index into the leading dimensions of the parameter: a number, None for the whole dimension, or
    # "e" for the expert's number.
    index: tuple[int | str | None, ...] = ()
    # Range (start, stop) of the tensor's first dimension, if the tensor holds more, or of each of
    # `row_groups` equal parts of it, as for heads whose queries, keys and values are next to each
    # other.
    rows: tuple[int, int] | None = None
    row_groups: int = 1
    num_rows: int | None = None  # Rows of that tensor if no parts hold the last of them.
    # First entry of the parameter's last dimension from which rotary pairs are interleaved (2i, 2i
    # + 1) in the tensor but split into halves in the parameter.
    pairs_from: int | None = None
    pairs_to: int | None = None  # End of these entries; None for the last one.
    # View of the tensor if it is stored with the shape of this view; it is not written so.
    other_view: str | None = None
    factor: float = 1.0  # Parameter over tensor; a power of two, so that the conversion is exact.


# Parameter path within a layer or the model -> the tensors that make it up.
Table = Mapping[str, Sequence[Part]]
LayerTable = Callable[[Any], Table]  # From the config of a layer to its table.


class TensorMapping(NamedTuple):
    """A `Part` of one particular layer and expert."""

    tensor: str  # Full name of the tensor.
    path: str  # Path of the parameter, such as "decoder/repeated0/self_attention/q".
    index: Index  # Index into the leading dimensions of the parameter; None for a whole dimension.
    part: Part  # The entry of the table.


def expand(model: Any, in_model: Table, in_layer: Table | LayerTable) -> list[TensorMapping]:
    """Returns the mapping of every tensor of a `CausalLM` whose decoder is a `BaseStack`.

    The tables have the parameters outside the layers, and those of one layer. The modules of
    multi-token prediction are numbered as layers after the last one.

    Raises:
        ValueError: If a trainable parameter is in neither table.
    """
    layers = dict(layer_numbers(model.children["decoder"]))
    mappings, unknown = [], []
    specs = model.create_parameter_specs_recursively()
    for path, spec in tree.flatten_items(specs, is_spec):
        first, _, rest = path.partition("/")
        name, _, inside = rest.partition("/")
        if first == "decoder":
            layer = model.children[first].children[name].config
            parts, numbers = _table_of(layer, in_layer).get(inside), layers[name]
        elif first == MULTI_TOKEN:
            layer = model.config.multi_token_prediction.module.layer
            parts = _table_of(layer, in_layer).get(inside.removeprefix("decoder/layer0/"))
            numbers = [model.config.decoder.num_layers + int(name.removeprefix("depth")) - 1]
        else:
            parts, numbers = in_model.get(path), [None]
        if parts is not None:
            mappings += _expand_parameter(path, spec, parts, numbers)
        elif spec.trainable and not is_adapter(path):
            unknown.append(path)
    if unknown:
        raise ValueError(f"No tensor of the Hugging Face model holds {', '.join(unknown)}.")
    return mappings


def _table_of(layer: Any, in_layer: Table | LayerTable) -> Table:
    return in_layer(layer) if callable(in_layer) else in_layer


def layer_numbers(decoder: BaseStack) -> Iterator[tuple[str, list[int]]]:
    """Yields (name of a child of the decoder, numbers of the layers it holds)."""
    for name in decoder.children:
        yield name, [int(x.removeprefix("layer")) for x in decoder.copies(name) or (name,)]


def _expand_parameter(
    path: str, spec: ParameterSpec, parts: Sequence[Part], numbers: Sequence[int | None]
) -> Iterator[TensorMapping]:
    stacked = "/repeated" in path
    for i, number in enumerate(numbers):
        lead: Index = (i,) if stacked else ()
        prefix = "" if number is None else f"model.layers.{number}."
        for part in parts:
            experts = range(spec.shape[len(lead)]) if "{e}" in part.tensor else [0]
            for e in experts:
                index = tuple(e if isinstance(i, str) else i for i in part.index)
                yield TensorMapping(prefix + part.tensor.format(e=e), path, (*lead, *index), part)


# -- Views ---------------------------------------------------------------------------------------


def slices(index: Index, shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of a mapping into a parameter of the given shape, as slices."""
    index = (*index, *(None for _ in shape[len(index) :]))
    return tuple(
        slice(0, n) if i is None else slice(i, i + 1) for i, n in zip(index, shape, strict=True)
    )


def part_shape(mapping: TensorMapping, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the mapped part of a parameter of the given shape."""
    index = (*mapping.index, *(None for _ in shape[len(mapping.index) :]))
    return tuple(n for i, n in zip(index, shape, strict=True) if i is None)


def tensor_shape(mapping: TensorMapping, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the tensor (its `rows`) for a parameter of the given shape."""
    left, right = mapping.part.view.split(" -> ")
    sizes = {"1": 1, **dict(zip(right.split(), part_shape(mapping, shape), strict=True))}
    groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
    return tuple(
        math.prod(sizes[n] for n in group.split()) if group else sizes[single]
        for group, single in groups
    )


def take_rows(tensor: Any, part: Part) -> Any:
    """Returns the rows of a tensor that a part holds."""
    if part.rows is None:
        return tensor
    groups = tensor.reshape(part.row_groups, -1, *tensor.shape[1:])
    return groups[:, slice(*part.rows)].reshape(-1, *tensor.shape[1:])


def join_rows(pieces: Sequence[tuple[np.ndarray, Part]]) -> np.ndarray:
    """Returns the tensor whose rows these parts hold, all of them; inverse of `take_rows`."""
    groups = [
        rows.reshape(part.row_groups, -1, *rows.shape[1:])
        for rows, part in sorted(pieces, key=lambda piece: piece[1].rows or (0, 0))
    ]
    joined = groups[0] if len(groups) == 1 else np.concatenate(groups, axis=1)
    return joined.reshape(-1, *joined.shape[2:])


def to_parameter(tensor: Any, mapping: TensorMapping, shape: Sequence[int]) -> Any:
    """Returns the part of a parameter of the given shape that a tensor (its `rows`) holds.

    The tensor is an array of NumPy or JAX, and so is the part.
    """
    part = mapping.part
    left, right = part.view.split(" -> ")
    sizes = dict(zip(right.split(), part_shape(mapping, shape), strict=True))
    grouped = " ".join(re.findall(r"\(([^)]*)\)", left)).split()  # einops knows the others.
    y = einops.rearrange(tensor, part.view, **{name: sizes[name] for name in grouped})
    if (start := part.pairs_from) is not None:
        order, stop = np.arange(y.shape[-1]), part.pairs_to or y.shape[-1]
        halves = order[start:stop:2], order[start + 1 : stop : 2]
        y = y[..., np.concatenate([order[:start], *halves, order[stop:]])]
    return y if part.factor == 1.0 else y * np.asarray(part.factor, y.dtype)


def to_tensor(values: np.ndarray, mapping: TensorMapping) -> np.ndarray:
    """Inverse of `to_parameter`."""
    part = mapping.part
    if part.factor != 1.0:
        values = values / np.asarray(part.factor, values.dtype)
    if (start := part.pairs_from) is not None:
        y, stop = values.copy(), part.pairs_to or values.shape[-1]
        halves = np.split(values[..., start:stop], 2, axis=-1)
        y[..., start:stop:2], y[..., start + 1 : stop : 2] = halves
        values = y
    left, right = part.view.split(" -> ")
    return einops.rearrange(values, f"{right} -> {left}")
