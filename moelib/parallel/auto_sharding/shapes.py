"""Sharding by shapes alone, where there is no function to trace."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

_ROWS = re.compile(r"(^|_)(o|out|output|down|wo|proj|dense_4h_to_h)(_|$)|^[co]_?proj$")
_CONTAINERS = ("kernel", "weight", "w", "layer", "bias")


def dimensions_from_shapes(shapes: Mapping[str, Sequence[int]], num_shards: int) -> dict[str, int]:
    """Returns the dimension along which each matrix is sharded; the other parameters are whole.

    The commonest size is taken for the width of the model, and each matrix is sharded along its
    other dimension: first up, then down. A square matrix is sharded by its name.

    Args:
        shapes: Shape of each parameter by path.
        num_shards: Number of shards, which must divide the dimension.
    """
    stacked = _stacked(shapes)
    bodies = {path: tuple(shape)[path in stacked :] for path, shape in shapes.items()}
    sizes = Counter(n for shape in bodies.values() if len(shape) > 1 for n in set(shape))
    width = sizes.most_common(1)[0][0] if sizes else 0
    chosen = {}
    for path, shape in bodies.items():
        window = square_window(shape)
        fitting = [i for i, n in enumerate(shape) if n % num_shards == 0 and i not in window]
        if len(shape) < 2 or not fitting:
            continue
        others = [i for i in fitting if shape[i] != width]
        if others and len(shape) > 2:
            best = others[0]  # Heads before their size, experts before their hidden size.
        elif others:
            best = max(others, key=lambda i: shape[i])
        else:
            names = [part for part in path.lower().split("/") if part not in _CONTAINERS]
            best = fitting[0] if names and _ROWS.search(names[-1]) else fitting[-1]
        chosen[path] = best + (path in stacked)
    return chosen


def square_window(shape: Sequence[int]) -> set[int]:
    """Returns the dimensions that may be a convolution's window: neighbors of equal size."""
    pairs = [(i - 1, i) for i in range(1, len(shape)) if shape[i - 1] == shape[i]]
    return {i for pair in pairs for i in pair} if len(shape) > 3 else set()


def _stacked(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Returns the parameters of subtrees whose arrays all begin with the number of layers."""
    groups: dict[str, list[str]] = {}
    for path in shapes:
        groups.setdefault(path.split("/")[0], []).append(path)
    return {
        path
        for paths in groups.values()
        if len(paths) >= 4
        and all(len(shapes[path]) > 1 for path in paths)
        and len({shapes[path][0] for path in paths}) == 1
        for path in paths
    }
