"""Candidates: every legal mesh, with a batch per device, a number of micro-batches and a remat."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers.remat import remat
from moelib.parallel import sharding
from moelib.parallel.mesh import (
    HybridMeshShape,
    all_meshes,
    create_device_mesh,
    describe_mesh,
    infer_mesh_shape,
    parse_mesh,
    shared_sides,
)
from moelib.parallel.pipeline.engine import AXIS
from moelib.parallel.pipeline.schedule import Schedule, check_microbatches
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
from moelib.planning.hardware.topologies import TopologyShape, torus_devices
from moelib.train import settings
from moelib.train.settings import check_loss_chunk

# Axes that may lie across slices: along them devices share only a batch, weights or experts, so
# that the least traffic crosses the slow network.
_ACROSS = ("pipeline", "data", "expert", "fsdp")
_MAX_PIPELINE = 16  # Ranks in a sweep; `mesh` may ask for more.
_MAX_REFUSALS = 4  # Reasons in an error.


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes above 1 of the mesh axes, as (name, size), inside a slice and across slices."""

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
        """Sizes of the axes: inside times across."""
        names = self.inside | self.across
        return {n: self.inside.get(n, 1) * self.across.get(n, 1) for n in names}

    def parts(self, axes: Sequence[str]) -> int:
        """Returns the number of devices along some axes."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def __str__(self) -> str:
        inside = describe_mesh(self.inside)
        return f"{inside}; across slices {describe_mesh(self.across)}" if self.dcn else inside


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to run a config's step on a topology."""

    topology: TopologyShape
    mesh: Mesh
    batch_per_device: float  # Sequences per device and micro-batch.
    num_microbatches: int
    remat: str  # A name of `Workload.saved`.
    schedule: Schedule | None = None  # Of a mesh with the axis "pipeline".

    def shared_sides(self) -> list[str]:
        """Returns the sides of a slice's torus that several axes share; see `mesh.shared_sides`."""
        devices = torus_devices(self.topology)
        if not devices:
            return []
        array = create_device_mesh([n for _, n in self.mesh.ici], [*self.mesh.inside], devices)
        return shared_sides(array.devices, array.axis_names)

    def apply(self, cfg: Any) -> Any:
        """Returns a copy of the trainer config that runs in this way."""
        sizes = lambda part: tuple(part.get(name, 1) for name in cfg.mesh_axis_names)
        shape: Any = sizes(self.mesh.inside)
        if self.topology.num_slices > 1:
            shape = HybridMeshShape(ici=shape, dcn=sizes(self.mesh.across))
        cfg = cfg.clone(mesh_shape=shape, num_microbatches=self.num_microbatches)
        cfg.log_gradient_noise = False  # It takes little, and restricts micro-batches.
        cfg.pipeline_schedule = self.schedule
        if self.remat != OWN:
            policy = None if self.remat == FULL else self.remat
            chosen = config_for_function(remat).set(policy=policy)
            cfg.model = with_remat(cfg.model, None if self.remat == NONE else chosen)
        return cfg


def candidates(
    cfg: Any, work: Workload, topology: TopologyShape, *, mesh: str | None = None
) -> Iterator[Candidate]:
    """Yields every legal way to run a trainer config, with its global batch, on a topology.

    Those of a mesh follow one another. `mesh` restricts them to sizes such as fsdp=2,expert=-1;
    other axes then have size 1.

    Raises:
        UserError: If there is no candidate, or the sharding rules or `mesh` are invalid.
    """
    rules = rules_of(cfg)
    split = _split_axes(cfg, work, rules)
    wanted = None if mesh is None else _wanted(cfg, work, topology, mesh, split)
    check, remats = _mesh_check(work, rules), [*_remats(cfg, work)]
    schedules, sequence = functools.cache(functools.partial(_schedules, work)), rules["sequence"]
    refusals, found_none = dict[str, None](), True
    for each in _meshes(split, topology, wanted):
        most, parts = work.global_batch_size // each.parts(rules["batch"]), each.parts(sequence)
        tokens, num_ranks = most * work.seq_len // parts, each.parts([AXIS])
        if refusal := check(each) or _refusal(check_loss_chunk, work.loss_chunk_size, tokens):
            refusals[refusal] = None
            continue
        for size in range(1, most + 1):
            if most % size or size * work.seq_len // parts < (work.loss_chunk_size or 0):
                continue
            for schedule in schedules(num_ranks, most // size):
                for name in remats:
                    found_none = False
                    yield Candidate(topology, each, size, most // size, name, schedule)
    if found_none:
        raise UserError(
            f"topology {topology.name}: no mesh of its {topology.num_devices} devices"
            f"{' with ' + mesh if mesh else ''} can run the config: "
            f"{' '.join([*refusals][:_MAX_REFUSALS]) or 'the config lacks the axes.'}"
        )


def _wanted(
    cfg: Any, work: Workload, topology: TopologyShape, mesh: str, split: Sequence[str]
) -> dict[str, int]:
    """Returns the sizes above 1 of a mesh. Raises UserError if nothing is split over an axis."""
    names, field = cfg.mesh_axis_names, f"topology {topology.name}: mesh"
    shape = parse_mesh(mesh, axis_names=names, num_devices=topology.num_devices, field=field)
    wanted = dict(_above_one(names, shape))
    for name in wanted.keys() - set(split):
        if name == AXIS and work.pipeline_refusal:
            raise UserError(f"topology {topology.name}: {work.pipeline_refusal}")
        dense = name == "expert" and work.moe is None
        reason = "the model has no experts" if dense else "nothing is split over it yet"
        raise UserError(f"{field} {mesh!r}: {name}={wanted[name]}, but {reason}; omit it.")
    return wanted


def current_candidate(cfg: Any, work: Workload, topology: TopologyShape) -> Candidate:
    """Returns the config's own mesh, micro-batches and remat on a topology.

    Raises:
        UserError: If its mesh does not fit the topology, or its batch does not fit the mesh.
    """
    rules, mesh = rules_of(cfg), own_mesh(cfg, topology)
    schedule = settings.schedule_on(cfg, mesh.sizes)
    settings.warn_unused_schedule(cfg, mesh.sizes)
    sharding.check_mesh_axes(mesh.sizes, _rules(cfg, schedule))
    if schedule is not None:
        if work.pipeline_refusal:
            raise UserError(f"topology {topology.name}: {work.pipeline_refusal}")
        check_microbatches(schedule, mesh.parts([AXIS]), cfg.num_microbatches)
    if refusal := _mesh_check(work, rules)(mesh):
        raise UserError(f"topology {topology.name}: {refusal}")
    num, parts = cfg.num_microbatches, mesh.parts(rules["batch"])
    if work.global_batch_size // num % parts:
        raise UserError(
            f"topology {topology.name}: num_microbatches={num} gives micro-batches of "
            f"{work.global_batch_size // num} sequences, which {parts} devices do not divide; set "
            f"it to a divisor of {work.global_batch_size // parts}."
        )
    size = work.global_batch_size // num // parts
    tokens = size * work.seq_len // mesh.parts(rules["sequence"])
    if refusal := _refusal(check_loss_chunk, work.loss_chunk_size, tokens):
        raise UserError(f"topology {topology.name}: {refusal}")
    return Candidate(topology, mesh, size, num, OWN, schedule)


def _schedules(work: Workload, num_ranks: int, num_microbatches: int) -> list[Schedule | None]:
    """Returns the possible schedules: None without a pipeline."""
    if num_ranks == 1:
        return [None]
    return [
        each
        for each in Schedule
        if each.num_chunks * num_ranks <= work.num_blocks
        and not _refusal(check_microbatches, each, num_ranks, num_microbatches)
    ]


def _refusal(check: Callable[..., Any], *arguments: Any) -> str:
    """Returns the message of the UserError that a check raises, or ""."""
    try:
        check(*arguments)
    except UserError as error:
        return str(error)
    return ""


def own_mesh(cfg: Any, topology: TopologyShape) -> Mesh:
    """Returns the config's own mesh. Raises UserError if it does not fit the topology."""
    names, shape = cfg.mesh_axis_names, cfg.mesh_shape
    field = f"topology {topology.name}: mesh_shape"
    if isinstance(shape, HybridMeshShape):
        per_slice, num_slices = topology.devices_per_slice, topology.num_slices
        ici = infer_mesh_shape(shape.ici, per_slice, axis_names=names, field=field)
        dcn = infer_mesh_shape(shape.dcn, num_slices, axis_names=names, field=field)
        return Mesh(_above_one(names, ici), _above_one(names, dcn))
    ici = infer_mesh_shape(shape, topology.num_devices, axis_names=names, field=field)
    mesh = Mesh(_above_one(names, ici))
    if topology.num_slices > 1:
        raise UserError(
            f"{field} {mesh}: the topology has {topology.num_slices} slices; set "
            "HybridMeshShape(ici=sizes inside a slice, dcn=sizes across slices)."
        )
    return mesh


def _above_one(names: Sequence[str], sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in zip(names, sizes, strict=True) if size > 1)


def rules_of(cfg: Any) -> sharding.Rules:
    """Returns the sharding rules of a trainer config, with those of a pipeline."""
    return _rules(cfg, Schedule.GPIPE)


def _rules(cfg: Any, schedule: Schedule | None) -> sharding.Rules:
    names = tuple(cfg.mesh_axis_names)
    mesh = jax.sharding.AbstractMesh((1,) * len(names), names)
    changed = settings.rules_of(cfg.clone(pipeline_schedule=schedule))
    with jax.sharding.use_abstract_mesh(mesh), sharding.sharding_rules(changed):
        return sharding.current_rules()


def _remats(cfg: Any, work: Workload) -> Iterator[str]:
    """Yields the names of remats that save different activations, the config's own first."""
    yield OWN
    own = remat_name(cfg.model)
    seen = {work.saved[OWN]}
    for name in (FULL, DOTS, DOTS_NO_BATCH, NONE):
        if name != own and work.saved[name] not in seen:
            seen.add(work.saved[name])
            yield name


def _split_axes(cfg: Any, work: Workload, rules: sharding.Rules) -> list[str]:
    """Returns the mesh axes over which the rules split something."""
    used = {axis for axes in rules.values() for axis in axes}
    if work.moe is None:
        used -= {"expert"}  # For dense weights it would be a second fsdp.
    if work.pipeline_refusal:
        used -= {AXIS}
    return [name for name in cfg.mesh_axis_names if name in used]


def _meshes(
    names: Sequence[str], topology: TopologyShape, wanted: Mapping[str, int] | None
) -> Iterator[Mesh]:
    """Yields the meshes of all devices over some axes; only those of the sizes `wanted`, if set."""
    inner = all_meshes(topology.devices_per_slice, names)
    for dcn in all_meshes(topology.num_slices, [name for name in names if name in _ACROSS]):
        for ici in inner:
            if topology.accelerator.platform == "gpu" and len(ici.keys() & dcn.keys()) > 1:
                continue  # `create_device_mesh` refuses it.
            mesh = Mesh(tuple(ici.items()), tuple(dcn.items()))
            if wanted is None:
                if mesh.parts([AXIS]) <= _MAX_PIPELINE:
                    yield mesh
            elif all(wanted.get(n, 1) == mesh.sizes.get(n, 1) for n in names):
                yield mesh


def _mesh_check(work: Workload, rules: sharding.Rules) -> Callable[[Mesh], str]:
    """Returns a function of a mesh: the reason why it cannot run the workload, or ""."""
    batch, length = work.global_batch_size, work.seq_len
    arrays: list[tuple[Sequence[str | None], Sequence[int] | None, str]] = [
        (("batch", "residual_sequence"), (batch, length), "the batch"),
        (("batch", "sequence", "vocab"), None, "the logits"),
        (("batch", "sequence", "expert_ffn"), None, "tokens of experts"),
        *((leaf.axes, leaf.shape, "a parameter") for leaf in work.parameters),
    ]
    # Ring attention gives each device two pieces of a sequence.
    halves = (("batch", "sequence"), (batch, length // 2), "attention's half sequences")

    def check(mesh: Mapping[str, int]) -> None:
        if (num_ranks := mesh.get(AXIS, 1)) > work.num_blocks:
            raise UserError(
                f"{AXIS}={num_ranks}: the model has {work.num_blocks} blocks; set fewer ranks."
            )
        ring = math.prod(mesh.get(axis, 1) for axis in rules["sequence"]) > 1
        for axes, shape, name in [halves, *arrays] if ring else arrays:
            sharding.partition_spec(axes, mesh, shape=shape, rules=rules, array=name)

    refusal = functools.cache(lambda sizes: _refusal(check, dict(sizes)))
    return lambda mesh: refusal(frozenset(mesh.sizes.items()))
