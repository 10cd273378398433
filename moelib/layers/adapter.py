"""Low-rank adapters (LoRA): y = x W + scale (x A) B, where W is frozen.

A has the dimensions of W with rank r in place of its outputs; B has the stacked dimensions of W, r,
and the outputs. Stacked matrices, such as keys and values or experts, have an A and a B each.

Source: Hu et al., arXiv:2106.09685.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moelib.core import precision
from moelib.core.config import REQUIRED, Configurable, Required, config_class
from moelib.core.config_text import sub_configs
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.param import FanAxes, ParameterSpec
from moelib.core.tree import Nested
from moelib.layers import initializers

# Regular expression of the paths of adapters.
ADAPTERS = r".*_lora_[ab]"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight and its adapter; indexing its stacked dimensions gives one of its parts."""

    weight: Any  # W: an array or a `QuantizedWeight`.
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> "AdaptedWeight":
        parts = {name: getattr(self, name)[index] for name in ("weight", "a", "b")}
        return dataclasses.replace(self, **parts)

    def astype(self, dtype: Any) -> "AdaptedWeight":
        """Returns weight and adapter in another dtype."""
        parts = {name: getattr(self, name).astype(dtype) for name in ("weight", "a", "b")}
        return dataclasses.replace(self, **parts)

    @property
    def frozen(self) -> Any:
        """The weight, without a gradient."""
        return jax.lax.stop_gradient(self.weight)

    @property
    def scaled_b(self) -> Array:
        """The matrix scale B, which is smaller than the products that it scales."""
        return self.scale * self.b

    def merged(self, fan_axes: FanAxes | None) -> Array:
        """Returns W + scale A B of a weight with these fan axes, summed in float32, in its dtype.

        W is an array.
        """
        assert fan_axes is not None
        outputs, stacked = fan_axes.out_axis, fan_axes.batch_axis
        rank = self.weight.ndim  # The label of r; a dimension of W is its own label.
        of_a = [axis for axis in range(rank) if axis not in outputs]
        a, b = (x.astype(jnp.float32) for x in (self.a, self.b))
        labels = [*of_a, rank], [*stacked, rank, *outputs]
        change = jnp.einsum(
            a, labels[0], b, labels[1], [*range(rank)], precision=jax.lax.Precision.HIGHEST
        )
        whole = self.frozen.astype(jnp.float32) + self.scale * change
        return whole.astype(self.weight.dtype)

    def change(self, x: Float[Array, "... D"], *, num_inputs: int) -> Array:
        """Returns scale (x A) B, summed over the last dimensions of x."""
        wide = precision.is_reduced_in_float32(x.dtype)
        dot = precision.tensordot if wide else jnp.tensordot
        inside = dot(x, self.a, num_inputs)  # [..., r], or [..., n, r] of n stacked matrices.
        axis = x.ndim - num_inputs
        if inside.ndim == axis + 1:
            return dot(inside, self.scaled_b, 1)
        parts = [dot(inside[..., i, :], b, 1) for i, b in enumerate(self.scaled_b)]
        return jnp.stack(parts, axis)


def split_frozen(weight: AdaptedWeight) -> tuple[AdaptedWeight, AdaptedWeight]:
    """Returns the adapter without the weight, and the weight without the adapter."""
    replace = dataclasses.replace
    return replace(weight, weight=None), replace(weight, a=None, b=None)


def join_frozen(adapter: AdaptedWeight, weight: AdaptedWeight) -> AdaptedWeight:
    """Returns the adapted weight of which `split_frozen` gave the parts."""
    return dataclasses.replace(adapter, weight=weight.weight)


def is_adapter(path: str) -> bool:
    """Returns whether a path is that of a parameter of an adapter."""
    return re.fullmatch(ADAPTERS, path) is not None


def has_adapters(cfg: Any) -> bool:
    """Returns whether a layer of a config has an adapter."""
    return any(isinstance(inside, LowRank.Config) for _, inside in sub_configs(cfg))


def without_adapters(cfg: Any) -> Any:
    """Returns a copy of a config whose layers have no adapters."""
    cfg = cfg.clone()
    for inside in (cfg, *(each for _, each in sub_configs(cfg))):
        if isinstance(getattr(inside, "adapter", None), LowRank.Config):
            inside.adapter = None
    return cfg


def adapter_names(weight: str) -> tuple[str, str]:
    """Returns the names of A and B of a weight."""
    return f"{weight}_lora_a", f"{weight}_lora_b"


class LowRank(Configurable):
    """An adapter of each weight of a layer."""

    @config_class
    class Config(Configurable.Config):
        rank: Required[PositiveInt] = REQUIRED  # r.
        alpha: PositiveFloat = 32.0  # Numerator of the scale, alpha / r.
        rs_lora: bool = False  # Whether the scale is alpha / sqrt(r) (arXiv:2312.03732).

    @property
    def scale(self) -> float:
        """The factor of A B."""
        cfg: LowRank.Config = self.config
        return cfg.alpha / (math.sqrt(cfg.rank) if cfg.rs_lora else cfg.rank)

    def specs(self, name: str, spec: ParameterSpec) -> dict[str, ParameterSpec]:
        """Returns the specs of the adapter of a weight: A is drawn uniformly, B is 0."""
        assert spec.fan_axes is not None, name
        rank, outputs, stacked = self.config.rank, spec.fan_axes.out_axis, spec.fan_axes.batch_axis
        of_a = [axis for axis in range(len(spec.shape)) if axis not in outputs]
        position = {axis: i for i, axis in enumerate(of_a)}
        inputs, copies = (
            tuple(position[axis] for axis in axes) for axes in (spec.fan_axes.in_axis, stacked)
        )
        n = len(stacked)
        a = ParameterSpec(
            (*(spec.shape[i] for i in of_a), rank),
            (*(spec.axes[i] for i in of_a), None),
            dtype="float32",
            initializer=initializers.fan_in_uniform(),
            fan_axes=FanAxes(inputs, (len(of_a),), copies),
        )
        b = ParameterSpec(
            (*(spec.shape[i] for i in stacked), rank, *(spec.shape[i] for i in outputs)),
            (*(spec.axes[i] for i in stacked), None, *(spec.axes[i] for i in outputs)),
            dtype="float32",
            initializer=initializers.constant(0.0),
            fan_axes=FanAxes((n,), tuple(range(n + 1, n + 1 + len(outputs))), tuple(range(n))),
        )
        return dict(zip(adapter_names(name), (a, b), strict=True))

    def joined(self, params: Nested) -> Nested:
        """Returns a layer's parameters with each adapted weight as an `AdaptedWeight`."""
        joined = dict(params)
        for name in params:
            of_a, of_b = adapter_names(name)
            if of_a in params:
                a, b = joined.pop(of_a), joined.pop(of_b)
                joined[name] = AdaptedWeight(params[name], a, b, self.scale)
        return joined
