"""Candidates: every legal mesh, with rows a device at a time and what is recomputed."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from moelib.core.config import config_for_function
from moelib.layers.remat import remat
from moelib.parallel import sharding
from moelib.parallel.mesh import (
    HybridMeshShape,
    all_meshes,
    describe_mesh,
    infer_mesh_shape,
    parse_mesh,
)
from moelib.planning.estimate.activations import (
    DOTS,
    DOTS_NO_BATCH,
    FULL,
    NONE,
    OWN,
    remat_name,
    with_remat,
)
from moelib.planning.estimate.workload import Workload
from moelib.planning.hardware.topologies import PlanError, TopologyShape

# An axis across slices carries what it must over the slow network: those along which devices only
# share a batch, or experts.
_ACROSS = ("data", "expert", "fsdp")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes, larger than 1, inside a slice and across slices."""

    ici: tuple[tuple[str, int], ...]
    dcn: tuple[tuple[str, int], ...] = ()

    @functools.cached_property
    def inside(self) -> dict[str, int]:
        """Sizes inside a slice."""
        return dict(self.ici)

    @functools.cached_property
    def across(self) -> dict[str, int]:
        """Sizes across slices."""
        return dict(self.dcn)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes, all together."""
        names = self.inside | self.across
        return {n: self.inside.get(n, 1) * self.across.get(n, 1) for n in names}

    def parts(self, axes: Sequence[str]) -> int:
        """Returns the devices along some axes."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def __str__(self) -> str:
        said = describe_mesh(self.inside)
        if not self.dcn:
            return said
        across = describe_mesh(self.across)
        return f"{said}; across slices {across}"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a config's step on a topology.

    Attributes:
        topology: Its devices.
        mesh: How they are arranged.
        rows: Rows of the batch on a device at a time.
        num_microbatches: Parts of the batch, one after the other.
        remat: What is recomputed: a name of `Workload.kept`.
    """

    topology: TopologyShape
    mesh: Mesh
    rows: float
    num_microbatches: int
    remat: str

    def apply(self, cfg: Any) -> Any:
        """Returns a copy of the trainer config that runs so."""
        sizes = lambda part: tuple(part.get(name, 1) for name in cfg.mesh_axis_names)
        shape: Any = sizes(self.mesh.inside)
        if self.topology.num_slices > 1:
            shape = HybridMeshShape(ici=shape, dcn=sizes(self.mesh.across))
        cfg = cfg.clone(mesh_shape=shape, num_microbatches=self.num_microbatches)
        if self.remat != OWN:
            policy = None if self.remat == FULL else self.remat
            chosen = config_for_function(remat).set(policy=policy)
            cfg.model = with_remat(cfg.model, None if self.remat == NONE else chosen)
        return cfg


def candidates(
    cfg: Any, work: Workload, topology: TopologyShape, *, mesh: str | None = None
) -> list[Candidate]:
    """Returns every legal way to run a trainer config on a topology, its global batch as it is.

    Args:
        cfg: A `SpmdTrainer.Config`.
        work: What its step computes.
        topology: The devices.
        mesh: Sizes of axes, as fsdp=2,expert=-1; axes that are not named have size 1.

    Raises:
        PlanError: If there is none, or the sharding rules or `mesh` cannot be.
    """
    rules = rules_of(cfg)
    wanted = None if mesh is None else _parsed_mesh(mesh, cfg.mesh_axis_names, topology)
    split = _axes(cfg, work, rules)
    for name, size in (wanted or {}).items():
        if size > 1 and name not in split:
            dense = name == "expert" and work.moe is None
            reason = "the model has no experts" if dense else "nothing is split over it yet"
            place = f"topology {topology.name}: mesh {mesh!r}"
            raise PlanError(f"{place}: {name} is {size}, but {reason}; leave it out.")
    found, why, legal = [], "", _Rules(work, rules)
    remats = list(_remats(cfg, work))
    for each in _meshes(cfg, work, topology, rules, wanted):
        if (refused := legal.refuse(each)) is not None:
            why = why or f"{each}: {refused}"
            continue
        parts = each.parts(rules["batch"])
        most = work.global_batch_size // parts
        for rows in (n for n in range(1, most + 1) if most % n == 0):
            found += [Candidate(topology, each, rows, most // rows, name) for name in remats]
    if not found:
        raise PlanError(
            f"topology {topology.name}: no mesh of its {topology.num_devices} devices"
            f"{' with ' + mesh if mesh else ''} can run the config ({why or 'none has the axes'})."
        )
    return found


def as_it_is(cfg: Any, work: Workload, topology: TopologyShape) -> Candidate:
    """Returns the config as it stands.

    Raises:
        PlanError: If its mesh does not fit the topology, its batch the mesh, or its sharding rules
            cannot be.
    """
    names, shape = cfg.mesh_axis_names, cfg.mesh_shape
    per_slice, place = topology.devices_per_slice, f"topology {topology.name}: mesh_shape"
    try:
        if isinstance(shape, HybridMeshShape):
            ici = infer_mesh_shape(shape.ici, per_slice, axis_names=names, field=place)
            dcn = infer_mesh_shape(shape.dcn, topology.num_slices, axis_names=names, field=place)
        else:
            ici = infer_mesh_shape(shape, topology.num_devices, axis_names=names, field=place)
            dcn = (1,) * len(names)
            if topology.num_slices > 1:
                mesh = describe_mesh(dict(zip(names, ici, strict=True)))
                raise ValueError(
                    f"{place} {mesh}: the topology has {topology.num_slices} slices; set "
                    "HybridMeshShape(ici=sizes inside a slice, dcn=sizes across slices)."
                )
        rules = rules_of(cfg)
        mesh = _mesh(names, ici, dcn)
        sharding.check_mesh_axes(mesh.sizes, rules)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if (refused := _Rules(work, rules).refuse(mesh)) is not None:
        raise PlanError(f"topology {topology.name}: {refused}")
    micro, parts = cfg.num_microbatches, mesh.parts(rules["batch"])
    rows = work.global_batch_size // micro
    if rows % parts:
        raise PlanError(
            f"topology {topology.name}: num_microbatches is {micro}, and {rows} rows of a "
            f"micro-batch do not divide over {parts} devices; make it a divisor of "
            f"{work.global_batch_size // parts}."
        )
    return Candidate(topology, mesh, rows // parts, micro, OWN)


def rules_of(cfg: Any) -> sharding.Rules:
    """Returns the sharding rules of a trainer config.

    Raises:
        PlanError: If one is of a logical axis, or names a mesh axis, that there is not.
    """
    names = tuple(cfg.mesh_axis_names)
    mesh = jax.sharding.AbstractMesh((1,) * len(names), names)
    try:
        with (
            jax.sharding.use_abstract_mesh(mesh),
            sharding.sharding_rules(cfg.sharding_rules or {}),
        ):
            return sharding.current_rules()
    except ValueError as error:
        raise PlanError(str(error)) from None


def _remats(cfg: Any, work: Workload) -> Iterator[str]:
    """Yields remats that differ: `nothing_saveable` is full, `everything_saveable` is none."""
    yield OWN
    own = remat_name(cfg.model)
    seen = {work.kept[OWN]}
    for name in (FULL, DOTS, DOTS_NO_BATCH, NONE):
        if name != own and work.kept[name] not in seen:
            seen.add(work.kept[name])
            yield name


def _mesh(names: Sequence[str], ici: Sequence[int], dcn: Sequence[int]) -> Mesh:
    larger = lambda sizes: tuple((n, s) for n, s in zip(names, sizes, strict=True) if s > 1)
    return Mesh(larger(ici), larger(dcn))


def _axes(cfg: Any, work: Workload, rules: sharding.Rules) -> list[str]:
    """Returns the axes by which something is split."""
    used = {axis for axes in rules.values() for axis in axes}
    if work.moe is None:
        used -= {"expert"}  # To dense weights it is a second fsdp.
    return [name for name in cfg.mesh_axis_names if name in used]


def _meshes(
    cfg: Any,
    work: Workload,
    topology: TopologyShape,
    rules: sharding.Rules,
    wanted: Mapping[str, int] | None,
) -> Iterator[Mesh]:
    """Yields the meshes of all devices over axes by which something is split."""
    names = _axes(cfg, work, rules)
    across = [n for n in names if n in _ACROSS]
    inner = all_meshes(topology.devices_per_slice, names)
    for dcn in all_meshes(topology.num_slices, across):
        for ici in inner:
            mesh = Mesh(tuple(ici.items()), tuple(dcn.items()))
            if (
                topology.accelerator.platform == "gpu"
                and len(mesh.inside.keys() & mesh.across.keys()) > 1
            ):
                continue  # `create_device_mesh` refuses it.
            if wanted is None or all(wanted.get(n, 1) == mesh.sizes.get(n, 1) for n in names):
                yield mesh


class _Rules:
    """Which meshes the sharding rules take, for what a workload splits."""

    def __init__(self, work: Workload, rules: sharding.Rules) -> None:
        self._rules = rules
        rows, length = work.global_batch_size, work.seq_len
        self._arrays = [
            (("batch", "residual_sequence"), (rows, length), "the batch"),
            (("batch", "sequence", "vocab"), None, "the logits"),
            (("batch", "sequence", "expert_ffn"), None, "tokens of experts"),
            *((leaf.axes, leaf.shape, "a parameter") for leaf in work.parameters),
        ]
        self._halves = (("batch", "sequence"), (rows, length // 2), "attention's half sequences")
        self._known: dict[tuple[Any, ...], str | None] = {}

    def refuse(self, mesh: Mesh) -> str | None:
        """Returns why the rules do not take a mesh, or None."""
        key = tuple(sorted(mesh.sizes.items()))
        if key not in self._known:
            # A ring of attention deals each device two pieces of a sequence.
            ring = [self._halves] if mesh.parts(self._rules["sequence"]) > 1 else []
            errors = (self._error(mesh, *each) for each in (*ring, *self._arrays))
            self._known[key] = next((error for error in errors if error), None)
        return self._known[key]

    def _error(
        self, mesh: Mesh, axes: Sequence[str | None], sizes: Sequence[int] | None, place: str
    ) -> str | None:
        try:
            rules = self._rules
            sharding.partition_spec(axes, mesh.sizes, shape=sizes, rules=rules, place=place)
        except ValueError as error:
            return str(error)
        return None


def _parsed_mesh(text: str, names: Sequence[str], topology: TopologyShape) -> dict[str, int]:
    """Returns the sizes of fsdp=2,expert=-1."""
    field = f"topology {topology.name}: mesh"
    try:
        shape = parse_mesh(text, axis_names=names)
        shape = infer_mesh_shape(shape, topology.num_devices, axis_names=names, field=field)
    except ValueError as error:
        raise PlanError(str(error)) from None
    return dict(zip(names, shape, strict=True))
