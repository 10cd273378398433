"""Compiles the training step of a config for a topology, and reports what came out."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from moelib.core.config import REQUIRED
from moelib.parallel.mesh import describe_mesh
from moelib.planning.compiled.dump import write_dump
from moelib.planning.compiled.examine import examine, memory_shares
from moelib.planning.hardware.topologies import OutOfMemoryError, PlanError, Topology
from moelib.planning.report.step_report import Memory, Seconds, StepReport

STAGES = ("build", "trace", "lower", "compile", "count")
OnStage = Callable[[str, float, str], None]

_GIB = 2**30

# The compiler asks the GPU itself how much room its own sort of over 16,384 keys takes; where there
# is none, it is to write the sort out, as it does for fewer.
_WITHOUT_DEVICE = {"tpu": {}, "gpu": {"xla_gpu_enable_cub_radix_sort": "False"}}


def plan_step(
    cfg: Any,
    topology: Topology,
    *,
    name: str,
    compiler_options: Mapping[str, str] | None = None,
    num_costliest: int = 20,
    dump_dir: str | None = None,
    on_stage: OnStage = lambda stage, seconds, said: None,
) -> StepReport:
    """Returns the report of a trainer config's own training step, compiled for a topology.

    Nothing is allocated, and no data is opened. A process compiles for one kind of GPU: the
    compiler of GPU kernels does not tell two apart.

    Args:
        cfg: A `SpmdTrainer.Config`, whose mesh is laid over the topology's devices.
        topology: For what to compile.
        name: What the report calls the step.
        compiler_options: Over those that the trainer compiles with.
        num_costliest: How many instructions the report lists.
        dump_dir: Folder for what the step is at each stage, and a report to read, if anywhere.
        on_stage: Told of each of `STAGES` that is done, its seconds, and what came out.

    Raises:
        PlanError: If the mesh does not fit the devices or the batch the mesh.
        OutOfMemoryError: If the step takes more memory than a TPU has. The compiler for GPUs does
            not refuse: compare the report's peak.
    """
    watch = _Stopwatch(on_stage)
    trainer = cfg.clone(**({"dir": "unused"} if cfg.dir is REQUIRED else {})).instantiate(
        parent=None, devices=topology.devices
    )
    try:
        mesh = dict(trainer.mesh().shape)
        _ = trainer.batch_sharding
    except ValueError as error:
        raise PlanError(f"topology {topology.name}: {error}") from None
    watch.done("build", describe_mesh(mesh))
    options = (
        trainer.compiler_options()
        | _WITHOUT_DEVICE[topology.accelerator.platform]
        | dict(compiler_options or {})
    )
    with no_compilation_cache():
        traced = trainer.trace_train_step()
        watch.done("trace", f"{len(traced.jaxpr.eqns)} equations at the top")
        with jax.set_mesh(trainer.mesh()):
            lowered = traced.lower()
        watch.done("lower", f"StableHLO of {len(lowered.as_text()) / 1e6:.1f} MB")
        cpu = time.process_time()
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:
            raise _out_of_memory(error, trainer, topology) or error from None
        cpu = time.process_time() - cpu
        watch.done("compile", f"{cpu:.1f} s of CPU")
    step = {"traced": traced, "lowered": lowered, "compiled": compiled}
    report = examine(
        trainer,
        **step,
        name=name,
        topology=topology.name,
        seconds=Seconds(*(watch.seconds[each] for each in STAGES[1:4]), compile_cpu=cpu),
        num_costliest=num_costliest,
        compiler_options=options,
    )
    if dump_dir is not None:
        write_dump(dump_dir, **step, report=report)
    watch.done("count", f"{report.instructions:,} instructions")
    return report


class _Stopwatch:
    """Knows how long each stage took, and tells of it."""

    def __init__(self, on_stage: OnStage) -> None:
        self.seconds: dict[str, float] = {}
        self._on_stage, self._begin = on_stage, time.perf_counter()

    def done(self, stage: str, said: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._begin = now - self._begin, now
        self._on_stage(stage, self.seconds[stage], said)


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Keeps compiled programs out of the cache: it cannot read back what is a TPU's, and warns."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks once whether there is one.
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _out_of_memory(error: Exception, trainer: Any, topology: Topology) -> OutOfMemoryError | None:
    """Returns what to say of a step that does not fit, or None if the error is another one."""
    said = str(error)
    if "RESOURCE_EXHAUSTED" not in said or "hbm" not in said.lower():
        return None
    found = re.search(r"total memory required for ([^(]*)\(([\d.]+)G\).*\(([\d.]+)G\)", said)
    needs = (
        f"needs {found.group(2)} of {found.group(3)} GiB a device for {found.group(1).strip()}"
        if found
        else f"does not fit: {said.splitlines()[0]}"
    )
    nothing = Memory(0, 0, 0, 0, 0, 0)
    holds = memory_shares(trainer, nothing)[:2]  # The parameters, and the learner's state.
    most = ", ".join(f"{share.category} {share.amount / _GIB:.2f}" for share in holds)
    return OutOfMemoryError(
        f"topology {topology.name}: the step {needs}; of the state a device holds, in GiB: {most}. "
        "Make global_batch_size smaller or num_microbatches larger, keep less for the backward "
        "pass (remat), or spread the state over more devices."
    )
