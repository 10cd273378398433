"""The objective on one device: values and gradients against the model in plain parts."""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moelib.core import tree
from moelib.layers.moe.balance import (
    BalanceScope,
    BiasBalancing,
    LoadBalanceLoss,
    RouterZLoss,
    balance_pool,
)
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
    """Returns the difference that comes first in the forward pass."""
    paths = [path for path in want if path in got and np.size(want[path])]
    pair = ({path: np.ravel(x[path]) for path in paths} for x in (want, got))
    return first_difference(*map(form.in_order, pair), relative=TOLERANCE, floor=1e-6)


def derivatives(known: Reference) -> None:
    """Compares gradients with finite differences, for each parameter of each layer."""
    known.check_plain()
    gradients = tree.by_path(known.plain.layers_apart(known.first.gradients))
    norms = {path: float(np.linalg.norm(g)) for path, g in gradients.items()}
    for path in reversed(known.plain.in_order(norms)):  # Errors spread to all layers before.
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
        ends.append(known.plain(state, known.batches[0]).terms)
    terms = {name: float(ends[0][name] - ends[1][name]) / (2 * _STEP) for name in ends[0]}
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


def balanced(known: Reference) -> None:
    """Compares the biases that balance experts with `rate * sign(mean load - load)`.

    Loads are those of the whole step, and of steps in which one micro-batch alone has tokens.
    """
    if known.first.metrics.get("skipped"):
        raise CheckSkippedError("the learner skips the first step")
    if any(isinstance(layer, BiasBalancing) for layer, _ in known.plain.model.walk()):
        known.check_plain()
    if not sum(_compare_biases(known, *each) for each in _steps_with_loads(known)):
        raise CheckSkippedError("no biases that balance experts")


def _steps_with_loads(known: Reference) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields states after a step, and the assignments to each expert in it by layer."""
    num, batch = known.config.num_microbatches, known.batches[0]
    total: dict[str, Any] = {}
    state = known.start._replace(model=known.plain.layers_apart(known.start.model))
    for i in range(num):
        is_own = (np.arange(len(batch["input_ids"])) % num == i)[:, None]
        padding = {"segment_ids": 0, "target_labels": -1}
        part = batch | {name: np.where(is_own, batch[name], x) for name, x in padding.items()}
        values = known.expected if num == 1 else known.plain(state, part)
        counts = {
            path.rpartition("/")[0]: x
            for path, x in values.metrics.items()
            if metric_name(path) == "expert_counts"
        }
        total = {path: x + total.get(path, 0) for path, x in counts.items()}
        if num > 1:
            yield known.observe(part).state, counts
    yield known.first.state, total


def _compare_biases(known: Reference, state: Any, loads: Mapping[str, np.ndarray]) -> int:
    """Compares the biases of a state with those expected after a step; returns their number."""
    is_frozen = known.probe.trainer.learner.is_frozen
    moves = tree.map_by_path(lambda path, x: 0 * x + (not is_frozen(path)), known.start.model)
    before, after, moves = (
        tree.by_path(known.plain.layers_apart(params))
        for params in (known.start.model, state.model, moves)
    )
    num = 0
    for layer, _ in known.plain.model.walk():
        path = layer.path().replace(".", "/")
        load = loads.get(path.removesuffix("/router/bias_balancing"))
        is_own = getattr(type(layer), "_end_step", None) is BiasBalancing._end_step
        if not is_own or load is None:
            continue
        path, rate, num = f"{path}/bias", layer.config.rate, num + 1
        load = load.reshape(before[path].shape)
        change = rate * np.sign(load.mean(-1, keepdims=True) - load) * moves[path]
        pair = {path: before[path] + change}, {path: after[path]}
        if found := first_difference(*pair, relative=1e-6, floor=1e-3 * rate):
            raise CheckFailedError(
                f"{found}. Expected is a move of {rate:g} towards the mean load."
            )
    return num
