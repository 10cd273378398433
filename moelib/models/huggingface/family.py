"""Description of a model family, from which conversion in both directions follows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.settings import Settings
from moelib.models.huggingface.tensor_mapping import Table


class Family(NamedTuple):
    """A family of models of transformers.

    Attributes:
        model_type: `model_type` of its config.json.
        architecture: Name of its class in transformers.
        model: Function from the settings of a config.json to a model config.
        settings: Function from a model config to settings, from which `model` gives it again.
        in_layer: Function from a model config to the tensors of a layer; a layer need not have all.
        defaults: Defaults of transformers for settings that may be absent from config.json.
        ignored: Function from a model config to regular expressions of tensors that are not read.
        zeros: Function from a model config to names and shapes of tensors written as zeros.
        heads_divide_dim: Whether transformers requires num_attention_heads to divide hidden_size.
    """

    model_type: str
    architecture: str
    model: Callable[[Settings], CausalLM.Config]
    settings: Callable[[CausalLM.Config], dict[str, Any]]
    in_layer: Callable[[CausalLM.Config], Table]
    defaults: Mapping[str, Any] = {}
    ignored: Callable[[CausalLM.Config], tuple[str, ...]] = lambda cfg: ()
    zeros: Callable[[CausalLM.Config], dict[str, tuple[int, ...]]] = lambda cfg: {}
    heads_divide_dim: bool = False
