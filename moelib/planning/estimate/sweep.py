"""The sweep: every candidate on every topology, estimated and sorted, without compiling."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moelib.core.accelerators import ACCELERATORS
from moelib.core.config import did_you_mean
from moelib.planning.estimate.candidates import as_it_is, candidates, rules_of
from moelib.planning.estimate.estimate import Estimate, Estimator
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import PlanError, describe


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What came out.

    Attributes:
        rows: The best candidate of each mesh. Those that fit come first, cheapest tokens first, but
            the best of each topology before all others; then those that do not, by what they lack.
        num_candidates: How many were estimated.
        estimator: With which.
        refused: Of each topology that can run nothing, the reason.
    """

    rows: tuple[Estimate, ...]
    num_candidates: int
    estimator: Estimator
    refused: tuple[str, ...]


def sweep(
    cfg: Any,
    topologies: Sequence[str],
    *,
    mesh: str | None = None,
    as_is: bool = False,
    prices: Mapping[str, float] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Returns the estimates of a trainer config's candidates.

    Args:
        cfg: A `SpmdTrainer.Config`.
        topologies: Their names.
        mesh: Sizes of mesh axes, as fsdp=2,expert=-1; by default every legal mesh.
        as_is: Whether to estimate the config as it stands, and nothing else.
        prices: Dollars per hour of one device by accelerator, over those of `hardware`.
        on_progress: Called with what is done next.

    Raises:
        PlanError: If a topology is not known, nothing can run on any, or the config cannot be.
    """
    shapes = [describe(name) for name in dict.fromkeys(topologies)]
    on_progress("reading what the model computes")
    rules = rules_of(cfg)
    try:
        work = read_workload(cfg)
    except ValueError as error:  # The model is traced, and says what it does not take.
        raise PlanError(str(error)) from None
    estimator = Estimator(work, rules, prices or {})
    best: dict[Any, Estimate] = {}
    refused: dict[str, None] = {}  # In order, each once.
    num = 0
    for shape in shapes:
        on_progress(f"estimating on {shape.name}")
        try:
            if as_is:
                found = [as_it_is(cfg, work, shape)]
            else:
                found = candidates(cfg, work, shape, mesh=mesh)
        except PlanError as error:
            refused[str(error)] = None
            continue
        num += len(found)
        for candidate in found:
            estimate, key = estimator(candidate), (candidate.topology.name, candidate.mesh)
            if key not in best or _rank(estimate) < _rank(best[key]):
                best[key] = estimate
    if not best:
        raise PlanError(" ".join(refused))
    return Sweep(tuple(_sorted(best.values())), num, estimator, tuple(refused))


def _rank(estimate: Estimate) -> tuple[bool, float, int]:
    measure = estimate.middle_dollars if estimate.fits else estimate.bytes_held - estimate.capacity
    mesh = estimate.candidate.mesh
    return not estimate.fits, measure, len(mesh.ici) + len(mesh.dcn)


def _sorted(estimates: Any) -> list[Estimate]:
    """Returns the estimates best first, the best of each topology before all others."""
    ordered = sorted(estimates, key=_rank)
    first: dict[str, Estimate] = {}
    for each in ordered:
        first.setdefault(each.candidate.topology.name, each)
    leading = {id(each) for each in first.values()}
    return [*first.values(), *(each for each in ordered if id(each) not in leading)]


def read_prices(path: str) -> dict[str, float]:
    """Returns the prices of a file: a JSON object, dollars per hour of a device by accelerator.

    Raises:
        PlanError: If it cannot be read as that.
    """
    try:
        with open(path, encoding="utf-8") as file:
            prices = json.load(file)
        if not isinstance(prices, dict):
            raise ValueError("it holds no object")
        for name, price in prices.items():
            if name not in ACCELERATORS:
                raise ValueError(
                    f"there is no accelerator {name!r}; {did_you_mean(name, ACCELERATORS)}"
                )
            number = isinstance(price, int | float) and not isinstance(price, bool)
            if not number or not 0 < price < math.inf:
                raise ValueError(f"the price of {name!r} is {price!r}; set a number above 0")
    except (OSError, ValueError) as error:
        raise PlanError(
            f"prices {path}: {error}. Write dollars per hour of one device, as "
            '{"v6e": 2.7, "h100": 3}.'
        ) from None
    return prices
