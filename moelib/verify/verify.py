"""Runs the checks: on one device, then mesh by mesh; what comes next is compiled meanwhile."""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from moelib.core.config import ConfigBase
from moelib.parallel.mesh import describe_mesh
from moelib.parallel.sharding import SplitError
from moelib.verify.compare import Difference
from moelib.verify.mesh_checks import mesh_checks
from moelib.verify.meshes import Axes
from moelib.verify.outcome import (
    FaultError,
    NotApplicableError,
    Outcome,
    Status,
)
from moelib.verify.reference import Reference, make_reference
from moelib.verify.single_device import Check, early_checks, single_checks
from moelib.verify.step_probe import Probe

ONE_DEVICE = "1 device"
COMPILED = "compiled"  # The check that a mesh can be used at all.


def verify(
    cfg: ConfigBase, axes: Sequence[Axes], devices: Sequence[Any], folder: str
) -> Iterator[Outcome]:
    """Yields what each check came to; ends after the first that fails.

    Args:
        cfg: A `SpmdTrainer.Config`, small enough to run here: see `shrink`.
        axes: Meshes to try; what the config cannot be split over is skipped, with the reason.
        devices: As many as each mesh takes.
        folder: For checkpoints.
    """
    for outcome in _all(cfg.clone(dir=os.path.join(folder, "one")), axes, devices, folder):
        yield outcome
        if outcome.status is Status.FAILED:
            return


def _all(cfg: Any, axes: Sequence[Axes], devices: Sequence[Any], folder: str) -> Iterator[Outcome]:
    def build() -> tuple[Probe, Any]:
        probe = Probe(cfg, {}, devices[:1])
        return probe, jax.device_get(probe.initial(cfg.prng_seed))

    built, outcome = _made(ONE_DEVICE, "built", build)
    yield outcome
    if built is None:
        return
    yield from _outcomes(ONE_DEVICE, early_checks(cfg, *built))
    reference, outcome = _made(ONE_DEVICE, COMPILED, lambda: make_reference(cfg, *built))
    yield outcome
    if reference is None:
        return
    with _ahead(cfg, reference, axes, devices, folder) as probes:
        yield from _outcomes(ONE_DEVICE, single_checks(cfg, reference))
        for each, probe in zip(axes, probes, strict=True):
            yield from _on_mesh(describe_mesh(each), reference, probe)


def _on_mesh(mesh: str, reference: Reference, compiled: Callable[[], Probe]) -> Iterator[Outcome]:
    probe, outcome = _made(mesh, COMPILED, compiled, skips=(SplitError,))
    yield outcome
    if probe is not None:
        yield from _outcomes(mesh, mesh_checks(reference, probe))


def _made[T](
    mesh: str, check: str, make: Callable[[], T], skips: tuple[type[Exception], ...] = ()
) -> tuple[T | None, Outcome]:
    """Returns what `make` makes, or None, and the outcome: errors of `skips` are no failure."""
    begin = time.perf_counter()
    try:
        made, status, said = make(), Status.PASSED, ""
    except skips as error:
        made, status, said = None, Status.SKIPPED, str(error)
    except Exception as error:
        made, status, said = None, Status.FAILED, f"{type(error).__name__}: {error}"
    return made, Outcome(mesh, check, status, said, time.perf_counter() - begin)


def _outcomes(mesh: str, checks: Iterable[Check]) -> Iterator[Outcome]:
    for name, check in checks:
        begin = time.perf_counter()
        status, said = _run(check)
        yield Outcome(mesh, name, status, said, time.perf_counter() - begin)


def _run(check: Callable[[], Difference | None]) -> tuple[Status, str]:
    try:
        found = check()
    except NotApplicableError as why:
        return Status.SKIPPED, str(why)
    except FaultError as fault:
        return Status.FAILED, str(fault)
    except Exception as error:
        return Status.FAILED, f"{type(error).__name__}: {error}"
    return (Status.PASSED, "") if found is None else (Status.FAILED, str(found))


@contextlib.contextmanager
def _ahead(
    cfg: Any, reference: Reference, axes: Sequence[Axes], devices: Sequence[Any], folder: str
) -> Iterator[Iterator[Callable[[], Probe]]]:
    """Yields functions that return each mesh's compiled step; threads compile them in order."""

    def compiled(index: int) -> Probe:
        own = cfg.clone(dir=os.path.join(folder, f"mesh{index}"))
        probe = Probe(own, axes[index], devices)
        probe.compile(reference.start, reference.batches[0], reference.first.gradients)
        return probe

    pool = concurrent.futures.ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))))
    try:
        yield _results([pool.submit(compiled, i) for i in range(len(axes))])
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(futures: list[concurrent.futures.Future[Probe]]) -> Iterator[Callable[[], Probe]]:
    """Yields what waits for each, and lets go of those before."""
    while futures:
        yield futures.pop(0).result
