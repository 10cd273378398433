"""Parameters without a gradient: the objective does not depend on them, so they are never trained.

A layer that returns integers or stops gradients cuts its parameters off. Their gradients are then
constant zeros in the traced step, which is where they are found: nothing is computed on a device.
"""

import logging
import operator
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
    "pvary",
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


def paths_without_gradient(jaxpr: Any) -> set[str]:
    """Returns the path of each tagged gradient that is a constant zero."""
    paths: set[str] = set()

    def rule(eqn: Any, zeros: list[bool]) -> list[bool]:
        pairs = zip(eqn.invars, zeros, strict=True)
        floats = [zero for v, zero in pairs if jnp.issubdtype(v.aval.dtype, jnp.floating)]
        kind, num_results = eqn.primitive.name, len(eqn.outvars)
        zero_sum = kind in _SUMS and floats and all(floats)
        if zero_sum or (kind in _PRODUCTS and any(floats)):
            name = str(eqn.params.get("name", ""))
            if name.startswith(_TAG):
                paths.add(name.removeprefix(_TAG))
            return [True] * num_results
        found = [False] * num_results
        for inner in inner_jaxprs(eqn):  # Gradients of micro-batches are inside a scan.
            outputs = zero_outputs(inner.jaxpr)
            # A scan's carry and stacked results, or the results of a wrapped function.
            if inner.trip_count and len(outputs) == num_results and kind != "cond":
                found = list(map(operator.or_, found, outputs))
        return found

    def zero_outputs(jaxpr: Any) -> list[bool]:
        return evaluate(jaxpr, [False] * len(jaxpr.invars), rule, is_zero)

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
