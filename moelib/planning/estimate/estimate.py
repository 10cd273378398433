"""Estimates of a step in closed form: memory, FLOPs, traffic, and time as a range.

Bytes of parameters and of the optimizer are exact; docs/calibration.md shows the errors of the
rest. Times are bounds:

    low   compute, HBM, links and network overlap fully at the best efficiency observed
    high  they run one after the other at a poor efficiency, plus the start of every operation

All values are per step and device.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from moelib.parallel import sharding
from moelib.planning.estimate import transfers
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.links import Links, Traffic
from moelib.planning.estimate.memory import Placement
from moelib.planning.estimate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Fractions of peak rates, the same for every accelerator and model."""

    compute: float  # Of the peak FLOP/s of matmuls.
    hbm: float  # Of the HBM bandwidth.
    links: float  # Of the bandwidth of links inside a slice.
    network: float  # Of the network's bandwidth.
    seconds_per_operation: float  # Interval between the starts of operations with no work.


# Steps of large matmuls reach two thirds of the peak (MaxText's Mixtral on v5p: 53% in model FLOPs,
# with a quarter recomputed); grouped matmuls of small experts, with a few hundred rows each, reach
# half of that. Copies reach 90% of HBM bandwidth, gathers of rows 60%. Collectives of many MiB
# reach 85% of a link; those of a few MiB, or one after another, half. Tiny operations take a few
# microseconds.
BEST = Efficiency(0.68, 0.90, 0.85, 0.85, 0.0)
POOR = Efficiency(0.35, 0.60, 0.50, 0.60, 3e-6)

# Steps compiled for v6e, H100 and B200 held from 8% less to 11% more than estimated.
MEMORY_ERROR = 0.12

# Operations per layer and step, forward, recomputed and backward: 5,129 for the 16 layers of
# MaxText's compiled GPT-OSS step.
_OPERATIONS_PER_LAYER = 320

Range = tuple[float, float]  # (low, high)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a candidate's step, per device."""

    candidate: Candidate
    memory: Mapping[str, float]  # Bytes by category.
    capacity: int  # Bytes of the device.
    model_flops: float  # Without recomputation.
    hardware_flops: float  # With recomputation, and with rows of experts that no token fills.
    links_bytes: float  # Sent to devices of the slice.
    network_bytes: float  # Sent to other slices.
    seconds: Range  # Time of the step.
    seconds_at_peak: Mapping[str, float]  # Of compute, HBM, links and network.
    tokens: int  # Tokens per step, on all devices.
    dollars_per_hour: float  # Price of one device.
    collectives: Mapping[str, float]  # Bytes of results by kind, as a compiled program has them.

    @functools.cached_property
    def bytes_held(self) -> float:
        """Bytes of all categories."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """True if the memory fits the device, with the error of the estimate."""
        return self.bytes_held * (1 + MEMORY_ERROR) <= self.capacity

    @property
    def limit(self) -> str:
        """The part that takes longest, or "memory" if the candidate does not fit."""
        longest = max(self.seconds_at_peak, key=self.seconds_at_peak.__getitem__)
        return longest if self.fits else "memory"

    @property
    def tokens_per_second(self) -> Range:
        """Tokens per second per device."""
        each = self.tokens / self.candidate.topology.num_devices
        return each / self.seconds[1], each / self.seconds[0]

    @property
    def mfu(self) -> Range:
        """Model FLOPs as a fraction of the peak."""
        peak = self.candidate.topology.accelerator.flops_per_second
        return self.model_flops / self.seconds[1] / peak, self.model_flops / self.seconds[0] / peak

    @property
    def dollars_per_billion_tokens(self) -> Range:
        """Dollars per billion tokens."""
        slow, fast = (1e9 / rate / 3600 * self.dollars_per_hour for rate in self.tokens_per_second)
        return fast, slow

    @functools.cached_property
    def middle_dollars(self) -> float:
        """Geometric mean of the range of dollars per billion tokens, which sorts candidates."""
        low, high = self.dollars_per_billion_tokens
        return math.sqrt(low * high)

    def whole_run(self, tokens: float) -> tuple[Range, Range]:
        """Returns the (days, dollars) of a run over so many tokens."""
        low, high = (second * tokens / self.tokens / 86_400 for second in self.seconds)
        least, most = (price * tokens / 1e9 for price in self.dollars_per_billion_tokens)
        return (low, high), (least, most)


class Estimator:
    """Estimates candidates of one workload; values that depend on the mesh alone are cached."""

    def __init__(self, work: Workload, rules: sharding.Rules, prices: Mapping[str, float]) -> None:
        """Takes a workload, its sharding rules, and dollars per device-hour by accelerator."""
        self._work, self._rules, self._prices = work, rules, prices
        self._by_mesh: dict[Any, _OnMesh] = {}

    def __call__(self, candidate: Candidate) -> Estimate:
        """Returns the estimate of a candidate."""
        work, topology = self._work, candidate.topology
        key = topology.name, candidate.mesh
        if key not in self._by_mesh:
            self._by_mesh[key] = _OnMesh(work, candidate, self._rules)
        on_mesh = self._by_mesh[key]
        placement, accelerator = on_mesh.placement, topology.accelerator
        micro, tokens = candidate.num_microbatches, work.tokens / topology.num_devices
        recomputed = work.recomputes(candidate.remat)
        unfilled = (placement.slots - 1) * work.routed_flops * (3 + recomputed)
        flops = work.model_flops + work.recomputed_flops(candidate.remat) + unfilled
        sent, results = on_mesh.sent(micro, tokens, recomputed)
        parts = {
            "compute": flops * tokens / accelerator.flops_per_second,
            "HBM": _hbm_bytes(placement, micro, tokens) / accelerator.hbm_bytes_per_second,
            "links": sent.links_seconds,
            "network": sent.network_seconds,
        }
        return Estimate(
            candidate=candidate,
            memory=placement.memory(candidate),
            capacity=accelerator.hbm_bytes,
            model_flops=work.model_flops * tokens,
            hardware_flops=flops * tokens,
            links_bytes=sent.links_bytes,
            network_bytes=sent.network_bytes,
            seconds=_seconds(parts, work.num_layers * micro),
            seconds_at_peak=parts,
            tokens=work.tokens,
            dollars_per_hour=self._prices.get(accelerator.name, accelerator.dollars_per_hour),
            collectives=results,
        )


class _OnMesh:
    """A workload on one mesh: its placement and its transfers."""

    def __init__(self, work: Workload, candidate: Candidate, rules: sharding.Rules) -> None:
        self.placement = Placement(work, candidate, rules)
        self._links = Links(candidate.topology, candidate.mesh)
        is_tpu = candidate.topology.accelerator.platform == "tpu"
        self._weights = list(transfers.weight_transfers(self.placement))
        self._tokens = list(transfers.token_transfers(self.placement, is_tpu=is_tpu))
        self._units = functools.cache(self._fold)

    def _fold(self, recomputed: bool) -> list[tuple[Traffic, dict[str, float]]]:
        """Returns (traffic, results) of one micro-batch's weights, and of one token."""
        return [
            (
                transfers.traffic(each, self._links, recomputed=recomputed),
                transfers.results(each, self.placement, recomputed=recomputed),
            )
            for each in (self._weights, self._tokens)
        ]

    def sent(self, micro: int, tokens: float, recomputed: bool) -> tuple[Traffic, dict[str, float]]:
        """Returns the traffic and the bytes of results by kind of a step, per device.

        The step has `micro` micro-batches, and `tokens` per device.
        """
        (weights, made), (token, routed) = self._units(recomputed)
        tokens *= self.placement.token_multiple
        results = {k: made.get(k, 0.0) * micro + routed.get(k, 0.0) * tokens for k in made | routed}
        return weights.times(micro) + token.times(tokens), results


def _hbm_bytes(placement: Placement, micro: int, tokens: float) -> float:
    """Returns the bytes read from and written to HBM in a step.

    The state is read and written once. Gathered weights are written, then read forward, for
    recomputation and for input gradients; their gradients are written and read. Saved activations
    of a block are written and read forward, recomputed and backward.
    """
    state = 2 * (placement.parameters + placement.optimizer) + 8 * placement.trained_elements
    saved = placement.work.block.times(placement.work.num_blocks)
    activations = 4 * (saved.split + saved.whole * placement.tensor_parts + saved.routed) * tokens
    return state + 7 * placement.gathered_bytes * micro + activations


def _seconds(parts: Mapping[str, float], layers: int) -> Range:
    times = lambda e: (
        parts["compute"] / e.compute,
        parts["HBM"] / e.hbm,
        parts["links"] / e.links,
        parts["network"] / e.network,
    )
    starts = POOR.seconds_per_operation * _OPERATIONS_PER_LAYER * layers
    return max(times(BEST)), sum(times(POOR)) + starts
