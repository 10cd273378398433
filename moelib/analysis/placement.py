"""Replay of a routing: drops by capacity, rows of the all-to-all, and placements of experts.

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

from moelib.analysis.routing_counts import Counts, Ids, as_json, coactivation, load_violation
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


def _origins(ids: Ids, num_experts: int, num_devices: int, outer: int) -> Counts:
    """Returns the assignments of each expert [E] by the device that the token is on [E, n]."""
    senders = ids.reshape(outer, num_devices, -1).swapaxes(0, 1)
    counts = [np.bincount(x.reshape(-1), minlength=num_experts)[:num_experts] for x in senders]
    return np.stack(counts, 1)


def capacity_rows(log: RoutingLog, layer: str, factor: float, num_devices: int) -> int:
    """Returns the rows per batch that a `CapacityDispatcher` sends to other devices, each way.

    They are C rows of every sequence and expert, whatever the routing and the placement.

    Args:
        log: The log, whose batch and experts the devices divide.
        layer: Name of the layer.
        factor: Capacity factor, as in `within_capacity`.
        num_devices: n.
    """
    from moelib.layers.moe.dispatch import capacity_for

    (num_experts, top_k, _), header = log.sizes(layer), log.header
    capacity = capacity_for(factor, header.seq_len * top_k / num_experts, header.seq_len)
    rows = header.batch_size * num_experts * capacity
    return rows - rows // num_devices


def remote(rows: Counts) -> int:
    """Returns the rows that go to another device."""
    return int(rows.sum() - np.trace(rows))


# -- Placements ----------------------------------------------------------------------------------


def propose_placement(together: Counts, origins: Counts) -> Devices:
    """Returns a device for each expert [E], equally many per device.

    Experts that tokens visit together share devices, those where most of their tokens are. The
    busiest device has at most the load that it has in the trainer's placement. Swaps of two experts
    improve that placement and a greedy one, whose groups of experts are first assigned to devices,
    and the better result is returned; the least traffic is not guaranteed.

    Args:
        together: `routing_counts.coactivation` of the tokens [E, E].
        origins: Assignments of each expert by the device that the token is on [E, n].
    """
    from scipy.optimize import linear_sum_assignment

    num_devices, load = origins.shape[1], np.diagonal(together).astype(np.int64)
    weight = together - np.diag(load)
    best = start = contiguous(len(load), num_devices)
    limit = int(_device_loads(start, load, num_devices).max())
    for devices in (start, _greedy(weight, load, num_devices)):
        local = np.stack([origins[devices == i].sum(0) for i in range(num_devices)])
        devices = linear_sum_assignment(local, maximize=True)[1][devices]
        devices = _swapped(devices, weight, load, origins, limit)
        fits = _device_loads(devices, load, num_devices).max() <= limit
        if fits and _inside(devices, weight, origins) > _inside(best, weight, origins):
            best = devices
    return best


def _device_loads(devices: Devices, load: Counts, num_devices: int) -> Counts:
    return np.bincount(devices, load, num_devices).astype(np.int64)


def _inside(devices: Devices, weight: Counts, origins: Counts) -> int:
    """Returns the co-activations within devices, and the assignments that stay on theirs."""
    pairs = int(weight[devices[:, None] == devices[None]].sum()) // 2
    return pairs + int(origins[np.arange(len(devices)), devices].sum())


def _greedy(weight: Counts, load: Counts, num_devices: int) -> Devices:
    """Fills one device after the other: with the busiest expert, then those most often with it."""
    devices = np.full(len(load), -1, np.intp)
    for device in range(num_devices):
        free = np.flatnonzero(devices < 0)
        devices[free[np.argmax(load[free])]] = device
        for _ in range(len(load) // num_devices - 1):
            free = np.flatnonzero(devices < 0)
            gain = weight[free][:, devices == device].sum(1)
            devices[free[np.argmax(gain)]] = device
    return devices


def _swapped(
    devices: Devices, weight: Counts, load: Counts, origins: Counts, limit: int
) -> Devices:
    """Returns a placement after swaps, the best one each time, until none improves it."""
    devices, num_devices = devices.copy(), origins.shape[1]
    for _ in range(4 * len(devices)):
        loads = _device_loads(devices, load, num_devices)
        to = weight @ np.eye(num_devices, dtype=np.int64)[devices] + origins  # [E, n]
        moved = to[:, devices] - to[np.arange(len(devices)), devices][:, None]
        gain = moved + moved.T - 2 * weight
        after = loads[devices][:, None] - load[:, None] + load[None]  # Of the row's device.
        worst = np.maximum(after, after.T)
        before = np.maximum(loads[devices][:, None], loads[devices][None])
        allowed = (worst <= np.maximum(limit, before)) & (devices[:, None] != devices[None])
        gain = np.where(allowed, gain, 0)
        i, j = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[i, j] <= 0:
            break
        devices[i], devices[j] = devices[j], devices[i]
    return devices


# -- Logs ----------------------------------------------------------------------------------------


def replay(
    log: RoutingLog, layer: str, factors: Sequence[float], num_devices: Sequence[int]
) -> dict[str, Any]:
    """Returns what a log predicts of other capacities, expert-parallel sizes and placements.

    `drops` has the share of assignments that a `CapacityDispatcher` drops, by capacity factor.
    `expert_parallel` has, by number of devices, the rows per token that a `RaggedDispatcher` sends
    to other devices in a forward pass, each way, and their bytes per batch, by the trainer's
    placement and by a proposed one, which is never worse. The batch is split over the mesh in the
    log's header, as `parts_around` says. `capacity_bytes_per_batch` has those that a
    `CapacityDispatcher` sends, by number of devices and capacity factor.

    Args:
        log: The log.
        layer: Name of the layer.
        factors: Capacity factors.
        num_devices: Expert-parallel sizes; those that divide no batch or experts are left out.
    """
    num_experts, _, width = log.sizes(layer)
    dropped = dict.fromkeys(factors, 0)
    num_assignments = num_tokens = 0
    header, sizes = log.header, [n for n in num_devices if num_experts % n == 0]
    around = {n: parts_around(header.mesh, n) for n in sizes}
    sizes = [n for n in sizes if header.batch_size % (n * math.prod(around[n])) == 0]
    origins = {n: np.zeros((num_experts, n), np.int64) for n in sizes}
    together = np.zeros((num_experts, num_experts), np.int64)
    for ids, mask in log.layer(layer, "expert_ids", "mask"):
        num_tokens += int(mask.sum())
        num_assignments += (valid := int((ids < num_experts).sum()))
        for factor in dropped:
            dropped[factor] += valid - int(within_capacity(ids, num_experts, factor).sum())
        together += coactivation(ids.reshape(-1, ids.shape[-1]), num_experts)
        for n in sizes:
            origins[n] += _origins(ids, num_experts, n, around[n][0])
    load = np.diagonal(together)
    placements = {
        n: [contiguous(num_experts, n), propose_placement(together, origins[n])] for n in sizes
    }
    rows = {n: [0, 0] for n in sizes}
    for (ids,) in log.layer(layer, "expert_ids"):
        for n, pair in placements.items():
            outer, inner = around[n]
            sent = [remote(rows_sent(ids, devices, outer=outer, inner=inner)) for devices in pair]
            rows[n] = [a + b for a, b in zip(rows[n], sent, strict=True)]
    batch_bytes = width * header.itemsize / header.num_batches
    parallel: dict[str, Any] = {}
    for n, pair in placements.items():
        if rows[n][1] > rows[n][0]:  # Never worse than the trainer's.
            pair[1], rows[n][1] = pair[0], rows[n][0]
        for name, devices, num in zip(("trainer", "proposed"), pair, rows[n], strict=True):
            loads = np.bincount(devices, load, n)
            parallel.setdefault(str(n), {})[name] = {
                "devices": devices.tolist(),
                "rows_per_token": as_json(num / num_tokens if num_tokens else math.nan),
                "bytes_per_batch": round(num * batch_bytes),
                "load_violation": as_json(load_violation(loads)),
            }
    share = lambda num: as_json(num / num_assignments if num_assignments else math.nan)
    return {
        "drops": {str(factor): share(num) for factor, num in dropped.items()},
        "expert_parallel": parallel,
        "capacity_bytes_per_batch": {
            str(n): {
                str(factor): capacity_rows(log, layer, factor, n) * width * header.itemsize
                for factor in factors
            }
            for n in sizes
        },
    }
