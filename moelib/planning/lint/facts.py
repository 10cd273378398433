"""The input of lint: a compiled step, and the trainer's settings that it should reflect."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from moelib.core import tree
from moelib.core.config_text import sub_configs
from moelib.core.param import is_spec
from moelib.core.precision import is_cast
from moelib.planning.hlo import source, values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.source import SourceMap
from moelib.planning.report.step_report import Finding

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Bytes per device from which on lint reports something."""

    state: int = 64 * _MIB  # An array of the state.
    activation: int = 64 * _MIB
    collective: int = 1 * _MIB  # The result of a collective.
    copy: int = 64 * _MIB
    padded: int = 64 * _MIB  # An array with its padding.


@dataclasses.dataclass(frozen=True)
class StateArray:
    """An array of the state between steps."""

    path: str  # Such as "model/decoder/repeated0/feed_forward/experts/up".
    shape: tuple[int, ...]  # Of the whole array.
    axes: tuple[Any, ...]  # Logical axes.
    shard_bytes: int  # Bytes per device.
    split: bool  # Whether a mesh axis splits it.
    cast: bool  # Whether the step computes with it in the trainer's `train_dtype`.
    on_host: bool = False  # Whether it is in the host's memory.


@dataclasses.dataclass(frozen=True)
class Facts:
    """Settings of a trainer that concern its step."""

    mesh: Mapping[str, int]  # Sizes of the axes, outermost first.
    platform: str = "tpu"  # Or "cuda", "cpu".
    batch_size: int = 0  # Sequences per micro-batch, over all devices.
    seq_len: int = 0  # Tokens per sequence.
    batch_axes: tuple[str, ...] = ()  # Mesh axes that split the batch.
    train_dtype: str | None = None  # Dtype that parameters are cast to.
    num_experts: frozenset[int] = frozenset()  # Of all layers.
    state: tuple[StateArray, ...] = ()
    model: Any = None  # Module, for paths in its config; may be None.

    @property
    def batch_parts(self) -> int:
        """Number of parts of the batch on different devices."""
        return math.prod(self.mesh[axis] for axis in self.batch_axes)

    def parameters(self) -> Iterator[StateArray]:
        """Yields the arrays of the model."""
        return (each for each in self.state if each.path.startswith("model/"))

    def sizes_of(self, axis: str | None = None) -> set[int]:
        """Returns the sizes of a logical axis in parameters; of all dimensions without an axis."""
        pairs = (zip(each.axes, each.shape, strict=True) for each in self.parameters())
        return {size for each in pairs for name, size in each if axis in (None, name)}


def facts_of(trainer: Any) -> Facts:
    """Returns the facts of a `SpmdTrainer`."""
    cfg, mesh = trainer.config, trainer.mesh()
    numbers = (getattr(inside, "num_experts", None) for _, inside in sub_configs(cfg.model))
    spec = trainer.batch_sharding.spec
    axes = spec[0] if spec and spec[0] is not None else ()
    return Facts(
        mesh=dict(mesh.shape),
        platform=mesh.devices.flat[0].platform,
        batch_size=cfg.input.global_batch_size // cfg.num_microbatches,
        seq_len=cfg.input.seq_len,
        batch_axes=(axes,) if isinstance(axes, str) else tuple(axes),
        train_dtype=cfg.train_dtype,
        num_experts=frozenset(number for number in numbers if isinstance(number, int)),
        state=tuple(_state(trainer)),
        model=trainer.model,
    )


def _state(trainer: Any) -> Iterator[StateArray]:
    train_dtype = trainer.config.train_dtype
    for part in ("model", "learner"):
        shardings = dict(tree.flatten_items(getattr(trainer.trainer_state_shardings, part)))
        specs = getattr(trainer.trainer_state_specs, part)
        for path, spec in tree.flatten_items(specs, is_spec):
            shard = shardings[path].shard_shape(spec.shape)
            yield StateArray(
                path=f"{part}/{path}",
                shape=spec.shape,
                axes=spec.axes,
                shard_bytes=math.prod(shard) * jnp.dtype(spec.dtype).itemsize,
                split=shard != spec.shape,
                cast=part == "model" and is_cast(spec, train_dtype),
                on_host=shardings[path].memory_kind == "pinned_host",
            )


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step under lint."""

    program: Program
    facts: Facts
    source_map: SourceMap
    thresholds: Thresholds = Thresholds()

    def config_path(self, op_name: str) -> str:
        """Returns the path of the config that made an instruction."""
        return source.config_path(op_name, self.facts.model)

    def finding(
        self,
        rule: str,
        severity: str,
        computation: Computation,
        instruction: Instruction,
        *,
        advice: str,
        path: str | None = None,
        num_bytes: int | None = None,
        shape: str | None = None,
    ) -> Finding:
        """Returns a finding about an instruction of a computation.

        By default its config path is that of the module that made the instruction, its shape that
        of the result, and its bytes those of the shape.
        """
        shape = shape or values.result_shape(instruction)
        return Finding(
            rule=rule,
            severity=severity,
            instruction=f"{instruction.name} {values.plain_shape(shape)}",
            bytes=values.shape_bytes(shape) if num_bytes is None else num_bytes,
            executions=computation.executions,
            op_name=instruction.op_name,
            locations=tuple(self.source_map.lines(instruction)[:3]),
            config_path=self.config_path(instruction.op_name) if path is None else path,
            advice=advice,
        )


def is_shard(sizes: list[int], whole: list[int], mesh: Mapping[str, int]) -> bool:
    """Returns whether an array of some sizes may be a shard of another on a mesh, or all of it."""
    if len(sizes) != len(whole):
        return False
    parts = {1}
    for size in mesh.values():
        parts |= {part * size for part in parts}
    return all(w % f == 0 and w // f in parts for w, f in zip(whole, sizes, strict=True))
