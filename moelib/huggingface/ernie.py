"""ERNIE 4.5: softmax scores with a bias that balances the load, interleaved rotary pairs.

Source: the published config and weights of baidu/ERNIE-4.5-21B-A3B-PT.
"""

from collections.abc import Sequence
from typing import Any

from moelib.huggingface import blocks, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Score
from moelib.models.causal_lm import CausalLM

_Q, _KV = (f"self_attention/{name}" for name in ("q", "kv"))
BIAS = "mlp.moe_statics.e_score_correction_bias"
IN_LAYER: Table = {
    **blocks.NORMS,
    **blocks.ATTENTION,
    **deepseek_moe.IN_LAYER,
    _Q: [part._replace(pairs_from=0) for part in blocks.ATTENTION[_Q]],
    _KV: [blocks.ATTENTION[_KV][0]._replace(pairs_from=0), blocks.ATTENTION[_KV][1]],
    "feed_forward/router/bias_balancing/bias": [Part(BIAS, "1 e -> e")],
}
_NAMES = deepseek_moe.Names("moe_num_experts", "moe_k", "moe_num_shared_experts")


def model(settings: Settings, dense: Sequence[bool]) -> CausalLM.Config:
    """Returns the model whose layers are dense where `dense` says so."""
    settings.expect(moe_norm_min=1e-12, moe_use_aux_free=True, use_bias=False, use_rmsnorm=True)
    # transformers reads no modules of further tokens, and drops no assignments.
    settings.skip("moe_capacity", "moe_gate", "num_nextn_predict_layers")
    router = deepseek_moe.balanced_router(Score.SOFTMAX_BEFORE_TOP_K, renormalize=True)
    parts = deepseek_moe.feed_forwards(settings, router, dense, _NAMES)
    return blocks.model(settings, blocks.attention(settings), parts)


def _is_sparse(n: int, start: int, end: int, every: int) -> bool:
    return start <= n <= end and (n + 1) % every == 0


def _model(settings: Settings) -> CausalLM.Config:
    total = settings.take("num_hidden_layers")
    start, end = settings.take("moe_layer_start_index"), settings.take("moe_layer_end_index")
    ends = start, total - 1 if end in (-1, None) else end, settings.take("moe_layer_interval")
    return model(settings, [not _is_sparse(n, *ends) for n in range(total)])


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    parts = [layer.feed_forward for layer in blocks.layers_of(cfg.decoder)]
    sparse = [n for n, part in enumerate(parts) if isinstance(part, MoELayer.Config)]
    ends = (sparse[0], sparse[-1]) if sparse else (len(parts), len(parts))
    every = next(
        every
        for every in range(1, len(parts) + 1)
        if [n for n in range(len(parts)) if _is_sparse(n, *ends, every)] == sparse
    )
    return {
        **blocks.attention_settings(cfg),
        **deepseek_moe.moe_settings(cfg, _NAMES),
        **dict(zip(("moe_layer_start_index", "moe_layer_end_index"), ends, strict=True)),
        "moe_layer_interval": every,
        "use_bias": False,
    }


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _model,
    _settings,
    lambda cfg: IN_LAYER,
    defaults={
        "max_position_embeddings": 131072,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    ignored=lambda cfg: (r".*mtp.*",),
)
