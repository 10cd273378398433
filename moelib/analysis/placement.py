"""Replay of a routing: drops by capacity, and rows of the all-to-all.

A batch is split over the devices as the trainer splits it: contiguous sequences to each device.

Letters: B sequences, S sequence length, K experts per token, E experts, n devices that share the
experts.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.analysis import routing_counts
from moelib.analysis.routing_counts import Counts, Ids, as_json, load_violation
from moelib.runs.routing_file import RoutingLog

Devices = npt.NDArray[np.intp]


def within_capacity(ids: Ids, num_experts: int, factor: float | None) -> npt.NDArray[np.bool_]:
    """Returns the assignments [B, S, K] that a `CapacityDispatcher` keeps.

    Args:
        ids: Expert ids [B, S, K], E for no expert.
        num_experts: E.
        factor: Capacity of an expert per sequence, as a multiple of the balanced load; None keeps
            all.
    """
    from moelib.layers.moe.dispatch import sequence_capacity

    if factor is None:
        return ids < num_experts
    flat = ids.reshape(len(ids), -1)
    num_tokens = np.sum(np.any(ids < num_experts, -1), 1, dtype=np.float32)
    per_token = factor * ids.shape[-1] / num_experts
    capacity = np.asarray(sequence_capacity(per_token, num_tokens))[:, None]
    order = np.argsort(flat, 1, kind="stable")  # By expert, then in the order of tokens.
    ordered = np.take_along_axis(flat, order, 1)
    index = np.arange(flat.shape[1])
    first = np.ones_like(ordered, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    rank = index - np.maximum.accumulate(np.where(first, index, 0), 1)
    kept = np.empty_like(flat, bool)
    np.put_along_axis(kept, order, (rank < capacity) & (ordered < num_experts), 1)
    return kept.reshape(ids.shape)


def contiguous(num_experts: int, num_devices: int) -> Devices:
    """Returns the trainer's device of each expert [E]. Raises ValueError if n does not divide E."""
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(
            f"num_devices={num_devices} does not divide num_experts={num_experts}; set a divisor."
        )
    return np.arange(num_experts) // (num_experts // num_devices)


def rows_sent(ids: Ids, devices: Devices, *, outer: int = 1, inner: int = 1) -> Counts:
    """Returns the rows that a `RaggedDispatcher` sends in a forward pass [sender n, receiver n].

    A token travels once to each device with at least one of its experts. As many rows come back.
    The diagonal holds the rows that stay on their device.

    Args:
        ids: Expert ids [B, S, K] of one batch, E for no expert or a dropped assignment.
        devices: Device of each expert [E].
        outer: Parts of the batch over mesh axes before `expert`, such as data.
        inner: Parts over mesh axes after it, such as fsdp.

    Raises:
        ValueError: If the devices do not divide the batch.
    """
    n, (num_rows, seq_len, top_k) = int(devices.max()) + 1, ids.shape
    if num_rows % (outer * n * inner):
        raise ValueError(
            f"a batch of {num_rows} sequences does not divide over {outer * n * inner} devices; "
            f"set a divisor instead of num_devices={n}."
        )
    receivers = np.append(devices, n)[ids].reshape(-1, top_k)  # n for no expert.
    visited = np.zeros((len(receivers), n + 1), bool)
    np.put_along_axis(visited, receivers, True, 1)
    parts = visited[:, :n].reshape(outer, n, -1, n)
    assert parts.shape[2] == num_rows * seq_len // (outer * n)
    return parts.sum((0, 2))


def parts_around(mesh: Mapping[str, int], num_devices: int) -> tuple[int, int]:
    """Returns the parts of a batch over mesh axes (before, after) `expert`, for `rows_sent`.

    With another number of devices on `expert` than in the mesh, the other axes get the remaining
    devices, the axes after `expert` first; where it does not divide the devices, it is alone.

    Args:
        mesh: Sizes of the mesh axes that split the batch, outermost first.
        num_devices: Devices on `expert`.
    """
    rest, remainder = divmod(math.prod(mesh.values()), num_devices)
    if remainder:
        return 1, 1
    inner = itertools.dropwhile(lambda axis: axis != "expert", mesh)
    after = math.gcd(rest, math.prod(mesh[axis] for axis in inner if axis != "expert"))
    return rest // after, after


def remote(rows: Counts) -> int:
    """Returns the rows that go to another device."""
    return int(rows.sum() - np.trace(rows))


def replay(
    log: RoutingLog, layer: str, factors: Sequence[float], num_devices: Sequence[int]
) -> dict[str, Any]:
    """Returns what a log predicts of other capacities and expert-parallel sizes.

    `drops` has the share of assignments that a `CapacityDispatcher` drops, by capacity factor.
    `expert_parallel` has, by number of devices, the rows per token that a `RaggedDispatcher` sends
    to other devices in a forward pass, each way, their bytes per batch, and the violation of an
    even load of the devices. The batch is split over the mesh in the log's header, as
    `parts_around` says.

    Args:
        log: The log.
        layer: Name of the layer.
        factors: Capacity factors.
        num_devices: Expert-parallel sizes; those that divide no batch or experts are left out.
    """
    num_experts, _, width = log.sizes(layer)
    header = log.header
    around = {n: parts_around(header.mesh, n) for n in num_devices if num_experts % n == 0}
    around = {n: x for n, x in around.items() if header.batch_size % (n * math.prod(x)) == 0}
    devices = {n: contiguous(num_experts, n) for n in around}
    dropped, rows = dict.fromkeys(factors, 0), dict.fromkeys(around, 0)
    load, num_tokens = np.zeros(num_experts, np.int64), 0
    for ids, mask in log.layer(layer, "expert_ids", "mask"):
        num_tokens += int(mask.sum())
        load += (of_batch := routing_counts.load(ids, num_experts))
        for factor in dropped:
            kept = within_capacity(ids, num_experts, factor)
            dropped[factor] += int(of_batch.sum() - kept.sum())
        for n, (outer, inner) in around.items():
            rows[n] += remote(rows_sent(ids, devices[n], outer=outer, inner=inner))
    share = lambda num, whole: as_json(num / whole if whole else math.nan)
    return {
        "drops": {str(factor): share(num, load.sum()) for factor, num in dropped.items()},
        "expert_parallel": {
            str(n): {
                "rows_per_token": share(num, num_tokens),
                "bytes_per_batch": round(num * width * header.itemsize / header.num_batches),
                "load_violation": as_json(load_violation(np.bincount(devices[n], load, n))),
            }
            for n, num in rows.items()
        },
    }
