"""Specs of parameters: shape, dtype, logical axes, initializer."""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

import jax

from moelib.core.errors import UserError
from moelib.core.tree import Nested, by_path

Axes = tuple[str | None, ...]  # A logical axis name for each dimension, None for one never split.
Initializer = Callable[[jax.Array, "ParameterSpec"], jax.Array]  # (key, spec) -> values


@dataclasses.dataclass(frozen=True)
class FanAxes:
    """Dimensions of a weight that are its inputs, its outputs, and independent copies.

    Each is a tuple of dimensions, or one dimension. Negative ones count from the last, as -1.
    """

    in_axis: tuple[int, ...]
    out_axis: tuple[int, ...]
    batch_axis: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, axes in vars(self).items():
            if isinstance(axes, int):
                object.__setattr__(self, name, (axes,))

    def resolved(self, shape: tuple[int, ...]) -> "FanAxes":
        """Returns the dimensions of an array of that shape, counted from 0."""
        num_dims = len(shape)
        for axis in (*self.in_axis, *self.out_axis, *self.batch_axis):
            if not -num_dims <= axis < num_dims:
                raise UserError(
                    f"{self}: a parameter of shape {shape} has no dimension {axis}; count from 0 "
                    f"to {num_dims - 1}, or from -1 to {-num_dims}."
                )
        groups = (self.in_axis, self.out_axis, self.batch_axis)
        return FanAxes(*(tuple(axis % num_dims for axis in group) for group in groups))


class Cast(enum.Enum):
    """Where a step casts a parameter to its compute dtype; see `moelib.core.precision`."""

    STEP = "step"  # In the step, before layers read it; those of stacked layers one by one.
    READ = "read"  # Where it is read, as rows of a table are; its gradient is float32.
    NEVER = "never"  # Nowhere: layers read it as it is stored.


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """The spec of a parameter of a layer."""

    shape: tuple[int, ...]
    axes: Axes  # Logical axis of each dimension ("embed", "ffn", ...); see parallel/sharding.py.
    dtype: str = ""  # Name of the storage dtype; empty for the layer's.
    initializer: Initializer | None = None  # (key, this spec) -> values; None: the layer's.
    fan_axes: FanAxes | None = None  # Dimensions of the fans; None for biases and scales.
    trainable: bool = True  # Whether the learner updates it by its gradient.
    weight_decay_scale: float = 1.0  # Factor of the weight decay; 0 for none.
    cast: Cast = Cast.STEP  # Where a step in lower precision casts it, if it is trainable.
    quantization: Any = None  # Scheme of its matmuls; see `moelib.layers.quantization`.

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise UserError(
                f"a parameter of shape {self.shape} has {len(self.shape)} dimensions, but its axes "
                f"{self.axes} name {len(self.axes)}."
            )
        if self.fan_axes is not None:
            object.__setattr__(self, "fan_axes", self.fan_axes.resolved(self.shape))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def fans(self) -> tuple[int, int]:
        """Returns (fan in, fan out). Raises UserError if the spec has no fan axes."""
        if self.fan_axes is None:
            raise UserError(
                f"shape {self.shape} has no fan_axes; give its ParameterSpec "
                "fan_axes=FanAxes(in_axis=(-2,), out_axis=(-1,)), or an initializer that counts "
                "no fans, such as normal or constant."
            )
        fan_in = math.prod(self.shape[axis] for axis in self.fan_axes.in_axis)
        fan_out = math.prod(self.shape[axis] for axis in self.fan_axes.out_axis)
        return fan_in, fan_out

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """The dimensions along which the parameter is a batch of independent ones.

        For a weight these are all but the input and output axes of its fans (layers of a scan,
        experts, query/key/value); a bias or scale is a batch of vectors along its last dimension.
        """
        dims = range(len(self.shape))
        if self.fan_axes is None:
            return tuple(dims)[:-1]
        matrix = (*self.fan_axes.in_axis, *self.fan_axes.out_axis)
        return tuple(axis for axis in dims if axis not in matrix)

    def stacked(self, num: int) -> "ParameterSpec":
        """Returns the spec of `num` such parameters stacked along a new first axis."""
        fan_axes = self.fan_axes and FanAxes(
            in_axis=tuple(a + 1 for a in self.fan_axes.in_axis),
            out_axis=tuple(a + 1 for a in self.fan_axes.out_axis),
            batch_axis=(0, *(a + 1 for a in self.fan_axes.batch_axis)),
        )
        shape, axes = (num, *self.shape), ("layers", *self.axes)
        return dataclasses.replace(self, shape=shape, axes=axes, fan_axes=fan_axes)


def is_spec(value: Any) -> bool:
    """Returns whether a value is a ParameterSpec (for `is_leaf`)."""
    return isinstance(value, ParameterSpec)


def specs_by_path(specs: Nested | None) -> dict[str, ParameterSpec]:
    """Returns {path: spec}; empty for None."""
    return by_path(specs or {}, is_spec)
