"""Description of a model family, from which conversion in both directions follows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import LayerTable, Table
from moelib.models.causal_lm import CausalLM


class Family(NamedTuple):
    """A family of models of transformers."""

    model_type: str  # `model_type` of its config.json.
    architecture: str  # Name of its class in transformers.
    # Function from the settings of a config.json to a model config.
    model: Callable[[Settings], CausalLM.Config]
    # Function from a model config to settings, from which `model` gives it again. Those that it
    # does not read are not written.
    settings: Callable[[CausalLM.Config], dict[str, Any]]
    # Function from a model config to the tensors of a layer, of which a layer need not have all; or
    # to a function from a layer's config to its tensors.
    in_layer: Callable[[CausalLM.Config], Table | LayerTable]
    # Defaults of transformers for settings that may be absent from config.json.
    defaults: Mapping[str, Any] = {}
    # Function from a model config to regular expressions of tensors that are not read.
    ignored: Callable[[CausalLM.Config], tuple[str, ...]] = lambda cfg: ()
    # Function from a model config to names and shapes of tensors written as zeros.
    zeros: Callable[[CausalLM.Config], dict[str, tuple[int, ...]]] = lambda cfg: {}
    # Function from a model config to the names of tensors that are copies, and of the originals.
    copies: Callable[[CausalLM.Config], dict[str, str]] = lambda cfg: {}
    # `model_type` of the family that models are written as, if not this one.
    written_as: str | None = None
    # Function from the name of a tensor of a language model to its name in files of the family.
    tensor_name: Callable[[str], str] = lambda name: name
    # Whether transformers requires num_attention_heads to divide hidden_size.
    heads_divide_dim: bool = False
