"""Updates of a state in host memory, streamed to the device one group of parameters at a time.

The update is traced, and split into groups of results that share no array of the state: for AdamW,
each parameter with its two moments.
"""

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from moelib.core.errors import UserError
from moelib.core.jaxpr import inlined
from moelib.learner.offload import is_offloaded, to_device, to_host

logger = logging.getLogger(__name__)

Update = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def streamed_update(
    update: Update, params: Any, gradients: Any, state: Any
) -> tuple[Any, Any, Any]:
    """Returns `update(params, gradients, state)` for a state in host memory.

    A loop copies the part of the state that a group of results requires to the device and back,
    before it continues with the next group. The compiler alone would copy all of it as the step
    begins and hold it together with the activations: more memory than a step without offloading.

    The update returns (params, state, anything that requires no array of the state). Arrays of the
    state are on the device together if one result requires them: all of them, for an optimizer
    whose update of one parameter depends on all moments.

    Raises:
        UserError: If a result other than parameters and state requires an array of the state.
    """
    leaves, treedef = jax.tree.flatten((params, gradients, state))
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*treedef.unflatten(structs))
    graph = _Graph(inlined(closed))  # A jitted function of all moments would be one group.
    given = dict(zip(graph.inputs, leaves, strict=True))
    # The input that each result replaces: its value before the update.
    num_state = len(jax.tree.leaves(state))
    of_state = graph.inputs[len(leaves) - num_state :]
    before = [*graph.inputs[: len(jax.tree.leaves(params))], *of_state]
    offloaded = [var for var in of_state if is_offloaded(given[var])]

    needs = graph.needs(offloaded)
    values = graph.constants | {var: x for var, x in given.items() if var not in offloaded}
    # Scalars shared by all parameters are computed once: norms, rates, counts.
    scalars = [var for var, bits in needs.items() if not bits and not var.aval.shape]
    values |= zip(scalars, graph.evaluate(scalars, values), strict=True)

    def group_update(bits: int, members: list[int]) -> Callable[[dict[int, Any]], dict[int, Any]]:
        def run(carry: dict[int, Any]) -> dict[int, Any]:
            own = {before[i]: carry[i] for i in members}
            copied = [var for i, var in enumerate(offloaded) if bits >> i & 1]
            known = values | own | {var: to_device(own.get(var, given[var])) for var in copied}
            found = graph.evaluate([graph.outs[i] for i in members], known)
            return carry | {i: back(i, x) for i, x in zip(members, found, strict=True)}

        return run

    def back(i: int, x: Any) -> Any:
        return to_host(x) if i < len(before) and before[i] in offloaded else x

    needed = [0 if isinstance(out, core.Literal) else needs.get(out, 0) for out in graph.outs]
    if any(needed[len(before) :]):
        raise UserError(
            "offload_state is True, but a metric of the optimizer is computed from moments, which "
            "are in host memory; set it to False."
        )
    independent = [i for i, bits in enumerate(needed) if not bits]
    found = graph.evaluate([graph.outs[i] for i in independent], values)
    results = {i: back(i, x) for i, x in zip(independent, found, strict=True)}
    if groups := _groups(needed):
        num_params = len(jax.tree.leaves(params))
        together = max(sum(i < num_params for i in members) for _, members in groups)
        if together > 1:
            logger.warning(
                "offload_state is True, but the update of each of %d parameters depends on the "
                "state of the others, which is on the device at once; use learner.skip in place of "
                "a conditional around the optimizer, or set offload_state to False.",
                together,
            )
        branches = [group_update(bits, members) for bits, members in groups]
        start = {i: given[before[i]] for i, bits in enumerate(needed) if bits}
        results |= lax.fori_loop(0, len(branches), lambda i, x: lax.switch(i, branches, x), start)
    return jax.tree.unflatten(jax.tree.structure(shapes), [results[i] for i in range(len(results))])


def _groups(needed: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Returns (required arrays, indices) of the results that share required arrays, transitively.

    Required arrays are bit sets; `needed` holds that of each result.
    """
    groups: list[tuple[int, list[int]]] = []
    for i, bits in enumerate(needed):
        if bits:
            shared = [group for group in groups if group[0] & bits]
            groups = [group for group in groups if not group[0] & bits]
            members = [member for _, members in shared for member in members]
            joined = functools.reduce(operator.or_, (bits for bits, _ in shared), bits)
            groups.append((joined, [*members, i]))
    return groups


class _Graph:
    """A traced function whose variables can be computed separately."""

    def __init__(self, closed: Any) -> None:
        self._jaxpr = closed.jaxpr
        self.inputs: list[Any] = list(self._jaxpr.invars)
        self.outs: list[Any] = list(self._jaxpr.outvars)
        self.constants = dict(zip(self._jaxpr.constvars, closed.consts, strict=True))

    def needs(self, some: Sequence[Any]) -> dict[Any, int]:
        """Returns for each computed variable the bit set of those of `some` that it depends on."""
        needs = {var: 1 << i for i, var in enumerate(some)}
        for eqn in self._jaxpr.eqns:
            bits = (needs.get(var, 0) for var in eqn.invars if not isinstance(var, core.Literal))
            needs |= dict.fromkeys(eqn.outvars, functools.reduce(operator.or_, bits, 0))
        return needs

    def evaluate(self, wanted: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
        """Returns the values of variables, computed from known values."""
        eqns = [eqn for eqn in self._jaxpr.eqns if any(var not in values for var in eqn.outvars)]
        part = self._jaxpr.replace(
            constvars=(), invars=list(values), outvars=list(wanted), eqns=eqns
        )
        part, used = dce_jaxpr(part, [True] * len(wanted))
        known = [value for value, is_used in zip(values.values(), used, strict=True) if is_used]
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))(*known)
