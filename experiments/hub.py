"""Trainers of models given by the settings of their config.json on the Hugging Face hub.

`moelib.huggingface` reads the settings as it reads a model's folder, so that weights of the
hub load into these models. Most were trained on data and by recipes that are not public; unless a
recipe is published, theirs is the standard job of `jobs`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moelib.core.config import config_for_function
from moelib.huggingface.families import read_model
from moelib.layers.initializers import normal
from moelib.layers.moe.balance import BalanceScope, LoadBalanceLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.remat import remat
from moelib.models.causal_lm import CausalLM
from moelib.train.trainer import SpmdTrainer

from .jobs import CHIPS, Job, trainer


class Recipe(NamedTuple):
    """The training of a model.

    Attributes:
        expert: Size of the mesh axis that splits the experts.
        balance: Weight and scope of the load-balance loss; None for no loss.
        bias_rate: Rate of the balancing bias, for models that have one.
        job: Fields of `Job` other than those of the standard job.
    """

    expert: int = 1
    balance: tuple[float, BalanceScope] | None = None
    bias_rate: float = 0.0
    job: Mapping[str, Any] = {}


def model(settings: Mapping[str, Any], name: str, recipe: Recipe) -> CausalLM.Config:
    """Returns the config of a model to train: N(0, 0.02) weights, and blocks rematerialized.

    Args:
        settings: Settings of config.json.
        name: Name of the model, for errors.
        recipe: Its balance of experts.
    """
    _, cfg = read_model(settings, name, multi_token_prediction=True)
    cfg.param_init = config_for_function(normal).set(std=0.02)
    cfg.decoder.remat = config_for_function(remat)
    layers = [*cfg.decoder.first_layers, *cfg.decoder.block]
    if cfg.multi_token_prediction is not None:
        cfg.multi_token_prediction.module.remat = config_for_function(remat)
        layers.append(cfg.multi_token_prediction.module.layer)
    for moe in (layer.feed_forward for layer in layers):
        if not isinstance(moe, MoELayer.Config):
            continue
        if recipe.balance is not None:
            weight, scope = recipe.balance
            loss = LoadBalanceLoss.default_config().set(weight=weight, scope=scope)
            moe.load_balance_loss = loss
        if moe.router.bias_balancing is not None:
            moe.router.bias_balancing.rate = recipe.bias_rate
    return cfg


def _trainer(settings: Mapping[str, Any], name: str, recipe: Recipe) -> SpmdTrainer.Config:
    standard = {"seq_len": 4096, "batch_size": 512}
    meshes = {CHIPS: {"fsdp": -1, "expert": recipe.expert}}
    job = Job(**{**standard, **recipe.job}, meshes=meshes)
    return trainer(model(settings, name, recipe), job)


def named_trainers(
    sizes: Mapping[str, Mapping[str, Any]], recipes: Mapping[str, Recipe] | None = None
) -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns functions that make the trainers of models, by name.

    Args:
        sizes: Settings of each model's config.json.
        recipes: Recipe of each model; the default recipe for models that are absent.
    """
    recipes = recipes or {}
    return {
        name: functools.partial(_trainer, settings, name, recipes.get(name, Recipe()))
        for name, settings in sizes.items()
    }
