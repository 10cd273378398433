"""Compiles the training step of a config for a topology, and reports what came out."""

import contextlib
import math
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from moelib.core.config import REQUIRED
from moelib.core.config_path import sub_configs
from moelib.planning.counting import step_report
from moelib.planning.report import Seconds, StepReport
from moelib.planning.topologies import PlanError, Topology
from moelib.train import state as state_lib

_GIB = 2**30


def plan_step(
    cfg: Any,
    topology: Topology,
    *,
    name: str,
    compiler_options: Mapping[str, str] | None = None,
    num_costliest: int = 20,
    hlo_path: str | None = None,
) -> StepReport:
    """Returns the report of a trainer config's own training step, compiled for a topology.

    Nothing is allocated, and no data is opened.

    Args:
        cfg: A `SpmdTrainer.Config`, whose mesh is laid over the topology's devices.
        topology: For what to compile.
        name: What the report calls the step.
        compiler_options: Over those that the trainer compiles with.
        num_costliest: How many instructions the report lists.
        hlo_path: Where to write the compiled program's text, if anywhere.

    Raises:
        PlanError: If the mesh does not fit the devices or the batch the mesh, or if the step takes
            more memory than a device has.
    """
    trainer = cfg.clone(**({"dir": "unused"} if cfg.dir is REQUIRED else {})).instantiate(
        parent=None, devices=topology.devices
    )
    try:
        mesh = dict(trainer.mesh().shape)
        rows_routed = _rows_routed(trainer)
    except ValueError as error:
        raise PlanError(f"topology {topology.name}: {error}") from None
    options = trainer.compiler_options() | dict(compiler_options or {})
    with no_compilation_cache():
        begin = time.perf_counter()
        traced = trainer.trace_train_step()
        after_trace = time.perf_counter()
        with jax.set_mesh(trainer.mesh()):
            lowered = traced.lower()
        after_lower, after_lower_cpu = time.perf_counter(), time.process_time()
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as error:
            raise _out_of_memory(error, trainer, topology) or error from None
    seconds = Seconds(
        trace=after_trace - begin,
        lower=after_lower - after_trace,
        compile=time.perf_counter() - after_lower,
        compile_cpu=time.process_time() - after_lower_cpu,
    )
    if hlo_path is not None:
        pathlib.Path(hlo_path).write_text(compiled.as_text(), encoding="utf-8")
    return step_report(
        compiled,
        name=name,
        topology=topology.name,
        mesh=mesh,
        rows_routed=rows_routed,
        seconds=seconds,
        num_costliest=num_costliest,
    )


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


def _rows_routed(trainer: Any) -> int | None:
    """Returns the rows that reach a device's experts if routing is balanced, or None.

    It is None without experts, and where layers differ in how many each token goes to.
    """
    cfg = trainer.config
    shape = cfg.input.global_batch_size, cfg.input.seq_len
    tokens = math.prod(trainer.batch_sharding.shard_shape(shape)) // cfg.num_microbatches
    counts = {
        inside.num_experts_per_token
        for _, inside in sub_configs(cfg.model)
        if isinstance(dict(inside.items()).get("num_experts_per_token"), int)
    }
    return tokens * counts.pop() if len(counts) == 1 else None


def _out_of_memory(error: Exception, trainer: Any, topology: Topology) -> PlanError | None:
    """Returns what to say of a step that does not fit, or None if the error is another one."""
    said = str(error)
    if "RESOURCE_EXHAUSTED" not in said or "hbm" not in said.lower():
        return None
    specs = state_lib.abstract_state(trainer.trainer_state_specs, trainer.trainer_state_shardings)
    found = re.search(r"total memory required for ([^(]*)\(([\d.]+)G\).*\(([\d.]+)G\)", said)
    needs = (
        f"needs {found.group(2)} of {found.group(3)} GiB a device for {found.group(1).strip()}"
        if found
        else f"does not fit: {said.splitlines()[0]}"
    )
    holds = {
        "parameters": _bytes_on_a_device(trainer.trainer_state_shardings.model, specs.model),
        "the learner's state": _bytes_on_a_device(
            trainer.trainer_state_shardings.learner, specs.learner
        ),
    }
    most = ", ".join(f"{what} {size / _GIB:.2f}" for what, size in holds.items())
    return PlanError(
        f"topology {topology.name}: the step {needs}; of the state a device holds, in GiB: {most}. "
        "Make global_batch_size smaller or num_microbatches larger, keep less for the backward "
        "pass (remat), or spread the state over more devices."
    )


def _bytes_on_a_device(shardings: Any, specs: Any) -> int:
    """Returns the bytes that one device holds of what the specs describe."""
    sizes = jax.tree.map(
        lambda place, spec: math.prod(place.shard_shape(spec.shape)) * spec.dtype.itemsize,
        shardings,
        specs,
    )
    return sum(jax.tree.leaves(sizes))
