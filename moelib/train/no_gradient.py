"""Parameters without a gradient: the objective does not depend on them, so they are never trained.

A layer that returns integers or stops gradients cuts its parameters off. Their gradients are then
constant zeros in the traced step, which is where they are found: nothing is computed on a device.
"""

import logging
from collections.abc import Iterator
from typing import Any

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


# Primitives whose results are zeros if their operands are.
_LINEAR = ("broadcast_in_dim", "convert_element_type", "reshape", "transpose", "pvary", "name")


def paths_without_gradient(jaxpr: Any) -> Iterator[str]:
    """Yields the path of each tagged gradient that is a constant zero."""
    zeros: set[Any] = set()
    for eqn in jaxpr.eqns:
        operands = (
            np.all(x.val == 0) if isinstance(x, Literal) else x in zeros for x in eqn.invars
        )
        if eqn.primitive.name in _LINEAR and all(operands):
            zeros.update(eqn.outvars)
            name = str(eqn.params.get("name", ""))
            if name.startswith(_TAG):
                yield name.removeprefix(_TAG)
        for inner in inner_jaxprs(eqn):  # Gradients of micro-batches are inside a scan.
            yield from paths_without_gradient(inner.jaxpr)


def warn_without_gradient(jaxpr: Any, num_trained: int) -> None:
    """Logs the parameters without a gradient, if there are any, in the jaxpr of a step."""
    if paths := sorted(set(paths_without_gradient(jaxpr))):
        logger.warning(
            "%d of %d trained parameters get no gradient, because the objective does not depend on "
            "them: %s. Use them, or set trainable=False in their ParameterSpec.",
            len(paths),
            num_trained,
            ", ".join(paths),
        )
