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
from collections.abc import Callable, Mapping
from typing import Any

from moelib.parallel import sharding
from moelib.parallel.pipeline.ticks import kept_over_1f1b
from moelib.planning.estimate import transfers
from moelib.planning.estimate.activations import NONE
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.links import Layout, Links, Traffic
from moelib.planning.estimate.memory import Placement, at_peak
from moelib.planning.estimate.pipeline import AXIS, Pipeline, pipeline_of
from moelib.planning.estimate.workload import Workload
from moelib.planning.hardware.topologies import TopologyShape
from moelib.runtime.accelerators import Accelerator, peak_flops_per_second


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

# Micro-batches per rank above which a rank keeps no more with schedules that defer gradients.
_IN_FLIGHT = 3

# Steps compiled for v5p, v6e and H100 hold from 13% less to 12% more than estimated.
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
    peak_flops: float  # FLOP/s of the device in the dtype of the computation.
    dollars_per_hour: float  # Price of one device.
    collectives: Mapping[str, float]  # Bytes of results by kind, as a compiled program has them.
    idle: Range = (0.0, 0.0)  # Shares of the time in which a rank of a pipeline waits.
    pipeline_bytes: float = 0.0  # Activations and their gradients sent to other ranks.
    # Bytes that a rank keeps between passes, over those of 1F1B; 1 without deferred gradients.
    kept_over_1f1b: float = 1.0

    def __repr__(self) -> str:
        topology, mesh = self.candidate.topology.name, self.candidate.mesh
        seconds = f"{self.seconds[0]:.3g} to {self.seconds[1]:.3g} s"
        return f"Estimate({topology}, {mesh}, {self.bytes_held / 2**30:.1f} GiB, {seconds})"

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
        peak = self.peak_flops
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
        """Initializes an estimator.

        Args:
            work: The workload.
            rules: Its sharding rules.
            prices: Dollars per device-hour, by accelerator.
        """
        self._work, self._rules, self._prices = work, rules, prices
        self._by_mesh: dict[Any, _OnMesh] = {}
        self._layout = functools.cache(Layout)
        self._pipeline = functools.cache(functools.partial(pipeline_of, work))

    def __call__(self, candidate: Candidate) -> Estimate:
        """Returns the estimate of a candidate."""
        work, topology = self._work, candidate.topology
        key = topology.name, candidate.mesh
        if key not in self._by_mesh:
            self._by_mesh[key] = _OnMesh(work, candidate, self._rules, self._layout)
        on_mesh = self._by_mesh[key]
        placement, accelerator = on_mesh.placement, topology.accelerator
        micro, tokens = candidate.num_microbatches, work.tokens / topology.num_devices
        recomputed, ranks = work.recomputes(candidate.remat), candidate.mesh.parts([AXIS])
        pipeline = self._pipeline(candidate.schedule, ranks, micro, recomputed=recomputed)
        unfilled = (placement.slots - 1) * work.routed_flops * (work.routed_products + recomputed)
        flops = work.model_flops + work.recomputed_flops(candidate.remat) + unfilled
        sent, results = on_mesh.sent(candidate, tokens, pipeline)
        # Forward, two gradients, and what is recomputed.
        native = work.float8_flops * (3 + work.recomputes_matmuls(candidate.remat))
        native -= work.untrained_float8_flops
        seconds = (flops - native) / on_mesh.peak_flops + native / on_mesh.peak_float8
        parts = {
            "compute": seconds * tokens,
            "HBM": on_mesh.hbm_bytes(candidate, tokens) / accelerator.hbm_bytes_per_second,
            "links": sent.links_seconds,
            "network": sent.network_seconds,
        }
        return Estimate(
            candidate=candidate,
            memory=at_peak(placement.memory(candidate, pipeline)),
            capacity=accelerator.hbm_bytes,
            model_flops=work.model_flops * tokens,
            hardware_flops=flops * tokens,
            links_bytes=sent.links_bytes,
            network_bytes=sent.network_bytes,
            seconds=_seconds(parts, work.num_layers * micro, pipeline),
            seconds_at_peak=parts,
            tokens=work.tokens,
            peak_flops=on_mesh.peak_flops,
            dollars_per_hour=self._prices.get(accelerator.name, accelerator.dollars_per_hour),
            collectives=results,
            idle=pipeline.idle,
            pipeline_bytes=on_mesh.pipeline_bytes(candidate, pipeline),
            kept_over_1f1b=on_mesh.kept_over_1f1b(candidate, pipeline),
        )


class _OnMesh:
    """A workload on one mesh: its placement and its transfers."""

    def __init__(
        self,
        work: Workload,
        candidate: Candidate,
        rules: sharding.Rules,
        layout: Callable[[TopologyShape, tuple[int, ...]], Layout],
    ) -> None:
        self.placement = Placement(work, candidate, rules)
        self._links = Links(candidate.topology, candidate.mesh, layout)
        accelerator = candidate.topology.accelerator
        self._is_tpu = accelerator.platform == "tpu"
        peak = peak_flops_per_second(accelerator.device_kind, work.compute_dtype)
        self.peak_flops = peak or accelerator.flops_per_second
        float8 = peak_flops_per_second(accelerator.device_kind, "float8_e4m3fn")
        self.peak_float8 = float8 or self.peak_flops
        saved = work.saved[NONE]
        whole = saved.whole * self.placement.tensor_parts
        self._saved_bytes = saved.split + whole + saved.routed  # Per token.
        self._writes_scores = _writes_scores(work, accelerator)
        self._units = functools.cache(self._fold)

    def _fold(self, remat: str, windowed: bool) -> list[tuple[Traffic, dict[str, float]]]:
        """Returns (traffic, results) of one micro-batch's weights, and of one token."""
        placement, is_tpu = self.placement, self._is_tpu
        recomputed = placement.work.recomputes(remat)
        kinds = (
            transfers.weight_transfers(placement, remat, is_tpu=is_tpu, windowed=windowed),
            transfers.token_transfers(placement, is_tpu=is_tpu),
        )
        return [
            (
                transfers.traffic(each, self._links, recomputed=recomputed),
                transfers.results(each, placement, recomputed=recomputed),
            )
            for each in map(list, kinds)
        ]

    def pipeline_bytes(self, candidate: Candidate, pipeline: Pipeline) -> float:
        """Returns the bytes of activations and gradients that a rank sends to others in a step."""
        return pipeline.num_sent * self.placement.stream_bytes(candidate.batch_per_device)

    def kept_over_1f1b(self, candidate: Candidate, pipeline: Pipeline) -> float:
        """Returns the bytes that a rank keeps between passes, over those with 1F1B."""
        if candidate.schedule is None or not pipeline.num_deferred:
            return 1.0
        deferred, num_ranks = self.placement.deferred_over_saved(candidate), pipeline.num_ranks
        num = min(candidate.num_microbatches, _IN_FLIGHT * num_ranks)
        return kept_over_1f1b(candidate.schedule, num_ranks, num, deferred)

    def sent(
        self, candidate: Candidate, tokens: float, pipeline: Pipeline
    ) -> tuple[Traffic, dict[str, float]]:
        """Returns the traffic and the bytes of results by kind of a step of a device's tokens."""
        micro, placement = candidate.num_microbatches, self.placement
        tokens *= placement.token_multiple
        windowed = transfers.is_windowed(placement, candidate.topology, tokens / micro)
        (weights, made), (token, routed) = self._units(candidate.remat, windowed)
        results = {k: made.get(k, 0.0) * micro + routed.get(k, 0.0) * tokens for k in made | routed}
        total = weights.times(micro) + token.times(tokens)
        if placement.num_ranks == 1:
            return total, results
        sent = self.pipeline_bytes(candidate, pipeline)
        between = [*transfers.rank_transfers(placement, sent, pipeline.filled)]
        more = transfers.results(between, placement, recomputed=True)
        return (
            total + transfers.traffic(between, self._links, recomputed=True),
            {k: results.get(k, 0.0) + more.get(k, 0.0) for k in results | more},
        )

    def hbm_bytes(self, candidate: Candidate, tokens: float) -> float:
        """Returns the bytes read from and written to HBM in a step.

        The state is read and written once. Gathered weights are written, then read forward, for
        recomputation and for input gradients; their gradients are written and read. Saved
        activations of a block are written and read forward, recomputed and backward.
        """
        placement, micro = self.placement, candidate.num_microbatches
        work = placement.work
        state = 2 * (placement.parameters + placement.optimizer) + 8 * placement.trained_elements
        activations = 4 * self._saved_bytes * tokens
        passes, layers = (
            2 + work.recomputes(candidate.remat),
            work.moe.num_layers if work.moe else 0,
        )
        rows = placement.empty_rows(tokens) * layers * passes * _EMPTY_ROWS
        loss = micro * placement.loss_bytes(tokens * placement.tensor_parts / micro)
        scores = 0.0
        if self._writes_scores:
            times = _SCORES_FORWARD * (passes - 1) + _SCORES_BACKWARD
            scores = 4 * times * tokens * work.attention_flops / (4 * work.head_dim)
        gathered = 7 * placement.gathered_bytes * micro
        glue = rows * work.dim * work.compute_itemsize
        return state + gathered + activations + glue + loss + scores


# Bytes of scores in float32 that attention in plain XLA reads and writes, over those of the scores
# that it needs, and of rows of experts that no token fills, over those of one row of the width D;
# counted in steps compiled for H100.
_SCORES_FORWARD, _SCORES_BACKWARD = 6.4, 11.7
_EMPTY_ROWS = 23 / 3  # In each of the forward pass, recomputation and the backward pass.
# Attention's kernels take from this head dimension on; those for Hopper its multiples, in 16 bits.
_LEAST_HEAD_DIM = 64
_HOPPER = ("h100", "h200")


def _writes_scores(work: Workload, accelerator: Accelerator) -> bool:
    """Returns whether attention runs in plain XLA, which writes blocks of scores to HBM."""
    if work.attention_backend is not None:
        return work.attention_backend in ("xla", "reference")
    if accelerator.platform == "gpu":
        is_taken = work.head_dim % _LEAST_HEAD_DIM == 0 and work.compute_dtype != "float32"
        return not is_taken or accelerator.name not in _HOPPER
    return accelerator.platform != "tpu" or work.head_dim < _LEAST_HEAD_DIM


def _seconds(parts: Mapping[str, float], layers: float, pipeline: Pipeline) -> Range:
    times = lambda e: (
        parts["compute"] / e.compute,
        parts["HBM"] / e.hbm,
        parts["links"] / e.links,
        parts["network"] / e.network,
    )
    starts = POOR.seconds_per_operation * _OPERATIONS_PER_LAYER * (layers / pipeline.num_ranks)
    low, high = (1 - share for share in pipeline.idle)
    return max(times(BEST)) / low, (sum(times(POOR)) + starts) / high
