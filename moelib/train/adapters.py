"""Low-rank adapters of a model or run: the layers that have one, and all other weights frozen."""

import re
from typing import Any

from moelib.core.config import ConfigBase, config_class
from moelib.core.config_modifier import ConfigModifier
from moelib.core.config_text import sub_configs
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.layers.adapter import ADAPTERS, LowRank
from moelib.layers.base import BaseLayer
from moelib.layers.moe.balance import BiasBalancing, LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.layer import MoELayer
from moelib.learner.learner import UpdateType
from moelib.models.causal_lm import CausalLM

# Parameters that `train_router` leaves trained: those of routers, and the counts of their loads.
_ROUTERS = r".*/(router|load_counter)/.*"


def add_adapters(
    cfg: Any,
    targets: str = ".*",
    *,
    rank: int = 16,
    alpha: float = 32.0,
    rank_of_experts: int | None = None,
    rs_lora: bool = False,
    train_router: bool = False,
) -> Any:
    """Sets the adapters of a config's layers; returns the config.

    A trainer's rules of updates are replaced: only adapters have gradients and state of the
    optimizer. Of a model alone, only weights with an adapter are frozen. Losses and biases that
    balance the load of experts are turned off.

    Args:
        cfg: Config of a model or trainer, which is changed.
        targets: Regular expression of whole paths of layers in the model's config, such as
            r".*self_attention"; by default all layers with projections, except the head.
        rank: Rank of the adapters, 1 or more.
        alpha: Numerator of their scale, alpha / rank.
        rank_of_experts: Rank for each expert; None for rank / K, at least 1, with K experts per
            token.
        rs_lora: Whether the scale is alpha / sqrt(rank).
        train_router: Whether routers are trained, and the load is balanced as before.

    Raises:
        UserError: If `targets` is no regular expression, or matches no layer with projections.
        ValueError: If a rank or alpha is not positive.
    """
    model = cfg.model if "model" in cfg else cfg
    adapter = LowRank.default_config().set(rank=rank, alpha=alpha, rs_lora=rs_lora)
    layers, ranks = _adaptable(model), {}
    for _, layer in sub_configs(model):
        if isinstance(layer, MoELayer.Config):
            ranks[id(layer.experts)] = max(1, rank // layer.num_experts_per_token)
            if not train_router:
                _stop_balancing(layer)
    for path in _matched(targets, layers):
        layer, own_rank = layers[path], rank
        if id(layer) in ranks:
            own_rank = ranks[id(layer)] if rank_of_experts is None else rank_of_experts
        layer.adapter = adapter.clone(rank=own_rank)
    if "model" in cfg:
        kept = [ADAPTERS, *([_ROUTERS] if train_router and ranks else [])]
        trained = [(pattern, UpdateType.OPTIMIZERS) for pattern in kept]
        cfg.learner.update_rules = [*trained, (".*", UpdateType.NO_UPDATE)]
    return cfg


def _adaptable(model: ConfigBase) -> dict[str, BaseLayer.Config]:
    """Returns the configs of layers with projections, by path, without the head."""
    head = model.lm_head if isinstance(model, CausalLM.Config) else None
    return {
        path: layer
        for path, layer in sub_configs(model)
        if isinstance(layer, BaseLayer.Config) and layer.klass.projections and layer is not head
    }


def _matched(targets: str, paths: Any) -> list[str]:
    try:
        matched = [path for path in paths if re.fullmatch(targets, path)]
    except re.error as error:
        raise UserError(
            f"targets={targets!r} is no regular expression ({error}); set it to one, such as "
            "'.*self_attention'."
        ) from None
    if not matched:
        raise UserError(
            f"targets={targets!r} matches no layer that can have an adapter; these can: "
            f"{', '.join(paths) or 'none'}."
        )
    return matched


def _stop_balancing(layer: MoELayer.Config) -> None:
    """Sets weights and rates of balancing to 0; the parameters of the layer stay the same."""
    for _, inside in sub_configs(layer):
        if isinstance(inside, LoadBalanceLoss.Config | RouterZLoss.Config):
            inside.weight = 0.0
        elif isinstance(inside, BiasBalancing.Config):
            inside.rate = 0.0


class AddAdapters(ConfigModifier):
    """`add_adapters` as a modifier of a config, such as a mesh rule."""

    @config_class
    class Config(ConfigModifier.Config):
        targets: str = ".*"  # Regular expression of whole paths of layers in the model's config.
        rank: PositiveInt = 16  # Rank of the adapters.
        alpha: PositiveFloat = 32.0  # Numerator of their scale.
        rank_of_experts: PositiveInt | None = None  # Rank for each expert; None for rank / K.
        rs_lora: bool = False  # Whether the scale is alpha / sqrt(rank), instead of alpha / rank.
        train_router: bool = False  # Whether routers are trained, and the load is balanced.

    def __call__(self, cfg: Any) -> Any:
        """Returns the config with adapters."""
        fields = {name: value for name, value in self.config.items() if name != "klass"}
        return add_adapters(cfg, fields.pop("targets"), **fields)
