"""The families that are known, and which of them a config is of.

family, cfg = read_model(json.load(file), "config.json")  # Theirs to ours.
family, settings = settings_of(cfg)  # Ours to theirs.
"""

import re
from collections.abc import Mapping
from typing import Any

from moelib.core.config import did_you_mean
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import GroupScore, Score
from moelib.layers.transformer import LoopStack, ScanStack
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface import blocks
from moelib.models.huggingface.deepseek import V2, V3
from moelib.models.huggingface.family import Family
from moelib.models.huggingface.gpt_oss import GPT_OSS
from moelib.models.huggingface.llama import LLAMA, QWEN3
from moelib.models.huggingface.mixture import (
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN2_MOE_UNGATED,
    QWEN3_MOE,
)
from moelib.models.huggingface.places import Place, expand
from moelib.models.huggingface.settings import Settings

# Of two that could hold a model, the first.
FAMILIES = (LLAMA, QWEN3, MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, QWEN2_MOE_UNGATED, V2, V3, GPT_OSS)


class NoFamilyError(ValueError):
    """No known architecture of transformers computes what a model of ours does."""


class NotTheModelError(ValueError):
    """A config.json computes something else than a model of ours does."""


def read_model(values: Mapping[str, Any], place: str) -> tuple[Family, CausalLM.Config]:
    """Returns the family and our config of a config.json.

    Args:
        values: Its settings.
        place: What errors call it.

    Raises:
        ValueError: If the architecture is unknown, or a setting is missing or unknown.
    """
    families = {family.model_type: family for family in reversed(FAMILIES)}
    kind = values.get("model_type")
    if kind not in families:
        raise ValueError(f"{place}: model_type is {kind!r}; {did_you_mean(str(kind), families)}")
    family = families[kind]
    if not values.get("num_hidden_layers", 1):
        raise ValueError(f"{place}: num_hidden_layers is {values['num_hidden_layers']!r}.")
    try:
        return family, family.model(Settings(values, place))
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{place}: a setting is of a kind that moelib does not know for {kind!r}: {error}"
        ) from error


def check_computes(values: dict[str, Any], place: str, cfg: CausalLM.Config) -> Family:
    """Returns the family of a config.json that computes what a config of ours does.

    Raises:
        NotTheModelError: If it computes something else; the message names what differs.
        Exception: As `read_model`.
    """
    family, read = read_model(values, place)
    wanted, found = _computed(cfg), _computed(read)
    differs = [
        f"{path} is {found.get(path)} there, and {wanted.get(path)} in the run"
        for path in sorted(wanted.keys() | found.keys())
        if wanted.get(path) != found.get(path)
    ]
    if differs:
        raise NotTheModelError(
            f"{place} is not the run's model: {'; '.join(differs[:5])}; set `model` to what it "
            "says."
        )
    return family


def may_drop(cfg: CausalLM.Config) -> list[str]:
    """Returns the fields by which a model's dispatchers may drop choices of experts."""
    fields = ("capacity_factor", "buffer_factor")
    values = cfg.to_flat_dict()
    return sorted(
        path for path, value in values.items() if path.endswith(fields) and value is not None
    )


def settings_of(cfg: CausalLM.Config) -> tuple[Family, dict[str, Any]]:
    """Returns the family that computes what a config of ours does, and its settings.

    How the config trains (losses of balance, recomputation, initial values) does not matter.

    Raises:
        NoFamilyError: If there is none; it says what the nearest has not.
    """
    try:
        wanted = _computed(cfg)
    except TypeError as error:
        raise NoFamilyError(
            f"No architecture of transformers is known for this model: {error}"
        ) from None
    nearest: tuple[int, str] | None = None
    for family in FAMILIES:
        try:
            settings = family.settings(cfg)
            read = family.model(Settings(settings, family.model_type))
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            continue  # It has no place for a layer of this kind.
        got = _computed(read)
        if got == wanted:
            return family, settings
        differs = [
            f"{path}: {wanted.get(path)}, there {got.get(path)}"
            for path in sorted(wanted.keys() | got.keys())
            if wanted.get(path) != got.get(path)
        ]
        if nearest is None or len(differs) < nearest[0]:
            nearest = len(differs), f"{family.architecture} differs in {'; '.join(differs[:5])}"
    raise NoFamilyError(
        "No architecture of transformers that moelib knows computes this model. "
        + ("No layer of it is known." if nearest is None else f"{nearest[1]}.")
    )


def places_of(family: Family, model: CausalLM) -> list[Place]:
    """Returns where each tensor of the family stands in the parameters of a model."""
    return expand(model, blocks.IN_MODEL, family.in_layer(model.config))


# What only matters in training, or to where things are stored.
_NOT_COMPUTED = re.compile(
    r"(^|\.)(name|input_dim|dtype|param_init|output_init|remat|dispatcher|load_balance_loss|router_z_loss"
    r"|z_loss|rate)(\.|\[|\(|$)"
)


def _computed(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns what of a config decides what it computes, by path."""
    if cfg.decoder.klass not in (LoopStack, ScanStack):  # Which run the same layers.
        raise TypeError(f"{cfg.decoder.klass.__qualname__} is no stack that moelib has.")
    cfg = cfg.clone()
    layers = [layer.clone() for layer in blocks.layers_of(cfg.decoder)]
    for layer in layers:
        attention = layer.self_attention
        if isinstance(attention, GroupedQueryAttention.Config):
            attention.num_kv_heads = attention.num_kv_heads or attention.num_heads
            attention.head_dim = attention.head_dim or cfg.dim // attention.num_heads
        if isinstance(layer.feed_forward, MoELayer.Config):
            router = layer.feed_forward.router
            if router.num_groups is None:  # Then it decides nothing.
                router.group_score = GroupScore.MAX
    cfg.decoder = blocks.stack(layers)
    values = {
        path: value for path, value in cfg.to_flat_dict().items() if not _NOT_COMPUTED.search(path)
    }
    for path in list(values):
        if values[path] is Score.SOFTMAX_AFTER_TOP_K:  # The same, written otherwise.
            values[path] = Score.SOFTMAX_BEFORE_TOP_K
            values[path.replace("score", "renormalize")] = True
    return values
