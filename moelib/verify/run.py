"""Verification: checks on one device, then on each mesh while the next meshes compile."""

import concurrent.futures
import contextlib
import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from moelib.core.config import ConfigBase, did_you_mean
from moelib.core.errors import UserError
from moelib.parallel.mesh import describe_mesh
from moelib.parallel.sharding import SplitError
from moelib.runtime import simulated
from moelib.runtime.progress import Progress
from moelib.verify.compare import Difference
from moelib.verify.early_checks import EARLY_CHECKS
from moelib.verify.mesh_checks import MESH_CHECKS, MeshRun
from moelib.verify.meshes import Axes, meshes_to_check
from moelib.verify.outcome import (
    COMPILED,
    ONE_DEVICE,
    CheckFailedError,
    CheckSkippedError,
    Outcome,
    Status,
)
from moelib.verify.reference import Reference, make_reference
from moelib.verify.report import Report
from moelib.verify.shrink import runnable, shrink
from moelib.verify.single_device import SINGLE_DEVICE_CHECKS
from moelib.verify.step_probe import Probe, narrow_layers
from moelib.verify.variant_checks import bfloat16

CHECKS = (*EARLY_CHECKS, *SINGLE_DEVICE_CHECKS, *MESH_CHECKS, "bfloat16")  # Names, in order.
_IN_FLOAT32 = ("plain", "derivatives", "doubled", "padding", "packing", "causality", *MESH_CHECKS)
_MOST_DEVICES = 256
_SECONDS_BETWEEN_LINES = 10.0  # Of progress, where stderr is no terminal.


def verify_config(
    trainer_config: Any,
    *,
    num_devices: int = 8,
    meshes: str = "auto",
    full_size: bool = False,
    name: str = "config",
    show_progress: bool = False,
    keep_going: bool = False,
    without: Sequence[str] = (),
    thorough: bool = False,
) -> Report:
    """Returns the report of checks that a config computes the same numbers on every mesh.

    The checks run on simulated CPU devices, in float32, and end after the first failure unless
    `keep_going` is set. Ctrl-C ends them too; the report then has the outcomes so far.

    Args:
        trainer_config: A `SpmdTrainer.Config`; it is not changed.
        num_devices: Devices of each mesh, 2 to 256.
        meshes: "auto" for each axis alone, each pair of axes together with as many others as
            possible, and the axes of the config's own meshes; "all" for every mesh; or a list such
            as "fsdp=8;data=2,model=4".
        full_size: Whether to keep the config's own sizes and data, instead of making it small.
        name: Name of the config in the report.
        show_progress: Whether to show progress on stderr.
        keep_going: Whether checks after a failure run too.
        without: Names of checks to leave out.
        thorough: Whether "auto" takes as many axes as possible together in every way.

    Raises:
        UserError: If a mesh of the list is impossible, a check to leave out is unknown, or JAX has
            started with too few CPU devices.
    """
    if not isinstance(trainer_config, ConfigBase):
        raise UserError(f"trainer_config is {trainer_config!r}; pass the config of a trainer.")
    for check in without:
        if check not in CHECKS:
            raise UserError(f"without={check!r}: no such check; {did_you_mean(check, CHECKS)}")
    devices = _cpu_devices(num_devices)
    is_small = full_size or not trainer_config.model.klass.is_language_model
    make = runnable if is_small else lambda cfg: shrink(cfg, num_devices)
    cfg, changes = make(trainer_config)
    axes = meshes_to_check(cfg, num_devices, meshes, thorough=thorough)
    names = [describe_mesh(each) for each in axes]
    report = Report(name, num_devices, changes, names, requested=meshes not in ("auto", "all"))
    begin = time.perf_counter()
    progress = Progress(
        "verify",
        total=len(axes) + 1,
        enabled=show_progress,
        seconds_between_lines=_SECONDS_BETWEEN_LINES,
    )
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory() as folder,
        jax.default_device(devices[0]),
        progress,
    ):
        for outcome in run_checks(
            cfg,
            axes,
            devices,
            folder,
            keep_going=keep_going,
            without=without,
        ):
            report.outcomes.append(outcome)
            report.seconds = time.perf_counter() - begin
            started = len({each.mesh for each in report.outcomes})
            progress.update(started - 1, f"{outcome.mesh}: {outcome.check}")
    return report


def _cpu_devices(num: int) -> list[Any]:
    """Returns simulated devices, as many as asked for."""
    if num > _MOST_DEVICES:  # XLA may end the process if it runs out of threads.
        raise UserError(f"num_devices={num}: set at most {_MOST_DEVICES}.")
    if jax.config.jax_num_cpu_devices < num:
        with contextlib.suppress(RuntimeError):  # JAX has started.
            simulated.simulate_devices(num)
    devices = jax.devices("cpu")
    if num < 2 or len(devices) < num:
        raise UserError(
            f"num_devices={num}: set at least 2, and at most the {len(devices)} CPU devices that "
            f"JAX started with; JAX_NUM_CPU_DEVICES={max(num, 2)} in the environment gives more."
        )
    return devices[:num]


def run_checks(
    cfg: Any,
    axes: Sequence[Axes],
    devices: Sequence[Any],
    folder: str,
    *,
    keep_going: bool = False,
    without: Sequence[str] = (),
) -> Iterator[Outcome]:
    """Yields the outcome of each check, up to and including the first failure.

    Args:
        cfg: A `SpmdTrainer.Config` that is small enough to run here, as `shrink` returns it.
        axes: Meshes to check; those that the config cannot be split over are skipped.
        devices: Devices of each mesh.
        folder: Folder for checkpoints.
        keep_going: Whether checks after a failure run too.
        without: Names of checks to leave out.
    """
    cfg = cfg.clone(dir=os.path.join(folder, "one"))
    for outcome in _all_checks(cfg, axes, devices, folder, without):
        yield outcome
        if outcome.status is Status.FAILED and not keep_going:
            return


def _note(known: Reference, check: str) -> str:
    """Returns a note on what may explain a failure to agree to 1e-5 without an error; or ""."""
    if known.tie:
        return (
            f" This may be a tie, not an error: {known.tie}, so that sums in another order decide. "
            "All batches that were tried have ties; set another prng_seed."
        )
    if found := narrow_layers(known.probe.trainer):
        return (
            f" {', '.join(found)} computes in bfloat16 or float16 in a step in float32, of which "
            "programs do not agree to 1e-5. If this is intended, take the dtype from a field of "
            "the layer's config whose name ends in _dtype, which verify sets to float32, or leave "
            f"the check out: --without={check}."
        )
    return ""


def _build(cfg: Any, devices: Sequence[Any]) -> tuple[Probe, Any]:
    """Returns the step on one device, not compiled, and the initial state on the host."""
    probe = Probe(cfg, {}, devices)
    if probe.trainer.model.has_own_step:
        raise CheckFailedError("The model has a training step of its own, which verify cannot run.")
    return probe, jax.device_get(probe.initial(cfg.prng_seed))


def _all_checks(
    cfg: Any, axes: Sequence[Axes], devices: Sequence[Any], folder: str, without: Sequence[str]
) -> Iterator[Outcome]:
    def outcomes(
        mesh: str, checks: Mapping[str, Callable[..., Any]], *of: Any
    ) -> Iterator[Outcome]:
        for name, check in checks.items():
            if name in without:
                yield Outcome(mesh, name, Status.SKIPPED, "left out")
            else:
                outcome = _attempt(mesh, name, functools.partial(check, *of))[1]
                if outcome.status is Status.FAILED and name in _IN_FLOAT32 and reference:
                    outcome = outcome._replace(detail=outcome.detail + _note(reference, name))
                yield outcome

    reference: Reference | None = None
    built, outcome = _attempt(ONE_DEVICE, "built", lambda: _build(cfg, devices[:1]))
    yield outcome
    if built is None:
        return
    yield from outcomes(ONE_DEVICE, EARLY_CHECKS, *built)
    reference, outcome = _attempt(ONE_DEVICE, COMPILED, lambda: make_reference(*built))
    yield outcome
    if reference is None:
        return
    with _compiled_ahead(cfg, reference, axes, devices, folder) as probes:
        yield from outcomes(ONE_DEVICE, SINGLE_DEVICE_CHECKS, reference)
        for each, wait in zip(axes, probes, strict=True):
            probe, outcome = _attempt(describe_mesh(each), COMPILED, wait, skips=(SplitError,))
            yield outcome
            if probe is not None:
                yield from outcomes(describe_mesh(each), MESH_CHECKS, MeshRun(reference, probe))
    # Last, because it would find errors of a mesh, too, but not name them.
    yield from outcomes(ONE_DEVICE, {"bfloat16": bfloat16}, reference, axes, devices)


def _attempt[T](
    mesh: str, check: str, run: Callable[[], T], skips: tuple[type[Exception], ...] = ()
) -> tuple[T | None, Outcome]:
    """Returns the value of a function, or None after an error, and the outcome.

    A `Difference` and errors are failures, except `CheckSkippedError` and errors of the types
    `skips`. A string is a detail of a passed check.
    """
    begin = time.perf_counter()
    value, status, detail, trace = None, Status.PASSED, "", ""
    try:
        value = run()
        if isinstance(value, Difference):
            status, detail = Status.FAILED, str(value)
        elif isinstance(value, str):
            detail = value
    except (CheckSkippedError, *skips) as reason:
        status, detail = Status.SKIPPED, str(reason)
    except CheckFailedError as defect:
        status, detail = Status.FAILED, str(defect)
    except Exception as error:
        status, detail = Status.FAILED, f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
    return value, Outcome(mesh, check, status, detail, time.perf_counter() - begin, trace)


@contextlib.contextmanager
def _compiled_ahead(
    cfg: Any, reference: Reference, axes: Sequence[Axes], devices: Sequence[Any], folder: str
) -> Iterator[Iterator[Callable[[], Probe]]]:
    """Yields, for each mesh, a function that waits for its step, which threads compile in order."""

    def compiled(index: int) -> Probe:
        # The step casts its parameters, as in training, but to the dtype that they have.
        own = cfg.clone(dir=os.path.join(folder, f"mesh{index}"), train_dtype="float32")
        probe = Probe(own, axes[index], devices)
        probe.compile(reference.start, reference.batches[0], reference.first.gradients)
        return probe

    own_cores = getattr(os, "sched_getaffinity", None)  # Linux only.
    num_cores = len(own_cores(0)) if own_cores else os.cpu_count() or 1
    pool = concurrent.futures.ThreadPoolExecutor(min(4, num_cores))
    futures = [pool.submit(compiled, i) for i in range(len(axes))]
    try:
        yield (futures.pop(0).result for _ in axes)  # Each probe is freed after its checks.
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
