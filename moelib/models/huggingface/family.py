"""What a family of models is, to those who convert."""

from collections.abc import Callable
from typing import Any, NamedTuple

from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.places import Table
from moelib.models.huggingface.settings import Settings


class Family(NamedTuple):
    """A family of models.

    Attributes:
        model_type: What its config.json calls it.
        architecture: The class of transformers.
        model: Reads the settings of a config.json.
        settings: Writes those of a model; `model` of them gives the model again.
        in_layer: The places of the tensors of a layer; a layer need not have all.
        ignored: Names of tensors, as regular expressions, that are left out.
        zeros: Names and shapes of tensors that are written as zeros.
    """

    model_type: str
    architecture: str
    model: Callable[[Settings], CausalLM.Config]
    settings: Callable[[CausalLM.Config], dict[str, Any]]
    in_layer: Callable[[CausalLM.Config], Table]
    ignored: Callable[[CausalLM.Config], tuple[str, ...]] = lambda cfg: ()
    zeros: Callable[[CausalLM.Config], dict[str, tuple[int, ...]]] = lambda cfg: {}
