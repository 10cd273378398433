"""Parameters without a gradient: the objective does not depend on them, so they are never trained.

A layer that returns integers or stops gradients cuts its parameters off. Their gradients are then
constant zeros in the traced step, which is where they are found: nothing is computed on a device.
"""

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from moelib.core import tree
from moelib.core.jaxpr import inner_jaxprs
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
    _zero_outputs(jaxpr, paths)
    return paths


def _zero_outputs(jaxpr: Any, paths: set[str]) -> list[bool]:
    """Returns which outputs are constant zeros, and adds the paths of tagged ones to `paths`."""
    zeros: set[Any] = set()

    def is_zero(x: Any) -> bool:
        return bool(np.all(x.val == 0)) if isinstance(x, Literal) else x in zeros

    for eqn in jaxpr.eqns:
        floats = [x for x in eqn.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
        kind = eqn.primitive.name
        zero_sum = kind in _SUMS and floats and all(map(is_zero, floats))
        if zero_sum or (kind in _PRODUCTS and any(map(is_zero, floats))):
            zeros.update(eqn.outvars)
            name = str(eqn.params.get("name", ""))
            if name.startswith(_TAG):
                paths.add(name.removeprefix(_TAG))
        for inner in inner_jaxprs(eqn):  # Gradients of micro-batches are inside a scan.
            outputs = _zero_outputs(inner.jaxpr, paths)
            # A scan's carry and stacked results, or the results of a wrapped function.
            whole = inner.trip_count and len(outputs) == len(eqn.outvars)
            if whole and kind != "cond":
                zeros.update(x for x, zero in zip(eqn.outvars, outputs, strict=True) if zero)
    return [is_zero(x) for x in jaxpr.outvars]


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
