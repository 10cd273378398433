"""The choice of dimension classes to shard, as an integer program."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from moelib.parallel.auto_sharding.classes import Collective

# FLOPs that a chip computes while its links carry one byte: about 1,000 on v5p and H100.
_FLOPS_PER_BYTE = 1000.0
# Bytes on the links that one byte of a parameter is worth: its gradient and two moments are stored
# with it, each is read and written, and memory limits a model more than speed.
_BYTES_PER_PARAMETER_BYTE = 16.0


def sent_bytes(kind: str, num_bytes: float, num_devices: int) -> float:
    """Returns the bytes that each device sends for a collective with such a result, in a ring."""
    part = (num_devices - 1) / num_devices
    factors = {"all-reduce": 2 * part, "reduce-scatter": num_devices - 1, "collective-permute": 1}
    return factors.get(kind, part) * num_bytes


def bytes_worth(flops: float, parameter_bytes: float) -> float:
    """Returns the bytes on the links that FLOPs and parameters of a device are worth."""
    return flops / _FLOPS_PER_BYTE + _BYTES_PER_PARAMETER_BYTE * parameter_bytes


def benefit(
    collectives: Sequence[Collective], flops: float, parameter_bytes: float, num_shards: int
) -> float:
    """Returns the savings from sharding a class, in bytes on the links; they may be negative."""
    sent = sum(sent_bytes(each.kind, each.num_bytes, num_shards) for each in collectives)
    return (1 - 1 / num_shards) * bytes_worth(flops, parameter_bytes) - sent


def best_classes(
    benefits: Mapping[int, float],
    arrays: Collection[tuple[int, ...]],
    required: Collection[int],
) -> set[int]:
    """Returns the classes whose benefits sum to the most, at most one of them in any array.

    Args:
        benefits: Benefit of each class that can be sharded.
        arrays: Classes of each array's dimensions.
        required: Classes that must be chosen.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    classes = list(benefits)
    if not classes:
        return set()
    column = {each: i for i, each in enumerate(classes)}
    together = {frozenset(column[c] for c in array if c in column) for array in arrays}
    rows = [sorted(group) for group in together if len(group) > 1] or [[0]]
    ends = np.cumsum([0, *map(len, rows)])
    columns = np.concatenate(rows)
    matrix = csr_array((np.ones(len(columns)), columns, ends), shape=(len(rows), len(classes)))
    scale = max(map(abs, benefits.values())) or 1.0
    found = milp(
        [-benefits[each] / scale for each in classes],
        constraints=LinearConstraint(matrix, ub=1),
        integrality=np.ones(len(classes)),
        bounds=Bounds([float(each in required) for each in classes], 1),
    )
    assert found.x is not None, found.message
    return {each for each, x in zip(classes, found.x, strict=True) if x > 0.5}
