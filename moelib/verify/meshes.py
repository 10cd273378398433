"""Over which meshes of some devices a config is tried."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moelib.core.config import ConfigBase, did_you_mean
from moelib.parallel.mesh import HybridMeshShape
from moelib.parallel.sharding import DEFAULT_RULES

Axes = dict[str, int]  # Sizes above 1 by axis, outermost first.


def meshes(cfg: Any, num_devices: int, which: str = "auto") -> list[Axes]:
    """Returns meshes of exactly so many devices over the axes that the config splits something by.

    Args:
        cfg: A `SpmdTrainer.Config`.
        num_devices: Devices of each mesh.
        which: "all"; "auto" for each axis alone, as many as fit together, and those axes that the
            config's own mesh and mesh rules have; or a list such as "fsdp=8;data=2,model=4".

    Raises:
        ValueError: If a mesh of the list is none of so many devices.
    """
    rules = {**DEFAULT_RULES, **(cfg.sharding_rules or {})}
    used = {axis for axes in rules.values() for axis in axes}
    names = [name for name in cfg.mesh_axis_names if name in used]
    if which not in ("auto", "all"):
        asked = [_read(text, names, num_devices) for text in which.split(";")]
        return list({describe(axes): axes for axes in asked}.values())
    found = list(_factorized(names, num_devices))
    if which == "all":
        return found
    own = [own for own in _own_axes(cfg) if own]
    most = max((len(axes) for axes in found), default=0)
    kept = [axes for axes in found if len(axes) in (1, most) or set(axes) in own]
    return sorted(kept, key=lambda axes: (set(axes) not in own, len(axes)))


def describe(axes: Mapping[str, int]) -> str:
    """Returns "data 2, fsdp 4"."""
    return ", ".join(f"{name} {size}" for name, size in axes.items()) or "1 device"


def _factorized(names: Sequence[str], num: int) -> Iterator[Axes]:
    """Yields every way to write a number as a product of the axes' sizes."""
    if num == 1:
        yield {}
        return
    if not names:
        return
    for size in range(1, num + 1):
        if num % size == 0:
            first = {names[0]: size} if size > 1 else {}
            for rest in _factorized(names[1:], num // size):
                yield first | rest


def _own_axes(cfg: Any) -> list[set[str]]:
    """Returns which axes are more than 1, or are to be found out, in each mesh of the config."""
    rules = [rule for _, rule in cfg.mesh_rules or ()]
    shapes = [cfg.mesh_shape, *rules]
    for rule in rules:
        if isinstance(rule, ConfigBase):
            with contextlib.suppress(Exception):  # The check `rules` says what it raises.
                shapes.append(rule.instantiate()(cfg.clone()).mesh_shape)
    sizes: list[Sequence[int]] = []
    for shape in shapes:
        if isinstance(shape, HybridMeshShape):
            both = zip(shape.ici, shape.dcn, strict=False)  # `rules` checks the lengths too.
            sizes.append([-1 if -1 in pair else math.prod(pair) for pair in both])
        elif isinstance(shape, Sequence):
            sizes.append(shape)
    return [
        {n for n, s in zip(cfg.mesh_axis_names, each, strict=False) if s != 1} for each in sizes
    ]


def _read(text: str, names: Sequence[str], num_devices: int) -> Axes:
    axes: Axes = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if name not in names:
            raise ValueError(f"mesh {text!r}: no axis {name!r}; {did_you_mean(name, names)}")
        if not size.isdigit() or int(size) < 1 or name in axes:
            raise ValueError(f"mesh {text!r}: write axes once each, as in fsdp=4,expert=2.")
        axes[name] = int(size)
    if (product := math.prod(axes.values())) != num_devices:
        raise ValueError(
            f"mesh {text!r} takes {product} devices; choose sizes that multiply to {num_devices}, "
            "or set --devices."
        )
    return {name: axes[name] for name in names if axes.get(name, 1) > 1}
