"""Granite 4: Mamba-2 and attention by turns, with Granite's factors.

Sources: the published configs and weights of ibm-granite/granite-4.0-h-small; arXiv:2405.21060.
"""

import itertools
import math
from typing import Any

from moelib.huggingface import blocks, granite
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.feed_forward import FeedForward
from moelib.layers.mixers.mamba2 import Mamba2
from moelib.layers.transformer import TransformerLayer
from moelib.models.causal_lm import CausalLM

_LINEAR = "linear_attention"
_MAMBA = {  # Our field -> its setting.
    "num_heads": "mamba_n_heads",
    "state_dim": "mamba_d_state",
    "num_groups": "mamba_n_groups",
    "conv_width": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}
_EXPERTS = "num_local_experts"
_UNLIMITED = [0.0, {"__float__": "Infinity"}]  # As transformers writes it.


# -- Tensors -------------------------------------------------------------------------------------


def _in_layer(layer: TransformerLayer.Config) -> Table:
    table = granite.IN_LAYER
    if isinstance(layer.feed_forward, FeedForward.Config):
        shared = "feed_forward/shared_experts/"
        of_shared = {path: parts for path, parts in table.items() if path.startswith(shared)}
        table = {**table, **{p.replace(shared, "feed_forward/"): x for p, x in of_shared.items()}}
    mixer = layer.self_attention
    return {**table, **mamba_table(mixer, "mamba")} if isinstance(mixer, Mamba2.Config) else table


def mamba_table(mixer: Mamba2.Config, prefix: str) -> Table:
    """Returns the tensors of Mamba-2, with one for all projections and one for all convolutions."""
    x, b, c = mixer.num_heads * mixer.head_dim, *[mixer.num_groups * mixer.state_dim] * 2
    of_heads, of_states = "(h k) d -> d h k", "(g n) d -> d g n"

    def parts(tensor: str, **sizes: int) -> dict[str, Part]:
        ends = zip(sizes, itertools.accumulate(sizes.values()), strict=True)
        rows = {name: (end - sizes[name], end) for name, end in ends}
        return {name: Part(f"{prefix}.{tensor}", "", (), each) for name, each in rows.items()}

    projections = parts("in_proj.weight", gate=x, x=x, b=b, c=c, step=mixer.num_heads)
    weights = parts("conv1d.weight", x=x, b=b, c=c)
    biases = parts("conv1d.bias", x=x, b=b, c=c)
    view = lambda part, text, *index: part._replace(view=text, index=index)
    found = {
        "gate": [view(projections["gate"], of_heads)],
        "x": [view(projections["x"], of_heads)],
        "bc": [view(projections[x], of_states, None, i) for i, x in enumerate("bc")],
        "time_step": [view(projections["step"], "h d -> d h")],
        "x_conv/weight": [view(weights["x"], "(h k) 1 w -> h k w")],
        "bc_conv/weight": [view(weights[x], "(g n) 1 w -> g n w", i) for i, x in enumerate("bc")],
        "x_conv/bias": [view(biases["x"], "(h k) -> h k")],
        "bc_conv/bias": [view(biases[x], "(g n) -> g n", i) for i, x in enumerate("bc")],
        "log_decay_rate": [Part(f"{prefix}.A_log", "h -> h")],
        "time_step_bias": [Part(f"{prefix}.dt_bias", "h -> h")],
        "skip": [Part(f"{prefix}.D", "h -> h")],
        "norm/scale": [Part(f"{prefix}.norm.weight", "d -> d")],
        "output": [Part(f"{prefix}.out_proj.weight", "d (h k) -> h k d")],
    }
    return {f"self_attention/{path}": each for path, each in found.items()}


# -- Settings ------------------------------------------------------------------------------------


def mamba_of(settings: Settings, head_dim: int) -> Mamba2.Config:
    """Returns Mamba-2."""
    fields = {field: settings.take(name) for field, name in _MAMBA.items()}
    settings.expect(mamba_proj_bias=False)
    settings.skip("mamba_chunk_size")  # Of the computation.
    if settings.take("time_step_limit", None) not in (None, _UNLIMITED, [0.0, math.inf]):
        settings.expect(time_step_limit=_UNLIMITED)
    return Mamba2.default_config().set(head_dim=head_dim, norm=blocks.norm(settings), **fields)


def mamba_settings(mamba: Mamba2.Config) -> dict[str, Any]:
    """Returns the settings that `mamba_of` reads."""
    return {name: getattr(mamba, field) for field, name in _MAMBA.items()}


def _model(settings: Settings) -> CausalLM.Config:
    positions = settings.take("position_embedding_type", None) or "nope"
    rotated = settings.lookup("position_embedding_type", positions, {"rope": True, "nope": False})
    rope = blocks.rope(settings)
    settings.expect(normalization_function="rmsnorm")
    settings.skip("init_method")
    channels = settings.take("mamba_expand") * settings.take("hidden_size")
    mamba = mamba_of(settings, channels // settings.take("mamba_n_heads"))
    if settings.take("mamba_d_head", "auto") != "auto":
        settings.expect(mamba_d_head=mamba.head_dim)
    kinds = settings.take("layer_types", None) or [_LINEAR] * settings.take("num_hidden_layers")
    settings.expect(num_hidden_layers=len(kinds))
    attention = granite.attention_of(settings, rope=rope if rotated else None)
    known = {_LINEAR: mamba, "mamba": mamba, blocks.FULL: attention, "attention": attention}
    mixers = [settings.lookup("layer_types", kind, known) for kind in kinds]
    shared = granite.shared_of(settings)
    if settings.take(_EXPERTS):
        return granite.model_of(settings, granite.moe_of(settings, shared), mixers)
    settings.skip("num_experts_per_tok", "intermediate_size")
    return granite.model_of(settings, shared, mixers)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layers, attention = blocks.layers_of(cfg.decoder), blocks.attention_of(cfg)
    mixers = [layer.self_attention for layer in layers]
    mamba = next(mixer for mixer in mixers if isinstance(mixer, Mamba2.Config))
    plain = cfg.clone()
    plain.decoder = blocks.stack([x.clone(self_attention=attention.clone()) for x in layers])
    found = granite.moe_settings(plain)
    if isinstance(layers[0].feed_forward, FeedForward.Config):
        found |= {_EXPERTS: 0, "shared_intermediate_size": layers[0].feed_forward.hidden_dim}
    channels = mamba.num_heads * mamba.head_dim
    if channels % cfg.dim:
        raise ValueError("The channels of Mamba-2 are a multiple of the width in transformers.")
    return {
        **found,
        **mamba_settings(mamba),
        "mamba_d_head": mamba.head_dim,
        "mamba_expand": channels // cfg.dim,
        "position_embedding_type": "nope" if attention.rope is None else "rope",
        "layer_types": [
            "mamba" if isinstance(mixer, Mamba2.Config) else "attention" for mixer in mixers
        ],
    }


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _model,
    _settings,
    lambda cfg: _in_layer,
    defaults={
        **granite.DEFAULTS,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "shared_intermediate_size": 1024,
    },
)
