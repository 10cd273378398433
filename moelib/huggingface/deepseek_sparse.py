"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer in each layer, which makes attention sparse.

The two families compute the same. They differ in the rotary pairs of the indexer: halves of a head
in DeepSeek-V3.2, neighbors in GLM-5.

Sources: arXiv:2512.02556 and arXiv:2602.15763.
"""

import functools
from typing import Any

from moelib.core.errors import UserError
from moelib.huggingface import blocks, deepseek, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.indexer import Indexer
from moelib.layers.attention.latent import LatentAttention
from moelib.models.causal_lm import CausalLM

_INDEXER = {  # Our field -> its setting.
    "num_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "num_chosen": "index_topk",
}
_KIND = "indexed_attention"  # Of all layers in `layer_types`.


def _in_layer(cfg: CausalLM.Config, *, neighbors: bool) -> Table:
    """Returns the tensors of a layer; `neighbors` is whether rotary pairs of the indexer are."""
    attention = blocks.layers_of(cfg.decoder)[0].self_attention
    rotated = blocks.expect(attention, LatentAttention.Config).rope_head_dim
    part = functools.partial(Part, pairs_from=0, pairs_to=rotated) if neighbors else Part
    ours, theirs = "self_attention/indexer", "self_attn.indexer"
    return {
        **deepseek.in_layer(cfg),
        f"{ours}/q": [part(f"{theirs}.wq_b.weight", "(j k) r -> r j k")],
        f"{ours}/k": [part(f"{theirs}.wk.weight", "k d -> d k")],
        f"{ours}/norm/scale": [part(f"{theirs}.k_norm.weight", "k -> k")],
        f"{ours}/norm/bias": [part(f"{theirs}.k_norm.bias", "k -> k")],
        f"{ours}/head_weights": [Part(f"{theirs}.weights_proj.weight", "j d -> d j")],
    }


def _model(settings: Settings, *, neighbors: bool) -> CausalLM.Config:
    settings.expect(rope_interleave=True, indexer_rope_interleave=neighbors)
    if settings.take("q_lora_rank") is None:
        raise UserError(f"{settings.source}: q_lora_rank=None; indexers read the queries' latent.")
    for kind in settings.take("layer_types", None) or []:
        settings.lookup("layer_types", kind, {_KIND: None})
    attention = deepseek.latent_attention(settings)
    fields = {field: settings.take(name) for field, name in _INDEXER.items()}
    attention.indexer = Indexer.default_config().set(**fields)
    dense = deepseek_moe.listed_dense(settings, settings.take("first_k_dense_replace"))
    return deepseek_moe.multi_token_model(settings, attention, dense)


def _glm_moe_dsa(settings: Settings) -> CausalLM.Config:
    # Layers that take the keys that another layer chose (arXiv:2603.12201) are not supported.
    settings.expect(index_topk_freq=1, index_topk_pattern=None)
    settings.skip("index_skip_topk_offset")
    for kind in settings.take("indexer_types", None) or []:
        settings.lookup("indexer_types", kind, {"full": None})
    return _model(settings, neighbors=True)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    attention = blocks.layers_of(cfg.decoder)[0].self_attention
    indexer = blocks.expect(attention.indexer, Indexer.Config)
    return {
        **deepseek.latent_settings(cfg),
        **{name: getattr(indexer, field) for field, name in _INDEXER.items()},
    }


_DEFAULTS = {
    "first_k_dense_replace": 3,
    "index_head_dim": 128,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    functools.partial(_model, neighbors=False),
    _settings,
    functools.partial(_in_layer, neighbors=False),
    defaults={
        **_DEFAULTS,
        "index_n_heads": 64,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "topk_group": 4,
        "v_head_dim": 128,
    },
    ignored=deepseek_moe.unused_layers,
    copies=deepseek_moe.copies,
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    _glm_moe_dsa,
    _settings,
    functools.partial(_in_layer, neighbors=True),
    defaults={
        **_DEFAULTS,
        "index_n_heads": 32,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    ignored=deepseek_moe.unused_layers,
    copies=deepseek_moe.copies,
)
