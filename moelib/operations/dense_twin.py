"""The dense twin of a Mixture-of-Experts config: the same model with dense feed-forward layers."""

import dataclasses
from typing import Any

from moelib.core.config import InstantiableConfig, config_origin
from moelib.core.config_text import set_at, sub_configs
from moelib.core.errors import UserError
from moelib.layers.activation import Activation
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer

MULTIPLE = 8  # Divides hidden sizes, so that devices can share them.


@dataclasses.dataclass(frozen=True)
class DenseTwin:
    """The twin of a config, and how nearly it has the same FLOPs."""

    config: Any  # Config of the trainer.
    hidden_dims: dict[str, int]  # Hidden size of each layer that was an MoE layer, by path.
    moe_flops: float  # FLOPs per training token.
    dense_flops: float

    @property
    def difference(self) -> float:
        """The twin's FLOPs over the MoE model's, minus 1."""
        return self.dense_flops / self.moe_flops - 1


def dense_twin(cfg: Any, *, width: float = 1.0, multiple_of: int = MULTIPLE) -> DenseTwin:
    """Returns the dense twin of a trainer's config, which is not changed.

    Every MoE layer becomes a `FeedForward` layer whose FLOPs per token are those of its router, K
    experts and shared experts, with the hidden size rounded to the nearest multiple. Its activation
    is that of the experts, or SwiGLU if they have no such field. Everything else is equal, seed and
    data included, except that no routing is logged. Biases of experts, without matmul FLOPs, have
    no twin.

    Args:
        cfg: Config of a trainer of a language model.
        width: Factor of the hidden sizes.
        multiple_of: Rounding of the hidden sizes.

    Raises:
        UserError: If the model has no MoE layer.
    """
    watchers = {k: x for k, x in cfg.watchers.items() if not x.klass.watches_experts}
    moe, twin = cfg.model, cfg.clone(watchers=watchers)
    dims: dict[str, int] = {}
    layers = [(path, x) for path, x in sub_configs(moe) if isinstance(x, MoELayer.Config)]
    if not layers:
        raise UserError("model has no MoE layer; name a config with one.")
    for path, layer in layers:
        dense = _dense_layer(layer, moe.dim, width, multiple_of)
        with config_origin("--twin"):
            set_at(twin.model, path, dense)
        dims[path] = dense.hidden_dim
    before, after = (
        x.clone(name="model").instantiate(parent=None).flops_per_token(seq_len=cfg.input.seq_len)
        for x in (moe, twin.model)
    )
    return DenseTwin(config=twin, hidden_dims=dims, moe_flops=before, dense_flops=after)


def _dense_layer(
    cfg: MoELayer.Config, dim: int, width: float, multiple_of: int
) -> FeedForward.Config:
    """Returns the dense layer of an MoE layer; both in a stream of `dim` features."""
    if isinstance(cfg.input_dim, int):
        dim = cfg.input_dim
    # A scope over all layers requires a stack, and no loss has matmuls.
    alone = cfg.clone(input_dim=dim, name="moe", load_balance_loss=None)
    flops = alone.instantiate(parent=None).forward_flops_per_token(seq_len=1)
    activation = dict(cfg.experts.items()).get("activation", Activation.SWIGLU)
    per_hidden = 2.0 * dim * (activation.num_projections + 1)
    hidden = max(1, round(width * flops / per_hidden / multiple_of)) * multiple_of
    dense: Any = FeedForward.default_config()
    fields: dict[str, Any] = {"hidden_dim": hidden, "activation": activation}
    for name in ("dtype", "param_init", "output_init", "quantization"):
        if (value := getattr(cfg, name)) is not None:
            fields[name] = value.clone() if isinstance(value, InstantiableConfig) else value
    return dense.set(**fields)
