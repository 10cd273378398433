"""What the forward pass keeps for the backward pass, read from the model's own trace.

`jax.vjp` says what is kept where nothing is computed again, whatever layers there are; the names
and matmuls in the forward pass, what a remat policy keeps of it. The trace is of a few tokens on
one device: all of it grows with the tokens.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_path import sub_configs
from moelib.core.module import functional
from moelib.core.param import ParameterSpec, is_spec, may_cast

# What a few tokens cost is the same for each; rows of two lengths tell them from other sizes.
_ROWS, _TOKENS = 2, 128
_TRACED = _ROWS * _TOKENS

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


def read_kept(
    cfg: Any, specs: Any, *, choices: int, num_blocks: int
) -> tuple[dict[str, Kept], Kept]:
    """Returns what a model keeps by the name of a remat, and what one block leaves without.

    Args:
        cfg: A `SpmdTrainer.Config`.
        specs: Those of its model's parameters.
        choices: Experts that a token goes to; 0 without experts.
        num_blocks: How often a block is repeated.
    """
    loss, args = _traceable(with_remat(cfg.model, None), specs, cfg.train_dtype)
    measure = functools.partial(_measured, choices=choices)
    none = _left(loss, args, measure)
    named: dict[str, Kept] = collections.defaultdict(Kept)
    dots = alone = Kept()
    for each, times in _equations(jax.make_jaxpr(loss)(*args).jaxpr):
        if each.primitive.name not in ("name", "dot_general"):
            continue
        result = each.outvars[0].aval
        size = measure(result.shape, result.dtype).times(times)
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
    own = _own(cfg.model, kept, named)
    if own is None:
        own = _left(_traceable(cfg.model, specs, cfg.train_dtype)[0], args, measure)
    return kept | {OWN: own}, none.times(1.0 / num_blocks)


def _left(loss: Any, args: Any, measure: Callable[..., Kept]) -> Kept:
    """Returns what the forward pass of a loss leaves, but for parameters."""
    known = {(x.shape, x.dtype) for x in jax.tree.leaves(args[0])}
    floats = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), args[0])

    def backward(params: Any, batch: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        chosen = jax.tree.leaves(floats)

        def of(trained: list[Any]) -> Any:
            rest = iter(trained)
            pairs = zip(leaves, chosen, strict=True)
            merged = [next(rest) if is_float else leaf for leaf, is_float in pairs]
            return loss(jax.tree.unflatten(structure, merged), batch)

        return jax.vjp(of, [x for x, is_float in zip(leaves, chosen, strict=True) if is_float])[1]

    residuals = jax.eval_shape(backward, *args)
    arrays = [x for x in jax.tree.leaves(residuals) if (x.shape, x.dtype) not in known]
    return sum((measure(x.shape, x.dtype) for x in arrays), Kept())


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


def _traceable(model: Any, specs: Any, train_dtype: Any) -> tuple[Any, tuple[Any, Any]]:
    """Returns the loss of a model's config, and shapes of its arguments at a few tokens."""
    built = model.clone(name="model").instantiate(parent=None)
    dtype = lambda s: train_dtype if train_dtype is not None and may_cast(s) else s.dtype
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype(s))), specs, is_leaf=is_spec
    )
    ids = jax.ShapeDtypeStruct((_ROWS, _TOKENS), jnp.int32)
    batch = dict.fromkeys(("input_ids", "target_labels", "segment_ids", "positions"), ids)

    def loss(params: Any, batch: Any) -> jax.Array:
        key = jax.random.key(0)
        (out, _), collection = functional(built, key, params, (batch,), is_training=True)
        return out.mean + collection.total_aux_loss()

    return loss, (params, batch)


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


def _measured(shape: tuple[int, ...], dtype: Any, *, choices: int) -> Kept:
    """Returns the bytes a token of an array of the trace."""
    size = math.prod(shape)
    if size % _TRACED:
        return Kept()  # It does not grow with the tokens.
    bytes_ = size * jnp.dtype(dtype).itemsize / _TRACED
    if choices and _TRACED * choices in shape:
        return Kept(rows=bytes_)
    # Rows and tokens in one dimension: what a dispatcher sees, of all devices that share tokens.
    return Kept(whole=bytes_) if _TRACED in shape else Kept(split=bytes_)
