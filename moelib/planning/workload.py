"""What a config's training step holds and computes, read from the model without a mesh.

Parameters and the optimizer's state are known exactly, by their specs. What the forward pass leaves
for the backward pass is read from the model's own trace at a few tokens, whatever layers it has:
`jax.vjp` says what is kept without recomputation; the names and matmuls in the forward pass, what a
remat policy keeps of it. All of it grows with the tokens.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config_path import sub_configs
from moelib.core.module import functional
from moelib.core.param import ParameterSpec, is_spec, may_cast
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.learner import offload
from moelib.planning.topologies import PlanError
from moelib.train import state as state_lib

# What a few tokens cost is the same for each; rows of two lengths tell them from other sizes.
_ROWS, _TOKENS = 2, 128
_TRACED = _ROWS * _TOKENS

FULL, NONE, OWN = "full", "none", "as it is"
DOTS, DOTS_NO_BATCH = "dots_saveable", "dots_with_no_batch_dims_saveable"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Arrays of one kind.

    Attributes:
        shape: Of each.
        axes: Logical axes.
        itemsize: Bytes of an element as it is stored.
        compute_itemsize: Bytes of an element in the forward pass.
        in_decoder: Whether it is a parameter of a layer that a block repeats, or of its like.
        trained: Whether it has a gradient.
        count: How many there are.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int
    compute_itemsize: int = 0
    in_decoder: bool = False
    trained: bool = False
    count: int = 1

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return math.prod(self.shape) * self.count


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

    def times(self, factor: float) -> "Kept":
        """Returns as much, multiplied."""
        return Kept(self.split * factor, self.whole * factor, self.rows * factor)


@dataclasses.dataclass(frozen=True)
class Moe:
    """The routed experts of a model, taken as alike in all layers.

    Attributes:
        num_layers: Layers that have them.
        num_experts: E.
        num_experts_per_token: K.
        expert_parallel: Whether the dispatcher reaches experts of other devices.
        ring: Whether it gathers tokens for that, and does not send each to its experts.
        buffer_factor: Room for the rows that come to a device over that of an even load; None for
            the most that can come.
    """

    num_layers: int
    num_experts: int
    num_experts_per_token: int
    expert_parallel: bool
    ring: bool
    buffer_factor: float | None


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a training step holds and computes.

    Attributes:
        global_batch_size: Rows of a step.
        seq_len: Tokens of a row.
        parameters: Kinds of parameters.
        optimizer: Kinds of arrays that the learner keeps on the devices.
        num_layers: L.
        num_blocks: What is recomputed together, as often as it is repeated.
        dim: D.
        vocab_size: V.
        compute_itemsize: Bytes of an element of activations.
        kv_width: Elements of keys and values a token and layer.
        moe: The routed experts, if there are any.
        forward_flops: Of a token.
        decoder_flops: Of these, those that a block recomputes.
        routed_flops: Of these, those of routed experts.
        kept: By the name of a remat, what the whole model keeps.
        block: What one block leaves when nothing is recomputed.
    """

    global_batch_size: int
    seq_len: int
    parameters: tuple[Leaf, ...]
    optimizer: tuple[Leaf, ...]
    num_layers: int
    num_blocks: int
    dim: int
    vocab_size: int
    compute_itemsize: int
    kv_width: int
    moe: Moe | None
    forward_flops: float
    decoder_flops: float
    routed_flops: float
    kept: Mapping[str, Kept]
    block: Kept

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.seq_len

    @property
    def model_flops(self) -> float:
        """FLOPs of a training token, nothing computed twice."""
        return 3.0 * self.forward_flops


def read_workload(cfg: Any) -> Workload:
    """Returns what the step of a `SpmdTrainer.Config` holds and computes.

    Raises:
        PlanError: If the model says nothing of its FLOPs, or cannot be traced.
    """
    trainer = _built(cfg)
    specs = trainer.trainer_state_specs
    if not hasattr(trainer.model, "forward_flops_per_token"):
        raise PlanError(
            f"{type(trainer.model).__qualname__} has no forward_flops_per_token(seq_len), without "
            "which no time can be said; define it, or see --compile."
        )
    compute = jnp.dtype(cfg.train_dtype or "float32").itemsize
    learner = [
        spec
        for spec in jax.tree.leaves(specs.learner, is_leaf=is_spec)
        if not (cfg.learner.offload_state and offload.waits(spec))
    ]
    parameters = _parameters(specs.model, cfg.train_dtype)
    model, seq_len = trainer.model, cfg.input.seq_len
    num_layers, num_blocks = _depth(cfg.model)
    moe = _moe(cfg.model, specs.model)
    forward = float(model.forward_flops_per_token(seq_len))
    decoder = getattr(model, "children", {}).get("decoder")
    inside = forward if decoder is None else float(decoder.forward_flops_per_token(seq_len))
    kept, block = _kept(cfg, specs.model, moe, num_blocks)
    return Workload(
        global_batch_size=cfg.input.global_batch_size,
        seq_len=seq_len,
        parameters=parameters,
        optimizer=_grouped(Leaf(s.shape, s.axes, jnp.dtype(s.dtype).itemsize) for s in learner),
        num_layers=num_layers,
        num_blocks=num_blocks,
        dim=_size_of(parameters, "embed"),
        vocab_size=_size_of(parameters, "vocab"),
        compute_itemsize=compute,
        kv_width=_kv_width(parameters, num_layers),
        moe=moe,
        forward_flops=forward,
        decoder_flops=inside,
        routed_flops=0.0 if moe is None else _routed_flops(parameters, moe),
        kept=kept,
        block=block,
    )


def _built(cfg: Any) -> Any:
    from moelib.core.config import REQUIRED

    try:
        given = {"dir": "unused"} if cfg.dir is REQUIRED else {}
        return cfg.clone(**given).instantiate(parent=None)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _parameters(specs: Any, train_dtype: Any) -> tuple[Leaf, ...]:
    def leaf(path: Any, spec: ParameterSpec) -> Leaf:
        stored = jnp.dtype(spec.dtype).itemsize
        cast = train_dtype is not None and may_cast(spec)
        return Leaf(
            spec.shape,
            spec.axes,
            stored,
            jnp.dtype(train_dtype).itemsize if cast else stored,
            in_decoder=path[0].key == "decoder",
            trained=spec.trainable,
        )

    return _grouped(
        leaf(path, spec)
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    )


def _grouped(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    counts = collections.Counter(leaves)
    return tuple(dataclasses.replace(leaf, count=count) for leaf, count in counts.items())


def _size_of(leaves: Iterable[Leaf], axis: str) -> int:
    sizes = (n for leaf in leaves for n, name in zip(leaf.shape, leaf.axes, strict=True))
    names = (name for leaf in leaves for name in leaf.axes)
    return max((n for n, name in zip(sizes, names, strict=True) if name == axis), default=1)


def _depth(model: Any) -> tuple[int, int]:
    """Returns (layers, blocks), of the deepest stack of the model's config."""
    found = [(1, 1)]
    for _, inside in sub_configs(model):
        values = dict(inside.items())
        if isinstance(values.get("num_layers"), int):
            first = len(values.get("first_layers") or ())
            size = len(values.get("block") or (None,))
            layers = values["num_layers"]
            found.append((layers, max((layers - first) // size, 1)))
    return max(found)


def _kv_width(leaves: tuple[Leaf, ...], num_layers: int) -> int:
    """Returns the elements of keys and values a token and layer."""
    for name in ("kv_heads", "heads"):  # Queries and outputs are as wide as keys and values.
        found = [leaf for leaf in leaves if name in leaf.axes and "embed" in leaf.axes]
        if found:
            inside = sum(leaf.size // leaf.shape[leaf.axes.index("embed")] for leaf in found)
            return inside // num_layers
    return 0


def _moe(model: Any, specs: Any) -> Moe | None:
    found = [
        inside
        for _, inside in sub_configs(model)
        if {"num_experts_per_token", "dispatcher"} <= dict(inside.items()).keys()
    ]
    routed = [s for s in jax.tree.leaves(specs, is_leaf=is_spec) if "experts" in s.axes]
    if not found or not routed:
        return None
    cfg = max(found, key=lambda each: each.num_experts)
    dispatcher = cfg.dispatcher.instantiate()
    widest = max(routed, key=lambda spec: spec.size)
    alike = [s for s in routed if s.axes == widest.axes]
    layers = sum(s.shape[0] if s.axes[0] == "layers" else 1 for s in alike)
    return Moe(
        num_layers=layers,
        num_experts=cfg.num_experts,
        num_experts_per_token=cfg.num_experts_per_token,
        expert_parallel=dispatcher.expert_parallel,
        ring=isinstance(dispatcher, RingDispatcher),
        buffer_factor=dict(cfg.dispatcher.items()).get("buffer_factor"),
    )


def _routed_flops(leaves: tuple[Leaf, ...], moe: Moe) -> float:
    routed = sum(leaf.size for leaf in leaves if "experts" in leaf.axes and len(leaf.shape) > 2)
    return 2.0 * routed * moe.num_experts_per_token / moe.num_experts


# -- What is kept --------------------------------------------------------------------------------


def with_remat(model: Any, remat: Any) -> Any:
    """Returns a model's config with the remat of every stack set; None recomputes nothing."""
    model = model.clone()
    for _, inside in sub_configs(model):
        if "remat" in dict(inside.items()):
            inside.remat = remat
    return model


def _kept(
    cfg: Any, specs: Any, moe: Moe | None, num_blocks: int
) -> tuple[dict[str, Kept], Kept]:
    """Returns what the model keeps by the name of a remat, and what one block leaves."""
    plain = with_remat(cfg.model, None)
    loss, args = _traceable(plain, specs, cfg.train_dtype)
    measure = functools.partial(_measured, moe=moe)
    known = {(x.shape, x.dtype) for x in jax.tree.leaves(args[0])}

    def left(loss: Any) -> Kept:
        residuals = jax.eval_shape(lambda p, b: jax.vjp(lambda p: loss(p, b), p)[1], *args)
        arrays = [x for x in jax.tree.leaves(residuals) if (x.shape, x.dtype) not in known]
        return sum((measure(x.shape, x.dtype) for x in arrays), Kept())

    none = left(loss)
    forward = list(_equations(jax.make_jaxpr(loss)(*args).jaxpr))
    point = lambda each: measure(each.outvars[0].aval.shape, each.outvars[0].aval.dtype).times
    total = lambda found: sum((point(e)(times) for e, times in found), Kept())
    named = collections.defaultdict(list)
    for each, times in forward:
        if each.primitive.name == "name":
            named[each.params["name"]].append((each, times))
    dots = [(e, times) for e, times in forward if e.primitive.name == "dot_general"]
    alone = [(e, t) for e, t in dots if not e.params["dimension_numbers"][1][0]]
    itemsize = jnp.dtype(cfg.train_dtype or "float32").itemsize
    dim = max((s.shape[s.axes.index("embed")] for s in _with(specs, "embed")), default=0)
    # The input of each block, and the last hidden state and its gradient.
    full = Kept(split=(num_blocks + 2.0) * dim * itemsize) + total(named["routing"])
    kept = {FULL: full, DOTS: full + total(dots), DOTS_NO_BATCH: full + total(alone), NONE: none}
    kept[OWN] = _own(cfg.model, kept, {name: total(found) for name, found in named.items()})
    if kept[OWN] is None:
        kept[OWN] = left(_traceable(cfg.model, specs, cfg.train_dtype)[0])
    return kept, none.times(1.0 / num_blocks)


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


def _measured(shape: tuple[int, ...], dtype: Any, *, moe: Moe | None) -> Kept:
    """Returns the bytes a token of an array of the trace."""
    size = math.prod(shape)
    if size % _TRACED:
        return Kept()  # It does not grow with the tokens.
    bytes_ = size * jnp.dtype(dtype).itemsize / _TRACED
    if moe and _TRACED * moe.num_experts_per_token in shape:
        return Kept(rows=bytes_)
    # Rows and tokens in one dimension: what a dispatcher sees, of all devices that share tokens.
    return Kept(whole=bytes_) if _TRACED in shape else Kept(split=bytes_)
