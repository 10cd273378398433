"""Parameters without a gradient: the objective does not depend on them, so they are never trained.

A layer that returns integers or stops gradients cuts its parameters off. Their gradients are then
constant zeros in the traced step, which is where they are found: nothing is computed on a device.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from moelib.core import tree
from moelib.core.jaxpr import evaluate, inner_jaxprs
from moelib.core.tree import Nested

logger = logging.getLogger(__name__)

_TAG = "gradient of "


def tag_gradients(gradients: Nested) -> Nested:
    """Returns the gradients, each with its path as a name in the trace."""
    return tree.map_by_path(lambda path, x: checkpoint_name(x, _TAG + path), gradients)


# Primitives whose results are zeros if all of their floating-point operands are, or one of them is.
_SUMS = (
    "add",
    "add_any",
    "broadcast_in_dim",
    "convert_element_type",
    "name",
    "neg",
    "optimization_barrier",
    "pvary",
    "reduce_precision",
    "reduce_sum",
    "reshape",
    "scatter-add",
    "scatter_add",
    "sharding_constraint",
    "squeeze",
    "sub",
    "transpose",
)
_PRODUCTS = ("dot_general", "mul")


class _Sum:
    """A ref of a trace to which gradients are added, layer by layer."""

    is_zero = True  # Whether only zeros are added.


def _results_of_sum(kind: str, zeros: Sequence[Any]) -> list[Any] | None:
    """Returns the results of an equation that makes, adds to or reads a ref; None for another."""
    if kind == "new_ref":
        return [_Sum()]
    if not zeros or not isinstance(zeros[0], _Sum):
        return None
    if kind == "addupdate":
        zeros[0].is_zero &= zeros[1]
        return []
    return [zeros[0].is_zero] if kind == "freeze" else None


def paths_without_gradient(jaxpr: Any) -> set[str]:
    """Returns the path of each tagged gradient that is a constant zero."""
    paths: set[str] = set()

    def rule(eqn: Any, zeros: list[Any]) -> list[Any]:
        kind, num_results = eqn.primitive.name, len(eqn.outvars)
        if (results := _results_of_sum(kind, zeros)) is not None:
            return results
        pairs = zip(eqn.invars, zeros, strict=True)
        floats = [zero for v, zero in pairs if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        zero_sum = kind in _SUMS and floats and all(floats)
        if zero_sum or (kind in _PRODUCTS and any(floats)):
            name = str(eqn.params.get("name", ""))
            if name.startswith(_TAG):
                paths.add(name.removeprefix(_TAG))
            return [True] * num_results
        found = [False] * num_results
        for inner in inner_jaxprs(eqn):  # Gradients of micro-batches are inside a scan.
            # A branch has all operands but the first, a loop's body those of a loop.
            outputs = zero_outputs(inner.jaxpr, zeros[len(zeros) - len(inner.jaxpr.invars) :])
            # A scan's carry and stacked results, or the results of a wrapped function.
            if inner.trip_count and len(outputs) == num_results and kind != "cond":
                found = list(map(operator.or_, found, outputs))
        return found

    def zero_outputs(jaxpr: Any, operands: Sequence[Any] = ()) -> list[bool]:
        sums = [x if isinstance(x, _Sum) else False for x in operands]
        arguments = sums if len(sums) == len(jaxpr.invars) else [False] * len(jaxpr.invars)
        return evaluate(jaxpr, arguments, rule, is_zero)

    is_zero = lambda v: isinstance(v, Literal) and bool(np.all(v.val == 0))
    zero_outputs(jaxpr)
    return paths


def warn_without_gradient(jaxpr: Any, num_trained: int) -> None:
    """Logs the parameters without a gradient, if there are any, in the jaxpr of a step."""
    if paths := sorted(paths_without_gradient(jaxpr)):
        logger.warning(
            "%d of %d trained parameters get no gradient, because the objective does not depend on "
            "them: %s. Use them, name them in `fixed` (of a task or an ExternalLayer), or set "
            "trainable=False in their ParameterSpec.",
            len(paths),
            num_trained,
            ", ".join(paths),
        )
