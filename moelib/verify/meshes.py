"""Over which meshes of some devices a config is tried."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from moelib.core.config import ConfigBase
from moelib.parallel.mesh import HybridMeshShape, all_meshes, describe_mesh, parse_mesh
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
        return list({describe_mesh(axes): axes for axes in asked}.values())
    found = all_meshes(num_devices, names)
    if which == "all":
        return found
    own = [own for own in _own_axes(cfg) if own]
    most = max((len(axes) for axes in found), default=0)
    kept = [axes for axes in found if len(axes) in (1, most) or set(axes) in own]
    return sorted(kept, key=lambda axes: (set(axes) not in own, len(axes)))


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
    shape = parse_mesh(text, axis_names=names, num_devices=num_devices)
    return {name: size for name, size in zip(names, shape, strict=True) if size > 1}
