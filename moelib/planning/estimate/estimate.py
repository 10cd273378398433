"""An estimate of a step: memory, FLOPs, bytes sent, and time as a range, from closed forms.

Bytes of parameters and of the optimizer's state are exact; the rest are estimates, whose errors
docs/calibration.md shows. Times are bounds:

    low   compute, HBM, links and network all at once, each as good as the best seen: the longest
    high  one after the other, each as bad as is usual, and the starts of all operations

All is of one step on one device.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from moelib.parallel import sharding
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.transfers import OnMesh
from moelib.planning.estimate.workload import Workload


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that are reached; the same for every accelerator and model.

    Attributes:
        compute: Of the matmuls' peak.
        hbm: Of the bandwidth of HBM.
        links: Of that of the links in a slice.
        network: Of that of the network.
        seconds_per_operation: From the start of one to that of the next, when there is no work.
    """

    compute: float
    hbm: float
    links: float
    network: float
    seconds_per_operation: float


# Steps of large matmuls reach two thirds of the peak (MaxText's Mixtral on v5p: 53% of it in model
# FLOPs, and a quarter computed again); grouped ones of small experts, of a few hundred rows each,
# half as much. Copies reach 90% of HBM's bandwidth, gathers of rows 60%. Collectives of many MiB
# reach 85% of a link, those of a few MiB, or one after another, half. An operation that has little
# to do takes a few microseconds.
BEST = Efficiency(0.68, 0.90, 0.85, 0.85, 0.0)
POOR = Efficiency(0.35, 0.60, 0.50, 0.60, 3e-6)

# Steps compiled for v6e, H100 and B200 held from 8% less to 11% more than was estimated.
MEMORY_ERROR = 0.12

# Operations a layer that XLA runs in a step, forward, again and backward: 5,129 for 16 layers of
# MaxText's compiled GPT-OSS step.
_OPERATIONS_A_LAYER = 320


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step of a candidate takes.

    Attributes:
        candidate: What is estimated.
        memory: Bytes by category.
        capacity: Bytes that the device has.
        model_flops: Of a step on one device, nothing computed twice.
        hardware_flops: With what is computed again, and for slots of experts.
        links_bytes: Sent to devices of the slice.
        network_bytes: Sent to other slices.
        seconds: The step's time, (low, high).
        parts: Seconds at the peak of compute, HBM, links and network.
        tokens: Of a step, on all devices.
        dollars_per_hour: Of one device.
    """

    candidate: Candidate
    memory: Mapping[str, float]
    capacity: int
    model_flops: float
    hardware_flops: float
    links_bytes: float
    network_bytes: float
    seconds: tuple[float, float]
    parts: Mapping[str, float]
    tokens: int
    dollars_per_hour: float

    @functools.cached_property
    def bytes_held(self) -> float:
        """Bytes of all categories."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the device has as many bytes, the estimate's error included."""
        return self.bytes_held * (1 + MEMORY_ERROR) <= self.capacity

    @property
    def limit(self) -> str:
        """What takes longest, or "memory" where it does not fit."""
        return max(self.parts, key=self.parts.__getitem__) if self.fits else "memory"

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Tokens a second and device, (low, high)."""
        each = self.tokens / self.candidate.topology.num_devices
        return each / self.seconds[1], each / self.seconds[0]

    @property
    def mfu(self) -> tuple[float, float]:
        """Model FLOPs over what the peak would give, (low, high)."""
        peak = self.candidate.topology.accelerator.flops_per_second
        return self.model_flops / self.seconds[1] / peak, self.model_flops / self.seconds[0] / peak

    @property
    def dollars_per_billion(self) -> tuple[float, float]:
        """Dollars a billion tokens, (low, high)."""
        slow, fast = (1e9 / rate / 3600 * self.dollars_per_hour for rate in self.tokens_per_second)
        return fast, slow

    @functools.cached_property
    def middle_dollars(self) -> float:
        """Dollars a billion tokens in the middle of the range, by which candidates are sorted."""
        low, high = self.dollars_per_billion
        return math.sqrt(low * high)

    def whole_run(self, tokens: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns (days, dollars), each (low, high), of a run over so many tokens."""
        low, high = (second * tokens / self.tokens / 86_400 for second in self.seconds)
        least, most = (price * tokens / 1e9 for price in self.dollars_per_billion)
        return (low, high), (least, most)


class Estimator:
    """Estimates candidates of one workload; what depends on the mesh alone is computed once."""

    def __init__(self, work: Workload, rules: sharding.Rules, prices: Mapping[str, float]) -> None:
        self._work, self._rules, self._prices = work, rules, prices
        self._by_mesh: dict[Any, OnMesh] = {}

    def __call__(self, candidate: Candidate) -> Estimate:
        """Returns the estimate of a candidate."""
        on_mesh, work, topology = self._on_mesh(candidate), self._work, candidate.topology
        accelerator = topology.accelerator
        micro = candidate.num_microbatches
        tokens = work.tokens / topology.num_devices
        again = work.computed_again(candidate.remat)
        recomputed = work.recomputes(candidate.remat)
        unchosen = (on_mesh.slots - 1) * work.routed_flops * (3 + recomputed)
        hardware = (work.model_flops + again + unchosen) * tokens
        sent = on_mesh.weights(recomputed).times(micro) + on_mesh.activations(recomputed).times(
            tokens * on_mesh.token_parts
        )
        parts = {
            "compute": hardware / accelerator.flops_per_second,
            "HBM": self._hbm_bytes(on_mesh, candidate, tokens) / accelerator.hbm_bytes_per_second,
            "links": sent.links_seconds,
            "network": sent.network_seconds,
        }
        return Estimate(
            candidate=candidate,
            memory=on_mesh.memory(candidate),
            capacity=accelerator.hbm_bytes,
            model_flops=work.model_flops * tokens,
            hardware_flops=hardware,
            links_bytes=sent.links_bytes,
            network_bytes=sent.network_bytes,
            seconds=_seconds(parts, work.num_layers * micro),
            parts=parts,
            tokens=work.tokens,
            dollars_per_hour=self._prices.get(accelerator.name, accelerator.dollars_per_hour),
        )

    def results(self, candidate: Candidate) -> dict[str, float]:
        """Returns the bytes of the results of collectives, by kind, as a compiled program has."""
        on_mesh, work = self._on_mesh(candidate), self._work
        tokens = work.tokens / candidate.topology.num_devices * on_mesh.token_parts
        recomputed = work.recomputes(candidate.remat)
        return on_mesh.results(candidate.num_microbatches, tokens, recomputed)

    def _on_mesh(self, candidate: Candidate) -> "OnMesh":
        key = candidate.topology.name, candidate.mesh
        if key not in self._by_mesh:
            self._by_mesh[key] = OnMesh(self._work, candidate, self._rules)
        return self._by_mesh[key]

    def _hbm_bytes(self, on_mesh: "OnMesh", candidate: Candidate, tokens: float) -> float:
        """Returns the bytes to and from HBM in a step.

        The state is read and written once; weights are written when they are gathered and read
        forward, again, and for the gradients of inputs, and gradients of them are written and read;
        what a block leaves is written and read forward, again and backward.
        """
        work, micro = self._work, candidate.num_microbatches
        state = 2 * (on_mesh.parameters + on_mesh.optimizer) + 8 * on_mesh.trained
        weights = 7 * on_mesh.gathered_bytes * micro
        left = work.block.times(work.num_blocks)
        model = on_mesh.tensor_parts
        activations = 4 * (left.split + left.whole * model + left.rows) * tokens
        return state + weights + activations


def _seconds(parts: Mapping[str, float], layers: int) -> tuple[float, float]:
    times = lambda e: (
        parts["compute"] / e.compute,
        parts["HBM"] / e.hbm,
        parts["links"] / e.links,
        parts["network"] / e.network,
    )
    starts = POOR.seconds_per_operation * _OPERATIONS_A_LAYER * layers
    return max(times(BEST)), sum(times(POOR)) + starts
