"""The objective on one device: values and gradients against the model in plain parts."""

import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from moelib.core import tree
from moelib.layers.moe.balance import BalanceScope, LoadBalanceLoss, RouterZLoss, balance_pool
from moelib.verify.compare import Difference, first_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.plain import Plain, wide
from moelib.verify.reference import TOLERANCE, Reference, metric_name

_STEP = 1e-7  # Of finite differences: small, so that no token changes its experts.
_PLAIN_FORM = (
    "Expected is the value of a loop of layers without recomputation, with dense dispatch and "
    "reference kernels, summed over micro-batches."
)
_GRADIENT_TOLERANCE = 1e-4  # Of a derivative, as a share of the norm of its gradient.


def plain(known: Reference) -> None:
    """Compares loss, auxiliary losses, metrics and layers' own state with the plain form."""
    known.check_plain()
    metrics = known.plain.metrics(known.first.metrics)
    if found := _difference(known.plain, known.expected.metrics, metrics):
        raise CheckFailedError(f"{found}. {_PLAIN_FORM}")
    after = known.plain.model.end_step_recursively(known.expected.params)
    trained = tree.by_path(known.plain.layers_apart(known.first.gradients))
    own = {path: x for path, x in tree.by_path(after).items() if path not in trained}
    got = tree.by_path(known.plain.layers_apart(known.first.state.model))
    if found := _difference(known.plain, own, got):
        raise CheckFailedError(f"State that layers update: {found}.")


def _difference(form: Plain, want: Mapping[str, Any], got: Mapping[str, Any]) -> Difference | None:
    """Returns the difference that comes first in the forward pass.

    Raises CheckFailedError if a value is missing. The step has others, of the learner.
    """
    # `Plain.metrics` leaves out a metric "loss/a", next to "loss".
    paths = [x for x in want if np.size(want[x]) and (x in got or x.split("/")[0] not in got)]
    if missing := [path for path in paths if path not in got]:
        raise CheckFailedError(f"{missing[0]} is missing from the results of the step.")
    pair = ({path: np.ravel(x[path]) for path in paths} for x in (want, got))
    return first_difference(*map(form.in_order, pair), relative=TOLERANCE, floor=1e-6)


def derivatives(known: Reference) -> None:
    """Compares gradients with finite differences, for each parameter of each layer.

    Losses of a layer that trains itself count for the parameters of this layer only.
    """
    known.check_plain()
    gradients = known.plain.by_layer(known.first.gradients)
    norms = {path: float(np.linalg.norm(g)) for path, g in gradients.items()}
    for path in reversed(norms):  # Errors spread to all layers before.
        allowed = _GRADIENT_TOLERANCE * norms[path] + 1e-6 * max(norms.values())
        # Two directions: along one of them, a token may change its experts.
        found = [_wrong_derivative(known, path, gradients[path], i, allowed) for i in range(2)]
        if all(found):
            raise CheckFailedError(found[0])


def _wrong_derivative(known: Reference, path: str, gradient: Any, seed: int, allowed: float) -> str:
    """Returns the error of the derivative along a random direction, "" if there is none."""
    rng = np.random.default_rng((seed, zlib.crc32(path.encode())))
    direction = rng.standard_normal(gradient.shape)
    params, ends = wide(known.plain.layers_apart(known.start.model)), []
    for step in (_STEP, -_STEP):
        moved = lambda at, x, step=step: x + step * direction if at == path else x
        state = known.start._replace(model=tree.map_by_path(moved, params))
        # The step takes no gradient through state that layers keep between micro-batches.
        ends.append(known.plain(state, known.batches[0], known.expected.updates).terms)
    names = [name for name in ends[0] if _reaches(known, name, path)]
    terms = {name: float(ends[0][name] - ends[1][name]) / (2 * _STEP) for name in names}
    want, got = sum(terms.values()), float(np.vdot(np.float64(gradient), direction))
    if abs(want - got) <= allowed:
        return ""
    text = (
        f"{path}: the derivative along a random direction is {got:.6g} by the gradient, and "
        f"{want:.6g} by finite differences: error {abs(want - got):.3g}, allowed {allowed:.3g}."
    )
    for name, term in terms.items():
        if abs(term) > allowed and abs(want - term - got) <= allowed:
            return f"{text} The gradient of {name} is missing."
    return text


def _reaches(known: Reference, term: str, path: str) -> bool:
    """Returns whether a term of the objective is to have a gradient for a parameter."""
    layer: Any = known.plain.model
    *holders, _ = term.split("/")
    for name in holders:
        layer = layer.children[name.partition("#")[0]]
    return not getattr(layer, "trains_itself", False) or path.startswith("/".join(holders) + "/")


def reached(known: Reference) -> None:
    """Checks that every trained parameter has a gradient, of each expert with tokens too."""
    metrics = known.plain.metrics(known.first.metrics)
    with_idle_experts = tuple(
        path.rpartition("/")[0]
        for path, x in metrics.items()
        if metric_name(path) == "dead_experts" and x.any()
    )
    for path, x in known.plain.experts_apart(known.first.gradients).items():
        if not np.any(x) and not (", expert " in path and path.startswith(with_idle_experts)):
            raise CheckFailedError(
                f"{path} has no gradient; use it, or freeze it with trainable=False in its "
                "ParameterSpec or with a rule of learner.update_rules."
            )


def auxiliary(known: Reference) -> None:
    """Checks that the objective has each configured auxiliary loss, with its weight."""
    found, configured = known.expected.weights, defaultdict(list)
    for layer, _ in known.plain.model.walk():
        for name in ("load_balance_loss", "router_z_loss"):
            cfg = dict(layer.config.items()).get(name)
            if isinstance(cfg, LoadBalanceLoss.Config | RouterZLoss.Config):
                is_pooled = getattr(cfg, "scope", None) is BalanceScope.ALL_LAYERS
                holder = (balance_pool(layer) if is_pooled else None) or layer
                path = f"{holder.path().replace('.', '/')}/{name}".lstrip("/")
                configured[path].append(cfg.weight)
    for path, weights in configured.items():
        if (weight := np.mean(weights)) and path not in found:
            raise CheckFailedError(
                f"{path} has weight {weight:g}, but no such loss reaches the trainer: a layer "
                "around it drops the outputs of its children."
            )
        if path in found and not np.allclose(found[path], weight, rtol=1e-6):
            raise CheckFailedError(
                f"{path} has weight {weight:g}, but the objective contains it with weight "
                f"{np.mean(found[path]):g}."
            )
    if not found:
        raise CheckSkippedError("no auxiliary losses")
