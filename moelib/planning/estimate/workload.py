"""What a config's training step holds and computes, read from the model without a mesh."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config import REQUIRED
from moelib.core.config_paths import sub_configs
from moelib.core.param import ParameterSpec, is_spec, may_cast
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.learner import offload
from moelib.planning.estimate.activations import (
    FULL,
    NONE,
    OWN,
    Kept,
    nearest_remat,
    read_kept,
    remat_name,
)
from moelib.planning.hardware.topologies import PlanError


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
class Moe:
    """The routed experts of a model, taken as alike in all layers.

    Attributes:
        num_layers: Layers that have them.
        num_experts: E.
        num_experts_per_token: K.
        expert_parallel: Whether the dispatcher reaches experts of other devices.
        ring: Whether it gathers tokens for that, and does not send each to its experts.
        buffer_factor: Room for the rows that come to a block of experts over that of an even load;
            None for the most that can come.
        buffer_blocks: Blocks of experts that have such room; 1 has a device at least.
        capacity_factor: Slots of an expert over an even load, all of which are sent and computed;
            None where only the rows that are chosen are.
    """

    num_layers: int
    num_experts: int
    num_experts_per_token: int
    expert_parallel: bool
    ring: bool
    buffer_factor: float | None
    buffer_blocks: int
    capacity_factor: float | None


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
        own: The remat that computes as much again as the config's own, as near as can be told.
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
    own: str
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

    def recomputes(self, remat: str) -> bool:
        """Returns whether the backward pass computes anything again."""
        return (self.own if remat == OWN else remat) != NONE

    def computed_again(self, remat: str) -> float:
        """Returns the FLOPs a token of matmuls that the backward pass computes again."""
        if not self.recomputes(remat):
            return 0.0
        name = self.own if remat == OWN else remat
        return self.decoder_flops if name == FULL else self.routed_flops


def read_workload(cfg: Any) -> Workload:
    """Returns what the step of a `SpmdTrainer.Config` holds and computes.

    Raises:
        PlanError: If the model says nothing of its FLOPs, or a setting cannot be.
    """
    trainer = _built(cfg)
    specs = trainer.trainer_state_specs
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
    flops = trainer.flops_per_token()
    if flops is None:
        raise PlanError(
            f"{type(model).__qualname__} has no flops_per_token(seq_len=), without which there is "
            "no time to estimate; define it: the FLOPs of training on a token."
        )
    forward = flops / 3
    decoder = getattr(model, "children", {}).get("decoder")
    inside = forward if decoder is None else float(decoder.forward_flops_per_token(seq_len))
    choices = 0 if moe is None else moe.num_experts_per_token
    slots_of = 0 if moe is None or moe.capacity_factor is None else moe.num_experts
    kept, block = read_kept(
        cfg, specs.model, choices=choices, num_blocks=num_blocks, slots_of=slots_of
    )
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
        own=remat_name(cfg.model) or nearest_remat(kept),
        kept=kept,
        block=block,
    )


def _built(cfg: Any) -> Any:
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
    dispatcher, fields = cfg.dispatcher.instantiate(), dict(cfg.dispatcher.items())
    widest = max(routed, key=lambda spec: spec.size)
    alike = [s for s in routed if s.axes == widest.axes]
    layers = sum(s.shape[0] if s.axes[0] == "layers" else 1 for s in alike)
    return Moe(
        num_layers=layers,
        num_experts=cfg.num_experts,
        num_experts_per_token=cfg.num_experts_per_token,
        expert_parallel=dispatcher.expert_parallel,
        ring=isinstance(dispatcher, RingDispatcher),
        buffer_factor=fields.get("buffer_factor"),
        buffer_blocks=fields.get("buffer_blocks", 1),
        capacity_factor=fields.get("capacity_factor"),
    )


def _routed_flops(leaves: tuple[Leaf, ...], moe: Moe) -> float:
    matrices = (
        leaf
        for leaf in leaves  # Biases have a dimension less.
        if "experts" in leaf.axes and len(leaf.shape) - ("layers" in leaf.axes) > 2
    )
    routed = sum(leaf.size for leaf in matrices)
    return 2.0 * routed * moe.num_experts_per_token / moe.num_experts
