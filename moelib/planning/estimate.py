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
from moelib.planning.candidates import Candidate, Mesh
from moelib.planning.links import Links, Sent
from moelib.planning.workload import DOTS, DOTS_NO_BATCH, FULL, NONE, OWN, Kept, Leaf, Workload

_GIB = 2**30
_CHUNK_BYTES = 2 * 128 * 2**20  # Logits of a chunk of tokens, and their gradients, at most.


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the peak that are reached; the same for every accelerator and model.

    Attributes:
        compute: Of the matmuls' peak.
        hbm: Of the bandwidth of HBM.
        links: Of that of the links in a slice.
        network: Of that of the network.
        seconds_an_operation: From the start of one to that of the next, when there is no work.
    """

    compute: float
    hbm: float
    links: float
    network: float
    seconds_an_operation: float


# Large dense matmuls reach some 80% of the peak on all of these; grouped ones of small experts, of
# a few hundred rows each, a third. Copies reach 90% of HBM's bandwidth, gathers of rows half.
# Collectives of many MiB reach 90% of a link, those of a few MiB, or one after another, half.
BEST = Efficiency(0.80, 0.90, 0.90, 0.90, 0.0)
POOR = Efficiency(0.33, 0.50, 0.50, 0.50, 3e-6)

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
        hardware_flops: With what is computed again.
        results: Bytes of the results of collectives, by kind, as a compiled program has them.
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
    results: Mapping[str, float]
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
        """Whether the device has as many bytes."""
        return self.bytes_held <= self.capacity

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
        slow, fast = self.tokens_per_second
        return tuple(1e9 / rate / 3600 * self.dollars_per_hour for rate in (fast, slow))  # type: ignore

    @functools.cached_property
    def middle_dollars(self) -> float:
        """Dollars a billion tokens in the middle of the range, by which candidates are sorted."""
        low, high = self.dollars_per_billion
        return math.sqrt(low * high)

    def whole_run(self, tokens: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns (days, dollars), each (low, high), of a run over so many tokens."""
        days = tuple(second * tokens / self.tokens / 86_400 for second in self.seconds)
        dollars = tuple(price * tokens / 1e9 for price in self.dollars_per_billion)
        return days, dollars  # type: ignore


class Estimator:
    """Estimates candidates of one workload; what depends on the mesh alone is computed once."""

    def __init__(self, work: Workload, rules: sharding.Rules, prices: Mapping[str, float]) -> None:
        self._work, self._rules, self._prices = work, rules, prices
        self._by_mesh: dict[Any, _OnMesh] = {}

    def __call__(self, candidate: Candidate) -> Estimate:
        """Returns the estimate of a candidate."""
        key = candidate.topology.name, candidate.mesh
        if key not in self._by_mesh:
            self._by_mesh[key] = _OnMesh(self._work, candidate, self._rules)
        on_mesh, work, topology = self._by_mesh[key], self._work, candidate.topology
        accelerator = topology.accelerator
        micro = candidate.num_microbatches
        tokens = work.tokens / topology.num_devices
        again = _computed_again(work, candidate.remat)
        recomputed = again > 0
        hardware = (work.model_flops + again) * tokens
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
            results=on_mesh.results(micro, tokens * on_mesh.token_parts, recomputed),
            links_bytes=sent.links_bytes,
            network_bytes=sent.network_bytes,
            seconds=_seconds(parts, work.num_layers * micro),
            parts=parts,
            tokens=work.tokens,
            dollars_per_hour=self._prices.get(accelerator.name, accelerator.dollars_per_hour),
        )

    def _hbm_bytes(self, on_mesh: "_OnMesh", candidate: Candidate, tokens: float) -> float:
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


def _computed_again(work: Workload, remat: str) -> float:
    """Returns the FLOPs a token that the backward pass computes again."""
    if remat == OWN:
        remat = _nearest(work)
    again = {NONE: 0.0, FULL: work.decoder_flops, DOTS: work.routed_flops}
    return (again | {DOTS_NO_BATCH: work.routed_flops})[remat]


def _nearest(work: Workload) -> str:
    """Returns the remat whose bytes are nearest to those that the config's own keeps."""
    held = lambda kept: kept.split + kept.whole + kept.rows
    own = held(work.kept[OWN])
    names = (FULL, DOTS, NONE)
    return min(names, key=lambda name: abs(math.log((held(work.kept[name]) + 1) / (own + 1))))


def _seconds(parts: Mapping[str, float], layers: int) -> tuple[float, float]:
    times = lambda e: (
        parts["compute"] / e.compute,
        parts["HBM"] / e.hbm,
        parts["links"] / e.links,
        parts["network"] / e.network,
    )
    starts = POOR.seconds_an_operation * _OPERATIONS_A_LAYER * layers
    return max(times(BEST)), sum(times(POOR)) + starts


class _OnMesh:
    """What a workload is on a mesh, whatever the rows at a time and the remat."""

    def __init__(self, work: Workload, candidate: Candidate, rules: sharding.Rules) -> None:
        self._work, self._mesh, self._rules = work, candidate.mesh, rules
        self._links = Links(candidate.topology, candidate.mesh)
        self._tpu = candidate.topology.accelerator.platform == "tpu"
        axes = lambda name: self._split(name)
        self._batch, self._sequence = axes("batch"), axes("sequence")
        self._experts = axes("experts") if work.moe and work.moe.expert_parallel else ()
        self._tensor = tuple(a for a in axes("residual_sequence") if a not in self._sequence)
        self._tokens = (*self._batch, *self._sequence)
        self._tokens += tuple(a for a in self._experts if a not in self._tokens)
        self.tensor_parts = self._mesh.parts(self._tensor)
        # Devices that have the same tokens, from which a device's own are a share.
        self.token_parts = candidate.topology.num_devices / self._mesh.parts(self._tokens)
        held = lambda leaves: sum(self._held(leaf) * leaf.itemsize for leaf in leaves)
        self.parameters, self.optimizer = held(work.parameters), held(work.optimizer)
        self.trained = sum(self._held(leaf) for leaf in work.parameters if leaf.trained)
        self.gathered_bytes = sum(
            self._held(leaf) * self._gathered_parts(leaf) * leaf.compute_itemsize
            for leaf in work.parameters
        )

    def _split(self, name: str | None) -> tuple[str, ...]:
        if name is None:
            return ()
        return sharding.mesh_axes(name, self._mesh.sizes, self._rules)

    def _held(self, leaf: Leaf) -> float:
        """Returns the elements of a leaf that a device holds."""
        return leaf.size / math.prod(self._mesh.parts(self._split(name)) for name in leaf.axes)

    @functools.cache  # noqa: B019: as many as there are kinds of parameters.
    def _gathered_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Returns the mesh axes over which a parameter is gathered to be computed with."""
        found: list[str] = []
        for name in leaf.axes:
            keep = self._experts if name == "experts" else ()
            found += [a for a in self._split(name) if a in self._tokens and a not in keep]
        return tuple(found)

    def _gathered_parts(self, leaf: Leaf) -> int:
        return self._mesh.parts(self._gathered_axes(leaf))

    def _reduced_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Returns the mesh axes whose devices have gradients of the same share of a parameter."""
        split = {axis for name in leaf.axes for axis in self._split(name)}
        return tuple(axis for axis in self._tokens if axis not in split)

    # Bytes sent.

    @functools.cache  # noqa: B019
    def weights(self, recomputed: bool) -> Sent:
        """Returns what is sent of parameters and gradients for one micro-batch."""
        total = Sent()
        for leaf in self._work.parameters:
            held, axes = self._held(leaf), self._gathered_axes(leaf)
            whole = held * self._gathered_parts(leaf) * leaf.compute_itemsize
            if axes:
                gathers = 2 if leaf.in_decoder and recomputed else 1
                total += self._links.gathered(axes, whole).times(gathers + leaf.trained)
            if leaf.trained and (others := self._reduced_axes(leaf)):
                total += self._links.reduced(others, held * leaf.compute_itemsize)
        return total

    @functools.cache  # noqa: B019
    def activations(self, recomputed: bool) -> Sent:
        """Returns what is sent for one token of those that a device computes."""
        work, links = self._work, self._links
        row = work.dim * work.compute_itemsize
        total = Sent()
        if self._tensor:
            # Two gathers and two reductions a layer, forward and backward, and the gathers again.
            times = (8 + 2 * recomputed) * work.num_layers
            total += links.gathered(self._tensor, row).times(times)
        if self._sequence:
            # Keys and values forward, again, and backward; with these their gradients in float32.
            passes = 2 + recomputed + 2 * 4 / work.compute_itemsize
            passed = links.passed(self._sequence, work.kv_width * work.compute_itemsize)
            total += passed.times(passes * work.num_layers)
        if work.moe is not None and self._experts:
            times = (4 + recomputed) * work.moe.num_layers
            n = self._mesh.parts(self._experts)
            if work.moe.ring:
                total += links.gathered(self._experts, n * row).times(times)
            else:
                total += links.exchanged(self._experts, _copies(work, n) * row).times(times)
        return total

    def results(self, micro: int, tokens: float, recomputed: bool) -> dict[str, float]:
        """Returns the bytes of the results of the largest collectives, by kind."""
        found: dict[str, float] = dict.fromkeys(
            ("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all"), 0.0
        )
        for leaf in self._work.parameters:
            held = self._held(leaf) * leaf.compute_itemsize * micro
            if self._gathered_axes(leaf):
                gathers = 2 if leaf.in_decoder and recomputed else 1
                found["all-gather"] += gathers * held * self._gathered_parts(leaf)
                found["reduce-scatter"] += held * leaf.trained
            if leaf.trained and self._reduced_axes(leaf):
                found["all-reduce"] += held
        work, moe = self._work, self._work.moe
        row = work.dim * work.compute_itemsize
        if self._tensor:
            found["all-gather"] += (4 + 2 * recomputed) * work.num_layers * tokens * row
            found["reduce-scatter"] += 4 * work.num_layers * tokens * row / self.tensor_parts
        if moe is not None and self._experts and not moe.ring:
            n = self._mesh.parts(self._experts)
            received = min(n, moe.num_experts_per_token * _room(work, n))
            back = min(n, moe.num_experts_per_token)
            forth, home = 2 + recomputed, 2  # With gradients; what comes back is not made again.
            bytes_ = row * (forth * received + home * back)
            # Choices travel with their rows, in a tile of 128 numbers each.
            bytes_ += 6 * 512 * received if self._tpu else 0
            found["ragged-all-to-all"] += moe.num_layers * tokens * bytes_
        return {kind: size for kind, size in found.items() if size}

    # Bytes held.

    def memory(self, candidate: Candidate) -> dict[str, float]:
        """Returns the bytes held by category."""
        work = self._work
        tokens = candidate.rows * work.seq_len / self._mesh.parts(self._sequence)
        kept, block = work.kept[candidate.remat], work.block
        decoder = [leaf for leaf in work.parameters if leaf.in_decoder]
        gathered = sum(
            self._held(leaf) * self._gathered_parts(leaf) * leaf.compute_itemsize
            for leaf in decoder
        )
        activations = self._bytes(kept, tokens)
        if _computed_again(work, candidate.remat) == 0.0:
            # Weights are kept as they are computed with: those of experts gathered, too.
            activations += sum(
                self._held(leaf)
                * (self._gathered_parts(leaf) if "experts" in leaf.axes else 1)
                * leaf.compute_itemsize
                for leaf in decoder
            )
        rows = block.rows * tokens * self._rows_held()
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "gradients": self._gradients(candidate.num_microbatches),
            "activations": activations,
            # One block's weights and their gradients, and what it leaves for its backward pass.
            "block": 2 * gathered / work.num_blocks
            + self._bytes(dataclasses.replace(block, rows=0.0), tokens),
            "dispatch": rows,
            "logits": self._logits(tokens),
        }

    def _bytes(self, kept: Kept, tokens: float) -> float:
        rows = kept.rows * self._rows_held()
        return tokens * (kept.split / self.tensor_parts + kept.whole + rows)

    def _rows_held(self) -> float:
        """Returns the rows of a device's buffers over K of each of its tokens."""
        if self._work.moe is None:
            return 1.0
        return _room(self._work, self._mesh.parts(self._experts))

    def _gradients(self, micro: int) -> float:
        """Returns the bytes of a micro-batch's gradients, and of their sums if there are more."""
        trained = [leaf for leaf in self._work.parameters if leaf.trained]
        one = sum(
            self._held(leaf) * (leaf.compute_itemsize if leaf.in_decoder else leaf.itemsize)
            for leaf in trained
        )
        return one + (4 * self.trained if micro > 1 else 0)

    def _logits(self, tokens: float) -> float:
        """Returns the bytes of a chunk of logits, and of the head and its gradient."""
        work = self._work
        vocab = work.vocab_size / self._mesh.parts(self._split("vocab"))
        head = vocab * work.dim * (work.compute_itemsize + 4)
        return head + min(2 * 4 * tokens * vocab, _CHUNK_BYTES)


def _copies(work: Workload, n: int) -> float:
    """Returns to how many of n groups of experts a token goes, when all choices are alike likely."""
    assert work.moe is not None
    experts, chosen = work.moe.num_experts, work.moe.num_experts_per_token
    others = experts - experts // n
    return n * (1 - math.comb(others, chosen) / math.comb(experts, chosen))


def _room(work: Workload, n: int) -> float:
    """Returns the rows of a device's buffer, over K of each of its tokens."""
    assert work.moe is not None
    moe = work.moe
    most = n * min(moe.num_experts_per_token, moe.num_experts // n) / moe.num_experts_per_token
    return most if moe.buffer_factor is None or n == 1 else min(most, moe.buffer_factor)
