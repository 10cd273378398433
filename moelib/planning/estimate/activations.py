"""Saved activations: the bytes per token that the forward pass keeps for the backward pass.

They are read from the model's own trace, so that layers of any kind count: `jax.vjp` gives them
without recomputation, and the names and matmuls of the forward pass give those that a remat policy
saves. Two batch sizes are traced on one device; what grows with the batch is an activation.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from moelib.core import jaxpr, tree
from moelib.core.config_text import sub_configs
from moelib.core.param import is_spec
from moelib.core.precision import activation_dtype
from moelib.core.tree import Batch, Nested
from moelib.data.batches.input import TOKEN_ARRAYS
from moelib.kernels.backend import BACKENDS, kernel_backends

_BATCH_SIZES, _SEQ_LEN = (2, 3), 128  # Of the two traces.
_ROUTING = "routing"  # The name that every remat saves: the routing of tokens.
_OPAQUE = (
    "cond",
    "custom_vjp_call",
    "pallas_call",
    "while",
)  # Primitives that save nothing inside.

# Names of remats: full recomputation, none, the config's own, and policies of `layers.remat`.
FULL, NONE, OWN = "full", "none", "as configured"
DOTS, DOTS_NO_BATCH = "dots_saveable", "dots_with_no_batch_dims_saveable"


@dataclasses.dataclass(frozen=True)
class Saved:
    """Bytes per token of saved activations."""

    split: float = 0.0  # Split by tensor parallelism: residual stream, heads, hidden dimensions.
    whole: float = 0.0  # Not split by it.
    routed: float = 0.0  # In rows sent to experts, with one row per assignment.

    def __add__(self, other: "Saved") -> "Saved":
        return Saved(*(a + b for a, b in self._pairs(other)))

    def minimum(self, other: "Saved") -> "Saved":
        """Returns the smaller value of each field."""
        return Saved(*(min(pair) for pair in self._pairs(other)))

    def times(self, factor: float) -> "Saved":
        """Returns the bytes times a factor."""
        return Saved(self.split * factor, self.whole * factor, self.routed * factor)

    def _pairs(self, other: "Saved") -> list[tuple[float, float]]:
        return list(zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))


# Shapes are the same for all backends, of which CPUs run few; a default is traced in each form.
_ONE_BACKEND = dict.fromkeys(BACKENDS) | dict.fromkeys(("flash_attention", "gmm"), "xla")

Measure = Callable[[Any, Any], Saved]  # Bytes per token of an array, from both traces.


def with_remat(model: Any, remat: Any) -> Any:
    """Returns a model's config with the remat of every stack set; None recomputes nothing."""
    model = model.clone()
    for _, inside in sub_configs(model):
        if "remat" in inside:
            inside.set(remat=remat)
    return model


@kernel_backends(_ONE_BACKEND)
def read_saved(
    cfg: Any,
    specs: Any,
    *,
    is_trained: Callable[[str], bool],
    num_recomputed: int,
    num_experts_per_token: int = 0,
    num_slotted_experts: int = 0,
) -> dict[str, Saved]:
    """Returns the saved activations of a model by remat.

    Args:
        cfg: A `SpmdTrainer.Config`.
        specs: ParameterSpecs of its model.
        is_trained: Whether the parameter at a path has a gradient.
        num_recomputed: Number of first layers and of blocks, each recomputed as a whole.
        num_experts_per_token: Experts per token; 0 without experts.
        num_slotted_experts: Experts with a fixed capacity per sequence; 0 without such.
    """
    params = jaxpr.abstract_parameters(specs, cfg.train_dtype)
    measure: Measure = functools.partial(
        _measured,
        num_experts_per_token=num_experts_per_token,
        num_slotted_experts=num_slotted_experts,
    )
    loss = _loss(with_remat(cfg.model, None))
    none = _residuals(loss, params, is_trained, measure)
    named: dict[str, Saved] = collections.defaultdict(Saved)
    dots = no_batch_dots = Saved()
    traces = (jax.make_jaxpr(loss)(params, batch) for batch in _batches())
    few, many = (jaxpr.walk(trace, opaque=_OPAQUE) for trace in traces)
    for (eqn, executions), (other, _) in zip(few, many, strict=True):
        if eqn.primitive.name not in ("name", "dot_general"):
            continue
        size = measure(eqn.outvars[0].aval, other.outvars[0].aval).times(executions)
        if eqn.primitive.name == "name":
            named[eqn.params["name"]] += size
        else:
            dots += size
            batch_dims = eqn.params["dimension_numbers"][1][0]
            no_batch_dots += Saved() if batch_dims else size
    itemsize = jnp.dtype(activation_dtype(cfg)).itemsize
    # Their inputs, and the last hidden state and its gradient.
    inputs = (num_recomputed + 2.0) * model_dim(cfg.model, specs)
    full = Saved(split=inputs * itemsize) + named[_ROUTING]
    # Policies save only those matmul results that the backward pass needs.
    saved = {FULL: full, NONE: none}
    saved |= {DOTS: (full + dots).minimum(none)}
    saved |= {DOTS_NO_BATCH: (full + no_batch_dots).minimum(none)}
    # Raises what the model or its remat raises when it is traced.
    jax.eval_shape(_loss(cfg.model), params, _batches()[0])
    own = _own_from_names(cfg.model, saved, named)
    if own is None:
        own = _residuals(_loss(cfg.model), params, is_trained, measure)
    return saved | {OWN: own}


def model_dim(model: Any, specs: Nested) -> int:
    """Returns the width D of the residual stream: a config's `dim`, or the largest one of specs."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    dims = (s.shape[s.axes.index("embed")] for s in leaves if "embed" in s.axes)
    return getattr(model, "dim", None) or max(dims, default=1)


def _loss(model: Any) -> Callable[[Nested, Batch], jax.Array]:
    """Returns the loss of a model's config, with auxiliary losses."""
    forward = jaxpr.forward_pass(model.clone(name="model").instantiate(parent=None))

    def loss(params: Nested, batch: Batch) -> jax.Array:
        (out, _), collection = forward(params, batch)
        return out.mean + collection.total_aux_loss()

    return loss


def _batches() -> list[Batch]:
    """Returns the abstract batches of the two traces."""
    shapes = (jax.ShapeDtypeStruct((size, _SEQ_LEN), jnp.int32) for size in _BATCH_SIZES)
    return [dict.fromkeys(TOKEN_ARRAYS, shape) for shape in shapes]


def _residuals(
    loss: Callable[..., jax.Array],
    params: Nested,
    is_trained: Callable[[str], bool],
    measure: Measure,
) -> Saved:
    """Returns the activations that a loss saves for the gradients of its trained parameters."""
    trained, fixed = tree.split(params, is_trained)
    of_trained = lambda fixed, batch, p: loss(tree.merge(fixed, p), batch)
    forward = lambda p, *rest: jax.vjp(functools.partial(of_trained, *rest), p)[1]
    found = []
    for batch in _batches():
        backward = jax.eval_shape(forward, trained, fixed, batch)
        residuals = jax.tree.leaves(backward)
        if jax.tree.leaves(fixed):  # Kernels save what only gradients of weights need, too.
            traced = jax.make_jaxpr(lambda backward: backward(jnp.float32(1)))(backward).jaxpr
            _, is_needed = dce_jaxpr(traced, [True] * len(traced.outvars))
            residuals = [*itertools.compress(residuals, is_needed)]
        found.append(residuals)
    return sum((measure(*pair) for pair in zip(*found, strict=True)), Saved())


def remats(model: Any) -> list[Any]:
    """Returns the remat of each stack of a model's config."""
    return [inside.remat for _, inside in sub_configs(model) if "remat" in inside]


def remat_name(model: Any) -> str | None:
    """Returns the name in `Workload.saved` of a config's remat, or None if it has none."""
    found = remats(model)
    if all(each is None for each in found):
        return NONE
    settings = [{} if each is None else dict(each.items()) for each in found]
    first = settings[0]
    if any(each != first for each in settings) or "policy" not in first:
        return None
    if first.get("keep") or first.get("offload"):
        return None
    policies = {None: FULL, "nothing_saveable": FULL, "everything_saveable": NONE}
    return policies.get(first["policy"], first["policy"])


def nearest_remat(saved: Mapping[str, Saved]) -> str:
    """Returns the remat whose saved bytes are nearest to those of the config's own."""
    size = lambda name: 1 + sum(dataclasses.astuple(saved[name]))
    return min((FULL, DOTS, NONE), key=lambda name: abs(math.log(size(name) / size(OWN))))


def _own_from_names(
    model: Any, saved: Mapping[str, Saved], named: Mapping[str, Saved]
) -> Saved | None:
    """Returns the activations that the config's own remat saves; None if only a trace can tell."""
    if (name := remat_name(model)) is not None:
        return saved[name]
    found = remats(model)
    if len(found) != 1 or "keep" not in found[0]:
        return None
    return sum((named.get(name, Saved()) for name in found[0].keep), saved[FULL])


def _measured(
    few: Any, many: Any, *, num_experts_per_token: int, num_slotted_experts: int
) -> Saved:
    """Returns the bytes per token of an array that occurs in both traces."""
    added = (_BATCH_SIZES[1] - _BATCH_SIZES[0]) * _SEQ_LEN
    elements = (math.prod(many.shape) - math.prod(few.shape)) / added
    size = elements * jnp.dtype(few.dtype).itemsize
    grown = {pair for pair in zip(few.shape, many.shape, strict=True) if pair[0] != pair[1]}
    tokens = tuple(n * _SEQ_LEN for n in _BATCH_SIZES)
    if num_experts_per_token and tuple(n * num_experts_per_token for n in tokens) in grown:
        return Saved(routed=size)
    if num_slotted_experts and _has_slots(few.shape, many.shape, num_slotted_experts):
        return Saved(routed=size)
    # Batch and sequence in one dimension: tokens of all devices that share them, in a dispatcher.
    return Saved(whole=size) if tokens in grown else Saved(split=size)


def _has_slots(few: tuple[int, ...], many: tuple[int, ...], num_experts: int) -> bool:
    """Returns whether an array has slots, as [..., E, B C, D] or flat as [..., E B C, D]."""
    for i, (a, b) in enumerate(zip(few, many, strict=True)):
        if a == b or (a, b) in (_BATCH_SIZES, tuple(n * _SEQ_LEN for n in _BATCH_SIZES)):
            continue
        if (i and few[i - 1] == num_experts) or a % (_BATCH_SIZES[0] * num_experts) == 0:
            return True
    return False
