"""The known families, and the family of a given model.

family, cfg = read_model(json.load(file), "config.json")  # Hugging Face to moelib.
family, settings = settings_of(cfg)  # moelib to Hugging Face.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from moelib.core.errors import UserError
from moelib.huggingface import blocks
from moelib.huggingface.dbrx import DBRX
from moelib.huggingface.deepseek import GLM4_MOE_LITE, KIMI_K2, MISTRAL4, V2, V3
from moelib.huggingface.deepseek_sparse import DEEPSEEK_V32, GLM_MOE_DSA
from moelib.huggingface.dense import MISTRAL, QWEN2, SMOLLM3
from moelib.huggingface.ernie import ERNIE4_5_MOE
from moelib.huggingface.family import Family
from moelib.huggingface.glm import DOTS1, EXAONE_MOE, GLM4_MOE, HY_V3, SOLAR_OPEN
from moelib.huggingface.gpt_oss import GPT_OSS
from moelib.huggingface.granite import GRANITE, GRANITEMOE, GRANITEMOESHARED
from moelib.huggingface.granite_hybrid import GRANITEMOEHYBRID
from moelib.huggingface.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE
from moelib.huggingface.kimi_linear import KIMI_LINEAR
from moelib.huggingface.llama import LLAMA, QWEN3
from moelib.huggingface.minimax import MINIMAX_M2
from moelib.huggingface.mixture import (
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN2_MOE_UNGATED,
    QWEN3_MOE,
)
from moelib.huggingface.nemotron_h import NEMOTRON_H
from moelib.huggingface.olmo import FLEX_OLMO, OLMO2, OLMO3
from moelib.huggingface.qwen_next import QWEN3_5_MOE, QWEN3_NEXT
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import TensorMapping, expand
from moelib.huggingface.text_parts import (
    ERNIE4_5_VL_MOE,
    QWEN3_5_MOE_WITH_IMAGES,
    QWEN3_VL_MOE,
)
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.mixers.delta_net import DeltaNet
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import GroupScore, Router, Score
from moelib.layers.quantization import Quantization
from moelib.layers.transformer import LoopStack, ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM

# If several families can hold a model, the first one is used.
FAMILIES = (
    *(LLAMA, QWEN3, QWEN2, MISTRAL, SMOLLM3, OLMO2, OLMO3, GRANITE, HUNYUAN_DENSE),
    *(MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, QWEN2_MOE_UNGATED, V2, V3, GPT_OSS),
    *(KIMI_K2, GLM4_MOE_LITE, SOLAR_OPEN, GLM4_MOE, DOTS1, EXAONE_MOE, HY_V3, MINIMAX_M2, MISTRAL4),
    *(ERNIE4_5_MOE, QWEN3_VL_MOE, QWEN3_5_MOE_WITH_IMAGES, ERNIE4_5_VL_MOE),
    *(FLEX_OLMO, GRANITEMOE, GRANITEMOESHARED, HUNYUAN_MOE, DBRX),
    *(QWEN3_NEXT, QWEN3_5_MOE, KIMI_LINEAR, GRANITEMOEHYBRID, NEMOTRON_H),
    *(DEEPSEEK_V32, GLM_MOE_DSA),
)

# Families whose rotary embeddings are more than one `rope_parameters`.
_OWN_ROPE = (DBRX, OLMO3)

_MAX_NAMED = 5  # Differences listed in an error.


class NoFamilyError(UserError):
    """No known architecture of transformers computes what a model of moelib computes."""


class NotTheModelError(UserError):
    """A config.json describes another model than a config of moelib."""


def read_model(
    values: Mapping[str, Any],
    source: str,
    *,
    ignored: Iterable[str] | None = (),
    multi_token_prediction: bool = False,
) -> tuple[Family, CausalLM.Config]:
    """Returns the family and the model config of a config.json.

    Absent settings take the defaults of transformers.

    Args:
        values: Content of config.json.
        source: Name of the file, for errors.
        ignored: Names of settings that are known to change nothing, which are as if absent; None
            for all that moelib does not read.
        multi_token_prediction: Whether the model has the modules that the file describes, which
            predict further tokens.

    Raises:
        UserError: If the architecture is unknown, or a setting is missing or unsupported.
    """
    families = {family.model_type: family for family in reversed(FAMILIES)}
    known = dict(sorted(families.items()))
    family = Settings(values, source).choose("model_type", known, None)
    try:
        settings = Settings(values, source, family.defaults, ignored)
        cfg = family.model(settings)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{source}: a setting has an unsupported type: {error}") from error
    if not multi_token_prediction:
        cfg.multi_token_prediction = None
    return family, cfg


def check_computes(
    values: Mapping[str, Any],
    source: str,
    cfg: CausalLM.Config,
    *,
    ignored: Iterable[str] | None = (),
) -> Family:
    """Returns the family of a config.json that describes the model of a config of moelib.

    Raises:
        NotTheModelError: If it describes another model; the message names the differences.
        UserError: If `read_model` refuses the settings.
    """
    further = cfg.multi_token_prediction is not None
    family, read = read_model(values, source, ignored=ignored, multi_token_prediction=further)
    wanted, found = _computed(cfg), _computed(read)
    if wanted != found:
        differences = "; ".join(_differences(wanted, found, "model", "file")[:_MAX_NAMED])
        raise NotTheModelError(
            f"{source} describes another model: {differences}; set `model` accordingly."
        )
    return family


def may_drop(cfg: CausalLM.Config) -> list[str]:
    """Returns the paths of fields by which dispatchers may drop assignments."""
    return _set_fields(cfg, "capacity_factor")


def quantizes(cfg: CausalLM.Config) -> list[str]:
    """Returns the paths of fields by which matmuls quantize their operands."""
    return _set_fields(cfg, "quantization")


def _set_fields(cfg: CausalLM.Config, *names: str) -> list[str]:
    nothing = (None, Quantization.NONE)
    values = cfg.to_flat_dict()
    return sorted(path for path in values if path.endswith(names) and values[path] not in nothing)


def settings_of(cfg: CausalLM.Config) -> tuple[Family, dict[str, Any]]:
    """Returns the family that computes what a model config does, and the model's settings.

    Fields that matter only for training (balance losses, remat, initial values) are not compared.

    Raises:
        NoFamilyError: If there is none; the message names what the nearest family lacks.
    """
    try:
        wanted = _computed(cfg)
    except TypeError as error:
        raise NoFamilyError(f"transformers has no architecture for this model: {error}") from None
    nearest: tuple[int, str] | None = None
    for family in FAMILIES:
        if family.written_as is not None:
            continue
        try:
            written = family.settings(cfg)
            reader = Settings(written, family.model_type, family.defaults, None)
            found = _computed(family.model(reader))
            settings = {name: x for name, x in written.items() if reader.is_known(name)}
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            continue  # The family has no such layer.
        if found != wanted:
            differences = _differences(wanted, found, "model", family.model_type)
            count, reason = len(differences), f"differs: {'; '.join(differences[:_MAX_NAMED])}"
        elif family.heads_divide_dim and cfg.dim % (heads := settings["num_attention_heads"]):
            count, reason = 0, f"requires num_heads={heads} to divide dim={cfg.dim}"
        else:
            return family, settings
        if nearest is None or count < nearest[0]:
            nearest = count, f"{family.architecture} {reason}"
    raise NoFamilyError(
        "No architecture of transformers that moelib knows computes this model"
        + ("." if nearest is None else f": {nearest[1]}.")
    )


def published_settings(values: Mapping[str, Any], cfg: CausalLM.Config) -> tuple[Family, dict]:
    """Returns the family and the settings with which a model's published config.json is written.

    The rotary embedding is described to all versions of transformers. The quantization, and modules
    of multi-token prediction that the model lacks, are those of the published tensors.

    Raises:
        UserError: If the config.json describes another model or cannot be read.
    """
    dropped = ("quantization_config", "torch_dtype")
    settings = {name: x for name, x in values.items() if name not in dropped}
    # Settings that moelib does not read were accepted when the model was converted.
    family = check_computes(settings, "config.json", cfg, ignored=None)
    if family.written_as is not None:
        raise UserError(f"model_type={family.model_type!r} is written as {family.written_as!r}.")
    if family in _OWN_ROPE:
        written = family.settings(cfg)
        settings |= {name: x for name, x in written.items() if name.startswith("rope_")}
    elif settings.get("rope_parameters"):
        known = Settings(settings, "config.json", family.defaults)
        settings |= blocks.rope_spellings(blocks.rope_parameters(known))
    if cfg.multi_token_prediction is None and "num_nextn_predict_layers" in settings:
        settings["num_nextn_predict_layers"] = 0
    return family, settings | blocks.balance_settings(cfg)


def tensor_mappings(family: Family, model: CausalLM) -> list[TensorMapping]:
    """Returns the mapping of each tensor of the family to the parameters of a model."""
    mappings = expand(model, blocks.IN_MODEL, family.in_layer(model.config))
    return [each._replace(tensor=family.tensor_name(each.tensor)) for each in mappings]


def _differences(a: dict[str, Any], b: dict[str, Any], of_a: str, of_b: str) -> list[str]:
    """Returns the paths whose values differ, with both values."""
    paths = sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))
    return [f"{path}: {a.get(path)} in {of_a}, {b.get(path)} in {of_b}" for path in paths]


# Fields that matter only for training or storage.
_NOT_COMPUTED = re.compile(
    r"(^|\.)(name|input_dim|dtype|param_init|output_init|remat|dispatcher|load_balance_loss|router_z_loss"
    r"|z_loss|objective|loss_weight|rate|report_expert_counts|quantization|adapter)(\.|\[|\(|$)"
)


def _computed(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the fields of a config that decide what it computes, by path."""
    if cfg.decoder.klass not in (LoopStack, ScanStack):  # Both run the same layers.
        raise TypeError(f"{cfg.decoder.klass.__qualname__} is not a stack of moelib.")
    cfg = cfg.clone()
    layers = [layer.clone() for layer in blocks.layers_of(cfg.decoder)]
    further = [] if cfg.multi_token_prediction is None else [cfg.multi_token_prediction.module]
    for layer in (*layers, *(blocks.expect(m.layer, TransformerLayer.Config) for m in further)):
        attention = layer.self_attention
        if isinstance(attention, GroupedQueryAttention.Config):
            attention.num_kv_heads = attention.num_kv_heads or attention.num_heads
            attention.head_dim = attention.head_dim or cfg.dim // attention.num_heads
        if isinstance(attention, DeltaNet.Config):
            attention.num_key_heads = attention.num_key_heads or attention.num_value_heads
        if isinstance(layer.feed_forward, MoELayer.Config):
            router = layer.feed_forward.router
            if (
                isinstance(router, Router.Config) and router.num_groups is None
            ):  # Then group_score has no effect.
                router.group_score = GroupScore.MAX
    cfg.decoder = blocks.stack(layers)
    values = {
        path: value for path, value in cfg.to_flat_dict().items() if not _NOT_COMPUTED.search(path)
    }
    for path in list(values):
        if values[path] is Score.SOFTMAX_AFTER_TOP_K:  # Equivalent to renormalizing.
            values[path] = Score.SOFTMAX_BEFORE_TOP_K
            values[path.replace("score", "renormalize")] = True
    return values
