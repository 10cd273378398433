"""Transformer layers and stacks of them, as a loop or as a scan over repeating blocks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
)
from moelib.core.context import Nested, fold_name
from moelib.core.module import nowrap, remat_in_context, scan_in_context
from moelib.core.param import is_spec
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.norm import BaseNorm, RMSNorm
from moelib.parallel.sharding import constrain


class TransformerLayer(BaseLayer):
    """Pre-norm layer: x += attention(norm(x)); x += feed_forward(norm(x))."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        self_attention: BaseLayer.Config = GroupedQueryAttention.default_config()
        feed_forward: BaseLayer.Config = FeedForward.default_config()  # Or a MoELayer.
        norm: BaseNorm.Config = RMSNorm.default_config()

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        self._add_child("attention_norm", cfg.norm.clone(dim=cfg.input_dim))
        self._add_child("self_attention", cfg.self_attention.clone(input_dim=cfg.input_dim))
        self._add_child("feed_forward_norm", cfg.norm.clone(dim=cfg.input_dim))
        self._add_child("feed_forward", cfg.feed_forward.clone(input_dim=cfg.input_dim))

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
            segment_ids: The document of each token in its row; None for one document a row.
            mask: False for padding; None if there is none.
        """
        stream = ("batch", "residual_sequence", "activation_embed")
        y = self.self_attention(
            self.attention_norm(x), positions=positions, segment_ids=segment_ids
        )
        x = constrain(x + y, stream)
        return constrain(x + self.feed_forward(self.feed_forward_norm(x), mask), stream)


class BaseStack(BaseLayer):
    """L transformer layers: some first ones, then a block of layers again and again."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_layers: Required[int] = REQUIRED  # L, the first layers included.
        first_layers: list[BaseLayer.Config] = []  # Layers unlike the rest.
        block: list[BaseLayer.Config] = [TransformerLayer.default_config()]
        remat: InstantiableConfig | None = None  # Wraps each block: moelib.layers.remat.remat.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        repeated = cfg.num_layers - len(cfg.first_layers)
        if not cfg.block or repeated < 0 or repeated % len(cfg.block):
            raise ValueError(
                f"{self._title()}: {cfg.num_layers} layers less {len(cfg.first_layers)} first ones "
                f"do not divide into blocks of {len(cfg.block)}; change num_layers."
            )
        self._repeats = repeated // len(cfg.block)
        self._remat = None if cfg.remat is None else cfg.remat.instantiate()

    def _add_layer(self, name: str, cfg: BaseLayer.Config) -> None:
        self._add_child(name, cfg.clone(input_dim=self.config.input_dim))


class LoopStack(BaseStack):
    """The layers one after another; each is compiled by itself."""

    def __init__(self, cfg: BaseStack.Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.remat is not None:
            self._remat = cfg.remat.clone(prevent_cse=True).instantiate()
        for i, layer in enumerate([*cfg.first_layers, *cfg.block * self._repeats]):
            self._add_layer(f"layer{i}", layer)

    def forward(self, x: Float[Array, "B S D"], **side_inputs: Any) -> Float[Array, "B S D"]:
        """Returns the last layer's output; the side inputs go to every layer."""
        size, first = len(self.config.block), len(self.config.first_layers)
        names = list(self.children)
        for name in names[:first]:
            x = self.children[name](x, **side_inputs)
        repeated = names[first:]
        for start in range(0, len(repeated), size):
            block = repeated[start : start + size]

            def run(x: Array, block: list[str] = block) -> Array:
                for name in block:
                    x = self.children[name](x, **side_inputs)
                return x

            if self._remat is None:
                x = run(x)
            else:
                x = remat_in_context(run, x, remat=self._remat, children=block)
        return x


class ScanStack(BaseStack):
    """The repeated blocks as one scan: parameters stacked, compiled once, whatever the depth.

    Parameters are those of a `LoopStack`, stacked: the same keys give the same values.
    """

    def __init__(self, cfg: BaseStack.Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        for i, layer in enumerate(cfg.first_layers):
            self._add_layer(f"layer{i}", layer)
        for j, layer in enumerate(cfg.block if self._repeats else []):
            self._add_layer(f"repeated{j}", layer)

    @nowrap
    def _repeated(self) -> dict[str, BaseLayer]:
        """Returns the layers of the block, by name."""
        return {n: c for n, c in self._layers().items() if n.startswith("repeated")}

    def _keys(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the keys [repeats] of each layer of the block, as a LoopStack's layers have."""
        first, size = len(self.config.first_layers), len(self.config.block)
        return {
            f"repeated{j}": jnp.stack(
                [fold_name(key, f"layer{first + r * size + j}") for r in range(self._repeats)]
            )
            for j in range(size if self._repeats else 0)
        }

    @nowrap
    def create_parameter_specs_recursively(self) -> Nested:
        """Returns the specs; those of the block are stacked along a first axis "layers"."""
        specs = super().create_parameter_specs_recursively()
        return self._stacked(specs)

    @nowrap
    def create_cache_specs_recursively(self, batch_size: int, length: int) -> Nested:
        """Returns the specs; those of the block are stacked along a first axis "layers"."""
        return self._stacked(super().create_cache_specs_recursively(batch_size, length))

    def _stacked(self, specs: Nested) -> Nested:
        """Returns specs of the layers, those of the block stacked."""
        stack = functools.partial(jax.tree.map, lambda s: s.stacked(self._repeats), is_leaf=is_spec)
        repeated = self._repeated()
        return {name: stack(part) if name in repeated else part for name, part in specs.items()}

    @nowrap
    def initialize_parameters_recursively(
        self, prng_key: jax.Array, *, prebuilt: Nested | None = None
    ) -> Nested:
        """Returns initial parameters; those of the block are stacked along a first axis."""
        self._check_known(prebuilt or {}, {})
        params: Nested = {}
        keys = self._keys(prng_key)
        for name, child in self._layers().items():
            built = (prebuilt or {}).get(name)
            if name not in keys:
                key = fold_name(prng_key, name)
                params[name] = child.initialize_parameters_recursively(key, prebuilt=built)
            elif built is None:
                params[name] = jax.vmap(child.initialize_parameters_recursively)(keys[name])
            else:
                init = child.initialize_parameters_recursively
                params[name] = jax.vmap(lambda k, b, init=init: init(k, prebuilt=b))(
                    keys[name], built
                )
        return params

    @nowrap
    def end_step_recursively(self, state: Nested) -> Nested:
        """Returns the state after an optimizer step."""
        state = dict(state)
        for name in state.keys() & self._layers().keys():
            end_step = self._layers()[name].end_step_recursively
            state[name] = (jax.vmap(end_step) if name in self._repeated() else end_step)(
                state[name]
            )
        return state

    def forward(self, x: Float[Array, "B S D"], **side_inputs: Any) -> Float[Array, "B S D"]:
        """Returns the last layer's output; the side inputs go to every layer."""
        repeated = self._repeated()
        for name, layer in self.children.items():
            if name not in repeated:
                x = layer(x, **side_inputs)
        if not repeated:
            return x

        def run(x: Array, _: None) -> tuple[Array, None]:
            for layer in repeated.values():
                x = layer(x, **side_inputs)
            return x, None

        context = self.get_invocation_context()
        key, state = context.key(), context.state or {}
        x, _ = scan_in_context(
            run,
            carry=x,
            length=self._repeats,
            state={name: state.get(name, {}) for name in repeated},
            child_keys={} if key is None else self._keys(key),
            remat=self._remat,
        )
        return x

    @nowrap
    def active_parameters(self) -> int:
        """Returns how many trainable parameters take part in computing one token."""
        return sum(self._times(n) * c.active_parameters() for n, c in self._layers().items())

    @nowrap
    def forward_flops_per_token(self, seq_len: int) -> float:
        """Returns the forward FLOPs a token."""
        return sum(
            self._times(n) * c.forward_flops_per_token(seq_len) for n, c in self._layers().items()
        )

    def _times(self, name: str) -> int:
        return self._repeats if name in self._repeated() else 1
