"""Runs the checks: on one device, then mesh by mesh; what comes next is compiled meanwhile."""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from moelib.core.config import ConfigBase
from moelib.planning.verify.compare import Difference
from moelib.planning.verify.meshes import Axes, describe
from moelib.planning.verify.on_mesh import mesh_checks
from moelib.planning.verify.on_one import Check, FaultError, NotApplicableError, single_checks
from moelib.planning.verify.outcome import Outcome, Status
from moelib.planning.verify.probe import Probe
from moelib.planning.verify.reference import Reference, make_reference

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
    begin = time.perf_counter()
    cfg = cfg.clone(dir=os.path.join(folder, "one"))
    try:
        reference = make_reference(cfg, devices[0])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        yield Outcome(ONE_DEVICE, COMPILED, Status.FAILED, said, time.perf_counter() - begin)
        return
    yield Outcome(ONE_DEVICE, COMPILED, Status.PASSED, "", time.perf_counter() - begin)
    with _ahead(cfg, reference, axes, devices, folder) as probes:
        for outcome in _outcomes(ONE_DEVICE, single_checks(cfg, reference)):
            yield outcome
            if outcome.status is Status.FAILED:
                return
        for each, probe in zip(axes, probes, strict=True):
            for outcome in _on_mesh(describe(each), reference, probe):
                yield outcome
                if outcome.status is Status.FAILED:
                    return


def _on_mesh(mesh: str, reference: Reference, probe: Callable[[], Probe]) -> Iterator[Outcome]:
    begin = time.perf_counter()
    try:
        made = probe()
    except ValueError as error:
        yield Outcome(mesh, COMPILED, Status.SKIPPED, str(error), time.perf_counter() - begin)
        return
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        yield Outcome(mesh, COMPILED, Status.FAILED, said, time.perf_counter() - begin)
        return
    yield Outcome(mesh, COMPILED, Status.PASSED, "", time.perf_counter() - begin)
    yield from _outcomes(mesh, mesh_checks(reference, made))


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
) -> Iterator[list[Callable[[], Probe]]]:
    """Yields functions that return each mesh's compiled step; threads compile them in order."""

    def compiled(index: int) -> Probe:
        own = cfg.clone(dir=os.path.join(folder, f"mesh{index}"))
        probe = Probe(own, axes[index], devices)
        probe.compile(reference.start, reference.batches[0], reference.first.gradients)
        return probe

    pool = concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1))
    try:
        yield [pool.submit(compiled, i).result for i in range(len(axes))]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
