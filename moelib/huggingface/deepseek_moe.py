"""MoE layers of DeepSeek and of its successors: shared experts, groups of experts, dense layers.

Sources: arXiv:2401.06066; the router of V3 and multi-token prediction: arXiv:2412.19437.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from moelib.huggingface import blocks
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import GroupScore, Router, Score
from moelib.models.causal_lm import CausalLM
from moelib.models.multi_token_prediction import MultiTokenModule, MultiTokenPrediction

IN_LAYER: Table = {
    **blocks.feed_forward_table("feed_forward", "mlp"),  # Dense layers.
    **blocks.MOE,
    "feed_forward/router/bias_balancing/bias": [Part("mlp.gate.e_score_correction_bias", "e -> e")],
    **blocks.feed_forward_table("feed_forward/shared_experts", "mlp.shared_experts"),
    # Modules of multi-token prediction.
    "embedding_norm/scale": [Part("enorm.weight", "d -> d")],
    "hidden_norm/scale": [Part("hnorm.weight", "d -> d")],
    "projection/weight": [Part("eh_proj.weight", "d e -> e d")],
    "output_norm/scale": [Part("shared_head.norm.weight", "d -> d")],
}


class Names(NamedTuple):
    """Names of the settings that families spell differently."""

    num_experts: str = "n_routed_experts"
    per_token: str = "num_experts_per_tok"
    num_shared: str = "n_shared_experts"
    scaling_factor: str = "routed_scaling_factor"

    @property
    def of_moe(self) -> tuple[str, str, str]:
        """The names of the settings of `blocks.moe`."""
        return self.num_experts, "moe_intermediate_size", self.per_token


NAMES = Names()
_MAX_DEPTHS = 8  # Modules of multi-token prediction; published models have one.
_FP8 = {  # V3 and others are published so; weights are dequantized when they are read.
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def expect_known_quantization(settings: Settings) -> None:
    """Raises UserError for a quantization other than that of DeepSeek-V3."""
    if quantization := settings.take("quantization_config", None):
        neutral = ("modules_to_not_convert", "scale_fmt")  # Dtypes of tensors tell both.
        found = {name: x for name, x in quantization.items() if name not in neutral}
        if found.get("fmt") == "float8_e4m3fn":
            found["fmt"] = "e4m3"
        if _FP8 | found != _FP8:
            settings.expect(quantization_config=_FP8)


def sigmoid_router(settings: Settings, names: Names = NAMES) -> Router.Config:
    """Returns the router of DeepSeek-V3: sigmoid scores, and a bias that balances the load."""
    settings.expect(scoring_func="sigmoid", topk_method="noaux_tc")
    router = balanced_router(
        Score.SIGMOID,
        renormalize=settings.take("norm_topk_prob"),
        scaling_factor=float(settings.take(names.scaling_factor)),
    )
    return with_groups(settings, router)


def balanced_router(score: Score, **fields: Any) -> Router.Config:
    """Returns a router whose selection of experts adds a bias, which was trained already."""
    balancing = BiasBalancing.default_config().set(rate=0.0)
    return Router.default_config().set(score=score, bias_balancing=balancing, **fields)


def with_groups(settings: Settings, router: Router.Config) -> Router.Config:
    """Returns a router with groups of experts, each scored by its best two, as in DeepSeek-V3."""
    groups = settings.take("n_group"), settings.take("topk_group")
    if groups[0] not in (None, 1):
        router.set(num_groups=groups[0], num_groups_per_token=groups[1])
        router.set(group_score=GroupScore.SUM_OF_TOP_2)
    return router


def first_dense(settings: Settings) -> list[bool]:
    """Returns whether each layer is dense: the first `first_k_dense_replace` are."""
    num_dense = settings.take("first_k_dense_replace")
    return [n < num_dense for n in range(settings.take("num_hidden_layers"))]


def listed_dense(settings: Settings, num_dense: int) -> list[bool]:
    """Returns whether each layer is dense by `mlp_layer_types`; by default the first are."""
    kinds = settings.take("mlp_layer_types", None)
    if kinds is None:
        settings.expect(first_k_dense_replace=num_dense)
        return [n < num_dense for n in range(settings.take("num_hidden_layers"))]
    settings.skip("first_k_dense_replace")
    settings.expect(num_hidden_layers=len(kinds))
    known = {"dense": True, "sparse": False}
    return [settings.lookup("mlp_layer_types", kind, known) for kind in kinds]


def feed_forwards(
    settings: Settings, router: Router.Config, dense: Sequence[bool], names: Names = NAMES
) -> list[BaseLayer.Config]:
    """Returns each layer's part: dense, or an MoE layer with shared experts."""
    settings.expect(moe_layer_freq=1, mlp_bias=False)
    expect_known_quantization(settings)
    moe = blocks.moe(settings, *names.of_moe, router=router)
    if num_shared := settings.take(names.num_shared, None):
        moe.shared_experts = blocks.feed_forward(num_shared * moe.hidden_dim)
    settings.skip("intermediate_size")  # Unused without dense layers.
    part = blocks.feed_forward(settings.take("intermediate_size")) if any(dense) else moe
    return [part if is_dense else moe for is_dense in dense]


def sigmoid_model(
    settings: Settings, attention: Any, dense: Sequence[bool], names: Names = NAMES
) -> CausalLM.Config:
    """Returns the model with DeepSeek-V3's MoE layers and this attention, or one of each layer."""
    parts = feed_forwards(settings, sigmoid_router(settings, names), dense, names)
    return blocks.model(settings, attention, parts)


def multi_token_model(settings: Settings, attention: Any, dense: Sequence[bool]) -> CausalLM.Config:
    """Returns `sigmoid_model` with the modules of multi-token prediction of the settings."""
    settings.skip("num_mtp_layers")
    num_depths = settings.take("num_nextn_predict_layers", 0)
    cfg = sigmoid_model(settings, attention, dense)
    if num_depths:
        layer = blocks.layers_of(cfg.decoder)[-1]
        module = MultiTokenModule.default_config().set(norm=cfg.output_norm, layer=layer)
        further = MultiTokenPrediction.default_config().set(num_depths=num_depths, module=module)
        cfg.multi_token_prediction = further
    return cfg


# -- Settings of a model -------------------------------------------------------------------------


def moe_settings(cfg: CausalLM.Config, names: Names = NAMES) -> dict[str, Any]:
    """Returns all settings that the functions above read; a family drops those that it does not."""
    moe, parts = blocks.moe_of(cfg), [layer.feed_forward for layer in blocks.layers_of(cfg.decoder)]
    dense = [part for part in parts if isinstance(part, FeedForward.Config)]
    kinds = ["dense" if isinstance(x, FeedForward.Config) else "sparse" for x in parts]
    found = {"first_k_dense_replace": len(dense)} if kinds == sorted(kinds) else {}
    found |= {"intermediate_size": dense[0].hidden_dim} if dense else {}
    shared = moe.shared_experts.hidden_dim if moe.shared_experts else 0
    return {
        **blocks.moe_settings(cfg, *names.of_moe),
        **found,
        "mlp_layer_types": kinds,
        names.num_shared: shared // moe.hidden_dim,
        names.scaling_factor: moe.router.scaling_factor,
        "norm_topk_prob": moe.router.renormalize,
        "n_group": moe.router.num_groups or 1,
        "topk_group": moe.router.num_groups_per_token or 1,
        "num_nextn_predict_layers": len(_further_layers(cfg)),
    }


# -- Tensors of multi-token prediction -----------------------------------------------------------


def _further_layers(cfg: CausalLM.Config) -> list[str]:
    """Returns the names of the layers that hold the modules of multi-token prediction."""
    further, first = cfg.multi_token_prediction, cfg.decoder.num_layers
    return [f"model.layers.{first + i}" for i in range(further.num_depths if further else 0)]


def unused_layers(cfg: CausalLM.Config) -> tuple[str, ...]:
    """Returns a pattern of the layers that predict further tokens, which transformers ignores."""
    numbers = range(cfg.decoder.num_layers, cfg.decoder.num_layers + _MAX_DEPTHS)
    unused = rf"model\.layers\.({'|'.join(map(str, numbers))})\..*"
    return () if cfg.multi_token_prediction else (unused,)


def copies(cfg: CausalLM.Config) -> dict[str, str]:
    """Returns the names of the modules' copies of embedding and head, and of the originals."""
    table = "model.embed_tokens.weight"
    parts = {"embed_tokens": table, "shared_head.head": "lm_head.weight" if cfg.lm_head else table}
    return {
        f"{layer}.{copy}.weight": name
        for layer in _further_layers(cfg)
        for copy, name in parts.items()
    }
