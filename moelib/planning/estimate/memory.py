"""Memory: the bytes per device that a workload holds on a mesh, from the sharding rules."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moelib.layers.moe.rounds import rows_per_round
from moelib.models.loss import held_logits
from moelib.parallel import sharding
from moelib.planning.estimate.activations import Saved
from moelib.planning.estimate.candidates import Candidate
from moelib.planning.estimate.pipeline import AXIS, Pipeline
from moelib.planning.estimate.workload import Leaf, Workload

# Bytes kept for a deferred weight gradient of a block, over its saved activations: the inputs of
# its matmuls and the gradients of their outputs.
_DEFERRED = 0.75

# Bytes of a compiled program on a TPU: 17 to 125 MiB in steps compiled for v5e, v5p and v6e.
_PROGRAM = 50 * 2**20


class RankBytes(NamedTuple):
    """Bytes of parameters of a pipeline's rank, in the computation and as summed gradients."""

    weights: float
    gradients: float  # In float32.


class Placement:
    """A workload on a mesh, for any batch per device and remat.

    Weights are gathered over the axes that split tokens, in the dtype of the computation. Weights
    of experts that other devices reach stay in place, and tokens are sent to them.
    """

    def __init__(self, work: Workload, candidate: Candidate, rules: sharding.Rules) -> None:
        self.work, self.mesh = work, candidate.mesh
        self.accelerator = candidate.topology.accelerator
        names = {name for leaf in (*work.parameters, *work.optimizer) for name in leaf.axes}
        names |= {"batch", "sequence", "residual_sequence", "experts", "vocab", "heads", "kv_heads"}
        self.axes: dict[str | None, tuple[str, ...]] = {
            name: sharding.mesh_axes(name, self.mesh.sizes, rules) for name in names if name
        } | {None: ()}
        self.parts = {name: self.mesh.parts(axes) for name, axes in self.axes.items()}
        # Mesh axes over which experts are shared, and those that split tokens.
        self.expert_axes = self.axes["experts"] if work.moe and work.moe.expert_parallel else ()
        split = (*self.axes["batch"], *self.axes["sequence"])
        self.token_axes = (*split, *(axis for axis in self.expert_axes if axis not in split))
        # Axes whose devices share the work on the same tokens.
        stream = self.axes["residual_sequence"]
        self.tensor_axes = tuple(axis for axis in stream if axis not in self.axes["sequence"])
        self.tensor_parts = self.mesh.parts(self.tensor_axes)
        # Tokens per device, as a multiple of an even share of all. Pipelines split layers instead.
        self.num_ranks = self.mesh.parts([AXIS])
        shares = self.mesh.parts(self.token_axes) * self.num_ranks
        self.token_multiple = candidate.topology.num_devices / shares
        self._sum_parameters()
        self._saved = functools.cache(lambda remat: self._per_token(work.saved[remat]))
        self._chunk = functools.cache(self._tokens_of_chunk)

    def _sum_parameters(self) -> None:
        """Sets the bytes per device of the state, and of weights as they are computed with."""
        held = {leaf: self.held(leaf) for leaf in self.work.parameters}
        whole = {leaf: n * self.mesh.parts(self.gathered_axes(leaf)) for leaf, n in held.items()}
        decoder = [leaf for leaf in held if leaf.in_decoder]
        trained = [leaf for leaf in held if leaf.trained]
        self.parameters = sum(n * leaf.itemsize for leaf, n in held.items())
        self.optimizer = sum(self.held(x) * x.itemsize for x in self.work.optimizer)
        self.trained_elements = sum(held[leaf] for leaf in trained)
        self.gathered_bytes = sum(n * leaf.compute_itemsize for leaf, n in whole.items())
        self.gathered_trained = sum(whole[leaf] * leaf.compute_itemsize for leaf in trained)
        of_layers = {leaf: whole[leaf] * leaf.compute_itemsize for leaf in decoder}
        self._gathered_decoder = sum(of_layers.values())
        self._trained_decoder = sum(n for leaf, n in of_layers.items() if leaf.trained)
        # Without recomputation weights are saved in the dtype of the computation, and gathered
        # weights of experts too.
        self._saved_weights = sum(
            (whole if "experts" in leaf.axes else held)[leaf] * leaf.compute_itemsize
            for leaf in decoder
        )
        self._quantized = sum(n for leaf, n in held.items() if leaf.quantized)
        gradients = {leaf: held[leaf] * leaf.gradient_itemsize for leaf in trained}
        self._gradients = sum(gradients.values())
        self._gradients_of_casts = sum(n for x, n in gradients.items() if x.is_cast_by_layers)

    def held(self, leaf: Leaf) -> float:
        """Returns the elements of a leaf that a device holds."""
        return leaf.size / math.prod(self.parts[name] for name in leaf.axes)

    def gathered_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Returns the mesh axes over which a parameter is gathered for the computation."""
        if self.is_lookup_table(leaf):
            return ()  # Its rows are sent to the tokens.
        found: list[str] = []
        for name in leaf.axes:
            stay = self.expert_axes if name == "experts" else ()
            found += [a for a in self.axes[name] if a in self.token_axes and a not in stay]
        return tuple(found)

    def reduced_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Returns the mesh axes over which the gradient of a device's share is all-reduced."""
        split = {axis for name in leaf.axes for axis in self.axes[name]}
        return tuple(axis for axis in self.token_axes if axis not in split)

    def is_lookup_table(self, leaf: Leaf) -> bool:
        """Returns whether a parameter is an embedding that is not the head too."""
        heads = (other.axes == ("embed", "vocab") for other in self.work.parameters)
        return leaf.axes == ("vocab", "embed") and any(heads)

    @functools.cached_property
    def _sequence_parts(self) -> int:
        """Parts of a sequence that are dispatched separately, each with its own capacity."""
        axes = (axis for axis in self.axes["sequence"] if axis not in self.expert_axes)
        return self.mesh.parts([*axes])

    @functools.cached_property
    def slots(self) -> float:
        """Rows that experts compute, over assigned rows: a fixed capacity is computed in full."""
        return self._slots(self._sequence_parts)

    def _slots(self, sequence_parts: int) -> float:
        """Returns the rows of all experts over K rows per token; all tokens fill no more."""
        moe = self.work.moe
        if moe is None or moe.capacity_factor is None:
            return 1.0
        most = moe.num_experts / moe.num_experts_per_token
        return min(moe.capacity_factor * sequence_parts, most)

    @functools.cached_property
    def receive_capacity(self) -> float:
        """Rows of a device's receive buffer, over K rows for each of its own tokens."""
        moe, n = self.work.moe, self.mesh.parts(self.expert_axes)
        assert moe is not None
        most = n * min(moe.num_experts_per_token, moe.num_experts // n) / moe.num_experts_per_token
        return rows_per_round(moe.round_factor, 1.0, most)

    @functools.cached_property
    def _routed_multiple(self) -> float:
        """Routed rows that a device holds, over those of the trace."""
        moe = self.work.moe
        if moe is None:
            return 1.0
        if moe.capacity_factor is not None:
            return self.slots / self._slots(1)
        return self.receive_capacity

    def empty_rows(self, tokens: float) -> float:
        """Returns the rows of receive buffers that no assignment fills, per layer with experts."""
        moe = self.work.moe
        if moe is None or moe.capacity_factor is not None or not self.expert_axes:
            return 0.0
        return max(self.receive_capacity - 1, 0.0) * moe.num_experts_per_token * tokens

    def memory(self, candidate: Candidate, pipeline: Pipeline) -> dict[str, float]:
        """Returns the bytes of a device by category; see `at_peak` for what it holds at once.

        A rank of a pipeline has its stages filled up to the largest.
        """
        work, tokens = self.work, self._tokens(candidate)
        saved = tokens * self._saved(candidate.remat)
        weights = 0.0 if work.recomputes(candidate.remat) else self._saved_weights
        unrouted, routed = (tokens * size for size in self._block)
        in_blocks = work.block_size * work.num_blocks / work.num_layers
        largest, stages = pipeline.largest, self.stage_bytes
        scheduled = candidate.schedule is not None
        sums = pipeline.filled * stages.gradients + self.outer_bytes.gradients
        several = candidate.num_microbatches > 1
        gradients = self._gradients
        if several and candidate.topology.accelerator.platform == "gpu":
            gradients -= self._gradients_of_casts  # Added to the sums layer by layer.
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "summed gradients": sums if scheduled or several else 0.0,
            "8-bit weights": 0.0 if scheduled else self._quantized,
            "weights of stages": pipeline.filled * stages.weights,
            "activations": pipeline.num_kept * self.stream_bytes(candidate.batch_per_device)
            # The backward pass of a stage reads a copy.
            + (pipeline.num_saved + largest) / work.num_blocks * saved
            + pipeline.num_deferred * _DEFERRED * (unrouted + routed)
            + largest / pipeline.rows * weights,
            "gradients": 0.0 if scheduled else gradients,
            # Gathered weights of a block, gradients of those of a layer, and what the block saves.
            "block": in_blocks
            * (self._gathered_decoder + self._trained_decoder / work.block_size)
            / pipeline.rows
            + unrouted,
            "dispatch": routed + tokens * self._adapted,
            "logits": self._logits(tokens),
            # Received, and in the order of the layers.
            "exchanged gradients": 2 * pipeline.filled * stages.gradients,
            "program": _PROGRAM if self.accelerator.platform == "tpu" else 0.0,
        }

    def deferred_over_saved(self, candidate: Candidate) -> float:
        """Returns the bytes of a block's deferred weight gradient over its saved activations."""
        saved = self._saved(candidate.remat) / self.work.num_blocks
        return _DEFERRED * sum(self._block) / saved

    def _tokens(self, candidate: Candidate) -> float:
        """Returns the tokens of a device's micro-batch."""
        return candidate.batch_per_device * self.work.seq_len / self.parts["sequence"]

    @functools.cached_property
    def _block(self) -> tuple[float, float]:
        """Bytes per token of a block's activations without recomputation, and of routed rows."""
        block = self.work.block
        return self._per_token(Saved(block.split, block.whole)), self._per_token(
            Saved(routed=block.routed)
        )

    @functools.cached_property
    def _adapted(self) -> float:
        """Bytes per token of products with adapters of a layer's experts, until they are added."""
        return self._per_token(Saved(routed=self.work.adapted_bytes))

    def is_of_stage(self, leaf: Leaf) -> bool:
        """Returns whether a parameter belongs to the stages of a pipeline."""
        return self.num_ranks > 1 and leaf.in_decoder and leaf.axes[:1] == ("layers",)

    @functools.cached_property
    def stage_bytes(self) -> "RankBytes":
        """Bytes of the layers of a rank, if all ranks have as many."""
        return self._rank_bytes(filter(self.is_of_stage, self.work.parameters))

    @functools.cached_property
    def outer_bytes(self) -> "RankBytes":
        """Bytes of parameters outside of the stages, which each rank has."""
        outer = [x for x in self.work.parameters if not self.is_of_stage(x)]
        split = [x for x in outer if any(AXIS in self.axes[name] for name in x.axes)]
        parts = self._rank_bytes(outer), self._rank_bytes(split)
        return RankBytes(*(a + (self.num_ranks - 1) * b for a, b in zip(*parts, strict=True)))

    def _rank_bytes(self, leaves: Iterable[Leaf]) -> "RankBytes":
        held = [(leaf, self.held(leaf)) for leaf in leaves]
        return RankBytes(
            weights=sum(n * leaf.gathered_itemsize for leaf, n in held),
            gradients=sum(4 * n for leaf, n in held if leaf.trained),
        )

    def stream_bytes(self, batch_size: float) -> float:
        """Returns the bytes of the residual stream between layers, for a device's sequences."""
        elements = batch_size * self.work.seq_len * self.work.dim
        return elements * self.work.compute_itemsize / self.parts["residual_sequence"]

    def _per_token(self, saved: Saved) -> float:
        """Returns the bytes that a device holds for one of its tokens."""
        return saved.split / self.tensor_parts + saved.whole + saved.routed * self._routed_multiple

    def _logits(self, tokens: float) -> float:
        """Returns the bytes of a chunk's logits in float32, of the head, and of both gradients.

        Several chunks add up the head's gradient in float32; of a single chunk, the head makes room
        for its gradient, as logits do for theirs if it is in float32 too. A frozen head has none.
        """
        chunk, itemsize = self._chunk(tokens), self.work.compute_itemsize
        head = itemsize + 4 if chunk < tokens and self._trains_head else itemsize
        logits = 4 if itemsize == 4 else 4 + itemsize
        return self._vocab * (self.work.dim * head + chunk * logits)

    @functools.cached_property
    def _trains_head(self) -> bool:
        """Whether the head has a gradient: a matrix of the vocabulary that is no lookup table."""
        matrices = (x for x in self.work.parameters if {*x.axes} == {"embed", "vocab"})
        return any(x.trained for x in matrices if not self.is_lookup_table(x))

    @property
    def _vocab(self) -> int:
        """Size of a device's part of the vocabulary."""
        return self.work.vocab_size // self.parts["vocab"]

    def _tokens_of_chunk(self, tokens: float) -> int:
        """Returns the tokens of a chunk of the loss."""
        work = self.work
        held = held_logits(math.ceil(tokens), work.dim, self._vocab, work.loss_chunk_size)
        return held // self._vocab

    def loss_bytes(self, tokens: float) -> float:
        """Returns the bytes that the head and the loss of a micro-batch read and write.

        Each of several chunks reads the head twice, and reads and writes its gradient in float32.
        Logits in float32 pass six times: written, read for maximum, sum and gradient, which is
        written and read.
        """
        chunks, itemsize = math.ceil(tokens / self._chunk(tokens)), self.work.compute_itemsize
        gradient = (8 if chunks > 1 else itemsize) if self._trains_head else 0
        head = chunks * (2 * itemsize + gradient)
        return self._vocab * (head * self.work.dim + 6 * 4 * tokens)


# Categories of which a device holds those of one phase at a time.
_PHASES = (
    ("activations", "logits"),
    ("activations", "gradients", "block", "dispatch"),
    ("exchanged gradients",),
)
_ENDED = {phase: {x for each in _PHASES for x in each}.difference(phase) for phase in _PHASES}


def at_peak(memory: Mapping[str, float]) -> dict[str, float]:
    """Returns the bytes that a device holds at the peak: zero for those of smaller phases.

    The loss, with a head gathered and its gradient, ends before the backward pass through the
    decoder has gradients and the arrays of a block. At the end of a step, ranks of a pipeline
    exchange gradients.
    """
    ended = _ENDED[max(_PHASES, key=lambda phase: sum(map(memory.__getitem__, phase)))]
    return {name: 0.0 if name in ended else size for name, size in memory.items()}
