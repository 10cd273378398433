"""Updates of a state in host memory, streamed to the device one group of parameters at a time.

The update is traced, and its results are grouped by the arrays of the state that they require: for
AdamW, a group is a parameter with its two moments.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Literal

from moelib.core.errors import UserError
from moelib.core.jaxpr import bind, evaluate, inlined
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
    num_params, num_state = len(jax.tree.leaves(params)), len(jax.tree.leaves(state))
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*treedef.unflatten(structs))
    graph = _Graph(inlined(closed))  # A jitted function of all moments would be one group.
    arguments = dict(zip(graph.inputs, leaves, strict=True))
    of_state = graph.inputs[len(leaves) - num_state :]
    offloaded = [var for var in of_state if is_offloaded(arguments[var])]
    # The input that each result replaces; metrics, the last results, replace none.
    replaced = dict(enumerate([*graph.inputs[:num_params], *of_state]))

    def place(i: int, x: Any) -> Any:
        return to_host(x) if replaced.get(i) in offloaded else x

    required = graph.required(offloaded)
    known = graph.constants | {var: x for var, x in arguments.items() if var not in offloaded}
    # Scalars shared by all parameters are computed once: norms, rates, counts.
    shared = [var for var, arrays in required.items() if not arrays and not var.aval.shape]
    known |= zip(shared, graph.evaluate(shared, known), strict=True)

    none = frozenset[Any]()
    of_results = [
        none if isinstance(out, Literal) else required.get(out, none) for out in graph.outs
    ]
    if any(of_results[len(replaced) :]):
        raise UserError(
            "offload_state is True, but a metric of the optimizer is computed from moments, which "
            "are in host memory; set it to False."
        )
    on_device = [i for i, arrays in enumerate(of_results) if not arrays]
    values = graph.evaluate([graph.outs[i] for i in on_device], known)
    results = {i: place(i, x) for i, x in zip(on_device, values, strict=True)}
    groups = _groups(of_results)
    if groups:
        _warn_of_large_group(groups, num_params)
        # Replaced values are read from the carry, which the loop updates in place.
        start = {i: arguments[replaced[i]] for group in groups for i in group.results}

        def group_update(group: _Group) -> Callable[[dict[int, Any]], dict[int, Any]]:
            def run(carry: dict[int, Any]) -> dict[int, Any]:
                current = arguments | {replaced[i]: carry[i] for i in group.results}
                copied = [var for var in offloaded if var in group.arrays]
                copies = {var: to_device(current[var]) for var in copied}
                inputs = known | {replaced[i]: carry[i] for i in group.results} | copies
                values = graph.evaluate([graph.outs[i] for i in group.results], inputs)
                pairs = zip(group.results, values, strict=True)
                return carry | {i: place(i, x) for i, x in pairs}

            return run

        branches = [group_update(group) for group in groups]
        results |= lax.fori_loop(0, len(branches), lambda i, x: lax.switch(i, branches, x), start)
    return jax.tree.unflatten(jax.tree.structure(shapes), [results[i] for i in range(len(results))])


class _Group(NamedTuple):
    """Results that are computed together, as they require the same arrays."""

    arrays: frozenset[Any]  # Inputs in host memory that one of the results requires.
    results: list[int]  # Indices of the results.


def _groups(required: Sequence[frozenset[Any]]) -> list[_Group]:
    """Returns the results that share required arrays, transitively; those without are in none."""
    groups: list[_Group] = []
    for i, arrays in enumerate(required):
        if arrays:
            shared = [group for group in groups if group.arrays & arrays]
            groups = [group for group in groups if not group.arrays & arrays]
            members = [member for group in shared for member in group.results]
            together = arrays.union(*(group.arrays for group in shared))
            groups.append(_Group(together, [*members, i]))
    return groups


def _warn_of_large_group(groups: Sequence[_Group], num_params: int) -> None:
    largest = max(sum(i < num_params for i in group.results) for group in groups)
    if largest > 1:
        logger.warning(
            "offload_state is True, but the update of each of %d parameters depends on the state "
            "of the others, which is on the device at once; use learner.skip in place of a "
            "conditional around the optimizer, or set offload_state to False.",
            largest,
        )


class _Graph:
    """A traced function whose variables can be computed separately."""

    def __init__(self, closed: Any) -> None:
        self._jaxpr = closed.jaxpr
        self.inputs: list[Any] = list(self._jaxpr.invars)
        self.outs: list[Any] = list(self._jaxpr.outvars)
        self.constants = dict(zip(self._jaxpr.constvars, closed.consts, strict=True))

    def required(self, inputs: Sequence[Any]) -> dict[Any, frozenset[Any]]:
        """Returns for each computed variable those of `inputs` that it depends on."""
        required = {var: frozenset([var]) for var in inputs}
        for eqn in self._jaxpr.eqns:
            operands = [required[v] for v in _variables(eqn) if v in required]
            required |= dict.fromkeys(eqn.outvars, frozenset().union(*operands))
        return required

    def evaluate(self, wanted: Sequence[Any], known: Mapping[Any, Any]) -> list[Any]:
        """Returns the values of variables, by the equations that lead to them from known ones."""
        needed = {v for v in wanted if not isinstance(v, Literal) and v not in known}
        eqns: list[Any] = []
        for eqn in reversed(self._jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                eqns.append(eqn)
                needed.update(v for v in _variables(eqn) if v not in known)
        part = self._jaxpr.replace(
            constvars=(), invars=list(known), outvars=list(wanted), eqns=eqns[::-1]
        )
        return evaluate(part, list(known.values()), bind)


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]
