"""Grouped matmul: rows sorted by group, and a matrix for each group.

`gmm` and `gmm_weight_gradient` are the two entries. Each is the other's derivative, so both can be
differentiated any number of times, in reverse:

    out = gmm(lhs, rhs, group_sizes)
    d lhs = gmm(d out, rhs, group_sizes, transpose_rhs=True)
    d rhs = gmm_weight_gradient(lhs, d out, group_sizes)

A schedule that defers weight gradients calls the last two itself. `gmm_activated` is `gmm` by
several matrices of each group (gate and up) and then an activation that joins their products.

Shapes: m rows, k in, n out, g groups held, s groups counted.
"""

from moelib.kernels.gmm.activated import clamped_swiglu, gmm_activated, swiglu
from moelib.kernels.gmm.product import gmm, gmm_weight_gradient

__all__ = ["clamped_swiglu", "gmm", "gmm_activated", "gmm_weight_gradient", "swiglu"]
