"""The workload of a config's training step, read from the model without a mesh."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moelib.core.config import REQUIRED
from moelib.core.config_text import sub_configs
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, is_spec, specs_by_path
from moelib.core.precision import activation_dtype, compute_dtype, gradient_dtype
from moelib.layers.adapter import adapter_names
from moelib.layers.exchange import Exchange
from moelib.layers.moe.dispatch_ragged import RingDispatcher
from moelib.layers.quantization import Quantization
from moelib.learner import offload
from moelib.learner.learner import Learner
from moelib.models.multi_token_prediction import MULTI_TOKEN
from moelib.planning.estimate.activations import (
    DOTS,
    FULL,
    NONE,
    OWN,
    Saved,
    model_dim,
    nearest_remat,
    read_saved,
    remat_name,
)
from moelib.train.pipeline import stack_of


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Arrays of the same shape, axes and dtypes."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # Logical axes.
    itemsize: int  # Bytes per stored element.
    compute_itemsize: int = 0  # Bytes per element in the forward pass.
    gradient_itemsize: int = 0  # Bytes per element of its gradient in a micro-batch.
    quantized: bool = False  # Whether matmuls read it in 8 bits.
    in_decoder: bool = False  # Whether it is a parameter of layers, in or after the decoder.
    trained: bool = False  # Whether it has a gradient.
    count: int = 1  # Number of such arrays.
    reduce_itemsize: int = 0  # Least bytes per element of sums of its gradient over devices.

    @property
    def size(self) -> int:
        """Elements of all arrays."""
        return math.prod(self.shape) * self.count

    @property
    def is_cast_by_layers(self) -> bool:
        """Whether layers of a stack cast it one by one."""
        is_cast = self.compute_itemsize < self.itemsize and not self.quantized
        return is_cast and self.axes[:1] == ("layers",)

    @property
    def reduced(self) -> float:
        """Bytes of sums of its gradient over devices, over those in the compute dtype."""
        return max(self.reduce_itemsize, self.compute_itemsize) / self.compute_itemsize

    @property
    def gathered_itemsize(self) -> int:
        """Bytes per element of the weights that devices send each other."""
        return 1 if self.quantized else self.compute_itemsize


@dataclasses.dataclass(frozen=True)
class Moe:
    """The routed experts of a model, taken to be alike in all layers."""

    num_layers: int  # Layers with experts.
    num_experts: int  # E.
    num_experts_per_token: int  # K.
    expert_parallel: bool  # Whether the dispatcher reaches experts of other devices.
    ring: bool  # Whether it gathers tokens instead of sending each to its experts.
    # Receive capacity of a round, as a multiple of the balanced load; None for a single round.
    round_factor: float | None
    # Capacity of an expert, as a multiple of the balanced load, sent and computed in full; None for
    # assigned rows only.
    capacity_factor: float | None
    latent_dim: int | None  # Width of the rows that are sent; None for D.


@dataclasses.dataclass(frozen=True)
class Workload:
    """The arrays and the computation of a training step."""

    global_batch_size: int  # Sequences per step.
    seq_len: int  # Tokens per sequence.
    parameters: tuple[Leaf, ...]
    optimizer: tuple[Leaf, ...]  # State of the learner on the devices.
    num_layers: int  # L.
    block_size: int  # Layers of the block that is recomputed as a whole.
    num_blocks: int  # Repetitions of it.
    dim: int  # D.
    vocab_size: int  # V.
    loss_chunk_size: int | None  # Tokens of a chunk of logits, as the model's field.
    compute_dtype: str  # Of matmuls and activations.
    head_dim: int  # Width of an attention head; 1 without attention.
    attention_backend: str | None  # Backend of attention; None for the default.
    # Exchanges of layers where the mesh splits sequences, each with its number of layers.
    exchanges: tuple[tuple[Exchange, int], ...]
    moe: Moe | None
    forward_flops: float  # Per token.
    untrained_flops: float  # Those of `forward_flops` of matrices without a gradient.
    decoder_flops: float  # Those of `forward_flops` that full remat recomputes.
    routed_flops: float  # Those of `forward_flops` in routed experts.
    attention_flops: float  # Those of `forward_flops` between queries, keys and values.
    float8_flops: float  # Those of `forward_flops` in dots of 8-bit floats, where there are units.
    untrained_float8_flops: float  # Those of `float8_flops` of matrices without a gradient.
    pipeline_refusal: str  # Why its layers cannot be spread over a pipeline; "" if they can.
    # Per token, of products of routed rows with A B of a layer's adapters, until they are added.
    adapted_bytes: float
    own_remat: str  # The named remat that recomputes as much as the config's own, or nearly.
    saved: Mapping[str, Saved]  # Saved activations of the model, by remat.

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch_size * self.seq_len

    @property
    def routed_dim(self) -> int:
        """Width of the rows that are sent to experts."""
        return (self.moe.latent_dim if self.moe else None) or self.dim

    @property
    def num_first_layers(self) -> int:
        """Layers before the blocks, each recomputed as a whole."""
        return self.num_layers - self.block_size * self.num_blocks

    @functools.cached_property
    def block(self) -> Saved:
        """Saved activations of a block without remat, if all layers save as much."""
        return self.saved[NONE].times(self.block_size / self.num_layers)

    @property
    def num_inner_experts(self) -> int:
        """Layers with experts before the last layer of their block, taken to have experts too."""
        layers = self.moe.num_layers if self.moe else 0
        inner = self.num_blocks * (self.block_size - 1)
        return max(min(inner, layers - self.num_blocks), 0)

    @functools.cached_property
    def compute_itemsize(self) -> int:
        """Bytes per element of activations."""
        return jnp.dtype(self.compute_dtype).itemsize

    @property
    def model_flops(self) -> float:
        """FLOPs per trained token, without recomputation."""
        return 3.0 * self.forward_flops - self.untrained_flops

    @property
    def routed_products(self) -> int:
        """Products of a row with a matrix of routed experts: forward, and for each gradient."""
        routed = [leaf for leaf in self.parameters if "experts" in leaf.axes]
        return 3 if not routed or max(routed, key=lambda leaf: leaf.size).trained else 2

    def recomputes(self, remat: str) -> bool:
        """Returns whether the backward pass recomputes anything."""
        return (self.own_remat if remat == OWN else remat) != NONE

    def recomputes_matmuls(self, remat: str) -> bool:
        """Returns whether the backward pass recomputes dense matmuls, too."""
        return (self.own_remat if remat == OWN else remat) == FULL

    def alike(self, remat: str) -> str:
        """Returns the remat that stands for all that recompute as many matmuls."""
        return FULL if self.recomputes_matmuls(remat) else DOTS if self.recomputes(remat) else NONE

    def recomputed_flops(self, remat: str) -> float:
        """Returns the FLOPs per token in addition to the model's, which the backward pass repeats.

        A flash kernel recomputes the scores: its backward pass has five matmuls, its forward pass
        two. Policies that save matmuls do not see into kernels: those of experts and attention.
        """
        scores = 0.5 * self.attention_flops
        if not self.recomputes(remat):
            return scores
        kernels = self.routed_flops + self.attention_flops
        return scores + (self.decoder_flops if self.recomputes_matmuls(remat) else kernels)


def read_workload(cfg: Any) -> Workload:
    """Returns the workload of a `SpmdTrainer.Config`.

    Raises UserError if the model does not count its FLOPs, or a setting is invalid.
    """
    given = {"dir": "unused"} if cfg.dir is REQUIRED else {}
    trainer = cfg.clone(**given).instantiate(parent=None)
    if not trainer.model.is_language_model:
        raise UserError(
            f"model is a {type(trainer.model).__qualname__}: times are estimated for language "
            "models only; measure a short run of it instead."
        )
    specs, seq_len = trainer.trainer_state_specs, cfg.input.seq_len
    learner = [
        spec
        for spec in jax.tree.leaves(specs.learner, is_leaf=is_spec)
        if not (cfg.learner.offload_state and offload.is_offloaded(spec))
    ]
    parameters = _parameters(specs.model, trainer.learner, cfg.train_dtype, cfg.reduce_dtype)
    num_layers, block_size, num_blocks = _depth(cfg.model)
    moe = _moe(cfg.model, specs.model)
    flops = trainer.flops_per_token()
    if flops is None:
        raise UserError(
            f"{type(trainer.model).__qualname__} has no flops_per_token(seq_len=), so that times "
            "cannot be estimated; define it to return the training FLOPs per token."
        )
    untrained = trainer.untrained_flops_per_token()
    forward = (flops + untrained) / 3
    decoder = getattr(trainer.model, "children", {}).get("decoder")
    refusal = ""
    try:
        stack_of(trainer.model)
    except UserError as error:
        refusal = str(error)
    of_decoder = decoder.forward_flops_per_token if decoder else lambda seq_len: forward
    saved = read_saved(
        cfg,
        specs.model,
        is_trained=trainer.learner.is_updated,
        num_recomputed=num_layers - (block_size - 1) * num_blocks,
        num_experts_per_token=moe.num_experts_per_token if moe else 0,
        num_slotted_experts=moe.num_experts if moe and moe.capacity_factor is not None else 0,
    )
    return Workload(
        global_batch_size=cfg.input.global_batch_size,
        seq_len=seq_len,
        parameters=parameters,
        optimizer=_grouped(Leaf(s.shape, s.axes, jnp.dtype(s.dtype).itemsize) for s in learner),
        num_layers=num_layers,
        block_size=block_size,
        num_blocks=num_blocks,
        dim=model_dim(cfg.model, specs.model),
        vocab_size=_size_of(parameters, "vocab"),
        loss_chunk_size=getattr(cfg.model, "loss_chunk_size", None),
        compute_dtype=activation_dtype(cfg),
        head_dim=_size_of(parameters, "head_dim"),
        attention_backend=(cfg.kernel_backends or {}).get("flash_attention"),
        exchanges=tuple(decoder.exchanges(seq_len).items()) if decoder else (),
        moe=moe,
        forward_flops=forward,
        untrained_flops=untrained,
        decoder_flops=float(of_decoder(seq_len)),
        attention_flops=float(of_decoder(seq_len) - of_decoder(1)),  # All that depends on length.
        float8_flops=_float8_flops(specs.model, lambda path: True),
        untrained_float8_flops=_float8_flops(
            specs.model, lambda path: not trainer.learner.is_updated(path)
        ),
        routed_flops=0.0 if moe is None else _routed_flops(parameters, moe),
        pipeline_refusal=refusal,
        adapted_bytes=_adapted_bytes(specs.model, activation_dtype(cfg), moe),
        own_remat=remat_name(cfg.model) or nearest_remat(saved),
        saved=saved,
    )


def _parameters(
    specs: Any, learner: Learner, train_dtype: Any, reduce_dtype: str | None
) -> tuple[Leaf, ...]:
    def leaf(path: str, spec: ParameterSpec) -> Leaf:
        return Leaf(
            spec.shape,
            spec.axes,
            jnp.dtype(spec.dtype).itemsize,
            jnp.dtype(compute_dtype(spec, train_dtype)).itemsize,
            jnp.dtype(gradient_dtype(spec, train_dtype)).itemsize,
            in_decoder=path.split("/", maxsplit=1)[0] in ("decoder", MULTI_TOKEN),
            trained=learner.is_updated(path),
            quantized=spec.quantization is not None,
            reduce_itemsize=jnp.dtype(reduce_dtype).itemsize if reduce_dtype else 0,
        )

    return _grouped(leaf(path, spec) for path, spec in specs_by_path(specs).items())


def _grouped(leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
    counts = collections.Counter(leaves)
    return tuple(dataclasses.replace(leaf, count=count) for leaf, count in counts.items())


def _size_of(leaves: Iterable[Leaf], axis: str) -> int:
    """Returns the largest size of a logical axis."""
    pairs = (pair for leaf in leaves for pair in zip(leaf.axes, leaf.shape, strict=True))
    return max((size for name, size in pairs if name == axis), default=1)


def _depth(model: Any) -> tuple[int, int, int]:
    """Returns (layers, layers of a block, blocks) of the deepest stack of a model's config."""
    found = [(1, 1, 1)]
    for _, inside in sub_configs(model):
        values = dict(inside.items())
        if isinstance(values.get("num_layers"), int):
            first = len(values.get("first_layers") or ())
            size = len(values.get("block") or (None,))
            layers = values["num_layers"]
            repeats = (layers - first) // size
            found.append((layers, size, repeats) if repeats else (layers, 1, layers))
    return max(found)


def _moe(model: Any, specs: Any) -> Moe | None:
    found = [
        inside
        for _, inside in sub_configs(model)
        if "num_experts_per_token" in inside and "dispatcher" in inside
    ]
    routed = [s for s in jax.tree.leaves(specs, is_leaf=is_spec) if "experts" in s.axes]
    if not found or not routed:
        return None
    cfg = max(found, key=lambda each: each.num_experts)
    dispatcher = cfg.dispatcher.instantiate()
    widest = max(routed, key=lambda spec: spec.size)
    of_layer = lambda spec: spec.axes[spec.axes[0] == "layers" :]  # Some may be in no stack.
    alike = [s for s in routed if of_layer(s) == of_layer(widest)]
    return Moe(
        num_layers=sum(s.shape[0] if s.axes[0] == "layers" else 1 for s in alike),
        num_experts=cfg.num_experts,
        num_experts_per_token=cfg.num_experts_per_token,
        expert_parallel=dispatcher.expert_parallel,
        ring=isinstance(dispatcher, RingDispatcher),
        round_factor=getattr(cfg.dispatcher, "round_factor", None),
        capacity_factor=getattr(cfg.dispatcher, "capacity_factor", None),
        latent_dim=getattr(cfg, "latent_dim", None),
    )


def _float8_flops(specs: Any, chosen: Callable[[str], bool]) -> float:
    """Returns the forward FLOPs per token of dense matmuls in 8-bit floats whose path is chosen.

    These are those of schemes with one scale per array; others multiply in bfloat16, and so do
    experts.
    """
    return sum(
        2.0 * spec.size
        for path, spec in specs_by_path(specs).items()
        if spec.quantization is Quantization.FP8_TENSOR
        and "experts" not in spec.axes
        and chosen(path)
    )


def _adapted_bytes(specs: Any, dtype: str, moe: Moe | None) -> float:
    """Returns the bytes per token of the products x A B with adapters of a layer's experts."""
    if moe is None:
        return 0.0
    of_b = adapter_names("")[1]
    outputs = sum(
        spec.size / spec.shape[spec.fan_axes.in_axis[0]]  # Of all layers and experts.
        for path, spec in specs_by_path(specs).items()
        if path.endswith(of_b) and "experts" in spec.axes and spec.fan_axes
    )
    itemsize = jnp.dtype(dtype).itemsize
    rows = moe.num_experts_per_token / (moe.num_experts * moe.num_layers)
    return rows * outputs * itemsize


def _routed_flops(leaves: tuple[Leaf, ...], moe: Moe) -> float:
    """Returns the forward FLOPs per token of the experts' matrices."""
    matrices = (
        leaf
        for leaf in leaves  # Biases have one dimension less.
        if "experts" in leaf.axes and len(leaf.shape) - ("layers" in leaf.axes) > 2
    )
    elements = sum(leaf.size for leaf in matrices)
    return 2.0 * elements * moe.num_experts_per_token / moe.num_experts
