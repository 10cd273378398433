"""Differential attention: the difference of two softmax attentions.

Source: Ye et al., Differential Transformer, arXiv:2410.05258, eq. 1 to 3; the grouping of heads is
that of the released code.

Letters: H query heads and G key and value heads, of Dh entries, which form pairs.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.kernels.flash_attention import MaskSpec
from moelib.layers.attention.cached import attend_to_cache
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.on_mesh import attend
from moelib.layers.base import FLOAT32, BaseLayer
from moelib.layers.carry import carried, carry
from moelib.layers.initializers import normal
from moelib.layers.norm import RMSNorm


class DifferentialAttention(GroupedQueryAttention):
    """Softmax attention of the first heads of pairs, minus lambda times that of the second heads.

    A pair has two queries, two keys and one value of 2 Dh entries, so that projections and their
    parameters are those of grouped-query attention with H heads. Both attentions are flash
    attention with the same values: together 1.5 times the FLOPs of grouped-query attention.
    """

    @config_class
    class Config(GroupedQueryAttention.Config):
        # lambda at the start, in every layer. None for 0.8 - 0.6 exp(-0.3 depth): depth counts the
        # layers of this kind from 0. A pipeline, which carries no depth, requires a number.
        lambda_init: float | None = None
        eps: float = 1e-5  # Added to the mean square in the norm of each head.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        for name, number in (("num_heads", cfg.num_heads), ("num_kv_heads", self._num_kv_heads)):
            if number % 2:
                raise UserError(
                    f"{self._title()}: {name}={number}: differential attention takes heads in "
                    "pairs; set an even number."
                )
        if cfg.sinks:
            raise UserError(f"{self._title()}: sinks=True: differential attention has none.")
        norm = RMSNorm.default_config().set(dim=2 * self._head_dim, eps=cfg.eps)
        self._add_child("head_norm", norm)

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        vector = ParameterSpec(
            (self._head_dim,), (None,), initializer=normal(std=0.1), weight_decay_scale=0, **FLOAT32
        )
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        return super()._create_layer_parameter_specs() | dict.fromkeys(names, vector)

    def _create_layer_carry_specs(self, batch_size: int, seq_len: int) -> dict[str, ParameterSpec]:
        del batch_size, seq_len
        depth = ParameterSpec((), (), "float32")
        return {"depth": depth} if self.config.lambda_init is None else {}

    def _attend(
        self,
        q: Float[Array, "B S H Dh"],
        k: Float[Array, "B S G Dh"],
        v: Float[Array, "B S G Dh"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None,
        sinks: Float[Array, "H"] | None,
    ) -> Float[Array, "B S H Dh"]:
        del sinks
        cfg, (batch, seq_len, _, dim) = self.config, q.shape
        spec = MaskSpec(dim**-0.5, window=cfg.window, logit_cap=cfg.logit_cap)
        q = q.reshape(batch, seq_len, -1, 2, dim)  # [B, S, H / 2, 2, Dh]
        cached = self._store(k, v, positions, segment_ids)
        if cached is None:
            k, v = k.reshape(batch, seq_len, -1, 2, dim), v.reshape(batch, seq_len, -1, 2 * dim)
            parts = (
                attend(q[:, :, :, i], k[:, :, :, i], v, segment_ids, spec=spec) for i in (0, 1)
            )
        else:
            k, v = (x.reshape(batch, -1, 2, *x.shape[2:]) for x in cached)  # [B, G / 2, 2, L, Dh]
            v = jnp.concatenate([v[:, :, 0], v[:, :, 1]], -1)
            at = (v, positions, None, spec)
            parts = (attend_to_cache(q[:, :, :, i], k[:, :, i], *at) for i in (0, 1))
        first, second = parts  # [B, S, H / 2, 2 Dh]
        start = self._lambda_init()
        weight = (self._lambda() + start).astype(first.dtype)
        out = self.head_norm(first - weight * second) * (1 - start).astype(first.dtype)
        return out.reshape(batch, seq_len, -1, dim)

    def _lambda_init(self) -> Float[Array, ""]:
        """Returns the lambda of this depth at the start (section 2.1 of the paper)."""
        if self.config.lambda_init is not None:
            return jnp.asarray(self.config.lambda_init, jnp.float32)
        depth = carried(self, "depth")
        carry(self, depth=depth + 1)
        return 0.8 - 0.6 * jnp.exp(-0.3 * depth)

    def _lambda(self) -> Float[Array, ""]:
        """Returns the learned part of lambda (eq. 2), and logs it."""
        p = self.parameters
        exponents = (jnp.sum(p[f"lambda_q{i}"] * p[f"lambda_k{i}"]) for i in (1, 2))
        first, second = map(jnp.exp, exponents)
        self.add_summary("learned_lambda", first - second)
        return first - second

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        total = super()._own_forward_flops_per_token(seq_len)
        projections = BaseLayer._own_forward_flops_per_token(self, seq_len)
        return projections + 1.5 * (total - projections)


class UseDifferentialAttention(ConfigModifier):
    """Replaces grouped-query attention in a trainer's model."""

    @config_class
    class Config(ConfigModifier.Config):
        lambda_init: float | None = None  # See `DifferentialAttention`.

    def __call__(self, cfg):
        """Returns the changed config of a trainer."""
        new = DifferentialAttention.default_config().set(lambda_init=self.config.lambda_init)
        replace_layer_config_recursively(cfg.model, GroupedQueryAttention, new)
        return cfg
