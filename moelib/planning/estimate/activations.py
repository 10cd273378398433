"""What the forward pass keeps for the backward pass, read from the model's own trace.

`jax.vjp` says what is kept where nothing is computed again, whatever layers there are; the names
and matmuls in the forward pass, what a remat policy keeps of it. The trace is on one device, of two
numbers of rows: what grows with them is an activation, and by how much, its bytes a token.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_paths import sub_configs
from moelib.core.module import functional
from moelib.core.param import ParameterSpec, is_spec, may_cast

# Rows of each trace, and the tokens of a row.
_ROWS, _TOKENS = (2, 3), 128

_ROUTING = "routing"  # What every remat keeps: where tokens go.

FULL, NONE, OWN = "full", "none", "as it is"
DOTS, DOTS_NO_BATCH = "dots_saveable", "dots_with_no_batch_dims_saveable"


@dataclasses.dataclass(frozen=True)
class Kept:
    """Bytes a token, kept for the backward pass.

    Attributes:
        split: That tensor parallelism splits: the residual stream, heads, hidden dimensions.
        whole: That it does not.
        rows: Of rows that travelled to experts, one a choice; a buffer may hold more rows.
    """

    split: float = 0.0
    whole: float = 0.0
    rows: float = 0.0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.split + other.split, self.whole + other.whole, self.rows + other.rows)

    def at_most(self, other: "Kept") -> "Kept":
        """Returns the smaller of each."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Kept(*(min(pair) for pair in pairs))

    def times(self, factor: float) -> "Kept":
        """Returns as much, multiplied."""
        return Kept(self.split * factor, self.whole * factor, self.rows * factor)


def with_remat(model: Any, remat: Any) -> Any:
    """Returns a model's config with the remat of every stack set; None recomputes nothing."""
    model = model.clone()
    for _, inside in sub_configs(model):
        if "remat" in dict(inside.items()):
            inside.remat = remat
    return model


def _with_all_rows(model: Any) -> Any:
    """Returns a model's config whose dispatchers have room for every row that is sent."""
    model = model.clone()
    for _, inside in sub_configs(model):
        if "buffer_factor" in dict(inside.items()):
            inside.set(buffer_factor=None)
    return model


def read_kept(
    cfg: Any, specs: Any, *, choices: int, num_blocks: int, slots_of: int = 0
) -> tuple[dict[str, Kept], Kept]:
    """Returns what a model keeps by the name of a remat, and what one block leaves without.

    Args:
        cfg: A `SpmdTrainer.Config`.
        specs: Those of its model's parameters.
        choices: Experts that a token goes to; 0 without experts.
        num_blocks: How often a block is repeated.
        slots_of: Experts that have as many slots for each row of the batch; 0 without such.

    Raises:
        ValueError: If the model cannot be traced, or its remat names what no block has.
    """
    unlimited = _with_all_rows(cfg.model)
    loss, params, batches = _traceable(with_remat(unlimited, None), specs, cfg.train_dtype)
    measure = functools.partial(_measured, choices=choices, slots_of=slots_of)
    none = _left(loss, params, batches, measure)
    named: dict[str, Kept] = collections.defaultdict(Kept)
    dots = alone = Kept()
    few, many = (_equations(jax.make_jaxpr(loss)(params, batch).jaxpr) for batch in batches)
    for (each, times), (other, _) in zip(few, many, strict=True):
        if each.primitive.name not in ("name", "dot_general"):
            continue
        size = measure(each.outvars[0].aval, other.outvars[0].aval).times(times)
        if each.primitive.name == "name":
            named[each.params["name"]] += size
        else:
            dots += size
            batch_dims = each.params["dimension_numbers"][1][0]
            alone += Kept() if batch_dims else size
    itemsize = jnp.dtype(cfg.train_dtype or "float32").itemsize
    dim = max((s.shape[s.axes.index("embed")] for s in _with(specs, "embed")), default=0)
    # The input of each block, and the last hidden state and its gradient.
    full = Kept(split=(num_blocks + 2.0) * dim * itemsize) + named[_ROUTING]
    # Of the matmuls' results those are kept that the backward pass needs, and no more than all.
    kept = {FULL: full, NONE: none}
    kept |= {DOTS: (full + dots).at_most(none), DOTS_NO_BATCH: (full + alone).at_most(none)}
    # What the model refuses, or its remat, is an error.
    jax.eval_shape(_traceable(cfg.model, specs, cfg.train_dtype)[0], params, batches[0])
    own = _own(cfg.model, kept, named)
    if own is None:
        loss = _traceable(unlimited, specs, cfg.train_dtype)[0]
        own = _left(loss, params, batches, measure)
    return kept | {OWN: own}, none.times(1.0 / num_blocks)


def _left(loss: Any, params: Any, batches: Any, measure: Callable[..., Kept]) -> Kept:
    """Returns what the forward pass of a loss leaves of the tokens."""
    leaves, structure = jax.tree.flatten(params)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def backward(leaves: list[Any], batch: Any) -> Any:
        def of(trained: list[Any]) -> Any:
            rest = iter(trained)
            pairs = zip(leaves, floats, strict=True)
            merged = [next(rest) if is_float else leaf for leaf, is_float in pairs]
            return loss(jax.tree.unflatten(structure, merged), batch)

        return jax.vjp(of, [x for x, is_float in zip(leaves, floats, strict=True) if is_float])[1]

    residuals = (jax.tree.leaves(jax.eval_shape(backward, leaves, batch)) for batch in batches)
    return sum((measure(*pair) for pair in zip(*residuals, strict=True)), Kept())


def _with(specs: Any, axis: str) -> list[ParameterSpec]:
    return [s for s in jax.tree.leaves(specs, is_leaf=is_spec) if axis in s.axes]


def remats(model: Any) -> list[Any]:
    """Returns the remat of each stack of a model's config."""
    found = [dict(inside.items()) for _, inside in sub_configs(model)]
    return [values["remat"] for values in found if "remat" in values]


def remat_name(model: Any) -> str | None:
    """Returns which of the remats of `Workload.kept` a config has, or None if it is another."""
    found = remats(model)
    if not found or all(each is None for each in found):
        return NONE
    said = [{} if each is None else dict(each.items()) for each in found]
    if any(each != said[0] for each in said) or "policy" not in said[0]:
        return None
    if said[0].get("keep") or said[0].get("offload"):
        return None
    policies = {None: FULL, "nothing_saveable": FULL, "everything_saveable": NONE}
    return policies.get(said[0]["policy"], said[0]["policy"])


def nearest_remat(kept: Mapping[str, Kept]) -> str:
    """Returns the remat whose bytes are nearest to those that the config's own keeps."""
    held = lambda name: 1 + kept[name].split + kept[name].whole + kept[name].rows
    return min((FULL, DOTS, NONE), key=lambda name: abs(math.log(held(name) / held(OWN))))


def _own(model: Any, kept: Mapping[str, Kept], named: Mapping[str, Kept]) -> Kept | None:
    """Returns what the config's own remat keeps, or None if only a trace can tell."""
    name = remat_name(model)
    if name is not None:
        return kept[name]
    found = [dict(each.items()) for each in remats(model) if each is not None]
    if len(found) != 1 or "keep" not in found[0]:
        return None
    points = (named.get(name, Kept()) for name in found[0]["keep"])
    return sum(points, kept[FULL])


def _traceable(model: Any, specs: Any, train_dtype: Any) -> tuple[Any, Any, list[Any]]:
    """Returns the loss of a model's config, and shapes of parameters and of two batches."""
    built = model.clone(name="model").instantiate(parent=None)
    dtype = lambda s: train_dtype if train_dtype is not None and may_cast(s) else s.dtype
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype(s))), specs, is_leaf=is_spec
    )
    ids = [jax.ShapeDtypeStruct((rows, _TOKENS), jnp.int32) for rows in _ROWS]
    names = ("input_ids", "target_labels", "segment_ids", "positions")

    def loss(params: Any, batch: Any) -> jax.Array:
        key = jax.random.key(0)
        (out, _), collection = functional(built, key, params, (batch,), is_training=True)
        return out.mean + collection.total_aux_loss()

    return loss, params, [dict.fromkeys(names, each) for each in ids]


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields what is computed and how often, but for what kernels do inside."""
    for each in jaxpr.eqns:
        yield each, times
        if each.primitive.name in ("cond", "custom_vjp_call", "pallas_call", "while"):
            continue
        inside = times * each.params["length"] if each.primitive.name == "scan" else times
        for value in each.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner, inside)


def _measured(few: Any, many: Any, *, choices: int, slots_of: int) -> Kept:
    """Returns the bytes a token of an array that is in both traces."""
    rows = _ROWS[1] - _ROWS[0]
    elements = (math.prod(many.shape) - math.prod(few.shape)) / (rows * _TOKENS)
    bytes_ = elements * jnp.dtype(few.dtype).itemsize
    grown = {pair for pair in zip(few.shape, many.shape, strict=True) if pair[0] != pair[1]}
    tokens = tuple(rows * _TOKENS for rows in _ROWS)
    if choices and tuple(n * choices for n in tokens) in grown:
        return Kept(rows=bytes_)
    if slots_of and _has_slots(few.shape, many.shape, slots_of):
        return Kept(rows=bytes_)
    # Rows and tokens in one dimension: what a dispatcher sees, of all devices that share tokens.
    return Kept(whole=bytes_) if tokens in grown else Kept(split=bytes_)


def _has_slots(few: tuple[int, ...], many: tuple[int, ...], experts: int) -> bool:
    """Returns whether an array has slots: [..., E, B C, D], or flat, [..., E B C, D]."""
    for i, (a, b) in enumerate(zip(few, many, strict=True)):
        if a == b or (a, b) in (_ROWS, tuple(rows * _TOKENS for rows in _ROWS)):
            continue
        if (i and few[i - 1] == experts) or a % (_ROWS[0] * experts) == 0:
            return True
    return False
