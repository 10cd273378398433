"""Estimates of a step in closed form: memory, FLOPs, traffic, and time as a range.

Bytes of parameters and of the optimizer are exact; docs/calibration.md shows the errors of the
rest. Times are bounds:

    low   compute, HBM, links and network overlap fully at the best efficiency observed
    high  they run one after the other at a poor efficiency, plus the start of every operation

All values are per step and device.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moelib.parallel import sharding
from moelib.parallel.pipeline.ticks import kept_over_1f1b
from moelib.planning.estimate import transfers
from moelib.planning.estimate.activations import NONE
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.links import Layout, Links, Traffic
from moelib.planning.estimate.memory import Placement, at_peak
from moelib.planning.estimate.pipeline import Pipeline, pipeline_of
from moelib.planning.estimate.transfers import Transfer
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
    """The estimate of a candidate's step, per device; a figure is computed when it is asked for."""

    candidate: Candidate
    on_mesh: "OnMesh"
    pipeline: Pipeline
    dollars_per_hour: float  # Price of one device.

    def __repr__(self) -> str:
        topology, mesh = self.candidate.topology.name, self.candidate.mesh
        seconds = f"{self.seconds[0]:.3g} to {self.seconds[1]:.3g} s"
        return f"Estimate({topology}, {mesh}, {self.bytes_held / 2**30:.1f} GiB, {seconds})"

    @functools.cached_property
    def memory(self) -> dict[str, float]:
        """Bytes by category."""
        return at_peak(self.on_mesh.placement.memory(self.candidate, self.pipeline))

    @functools.cached_property
    def bytes_held(self) -> float:
        """Bytes of all categories."""
        return sum(self.memory.values())

    @property
    def capacity(self) -> int:
        """Bytes of the device."""
        return self.on_mesh.accelerator.hbm_bytes

    @property
    def fits(self) -> bool:
        """True if the memory fits the device, with the error of the estimate."""
        return self.bytes_held * (1 + MEMORY_ERROR) <= self.capacity

    @property
    def model_flops(self) -> float:
        """FLOPs without recomputation."""
        return self.on_mesh.work.model_flops * self.on_mesh.tokens

    @property
    def hardware_flops(self) -> float:
        """FLOPs with recomputation, and with rows of experts that no token fills."""
        return self.on_mesh.flops(self.candidate.remat) * self.on_mesh.tokens

    @functools.cached_property
    def _sent(self) -> Traffic:
        return self.on_mesh.sent(self.candidate, self.pipeline)

    @property
    def links_bytes(self) -> float:
        """Bytes sent to devices of the slice."""
        return self._sent.links_bytes

    @property
    def network_bytes(self) -> float:
        """Bytes sent to other slices."""
        return self._sent.network_bytes

    @property
    def collectives(self) -> dict[str, float]:
        """Bytes of results by kind, as a compiled program has them."""
        return self.on_mesh.results(self.candidate, self.pipeline)

    @property
    def idle(self) -> Range:
        """Shares of the time in which a rank of a pipeline waits."""
        return self.pipeline.idle

    @property
    def pipeline_bytes(self) -> float:
        """Bytes of activations and their gradients sent to other ranks."""
        return self.on_mesh.pipeline_bytes(self.candidate, self.pipeline)

    @property
    def kept_over_1f1b(self) -> float:
        """Bytes that a rank keeps between passes, over those of 1F1B; 1 if nothing is deferred."""
        return self.on_mesh.kept_over_1f1b(self.candidate, self.pipeline)

    @functools.cached_property
    def seconds_at_peak(self) -> dict[str, float]:
        """Times of compute, HBM, links and network at their peak rates."""
        on_mesh, candidate, sent = self.on_mesh, self.candidate, self._sent
        hbm = on_mesh.hbm_bytes(candidate) / on_mesh.accelerator.hbm_bytes_per_second
        return {
            "compute": on_mesh.compute_seconds(candidate.remat),
            "HBM": hbm,
            "links": sent.links_seconds,
            "network": sent.network_seconds,
        }

    @functools.cached_property
    def seconds(self) -> Range:
        """Time of the step."""
        layers = self.on_mesh.work.num_layers * self.candidate.num_microbatches
        return _seconds(self.seconds_at_peak, layers, self.pipeline)

    @property
    def limit(self) -> str:
        """The part that takes longest, or "memory" if the candidate does not fit."""
        longest = max(self.seconds_at_peak, key=self.seconds_at_peak.__getitem__)
        return longest if self.fits else "memory"

    @property
    def tokens_per_second(self) -> Range:
        """Tokens per second per device."""
        tokens, (low, high) = self.on_mesh.tokens, self.seconds
        return tokens / high, tokens / low

    @property
    def mfu(self) -> Range:
        """Model FLOPs as a fraction of the peak."""
        peak, (low, high) = self.on_mesh.peak_flops, self.seconds
        return self.model_flops / high / peak, self.model_flops / low / peak

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
        steps = tokens / self.on_mesh.work.tokens
        low, high = (second * steps / 86_400 for second in self.seconds)
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
        self._by_mesh: dict[Any, OnMesh] = {}
        self._layout = functools.cache(Layout)
        self._pipeline = functools.cache(functools.partial(pipeline_of, work))

    def __call__(self, candidate: Candidate) -> Estimate:
        """Returns the estimate of a candidate."""
        key = candidate.topology.name, candidate.mesh
        if (on_mesh := self._by_mesh.get(key)) is None:
            on_mesh = OnMesh(self._work, candidate, self._rules, self._layout)
            self._by_mesh[key] = on_mesh
        pipeline = self._pipeline(
            candidate.schedule,
            on_mesh.placement.num_ranks,
            candidate.num_microbatches,
            recomputed=self._work.recomputes(candidate.remat),
        )
        accelerator = on_mesh.accelerator
        price = self._prices.get(accelerator.name, accelerator.dollars_per_hour)
        return Estimate(candidate, on_mesh, pipeline, price)


class OnMesh:
    """A workload on one mesh: its placement, its computation and its transfers, per device."""

    def __init__(
        self,
        work: Workload,
        candidate: Candidate,
        rules: sharding.Rules,
        layout: Callable[[TopologyShape, tuple[int, ...]], Layout],
    ) -> None:
        self.work, self.placement = work, Placement(work, candidate, rules)
        self._links = Links(candidate.topology, candidate.mesh, layout)
        self.accelerator = accelerator = candidate.topology.accelerator
        self._is_tpu = accelerator.platform == "tpu"
        self.tokens = work.tokens / candidate.topology.num_devices  # An even share of a step's.
        # Devices with the same tokens all count them.
        self._held_tokens = self.tokens * self.placement.token_multiple
        peak = peak_flops_per_second(accelerator.device_kind, work.compute_dtype)
        self.peak_flops = peak or accelerator.flops_per_second  # In the dtype of the computation.
        float8 = peak_flops_per_second(accelerator.device_kind, "float8_e4m3fn")
        self._peak_float8 = float8 or self.peak_flops
        saved = work.saved[NONE]
        whole = saved.whole * self.placement.tensor_parts
        self._saved_bytes = saved.split + whole + saved.routed  # Per token.
        self._writes_scores = _writes_scores(work, accelerator)
        self.compute_seconds = functools.cache(self._compute_seconds)
        self._weights = functools.cache(self._weight_traffic)
        self._tokens = functools.cache(self._tokens_traffic)
        self._ranks = functools.cache(self._rank_traffic)

    def flops(self, remat: str) -> float:
        """Returns the FLOPs of a token, with those of recomputation and of unfilled rows."""
        work = self.work
        products = work.routed_products + work.recomputes(remat)
        unfilled = (self.placement.slots - 1) * work.routed_flops * products
        return work.model_flops + work.recomputed_flops(remat) + unfilled

    def _compute_seconds(self, remat: str) -> float:
        """Returns the seconds of a step's matmuls at their peak rates."""
        # Forward, two gradients, and what is recomputed.
        native = self.work.float8_flops * (3 + self.work.recomputes_matmuls(remat))
        native -= self.work.untrained_float8_flops
        others = self.flops(remat) - native
        return (others / self.peak_flops + native / self._peak_float8) * self.tokens

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

    def _weight_transfers(self, remat: str, windowed: bool) -> Iterator[Transfer]:
        """Yields the transfers of weights and gradients for one micro-batch."""
        return transfers.weight_transfers(
            self.placement, remat, is_tpu=self._is_tpu, windowed=windowed
        )

    def _token_transfers(self) -> Iterator[Transfer]:
        """Yields the transfers of activations for one token."""
        return transfers.token_transfers(self.placement, is_tpu=self._is_tpu)

    def _weight_traffic(self, remat: str, windowed: bool) -> Traffic:
        return transfers.traffic(self._weight_transfers(remat, windowed), self._links)

    def _tokens_traffic(self, recomputed: bool) -> Traffic:
        of_one = transfers.traffic(self._token_transfers(), self._links, recomputed=recomputed)
        return of_one.times(self._held_tokens)

    def _rank_traffic(self, filled: float) -> tuple[Traffic, Traffic]:
        """Returns what ranks send each other per step, and per byte of activations."""
        placement, links = self.placement, self._links
        of_byte = transfers.traffic([transfers.to_next_rank(1.0)], links)
        return transfers.traffic(transfers.rank_transfers(placement, filled), links), of_byte

    def _is_windowed(self, candidate: Candidate) -> bool:
        tokens = self._held_tokens / candidate.num_microbatches
        return transfers.is_windowed(self.placement, candidate.topology, tokens)

    def sent(self, candidate: Candidate, pipeline: Pipeline) -> Traffic:
        """Returns the traffic of a step."""
        weights = self._weights(self.work.alike(candidate.remat), self._is_windowed(candidate))
        tokens = self._tokens(self.work.recomputes(candidate.remat))
        total = weights.times(candidate.num_microbatches) + tokens
        if self.placement.num_ranks == 1:
            return total
        between, of_byte = self._ranks(pipeline.filled)
        return total + between + of_byte.times(self.pipeline_bytes(candidate, pipeline))

    def results(self, candidate: Candidate, pipeline: Pipeline) -> dict[str, float]:
        """Returns the bytes of the results of a step's transfers by kind."""
        weights = self._weight_transfers(candidate.remat, self._is_windowed(candidate))
        sent = self.pipeline_bytes(candidate, pipeline)
        recomputed = self.work.recomputes(candidate.remat)
        total: dict[str, float] = collections.defaultdict(float)
        for each, times in (
            (weights, candidate.num_microbatches),
            (self._token_transfers(), self._held_tokens),
            (transfers.rank_transfers(self.placement, pipeline.filled), 1),
            ([transfers.to_next_rank(sent)] if sent else [], 1),
        ):
            found = transfers.results(each, self.placement, recomputed=recomputed)
            for kind, size in found.items():
                total[kind] += size * times
        return dict(total)

    def hbm_bytes(self, candidate: Candidate) -> float:
        """Returns the bytes read from and written to HBM in a step.

        The state is read and written once. Gathered weights are written, then read forward, for
        recomputation and for input gradients; their gradients are written and read. Saved
        activations of a block are written and read forward, recomputed and backward.
        """
        placement, micro = self.placement, candidate.num_microbatches
        work, tokens = self.work, self.tokens
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
        gathered = (5 * placement.gathered_bytes + 2 * placement.gathered_trained) * micro
        glue = rows * work.routed_dim * work.compute_itemsize
        return state + gathered + activations + glue + loss + scores


# Bytes of scores in float32 that attention in plain XLA reads and writes, over those of the scores
# that it needs, and of rows of experts that no token fills, over those of one row; counted in
# steps compiled for H100.
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
