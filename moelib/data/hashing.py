"""Random numbers and orders that are the same with any version of NumPy, on any machine.

NumPy's generators may change from one version to the next; the order of data must not.
"""

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Applies the finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(count: int, *seeds: int) -> npt.NDArray[np.uint64]:
    """Returns `count` uniform 64-bit numbers, determined by the seeds.

    Source: splitmix64, Steele et al. 2014, doi:10.1145/2660193.2660195.
    """
    state = np.zeros(1, np.uint64)
    for seed in seeds:
        state = _mix((state ^ np.uint64(seed & _MASK)) + np.uint64(_GOLDEN))
    return _mix(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))


def random_uniform(count: int, *seeds: int) -> npt.NDArray[np.float64]:
    """Returns `count` uniform numbers in [0, 1), determined by the seeds."""
    return (random_bits(count, *seeds) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_permutation(count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of `range(count)`, determined by the seeds."""
    return np.argsort(random_bits(count, *seeds), kind="stable")
