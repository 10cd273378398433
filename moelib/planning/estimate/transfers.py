"""What a workload is on a mesh: the bytes that a device holds and sends, from the sharding rules.

Weights are gathered over the axes that split tokens, in the dtype of the computation, forward,
again and backward, and their gradients are reduced and scattered back. Experts that stay
where they are have tokens sent to them. All is of one device.
"""

import functools
import math

from moelib.parallel import sharding
from moelib.planning.estimate.activations import Kept
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.links import Links, Sent
from moelib.planning.estimate.workload import Leaf, Workload

_CHUNK_BYTES = 2 * 128 * 2**20  # Logits of a chunk of tokens, and their gradients, at most.


class OnMesh:
    """What a workload is on a mesh, whatever the rows at a time and the remat."""

    def __init__(self, work: Workload, candidate: Candidate, rules: sharding.Rules) -> None:
        self._work, self._mesh, self._rules = work, candidate.mesh, rules
        self._links = Links(candidate.topology, candidate.mesh)
        self._tpu = candidate.topology.accelerator.platform == "tpu"
        names = {name for leaf in (*work.parameters, *work.optimizer) for name in leaf.axes}
        names |= {"batch", "sequence", "residual_sequence", "experts", "vocab", "kv_heads"}
        self._axes: dict[str | None, tuple[str, ...]] = {
            name: sharding.mesh_axes(name, self._mesh.sizes, rules) for name in names if name
        } | {None: ()}
        self._parts = {name: self._mesh.parts(axes) for name, axes in self._axes.items()}
        self._sequence = self._axes["sequence"]
        self._experts = self._axes["experts"] if work.moe and work.moe.expert_parallel else ()
        split = (*self._axes["batch"], *self._sequence)
        self._tokens = (*split, *(axis for axis in self._experts if axis not in split))
        # Devices that have the same tokens and share the work on them.
        stream = self._axes["residual_sequence"]
        self._tensor = tuple(axis for axis in stream if axis not in self._sequence)
        self.tensor_parts = self._mesh.parts(self._tensor)
        # A device's tokens, over an even share of all.
        self.token_parts = candidate.topology.num_devices / self._mesh.parts(self._tokens)
        self._sizes_of_state()
        self.weights = functools.cache(self._weights)
        self.activations = functools.cache(self._activations)

    def _sizes_of_state(self) -> None:
        """Sets what of the state a device holds, and what it computes with."""
        held = {leaf: self._held(leaf) for leaf in self._work.parameters}
        whole = {leaf: n * self._gathered_parts(leaf) for leaf, n in held.items()}
        decoder = [leaf for leaf in held if leaf.in_decoder]
        trained = [leaf for leaf in held if leaf.trained]
        self.parameters = sum(n * leaf.itemsize for leaf, n in held.items())
        self.optimizer = sum(self._held(x) * x.itemsize for x in self._work.optimizer)
        self.trained = sum(held[leaf] for leaf in trained)
        self.gathered_bytes = sum(n * leaf.compute_itemsize for leaf, n in whole.items())
        self._gathered_layers = sum(whole[leaf] * leaf.compute_itemsize for leaf in decoder)
        # Where nothing is computed again weights are kept as they were computed with: those of
        # experts gathered, too.
        self._kept_weights = sum(
            (whole if "experts" in leaf.axes else held)[leaf] * leaf.compute_itemsize
            for leaf in decoder
        )
        self._gradients = sum(
            held[leaf] * (leaf.compute_itemsize if leaf.in_decoder else leaf.itemsize)
            for leaf in trained
        )

    def _held(self, leaf: Leaf) -> float:
        """Returns the elements of a leaf that a device holds."""
        return leaf.size / math.prod(self._parts[name] for name in leaf.axes)

    def _gathered_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Returns the mesh axes over which a parameter is gathered to be computed with."""
        if self._is_table(leaf):
            return ()  # Its rows go to the tokens.
        found: list[str] = []
        for name in leaf.axes:
            keep = self._experts if name == "experts" else ()
            found += [a for a in self._axes[name] if a in self._tokens and a not in keep]
        return tuple(found)

    def _gathered_parts(self, leaf: Leaf) -> int:
        return self._mesh.parts(self._gathered_axes(leaf))

    def _is_table(self, leaf: Leaf) -> bool:
        """Returns whether a parameter is a table that is looked up only, not the head too."""
        heads = (other.axes == ("embed", "vocab") for other in self._work.parameters)
        return leaf.axes == ("vocab", "embed") and any(heads)

    @functools.cached_property
    def _looked_up(self) -> list[tuple[str, ...]]:
        """Returns the mesh axes that split the width of each table."""
        tables = (leaf for leaf in self._work.parameters if self._is_table(leaf))
        return [axes for _ in tables if (axes := self._axes["embed"])]

    def _reduced_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Returns the mesh axes whose devices have gradients of the same share of a parameter."""
        split = {axis for name in leaf.axes for axis in self._axes[name]}
        return tuple(axis for axis in self._tokens if axis not in split)

    # Bytes sent.

    def _weights(self, recomputed: bool) -> Sent:
        """Returns what is sent of parameters and gradients for one micro-batch."""
        total = Sent()
        for leaf in self._work.parameters:
            held, axes = self._held(leaf), self._gathered_axes(leaf)
            whole = held * self._gathered_parts(leaf) * leaf.compute_itemsize
            if axes:
                gathers = _gathers(leaf, recomputed)
                total += self._links.gathered(axes, whole).times(gathers + leaf.trained)
            if leaf.trained and (others := self._reduced_axes(leaf)):
                total += self._links.reduced(others, held * leaf.compute_itemsize)
        return total

    def _activations(self, recomputed: bool) -> Sent:
        """Returns what is sent for one token of those that a device computes."""
        work, links = self._work, self._links
        row = work.dim * work.compute_itemsize
        total = Sent()
        for axes in self._looked_up:  # Embeddings, and their gradients.
            total += links.exchanged(axes, row).times(2)
        if self._tensor:
            # Two gathers and two reductions a layer, forward and backward, and the gathers again.
            times = (8 + 2 * recomputed) * work.num_layers
            total += links.gathered(self._tensor, row).times(times)
        if self._sequence:
            # Keys and values forward, again, and backward; with these their gradients in float32.
            passes = 2 + recomputed + 4 / work.compute_itemsize
            width = work.kv_width / self._parts["kv_heads"]
            passed = links.passed(self._sequence, width * work.compute_itemsize)
            total += passed.times(passes * work.num_layers)
        if work.moe is not None and self._experts:
            times = (4 + recomputed) * work.moe.num_layers
            n = self._mesh.parts(self._experts)
            if work.moe.ring:
                total += links.gathered(self._experts, n * row).times(times)
            elif work.moe.capacity_factor is not None:
                slots = self.slots * work.moe.num_experts_per_token
                total += links.exchanged(self._experts, slots * row).times(times)
            else:
                total += links.exchanged(self._experts, _copies(work, n) * row).times(times)
        return total

    def results(self, micro: int, tokens: float, recomputed: bool) -> dict[str, float]:
        """Returns the bytes of the results of the largest collectives, by kind."""
        found: dict[str, float] = dict.fromkeys(
            ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"), 0.0
        )
        for leaf in self._work.parameters:
            held = self._held(leaf) * leaf.compute_itemsize * micro
            if self._gathered_axes(leaf):
                whole = held * self._gathered_parts(leaf)
                found["all-gather"] += _gathers(leaf, recomputed) * whole
                found["reduce-scatter"] += held * leaf.trained
            if leaf.trained and self._reduced_axes(leaf):
                found["all-reduce"] += held
        work, moe = self._work, self._work.moe
        row = work.dim * work.compute_itemsize
        found["all-to-all"] += 2 * tokens * row * len(self._looked_up)
        if self._tensor:
            found["all-gather"] += (4 + 2 * recomputed) * work.num_layers * tokens * row
            found["reduce-scatter"] += 4 * work.num_layers * tokens * row / self.tensor_parts
        if moe is not None and self._experts and moe.ring:
            # Tokens out and home: gathers of all, and reductions to a device's own.
            times = moe.num_layers * tokens * row
            found["all-gather"] += (2 + recomputed) * self._mesh.parts(self._experts) * times
            found["reduce-scatter"] += 2 * times
        elif moe is not None and self._experts and moe.capacity_factor is not None:
            slots = self.slots * moe.num_experts_per_token
            found["all-to-all"] += (4 + recomputed) * moe.num_layers * tokens * slots * row
        elif moe is not None and self._experts:
            n = self._mesh.parts(self._experts)
            room = _room(work, n, self._row_parts)
            received = min(n, moe.num_experts_per_token * room)
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
        work, micro = self._work, candidate.num_microbatches
        tokens = candidate.rows * work.seq_len / self._parts["sequence"]
        block = work.block
        activations = self._bytes(work.kept[candidate.remat], tokens)
        if not work.recomputes(candidate.remat):
            activations += self._kept_weights
        left = tokens * (block.split / self.tensor_parts + block.whole)
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            # Of a micro-batch, and their sums if there are more.
            "gradients": self._gradients + (4 * self.trained if micro > 1 else 0),
            "activations": activations,
            # A block's weights and their gradients, and what it leaves for its backward pass.
            "block": 2 * self._gathered_layers / work.num_blocks + left,
            "dispatch": block.rows * tokens * self._rows_held,
            "logits": self._logits(tokens),
        }

    def _bytes(self, kept: Kept, tokens: float) -> float:
        rows = kept.rows * self._rows_held
        return tokens * (kept.split / self.tensor_parts + kept.whole + rows)

    @functools.cached_property
    def slots(self) -> float:
        """Rows that experts compute over those that are chosen: an expert's slots, full or not."""
        moe = self._work.moe
        if moe is None or moe.capacity_factor is None:
            return 1.0
        return _slots(self._work, self._row_parts)

    @functools.cached_property
    def _row_parts(self) -> int:
        """Returns the parts of a row of the batch that are dispatched apart, each with its room."""
        return self._mesh.parts([axis for axis in self._sequence if axis not in self._experts])

    @functools.cached_property
    def _rows_held(self) -> float:
        """Returns the rows of a device's buffers over those of the trace."""
        work = self._work
        if work.moe is None:
            return 1.0
        if work.moe.capacity_factor is not None:
            return self.slots / _slots(work, 1)
        return _room(work, self._mesh.parts(self._experts), self._row_parts)

    def _logits(self, tokens: float) -> float:
        """Returns the bytes of a chunk of logits, and of the head and its gradient."""
        work = self._work
        vocab = work.vocab_size / self._parts["vocab"]
        head = vocab * work.dim * (work.compute_itemsize + 4)
        return head + min(2 * 4 * tokens * vocab, _CHUNK_BYTES)


def _gathers(leaf: Leaf, recomputed: bool) -> int:
    """Returns how often a step gathers a parameter for one micro-batch.

    Those of layers are gathered forward, for what is computed again, and backward; experts' stay
    from one of these passes to the next, and so does the head.
    """
    if not leaf.in_decoder:
        return 1
    return 1 + recomputed + ("experts" not in leaf.axes)


def _copies(work: Workload, n: int) -> float:
    """Returns to how many of n groups of experts a token goes, all choices being alike likely."""
    assert work.moe is not None
    experts, chosen = work.moe.num_experts, work.moe.num_experts_per_token
    others = experts - experts // n
    return n * (1 - math.comb(others, chosen) / math.comb(experts, chosen))


def _room(work: Workload, n: int, row_parts: int) -> float:
    """Returns the rows of a device's buffer, over K of each of its tokens.

    Args:
        work: What is dispatched.
        n: Devices that share the experts.
        row_parts: Parts of a row of the batch, each of which has the whole row's room.
    """
    assert work.moe is not None
    moe = work.moe
    most = n * min(moe.num_experts_per_token, moe.num_experts // n) / moe.num_experts_per_token
    if moe.buffer_factor is None:
        return most
    return min(most, moe.buffer_factor * max(1.0, n / moe.buffer_blocks) * row_parts)


def _slots(work: Workload, row_parts: int) -> float:
    """Returns the slots of all experts, over K of each token; a part of a row fills no more."""
    assert work.moe is not None
    assert work.moe.capacity_factor is not None
    most = work.moe.num_experts / work.moe.num_experts_per_token
    return min(work.moe.capacity_factor * row_parts, most)
