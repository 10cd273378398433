"""What lint knows of a compiled step: its program, and what its trainer meant it to be."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from moelib.core import tree
from moelib.core.config_paths import sub_configs
from moelib.core.param import is_spec, may_cast
from moelib.planning.hlo import values as hlo_values
from moelib.planning.hlo.config_source import config_path
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.hlo.source import Places
from moelib.planning.report.step_report import Finding

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on a device from which on lint speaks of something."""

    state: int = 64 * _MIB  # An array of the state.
    activation: int = 64 * _MIB
    collective: int = 1 * _MIB  # Its result.
    waited_for: int = 64 * _MIB  # Results of a synchronous collective in a step.
    copy: int = 64 * _MIB
    padded: int = 64 * _MIB  # An array with its padding.


@dataclasses.dataclass(frozen=True)
class StateArray:
    """An array of the state between steps.

    Attributes:
        path: Such as model/decoder/repeated0/feed_forward/experts/up.
        shape: Whole.
        axes: Logical axes.
        shard_bytes: On a device.
        split: Whether any axis of the mesh splits it.
        cast: Whether the step computes with it in the trainer's `train_dtype`.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[Any, ...]
    shard_bytes: int
    split: bool
    cast: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a trainer says of its step.

    Attributes:
        mesh: Sizes of the axes, outermost first.
        platform: "tpu", "gpu" or "cpu".
        device_kind: What JAX calls a device.
        rows: Of the batch that is computed at once, over all devices.
        seq_len: Tokens of a row.
        row_axes: Mesh axes that split rows.
        train_dtype: What parameters are cast to, or None.
        num_experts: All that layers have.
        compiler_options: What the step is compiled with, in lower case.
        state: The arrays of the state.
        model: The module, for the places in its config; or None.
    """

    mesh: Mapping[str, int]
    platform: str = "tpu"
    device_kind: str = ""
    rows: int = 0
    seq_len: int = 0
    row_axes: tuple[str, ...] = ()
    train_dtype: str | None = None
    num_experts: frozenset[int] = frozenset()
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    state: tuple[StateArray, ...] = ()
    model: Any = None

    @property
    def row_parts(self) -> int:
        """Into how many parts the mesh splits rows."""
        return math.prod(self.mesh[axis] for axis in self.row_axes)

    def parameters(self) -> Iterator[StateArray]:
        """Yields the model's arrays."""
        return (each for each in self.state if each.path.startswith("model/"))


def facts_of(trainer: Any, compiler_options: Mapping[str, str] | None = None) -> Facts:
    """Returns the facts of a `SpmdTrainer`; options by default those that it compiles with."""
    cfg, mesh = trainer.config, trainer.mesh()
    device = mesh.devices.flat[0]
    options = trainer.compiler_options() if compiler_options is None else compiler_options
    numbers = (dict(inside.items()).get("num_experts") for _, inside in sub_configs(cfg.model))
    spec = trainer.batch_sharding.spec
    axes = spec[0] if spec and spec[0] is not None else ()
    return Facts(
        mesh=dict(mesh.shape),
        platform="gpu" if device.platform in ("cuda", "gpu") else device.platform,
        device_kind=device.device_kind,
        rows=cfg.input.global_batch_size // cfg.num_microbatches,
        seq_len=cfg.input.seq_len,
        row_axes=(axes,) if isinstance(axes, str) else tuple(axes),
        train_dtype=cfg.train_dtype,
        num_experts=frozenset(number for number in numbers if isinstance(number, int)),
        compiler_options={name: value.lower() for name, value in options.items()},
        state=tuple(_state(trainer)),
        model=trainer.model,
    )


def _state(trainer: Any) -> Iterator[StateArray]:
    specs, places = trainer.trainer_state_specs, trainer.trainer_state_shardings
    for part in ("model", "learner"):
        shardings = dict(tree.flatten_items(getattr(places, part)))
        for path, spec in tree.flatten_items(getattr(specs, part), is_spec):
            whole, shard = spec.shape, shardings[path].shard_shape(spec.shape)
            yield StateArray(
                path=f"{part}/{path}",
                shape=whole,
                axes=spec.axes,
                shard_bytes=_bytes(shard, spec.dtype),
                split=shard != whole,
                cast=part == "model" and trainer.config.train_dtype is not None and may_cast(spec),
            )


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the bytes of an array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step under lint."""

    program: Program
    facts: Facts
    places: Places
    sizes: Sizes = Sizes()

    def alone(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yields what runs and is not part of a fusion."""
        for computation, each in self.program.instructions():
            if computation.executions and not computation.fused:
                yield computation, each

    def config_path(self, op_name: str) -> str:
        """Returns where in the config an instruction comes from."""
        return config_path(op_name, self.facts.model)

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
    ) -> Finding:
        """Returns what a rule found at an instruction.

        Args:
            rule: Its name.
            severity: As in `Finding`.
            computation: That of the instruction.
            instruction: What was found.
            advice: As in `Finding`.
            path: The config path; by default that of the module that made the instruction.
            num_bytes: By default of the instruction's result.
        """
        shape = hlo_values.result_shape(instruction)
        return Finding(
            rule=rule,
            severity=severity,
            instruction=f"{instruction.name} {hlo_values.plain_shape(shape)}",
            bytes=hlo_values.shape_bytes(shape) if num_bytes is None else num_bytes,
            executions=computation.executions,
            op_name=instruction.op_name,
            places=self._places(instruction),
            config_path=self.config_path(instruction.op_name) if path is None else path,
            advice=advice,
        )

    def _places(self, instruction: Instruction) -> tuple[str, ...]:
        """Returns the innermost lines, without those that only pass calls on."""
        stack = self.places.stack(instruction, 9)
        return tuple(str(p) for p in stack if not p.file.startswith("core/"))[:3]
