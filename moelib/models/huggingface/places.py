"""Where each tensor of a Hugging Face checkpoint stands in our parameters.

A table says it once for a layer: for each of our parameters, the tensors that make it up, and how
each is viewed. `expand` writes it out for a whole model: for every layer, expert and part.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import einops
import numpy as np

from moelib.core import tree
from moelib.core.param import ParameterSpec, is_spec
from moelib.layers.transformer import BaseStack

Index = tuple[int | None, ...]


class Part(NamedTuple):
    """One tensor of theirs, and the part of one parameter of ours that it is.

    Attributes:
        key: Its name, from the layer on; "{e}" is the number of an expert.
        view: How theirs becomes ours, as einops writes it: "(h k) d -> d h k".
        at: Which part of ours: a number for each first dimension, None for all of one; "e" for
            the number of an expert.
        rows: (first, past the last) of its first dimension, if it holds more than this.
        pairs_from: From which entry of our last dimension on theirs are rotated in pairs (2i,
            2i + 1), where ours are in halves.
        factor: What theirs is multiplied by to give ours; a power of two, so that nothing is lost.
    """

    key: str
    view: str
    at: tuple[int | str | None, ...] = ()
    rows: tuple[int, int] | None = None
    pairs_from: int | None = None
    factor: float = 1.0


# From our parameter's name in a layer, or in the model, to what makes it up.
Table = Mapping[str, Sequence[Part]]


class Place(NamedTuple):
    """A part, written out for one layer and one expert.

    Attributes:
        key: The tensor's whole name.
        path: Our parameter: "decoder/repeated0/self_attention/q".
        at: Which part of it: a number for each first dimension, None for all of one.
        part: How it is viewed.
    """

    key: str
    path: str
    at: Index
    part: Part


def expand(model: Any, in_model: Table, in_layer: Table) -> list[Place]:
    """Returns where every tensor of a model stands.

    Args:
        model: A `CausalLM` whose decoder is a `BaseStack`.
        in_model: What makes up the parameters outside of the layers.
        in_layer: What makes up those of a layer; names are from the layer on.

    Raises:
        ValueError: If a trained parameter is in neither table.
    """
    layers = dict(layer_numbers(model.children["decoder"]))
    places, unknown = [], []
    specs = model.create_parameter_specs_recursively()
    for path, spec in tree.flatten_items(specs, is_spec):
        first, _, rest = path.partition("/")
        name, _, inside = rest.partition("/")
        if first == "decoder":
            parts, numbers = in_layer.get(inside), layers[name]
        else:
            parts, numbers = in_model.get(path), [None]
        if parts is not None:
            places += _written_out(path, spec, parts, numbers)
        elif spec.trainable:
            unknown.append(path)
    if unknown:
        raise ValueError(f"No tensor of theirs holds {', '.join(unknown)}.")
    return places


def layer_numbers(decoder: BaseStack) -> Iterator[tuple[str, list[int]]]:
    """Yields (our name of a layer, the numbers of the layers that it is)."""
    cfg = decoder.config
    first, size = len(cfg.first_layers), len(cfg.block)
    for name in decoder.children:
        number = int(re.sub(r"\D", "", name))
        if name.startswith("repeated"):
            yield name, list(range(first + number, cfg.num_layers, size))
        else:
            yield name, [number]


def _written_out(
    path: str, spec: ParameterSpec, parts: Sequence[Part], numbers: Sequence[int | None]
) -> Iterator[Place]:
    """Yields the places of one parameter."""
    stacked = isinstance(numbers[0], int) and "/repeated" in path
    for turn, number in enumerate(numbers):
        lead: Index = (turn,) if stacked else ()
        before = "" if number is None else f"model.layers.{number}."
        for part in parts:
            experts = range(spec.shape[len(lead)]) if "{e}" in part.key else [0]
            for e in experts:
                at = tuple(e if isinstance(i, str) else i for i in part.at)
                yield Place(before + part.key.format(e=e), path, (*lead, *at), part)


# -- Views ---------------------------------------------------------------------------------------


def slices(at: Index, shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns which part of an array of that shape a place is, as slices."""
    at = (*at, *(None for _ in shape[len(at) :]))
    return tuple(
        slice(0, n) if i is None else slice(i, i + 1) for i, n in zip(at, shape, strict=True)
    )


def our_shape(place: Place, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of a place's part of our parameter, whose shape is given."""
    at = (*place.at, *(None for _ in shape[len(place.at) :]))
    return tuple(n for i, n in zip(at, shape, strict=True) if i is None)


def their_shape(place: Place, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of what their tensor holds of our parameter, whose shape is given."""
    left, right = place.part.view.split(" -> ")
    sizes = dict(zip(right.split(), our_shape(place, shape), strict=True))
    groups = re.findall(r"\(([^)]*)\)|(\S+)", left)
    return tuple(
        int(np.prod([sizes[n] for n in group.split()])) if group else sizes[single]
        for group, single in groups
    )


def to_ours(theirs: np.ndarray, place: Place, shape: Sequence[int]) -> np.ndarray:
    """Returns the part of our parameter that a tensor of theirs (its `rows`) is."""
    part, ours = place.part, our_shape(place, shape)
    names = part.view.split(" -> ")[1].split()
    y = einops.rearrange(theirs, part.view, **_needed(part.view, names, ours))
    if (start := part.pairs_from) is not None:
        y = np.concatenate([y[..., :start], y[..., start::2], y[..., start + 1 :: 2]], -1)
    return y if part.factor == 1.0 else y * np.asarray(part.factor, y.dtype)


def to_theirs(ours: np.ndarray, place: Place) -> np.ndarray:
    """Returns what `to_ours` would make this part of."""
    part = place.part
    if part.factor != 1.0:
        ours = ours / np.asarray(part.factor, ours.dtype)
    if (start := part.pairs_from) is not None:
        y = ours.copy()
        middle = start + (ours.shape[-1] - start) // 2
        y[..., start::2], y[..., start + 1 :: 2] = ours[..., start:middle], ours[..., middle:]
        ours = y
    left, right = part.view.split(" -> ")
    return einops.rearrange(ours, f"{right} -> {left}")


def _needed(view: str, names: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Returns the sizes that einops cannot tell: those of dimensions that a group joins."""
    theirs = view.split(" -> ", maxsplit=1)[0]
    joined = " ".join(re.findall(r"\(([^)]*)\)", theirs)).split()
    return {n: size for n, size in zip(names, sizes, strict=True) if n in joined}
