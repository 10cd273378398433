"""Transfers: the collectives of a step on a mesh, as one list for both its traffic and its results.

Weights are gathered forward, for recomputation and backward, and their gradients reduced and
scattered. Tokens are sent to experts that stay in place, and back.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moelib.planning.estimate.links import Links, Traffic
from moelib.planning.estimate.memory import Placement
from moelib.planning.estimate.workload import Leaf
from moelib.planning.hlo.values import COLLECTIVES

_TILE_BYTES = 512  # Metadata of a row on a TPU: a tile of 128 int32.


_ALL = ("forward", "recomputed", "backward")
_ONCE = ("forward", "backward")  # Phases of transfers whose results recomputation reuses.


class Transfer(NamedTuple):
    """A collective of one device: per micro-batch for weights, per token for activations."""

    kind: str  # One of `COLLECTIVES`.
    axes: tuple[str, ...]  # Mesh axes.
    bytes: float  # Result of a gather, or operand of other kinds.
    times: float
    phase: str  # "forward", "recomputed" or "backward".
    result_bytes: float | None = None  # Where the result in the program does not follow from bytes.


def weight_transfers(placement: Placement) -> Iterator[Transfer]:
    """Yields the transfers of parameters and gradients for one micro-batch."""
    for leaf in placement.work.parameters:
        held = placement.held(leaf) * leaf.compute_itemsize
        if axes := placement.gathered_axes(leaf):
            whole = held * placement.mesh.parts(axes)
            yield from _each("all-gather", axes, whole, 1, _gather_phases(leaf))
            if leaf.trained:
                yield Transfer("reduce-scatter", axes, whole, 1, "backward")
        if leaf.trained and (others := placement.reduced_axes(leaf)):
            yield Transfer("all-reduce", others, held, 1, "backward")


def _gather_phases(leaf: Leaf) -> tuple[str, ...]:
    """Returns the phases that gather a parameter.

    Weights outside of the decoder are saved, and those of experts from recomputation to the
    backward pass.
    """
    if not leaf.in_decoder:
        return _ALL[:1]
    return _ALL[:2] if "experts" in leaf.axes else _ALL


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
        num_tables = sum(map(placement.is_lookup_table, work.parameters))
        yield from _each("all-to-all", embed_axes, row, num_tables, _ONCE)
    if tensor := placement.tensor_axes:
        yield from _each("all-gather", tensor, row, 2 * work.num_layers, _ALL)
        yield from _each("reduce-scatter", tensor, row, 2 * work.num_layers, _ONCE)
    if sequence := placement.axes["sequence"]:
        # Keys and values, and in the backward pass also their gradients in float32.
        width = work.kv_width / placement.parts["kv_heads"] * work.compute_itemsize
        result = width * placement.mesh.parts(sequence)
        gradients = 4 / work.compute_itemsize * work.num_layers
        for times, phases in ((work.num_layers, _ALL), (gradients, ("backward",))):
            yield from _each("collective-permute", sequence, width, times, phases, result)
    if work.moe is not None and placement.expert_axes:
        yield from _dispatch_transfers(placement, row, is_tpu=is_tpu)


def _dispatch_transfers(placement: Placement, row: float, *, is_tpu: bool) -> Iterator[Transfer]:
    """Yields the transfers of one token to experts (in all phases) and back (not recomputed)."""
    moe, axes = placement.work.moe, placement.expert_axes
    assert moe is not None
    n, num_layers = placement.mesh.parts(axes), moe.num_layers
    if moe.ring:
        yield from _each("all-gather", axes, n * row, num_layers, _ALL)
        yield from _each("reduce-scatter", axes, n * row, num_layers, _ONCE)
    elif moe.capacity_factor is not None:
        slots = placement.slots * moe.num_experts_per_token * row
        yield from _each("all-to-all", axes, slots, num_layers, (*_ALL, *_ONCE))
    else:
        kind, most = "ragged-all-to-all", min(n, moe.num_experts_per_token)
        received = min(n, moe.num_experts_per_token * placement.receive_capacity)
        sent = _mean_destinations(moe.num_experts, moe.num_experts_per_token, n) * row
        yield from _each(kind, axes, sent, num_layers, _ALL, received * row)
        yield from _each(kind, axes, sent, num_layers, _ONCE, most * row)
        if is_tpu:  # Metadata; its traffic is negligible.
            yield Transfer(kind, axes, 0.0, 6 * num_layers, "forward", received * _TILE_BYTES)


def _mean_destinations(num_experts: int, num_experts_per_token: int, n: int) -> float:
    """Returns the mean number of n groups of experts that a token goes to, by uniform routing."""
    others = num_experts - num_experts // n
    unused = math.comb(others, num_experts_per_token) / math.comb(
        num_experts, num_experts_per_token
    )
    return n * (1 - unused)


# -- Folds ---------------------------------------------------------------------------------------

_TRAFFIC = {
    "all-gather": Links.all_gather,
    "reduce-scatter": Links.all_gather,
    "all-reduce": Links.all_reduce,
    "all-to-all": Links.all_to_all,
    "ragged-all-to-all": Links.all_to_all,
    "collective-permute": Links.ring,
}


def traffic(transfers: Iterable[Transfer], links: Links, *, recomputed: bool) -> Traffic:
    """Returns the traffic of transfers, with or without those of recomputation."""
    each = (
        _TRAFFIC[x.kind](links, x.axes, x.bytes).times(x.times)
        for x in transfers
        if recomputed or x.phase != "recomputed"
    )
    return sum(each, Traffic())


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
