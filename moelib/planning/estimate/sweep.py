"""The sweep: estimates of every candidate on every topology, without compiling."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.config import did_you_mean
from moelib.core.config_types import shortened
from moelib.core.errors import UserError
from moelib.parallel.mesh import parse_mesh
from moelib.planning.estimate.candidates import candidates, current_candidate, rules_of
from moelib.planning.estimate.estimate import Estimate, Estimator
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import describe
from moelib.runtime.accelerators import ACCELERATORS
from moelib.runtime.storage import parse_json


class Sweep(NamedTuple):
    """The best candidate of each mesh.

    Those that fit come first, in the order of their cost per token, with the best of each topology
    before all others; then the rest, in the order of missing memory.
    """

    rows: tuple[Estimate, ...]
    num_candidates: int  # Number of estimated candidates.
    refused: tuple[str, ...]  # Reason for each topology that can run nothing.


def sweep(
    cfg: Any,
    topologies: Sequence[str],
    *,
    mesh: str | None = None,
    current_mesh: bool = False,
    prices: Mapping[str, float] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Returns the estimates of a trainer config's candidates; the arguments are those of `plan`.

    Raises:
        UserError: If a topology is unknown, the config is invalid, or no topology can run it.
    """
    shapes = [describe(name) for name in dict.fromkeys(topologies)]
    on_progress("tracing the model")
    if cfg.auto_sharding and mesh is not None:  # The first mesh shards like the others.
        sizes = parse_mesh(mesh, axis_names=cfg.mesh_axis_names, num_devices=shapes[0].num_devices)
        cfg = cfg.clone(mesh_shape=sizes)
    rules, work = rules_of(cfg), read_workload(cfg)
    estimator = Estimator(work, rules, prices or {})
    best: list[Estimate] = []
    refused: dict[str, None] = {}  # An ordered set.
    num = 0
    for shape in shapes:
        on_progress(f"estimating {shape.name}")
        try:
            if current_mesh:
                found = [current_candidate(cfg, work, shape)]
            else:
                found = candidates(cfg, work, shape, mesh=mesh)
            for _, of_mesh in itertools.groupby(found, lambda candidate: candidate.mesh):
                estimates = [estimator(candidate) for candidate in of_mesh]
                num += len(estimates)
                best.append(min(estimates, key=_rank))
        except UserError as error:
            refused[str(error)] = None
    if not best:
        raise UserError(" ".join(refused))
    return Sweep(tuple(_sorted(best)), num, tuple(refused))


def _rank(estimate: Estimate) -> tuple[bool, float, int]:
    measure = estimate.middle_dollars if estimate.fits else estimate.bytes_held - estimate.capacity
    mesh = estimate.candidate.mesh
    return not estimate.fits, measure, len(mesh.ici) + len(mesh.dcn)


def _sorted(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Returns the estimates best first, with the best of each topology before all others."""
    ordered = sorted(estimates, key=_rank)
    first: dict[str, Estimate] = {}
    for each in ordered:
        first.setdefault(each.candidate.topology.name, each)
    leading = {id(each) for each in first.values()}
    return [*first.values(), *(each for each in ordered if id(each) not in leading)]


def read_prices(path: str) -> dict[str, float]:
    """Returns the prices of a JSON file, in dollars per device-hour by accelerator.

    Raises:
        UserError: If the file cannot be read as prices.
    """
    try:
        with open(path, encoding="utf-8") as file:
            prices = parse_json(file.read())
        if not isinstance(prices, dict):
            raise ValueError("it is not a JSON object")
        for name, price in prices.items():
            if name not in ACCELERATORS:
                advice = did_you_mean(name, ACCELERATORS)
                raise ValueError(f"unknown accelerator {shortened(name)}; {advice}")
            number = isinstance(price, int | float) and not isinstance(price, bool)
            if not number or not 0 < price < math.inf:
                raise ValueError(f"{name!r}: {shortened(price)} is not a number above 0")
    except (OSError, ValueError) as error:
        raise UserError(
            f"prices {path}: {error}. Write dollars per device-hour, such as "
            '{"v6e": 2.7, "h100": 3}.'
        ) from None
    return prices
