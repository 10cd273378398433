"""The meshes that a config is verified on."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from moelib.core.config_modifier import apply_mesh_rule
from moelib.parallel.mesh import HybridMeshShape, all_meshes, describe_mesh, parse_mesh
from moelib.parallel.sharding import DEFAULT_RULES
from moelib.train.settings import rules_of

Axes = dict[str, int]  # Sizes above 1 by axis, outermost first.


def meshes_to_check(
    cfg: Any, num_devices: int, which: str = "auto", *, thorough: bool = False
) -> list[Axes]:
    """Returns meshes of `num_devices` devices over the axes that the config's rules split over.

    `which` is the argument `meshes` of `verify_config`, and `thorough` too. A config with a
    pipeline schedule is checked with a pipeline of 2 and of 4. Raises UserError if a mesh is
    impossible.
    """
    rules = {**DEFAULT_RULES, **rules_of(cfg)}
    used = {axis for axes in rules.values() for axis in axes}
    names = [name for name in cfg.mesh_axis_names if name in used]
    if which not in ("auto", "all"):
        shapes = (
            parse_mesh(text, axis_names=names, num_devices=num_devices) for text in which.split(";")
        )
        requested = ({n: s for n, s in zip(names, shape, strict=True) if s > 1} for shape in shapes)
        return list({describe_mesh(axes): axes for axes in requested}.values())
    found = all_meshes(num_devices, names)
    if which == "all":
        return found
    if "pipeline" in names:
        sizes = [axes for axes in found if axes.get("pipeline") in (2, 4)]
        return _covering(sizes, lambda axes: {(axes["pipeline"], name) for name in axes})
    own = [axes for axes in _own_axes(cfg) if axes]
    most = max((len(axes) for axes in found), default=0)
    kept = [axes for axes in found if len(axes) == 1 or set(axes) in own]
    together = [axes for axes in found if len(axes) == most > 1 and axes not in kept]
    pairs = lambda axes: set(itertools.combinations(axes, 2))
    kept += together if thorough else _covering(together, pairs)
    return sorted(kept, key=lambda axes: (set(axes) not in own, len(axes)))


def _covering(meshes: list[Axes], parts: Callable[[Axes], set[Any]]) -> list[Axes]:
    """Returns a few of the meshes that have each part that any of them has."""
    kept: list[Axes] = []
    missing = set[Any]().union(*map(parts, meshes))
    while missing:
        kept.append(max(meshes, key=lambda axes: len(parts(axes) & missing)))
        missing -= parts(kept[-1])
    return kept


def _own_axes(cfg: Any) -> list[set[str]]:
    """Returns the axes that are larger than 1, or inferred, in each mesh of the config."""
    shapes = [cfg.mesh_shape]
    for _, rule in cfg.mesh_rules or ():
        with contextlib.suppress(Exception):  # The check `rules` reports it.
            shapes.append(apply_mesh_rule(cfg.clone(), rule).mesh_shape)
    sizes: list[Sequence[int]] = []
    for shape in shapes:
        if isinstance(shape, HybridMeshShape):
            both = zip(shape.ici, shape.dcn, strict=False)  # The check `rules` reports lengths.
            sizes.append([-1 if -1 in pair else math.prod(pair) for pair in both])
        elif isinstance(shape, Sequence):
            sizes.append(shape)
    return [
        {n for n, s in zip(cfg.mesh_axis_names, each, strict=False) if s != 1} for each in sizes
    ]
