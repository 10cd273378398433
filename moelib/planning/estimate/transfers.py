"""Transfers: the collectives of a step on a mesh, as one list for both its traffic and its results.

Weights are gathered, or passed on in windowed matmuls, forward, for recomputation and backward, and
their gradients reduced and scattered. Tokens are sent to experts that stay in place, and back.
"""

import collections
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from moelib.layers.attention.on_mesh import ring_plan
from moelib.planning.estimate.links import Links, Traffic
from moelib.planning.estimate.memory import Placement
from moelib.planning.estimate.pipeline import AXIS
from moelib.planning.estimate.workload import Leaf
from moelib.planning.hardware.topologies import TopologyShape
from moelib.planning.hlo.values import COLLECTIVES

# XLA for TPUs all-reduces the head's gradient over four or more devices, and does not scatter it,
# if it cannot cut the vocabulary into pieces: if the largest prime factor of its tiles exceeds a
# number that falls with the square root of the devices. Single sums compiled: over 4, 16 and 64 v6e
# 587, 293 and 131 tiles were scattered, and 601, 587 and 151 were not; over 4 and 64 v5p 113 and
# 11, and not 127 and 37; over 8 tpu7x 257, and not 367; over 4 v5e 83, and not 131.
_LARGEST_PIECE = {"v5e": 2 * 83, "v5p": 2 * 113, "v6e": 2 * 587, "tpu7x": math.sqrt(8) * 257}
_LANES = 128  # Minor dimension of a tile.
_STATISTICS = 5  # Numbers per expert that a router sums over devices: loads, losses, metrics.
_TILE_BYTES = 512  # Of a TPU; rows of a ragged all-to-all are whole tiles there.
_ALL = ("forward", "recomputed", "backward")
_ONCE = ("forward", "backward")  # Phases of transfers whose results recomputation reuses.


class Transfer(NamedTuple):
    """A collective of one device: per micro-batch for weights, per token for activations."""

    kind: str  # One of `COLLECTIVES`.
    axes: tuple[str, ...]  # Mesh axes.
    bytes: float  # Result of a gather, or operand of other kinds.
    times: float = 1
    phase: str = "forward"  # "forward", "recomputed" or "backward".
    result_bytes: float | None = None  # Where the result in the program does not follow from bytes.


def weight_transfers(
    placement: Placement, remat: str, *, is_tpu: bool, windowed: bool = False
) -> Iterator[Transfer]:
    """Yields the transfers of parameters and gradients for one micro-batch.

    Args:
        placement: A workload on a mesh.
        remat: A name of `Workload.saved`.
        is_tpu: Whether the devices are TPUs.
        windowed: Whether XLA makes windowed matmuls of dense layers; see `is_windowed`.
    """
    for leaf in placement.work.parameters:
        held = placement.held(leaf) * leaf.compute_itemsize
        if axes := placement.gathered_axes(leaf):
            whole = held * placement.mesh.parts(axes)
            if windowed and _is_dense_matrix(placement, leaf):
                yield from _windows(placement, leaf, axes, whole, remat)
                continue
            yield _gathers(placement, leaf, axes, whole, remat, is_tpu)
            summed = is_tpu and not leaf.in_decoder and _is_all_reduced(placement, leaf, axes)
            if leaf.trained:
                kind = "all-reduce" if summed else "reduce-scatter"
                yield Transfer(kind, axes, whole * leaf.reduced)
        if leaf.trained and (others := placement.reduced_axes(leaf)):
            # On GPUs, XLA sums the gradients of norms in float32 before it casts them.
            in_float32 = not is_tpu and not _is_matrix(leaf)
            sums = 4 * placement.held(leaf) if in_float32 else held * leaf.reduced
            yield Transfer("all-reduce", others, sums)
    if (moe := placement.work.moe) is not None and placement.token_axes:
        statistics = _STATISTICS * moe.num_experts * 4
        yield Transfer("all-reduce", placement.token_axes, statistics, moe.num_layers)


def _is_all_reduced(placement: Placement, leaf: Leaf, axes: tuple[str, ...]) -> bool:
    """Returns whether XLA for TPUs all-reduces the gradient of a parameter out of the decoder."""
    n = placement.mesh.parts(axes)
    vocab = leaf.shape[leaf.axes.index("vocab")] if "vocab" in leaf.axes else 1
    tiles = -(-vocab // (placement.parts["vocab"] * _LANES))
    most = _LARGEST_PIECE[placement.accelerator.name] / math.sqrt(n)
    return n >= 4 and _largest_prime(tiles) > most


def _largest_prime(n: int) -> int:
    """Returns the largest prime factor of a number above 1; 1 for 1."""
    prime = 2
    while prime * prime <= n:
        if n % prime:
            prime += 1
        else:
            n //= prime
    return n


def _gathers(
    placement: Placement, leaf: Leaf, axes: tuple[str, ...], whole: float, remat: str, is_tpu: bool
) -> Transfer:
    """Returns the gathers of a parameter of `whole` bytes in the dtype of the computation."""
    gathered = whole * leaf.gathered_itemsize / leaf.compute_itemsize
    return Transfer("all-gather", axes, gathered, _num_gathers(placement, leaf, remat, is_tpu))


def _num_gathers(placement: Placement, leaf: Leaf, remat: str, is_tpu: bool) -> int:
    """Returns how often a parameter is gathered.

    Weights outside of the decoder are saved, and those of experts from recomputation to the
    backward pass. On GPUs, and of 8-bit weights, XLA shares one gather of dense weights between the
    two. So it does in a pipeline, whose backward pass recomputes a layer in the same iteration, but
    for 8-bit weights.
    """
    work = placement.work
    if placement.is_of_stage(leaf):
        return 3 if leaf.quantized and work.recomputes_matmuls(remat) else 2
    if not leaf.in_decoder:
        return 1
    if "experts" in leaf.axes:
        return 2 if work.recomputes(remat) else 1
    return 3 if is_tpu and work.recomputes_matmuls(remat) and not leaf.quantized else 2


# -- Windowed matmuls ----------------------------------------------------------------------------

# XLA for TPUs passes on weights in turns, each with a part of a matmul, and the sums of weight
# gradients, where FSDP over all devices leaves each enough work. Single matmuls compiled for v5e,
# v5p, v6e and tpu7x: at 8,192 tokens over 4 or 8 v6e they are not windowed, and at 12,288 they are;
# over 2 or 64 devices of any kind, or 4 v5p, they never are.
_WINDOWED_DEVICES = (4, 32)
_WINDOWED_TOKENS_PER_FLOP_PER_SECOND = 10_000 / 918e12


def is_windowed(placement: Placement, topology: TopologyShape, tokens: float) -> bool:
    """Returns whether XLA makes windowed matmuls of dense layers; tokens are those of a device."""
    chip, n, mesh = topology.accelerator, topology.num_devices, placement.mesh
    least, most = _WINDOWED_DEVICES
    return (
        chip.platform == "tpu"
        and topology.num_slices == 1
        and (2 * least if chip.name == "v5p" else least) <= n <= most
        and mesh.parts(placement.axes.get("embed", ())) == n
        and tokens * n >= _WINDOWED_TOKENS_PER_FLOP_PER_SECOND * chip.flops_per_second
    )


def _is_matrix(leaf: Leaf) -> bool:
    return len(leaf.shape) - ("layers" in leaf.axes) > 1


def _is_dense_matrix(placement: Placement, leaf: Leaf) -> bool:
    cast = leaf.compute_itemsize == placement.work.compute_itemsize  # Routers are not.
    return leaf.in_decoder and _is_matrix(leaf) and cast and "experts" not in leaf.axes


def _windows(
    placement: Placement, leaf: Leaf, axes: tuple[str, ...], whole: float, remat: str
) -> Iterator[Transfer]:
    """Yields the permutes of windowed matmuls, as programs compiled for TPUs have them.

    They pass on one part of n in n - 1 turns over four devices, and two in opposite directions in
    as many over more. A matmul that is recomputed shares a gather with that of its input's
    gradient; the last one of a block is not recomputed. Weights in 8 bits are gathered.
    """
    n = placement.mesh.parts(axes)
    part = whole / n
    turns, of_sums = (n - 1, n + 1) if n == 4 else (2 * n + 1, 2 * n + 1)
    permutes = lambda turns, part=part: Transfer(
        "collective-permute", axes, part * (n - 1), result_bytes=turns * part
    )
    last = leaf.axes[-1] == "embed" and "ffn" in leaf.axes
    if leaf.quantized:
        yield _gathers(placement, leaf, axes, whole, remat, is_tpu=True)
    else:
        yield permutes(turns)
        recomputed = placement.work.recomputes_matmuls(remat) and not last
        yield Transfer("all-gather", axes, whole) if recomputed else permutes(turns)
    if leaf.trained:
        yield permutes(of_sums, part * leaf.reduced)


# -- Activations ---------------------------------------------------------------------------------


def _each(
    kind: str,
    axes: tuple[str, ...],
    num_bytes: float,
    times: float,
    phases: Iterable[str],
    result_bytes: float | None = None,
) -> Iterator[Transfer]:
    return (Transfer(kind, axes, num_bytes, times, phase, result_bytes) for phase in phases)


def token_transfers(placement: Placement, *, is_tpu: bool) -> Iterator[Transfer]:
    """Yields the transfers of activations for each token of a device."""
    work = placement.work
    row = work.dim * work.compute_itemsize
    if embed_axes := placement.axes["embed"]:
        # Rows travel as they are stored, before they are cast, and their gradients in float32.
        for table in filter(placement.is_lookup_table, work.parameters):
            yield Transfer("all-to-all", embed_axes, work.dim * table.itemsize)
            if table.trained:
                gradient = work.dim * max(table.gradient_itemsize, 4)
                yield Transfer("all-to-all", embed_axes, gradient, phase="backward")
    if tensor := placement.tensor_axes:
        yield from _each("all-gather", tensor, row, 2 * work.num_layers, _ALL)
        yield from _each("reduce-scatter", tensor, row, 2 * work.num_layers, _ONCE)
    if sequence := placement.axes["sequence"]:
        yield from _sequence_transfers(placement, sequence)
    if work.moe is not None and placement.expert_axes:
        row = work.routed_dim * work.compute_itemsize
        yield from _dispatch_transfers(placement, row, is_tpu=is_tpu)


def _sequence_transfers(placement: Placement, axes: tuple[str, ...]) -> Iterator[Transfer]:
    """Yields the transfers of layers that mix tokens, for each token.

    In the backward pass, gradients take the way back, those of a ring's keys and values with them,
    in float32.
    """
    work, n = placement.work, placement.mesh.parts(axes)
    size, itemsize = work.seq_len // n, work.compute_itemsize
    of_heads = placement.parts["heads"]
    for each, times in work.exchanges:
        if each.keys:
            plan = ring_plan(n, size, window=each.window)
            keys = each.keys / placement.parts["kv_heads"]
            sent = keys * plan.rotations * plan.num_keys / size
            dealt = (each.queries / of_heads + keys) * plan.zigzag
            permutes = functools.partial(_each, "collective-permute", axes, times=times)
            yield from permutes((sent + dealt) * itemsize, phases=_ALL)
            yield from permutes(sent * 4, phases=("backward",))
        if each.heads:
            exchanged = (each.heads * itemsize + each.heads_in_float32 * 4) / of_heads
            yield from _each("all-to-all", axes, exchanged, times, _ALL)
        if gathered := each.gathered * itemsize * n:
            yield from _each("all-gather", axes, gathered, times, ("forward", "recomputed"))
            yield Transfer("reduce-scatter", axes, gathered, times, "backward")


def _dispatch_transfers(placement: Placement, row: float, *, is_tpu: bool) -> Iterator[Transfer]:
    """Yields the transfers of one token to experts (in all phases) and back.

    Of those back, recomputation repeats the ones of all layers of a block but the last.
    """
    moe, axes = placement.work.moe, placement.expert_axes
    assert moe is not None
    n, num_layers = placement.mesh.parts(axes), moe.num_layers

    def back(kind: str, sent: float, result_bytes: float | None = None) -> Iterator[Transfer]:
        yield from _each(kind, axes, sent, num_layers, _ONCE, result_bytes)
        inner = placement.work.num_inner_experts
        yield from _each(kind, axes, sent, inner, ("recomputed",), result_bytes)

    if moe.ring:
        yield from _each("all-gather", axes, n * row, num_layers, _ALL)
        yield from back("reduce-scatter", n * row)
    elif moe.capacity_factor is not None:
        slots = placement.slots * moe.num_experts_per_token * row
        yield from _each("all-to-all", axes, slots, num_layers, _ALL)
        yield from back("all-to-all", slots)
    else:
        kind, most = "ragged-all-to-all", min(n, moe.num_experts_per_token)
        received = min(n, moe.num_experts_per_token * placement.receive_capacity)
        metadata = 2 * moe.num_experts_per_token * 4  # A row's expert ids and weights.
        if is_tpu:
            row, metadata = (math.ceil(x / _TILE_BYTES) * _TILE_BYTES for x in (row, metadata))
        sent = _mean_destinations(moe.num_experts, moe.num_experts_per_token, n) * row
        yield from _each(kind, axes, sent, num_layers, _ALL, received * row)
        yield from back(kind, sent, most * row)
        # The traffic of metadata is negligible.
        yield from _each(kind, axes, 0.0, num_layers, _ONCE, received * metadata)


def _mean_destinations(num_experts: int, num_experts_per_token: int, n: int) -> float:
    """Returns the mean number of n groups of experts that a token goes to, by uniform routing."""
    others = num_experts - num_experts // n
    unused = math.comb(others, num_experts_per_token) / math.comb(
        num_experts, num_experts_per_token
    )
    return n * (1 - unused)


# -- Pipelines -----------------------------------------------------------------------------------


def to_next_rank(sent: float) -> Transfer:
    """Returns the transfer of the activations and gradients that a rank sends, in bytes."""
    return Transfer("collective-permute", (AXIS,), sent)


def rank_transfers(placement: Placement, filled: float) -> Iterator[Transfer]:
    """Yields the transfers of parameters between ranks of a pipeline in a step.

    Ranks exchange parts of layers for their own before a step, and gradients after it.

    Args:
        placement: A workload on a mesh.
        filled: Blocks of a rank, over an even share of all.
    """
    if placement.num_ranks == 1:
        return
    stage, outer = placement.stage_bytes, placement.outer_bytes
    yield Transfer("all-to-all", (AXIS,), filled * (stage.weights + stage.gradients))
    yield Transfer("all-gather", (AXIS,), outer.weights)
    yield Transfer("all-reduce", (AXIS,), outer.gradients)


# -- Folds ---------------------------------------------------------------------------------------

_TRAFFIC = {
    "all-gather": Links.all_gather,
    "reduce-scatter": Links.all_gather,
    "all-reduce": Links.all_reduce,
    "all-to-all": Links.all_to_all,
    "ragged-all-to-all": Links.all_to_all,
    "collective-permute": Links.ring,
}


def traffic(transfers: Iterable[Transfer], links: Links, *, recomputed: bool = True) -> Traffic:
    """Returns the traffic of transfers, with or without those of recomputation."""
    # Traffic is proportional to bytes.
    sums: dict[tuple[Any, tuple[str, ...]], float] = collections.defaultdict(float)
    for each in transfers:
        if recomputed or each.phase != "recomputed":
            sums[_TRAFFIC[each.kind], each.axes] += each.bytes * each.times
    return sum((of(links, axes, size) for (of, axes), size in sums.items()), Traffic())


def results(
    transfers: Iterable[Transfer], placement: Placement, *, recomputed: bool
) -> dict[str, float]:
    """Returns the bytes of the results of transfers by kind, as a compiled program has them."""
    found = dict.fromkeys(COLLECTIVES, 0.0)
    for each in transfers:
        if recomputed or each.phase != "recomputed":
            size = each.bytes if each.result_bytes is None else each.result_bytes
            scattered = placement.mesh.parts(each.axes) if each.kind == "reduce-scatter" else 1
            found[each.kind] += size / scattered * each.times
    return {kind: size for kind, size in found.items() if size}
