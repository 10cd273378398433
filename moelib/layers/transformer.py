"""Transformer layers, and stacks of them as a loop or as a scan over repeated blocks."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
)
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.context import remat_in_context, scan_in_context
from moelib.core.errors import UserError
from moelib.core.module import in_context
from moelib.core.tree import array_text
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer
from moelib.layers.carry import carrying, initial_carry, put_back
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import add_pooled_balance_loss, balance_pool
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.layers.remat import names_checked_together
from moelib.layers.tracing import HIDDEN, trace
from moelib.parallel.sharding import constrain

_MAX_LAYERS = 10_000  # Far above any model; far more would be built for hours.

if TYPE_CHECKING:  # The fields of a part may be set without a check for None.
    _Part = BaseLayer.Config | Any
else:
    _Part = BaseLayer.Config | None

# The residual stream, and what layers carry besides it.
Stream = tuple[Array, dict[str, Array]]


class TransformerLayer(BaseLayer):
    """Pre-norm layer: x += attention(norm(x)); x += feed_forward(norm(x)).

    `self_attention` holds any layer that mixes the tokens of a document, with the method
    `forward(x [B S D], *, positions [B S], segment_ids [B S] | None) -> [B S D]`. A token sees
    itself and earlier tokens of its segment; segment 0 is padding, which changes no other token. To
    generate without computing all tokens again, the layer declares `_create_layer_cache_specs`.
    Called with a cache, it gets whole prompts (S above 1, padded at the end), then one new token of
    each sequence (S = 1), and returns the cache with them by `put_cache`.

    With `output_norm` and without `norm` it is the layer of OLMo 2, arXiv:2501.00656: x +=
    norm(attention(x)); x += norm(feed_forward(x)). A layer may have one of the two parts alone, as
    in Nemotron-H, arXiv:2504.03624.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        # Mixes tokens; None for a layer of `feed_forward` alone.
        self_attention: _Part = GroupedQueryAttention.default_config()
        # FeedForward or MoELayer; None for a layer of `self_attention` alone.
        feed_forward: _Part = FeedForward.default_config()
        # Norm of the inputs of both; None for none.
        norm: BaseNorm.Config | None = RMSNorm.default_config()
        # Norm of the outputs of both, before they are added; None for none.
        output_norm: BaseNorm.Config | None = None
        # Factor of the outputs of both, as in depth-muP (arXiv:2310.02244) and Granite; None for 1.
        residual_scale: PositiveFloat | None = None

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        parts = {"attention": "self_attention", "feed_forward": "feed_forward"}
        parts = {name: part for name, part in parts.items() if getattr(cfg, part) is not None}
        if not parts:
            raise UserError(
                f"{self._title()}: self_attention=None and feed_forward=None; set one of them, or "
                "remove the layer."
            )
        for name, part in parts.items():
            if cfg.norm is not None:
                self._add_child(f"{name}_norm", cfg.norm.clone(dim=cfg.input_dim))
            self._add_child(part, getattr(cfg, part).clone(input_dim=cfg.input_dim))
            if cfg.output_norm is not None:
                self._add_child(f"{name}_output_norm", cfg.output_norm.clone(dim=cfg.input_dim))

    def forward(
        self,
        x: Float[Array, "B S D"],
        *,
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
        mask: Bool[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output.

        Args:
            x: The residual stream.
            positions: Position of each token in its document.
            segment_ids: Number of each token's document; None for one document per sequence.
            mask: False for padding; None for no padding.
        """
        stream = ("batch", "residual_sequence", "activation_embed")
        if self.config.self_attention is not None:
            y = self._normalized("attention_norm", x)
            y = self.self_attention(y, positions=positions, segment_ids=segment_ids)
            x = constrain(x + self._to_residual("attention", x, y), stream)
        if self.config.feed_forward is not None:
            y = self.feed_forward(self._normalized("feed_forward_norm", x), mask)
            x = constrain(x + self._to_residual("feed_forward", x, y), stream)
        trace(self, HIDDEN, lambda: x)
        return x

    def _normalized(self, norm: str, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Returns the output of a norm, or x if the layer has none of this name."""
        return self.children[norm](x) if norm in self.children else x

    def _to_residual(self, part: str, x: Float[Array, "B S D"], y: Any) -> Float[Array, "B S D"]:
        """Returns what the output of attention or of the feed-forward layer adds to the stream."""
        if getattr(y, "shape", None) != x.shape:  # Another shape may broadcast.
            layer = self.self_attention if part == "attention" else self.feed_forward
            raise UserError(
                f"{layer._title()} returned {array_text(y)}; return an array of the shape "
                f"{list(x.shape)} of its input."
            )
        y, scale = self._normalized(f"{part}_output_norm", y), self.config.residual_scale
        return y if scale is None else y * scale


class BaseStack(BaseLayer):
    """L transformer layers: individual first layers, then a repeated block of layers.

    The outermost stack adds the balance loss of MoE layers whose scope is ALL_LAYERS.
    """

    pools_balance_loss: ClassVar[bool] = True

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_layers: Required[PositiveInt] = REQUIRED  # L, the first layers included.
        first_layers: list[BaseLayer.Config] = []  # Layers before the repeated block.
        # Layers of the block, repeated until there are num_layers.
        block: list[BaseLayer.Config] = [TransformerLayer.default_config()]
        # Wraps each first layer and each block for recomputation (moelib.layers.remat.remat); None
        # saves all activations.
        remat: InstantiableConfig | None = None

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.num_layers > _MAX_LAYERS:
            raise UserError(
                f"{self._title()}: num_layers={cfg.num_layers}; set {_MAX_LAYERS} at most."
            )
        repeated = cfg.num_layers - len(cfg.first_layers)
        if not cfg.block or repeated < 0 or repeated % len(cfg.block):
            raise UserError(
                f"{self._title()}: num_layers={cfg.num_layers}, less {len(cfg.first_layers)} first "
                f"layers, does not divide into blocks of {len(cfg.block)}; change num_layers."
            )
        self._repeats = repeated // len(cfg.block)
        self._remat_first = self._remat(prevent_cse=True)
        for i, layer in enumerate(cfg.first_layers):
            self._add_layer(f"layer{i}", layer)

    def _add_layer(self, name: str, cfg: BaseLayer.Config) -> None:
        self._add_child(name, cfg.clone(input_dim=self.config.input_dim))

    def _remat(self, **options: bool) -> Callable[[Callable], Callable] | None:
        """Returns the wrapper of `remat`, with those of the options that it has."""
        cfg = self.config.remat
        if cfg is None:
            return None
        return cfg.clone(**{name: on for name, on in options.items() if name in cfg}).instantiate()

    def forward(self, x: Float[Array, "B S D"], **side_inputs: Any) -> Float[Array, "B S D"]:
        """Returns the last layer's output; the side inputs go to every layer."""
        stream = x, initial_carry(self, x)
        with names_checked_together():
            stream = self._apply_first(stream, side_inputs)
            x, carried = self._apply_blocks(stream, side_inputs) if self._repeats else stream
        put_back(carried)
        if balance_pool(self) is None:
            add_pooled_balance_loss(self)
        return x

    def _apply_first(self, stream: Stream, side_inputs: dict[str, Any]) -> Stream:
        """Returns the output of the first layers."""
        for i in range(len(self.config.first_layers)):
            stream = self._apply([f"layer{i}"], stream, side_inputs, self._remat_first)
        return stream

    @abstractmethod
    def _apply_blocks(self, stream: Stream, side_inputs: dict[str, Any]) -> Stream:
        """Returns the output of the repeated blocks."""

    def _apply(
        self,
        names: Sequence[str],
        stream: Stream,
        side_inputs: dict[str, Any],
        remat: Callable[[Callable], Callable] | None,
    ) -> Stream:
        """Returns the output of a sequence of children, wrapped by `remat` as one block."""

        def run(stream: Stream) -> Stream:
            x, carried = stream
            with carrying(carried) as carried:
                for name in names:
                    x = self.children[name](x, **side_inputs)
            return x, carried

        if remat is None:
            return run(stream)
        return remat_in_context(run, stream, remat=remat, children=names)


class LoopStack(BaseStack):
    """The layers one after another; each is compiled separately."""

    def __init__(self, cfg: BaseStack.Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        self._remat_block = self._remat(prevent_cse=True)
        first = len(self.config.first_layers)
        for i, layer in enumerate(self.config.block * self._repeats):
            self._add_layer(f"layer{first + i}", layer)

    def _apply_blocks(self, stream: Stream, side_inputs: dict[str, Any]) -> Stream:
        cfg = self.config
        for start in range(len(cfg.first_layers), cfg.num_layers, len(cfg.block)):
            names = [f"layer{start + j}" for j in range(len(cfg.block))]
            stream = self._apply(names, stream, side_inputs, self._remat_block)
        return stream


class ScanStack(BaseStack):
    """The repeated blocks as one scan: parameters stacked, compiled once at any depth.

    Parameters are those of a `LoopStack`, stacked: the same keys give the same values.
    """

    def __init__(self, cfg: BaseStack.Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        self._remat_block = self._remat()
        for j, layer in enumerate(self.config.block if self._repeats else []):
            self._add_layer(f"repeated{j}", layer)

    def copies(self, child: str) -> tuple[str, ...] | None:
        """Returns the names that the copies of a layer of the block have in a `LoopStack`."""
        if not child.startswith("repeated"):
            return None
        cfg = self.config
        start = len(cfg.first_layers) + int(child.removeprefix("repeated"))
        return tuple(f"layer{i}" for i in range(start, cfg.num_layers, len(cfg.block)))

    @property
    def num_blocks(self) -> int:
        """The number of repeated blocks."""
        return self._repeats

    @property
    def _block_names(self) -> list[str]:
        return [f"repeated{j}" for j in range(len(self.config.block))]

    @in_context
    def forward_first(
        self, x: Float[Array, "B S D"], side_inputs: dict[str, Any]
    ) -> Float[Array, "B S D"]:
        """Returns the input of the first block, without a check of the names in `remat`.

        No layer inside may carry values to the next one.
        """
        with names_checked_together(check=False):
            return self._apply_first((x, {}), side_inputs)[0]

    @in_context
    def forward_block(
        self, x: Array, block: Array, key: Array | None, side_inputs: dict[str, Any]
    ) -> Array:
        """Returns the output of one block, whose parameters are the state of this context.

        The block is recomputed in its backward pass as `remat` says. No layer inside may carry
        values to the next one.

        Args:
            x: The residual stream.
            block: Number of the block.
            key: Random key of the whole stack.
            side_inputs: Arguments of every layer.
        """
        names, context = self._block_names, self.get_invocation_context()
        if key is not None:
            context.prng_key = jax.random.fold_in(key, block)
            context.child_keys = {name: self._child_key(key, name)[block] for name in names}
        return self._apply(names, (x, {}), side_inputs, self._remat_block)[0]

    def _apply_blocks(self, stream: Stream, side_inputs: dict[str, Any]) -> Stream:
        names = self._block_names

        def run(stream: Stream, _: None) -> tuple[Stream, None]:
            return self._apply(names, stream, side_inputs, None), None

        context = self.get_invocation_context()
        key, state = context.key(), context.state or {}
        stream, _ = scan_in_context(
            run,
            carry=stream,
            length=self._repeats,
            state={name: state.get(name, {}) for name in names},
            child_keys={} if key is None else {n: self._child_key(key, n) for n in names},
            remat=self._remat_block,
        )
        return stream
