"""Compilation of a config's training step for a topology, with a report of the result."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from moelib.core.config import REQUIRED
from moelib.core.errors import UserError, is_full_device
from moelib.parallel.mesh import describe_mesh
from moelib.planning.compiled.dump import write_dump
from moelib.planning.compiled.examine import Step, examine, state_bytes
from moelib.planning.hardware.topologies import OutOfMemoryError, Topology, describe
from moelib.planning.lint.facts import facts_of
from moelib.planning.report.step_report import StepReport
from moelib.train.compiler_options import compile_with, spelled

STAGES = ("build", "trace", "lower", "compile", "count")
OnStage = Callable[[str, float, str], None]  # (stage, seconds, result in words)

# Without a GPU the compiler cannot ask it for the workspace of its own sort of over 16,384 keys; it
# then writes out the sort, as for fewer keys.
WITHOUT_DEVICE = {"tpu": {}, "gpu": {"xla_gpu_enable_cub_radix_sort": "False"}}


def compile_step(
    cfg: Any,
    topology: Topology,
    *,
    name: str,
    compiler_options: Mapping[str, str] | None = None,
    dump_dir: str | None = None,
    on_stage: OnStage = lambda stage, seconds, detail: None,
) -> StepReport:
    """Returns the report of a trainer config's own training step, compiled for a topology.

    Nothing is allocated and no data is opened. A process can compile for one kind of GPU only,
    because the compiler of GPU kernels does not distinguish kinds.

    Args:
        cfg: A `SpmdTrainer.Config`, whose mesh is laid over the topology's devices.
        topology: Topology to compile for.
        name: Name of the step in the report.
        compiler_options: Options in addition to those of the trainer.
        dump_dir: Folder for the step at each stage and a readable report; None for no dump.
        on_stage: Called after each of `STAGES`.

    Raises:
        UserError: If the mesh does not fit the devices, the batch does not fit the mesh, or the
            compiler does not know an option or its value.
        OutOfMemoryError: If the step needs more memory than a TPU has. The compiler for GPUs does
            not refuse: compare the report's peak.
    """
    stopwatch = _Stopwatch(on_stage)
    trainer = cfg.clone(**({"dir": "unused"} if cfg.dir is REQUIRED else {})).instantiate(
        parent=None, devices=topology.devices
    )
    try:
        mesh = dict(trainer.mesh().shape)
        _ = trainer.batch_sharding
    except UserError as error:
        raise UserError(f"topology {topology.name}: {error}") from None
    stopwatch.done("build", describe_mesh(mesh))
    options = (
        trainer.compiler_options()
        | WITHOUT_DEVICE[topology.accelerator.platform]
        | spelled(compiler_options or {})
    )
    with no_compilation_cache():
        traced = trainer.trace_train_step()
        stopwatch.done("trace", f"{len(traced.jaxpr.eqns)} top-level equations")
        with jax.set_mesh(trainer.mesh()):
            lowered = traced.lower()
        stopwatch.done("lower", f"{len(lowered.as_text()) / 1e6:.1f} MB of StableHLO")
        cpu = time.process_time()
        try:
            compiled = compile_with(lowered, options)
        except Exception as error:
            raise _out_of_memory(error, trainer, topology) or error from None
        cpu = time.process_time() - cpu
        stopwatch.done("compile", f"{cpu:.1f} s of CPU time")
    step = Step(traced, lowered, compiled)
    seconds = {stage: stopwatch.seconds[stage] for stage in STAGES[1:4]} | {"compile_cpu": cpu}
    shape = describe(topology.name)
    report = examine(trainer, step, name=name, topology=topology.name, shape=shape, seconds=seconds)
    if dump_dir is not None:
        write_dump(dump_dir, step, report)
    stopwatch.done("count", f"{report.figures['instructions']:,} instructions")
    return report


class _Stopwatch:
    """Measures and reports the seconds of each stage."""

    def __init__(self, on_stage: OnStage) -> None:
        self.seconds: dict[str, float] = {}
        self._on_stage, self._begin = on_stage, time.perf_counter()

    def done(self, stage: str, detail: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._begin = now - self._begin, now
        self._on_stage(stage, self.seconds[stage], detail)


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Disables JAX's persistent cache, which warns that it cannot read a TPU's programs back."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks for the cache once.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _out_of_memory(error: Exception, trainer: Any, topology: Topology) -> OutOfMemoryError | None:
    """Returns the error for a step that does not fit, or None if `error` is another one."""
    if not is_full_device(error):
        return None
    text = str(error)
    found = re.search(r"total memory required for ([^(]*)\(([\d.]+)G\).*\(([\d.]+)G\)", text)
    reason = (
        f"needs {found.group(2)} of {found.group(3)} GiB per device for {found.group(1).strip()}"
        if found
        else f"does not fit: {text.splitlines()[0]}"
    )
    state = state_bytes(facts_of(trainer))
    held = ", ".join(f"{content} {size / 2**30:.2f}" for content, size in state.items())
    return OutOfMemoryError(
        f"topology {topology.name}: the step {reason}; its state takes, in GiB: {held}. Reduce "
        "global_batch_size, increase num_microbatches, save fewer activations (remat), or split "
        "the state over more devices."
    )
