"""A run that the tests of the documentation share."""

import pytest

import moelib
from moelib.core.config import config_for_function
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import Router
from moelib.learner.transforms import skip_bad_steps
from moelib.train.evaler import SpmdEvaler
from tests import tiny
from tests.train import small_run


@pytest.fixture(scope="session")
def trainer_config(tmp_path_factory):
    """Returns the config of an MoE layer on a token store, with most metrics switched on."""
    store = small_run.make_store(tmp_path_factory.mktemp("store") / "text")
    router = Router.default_config().set(bias_balancing=BiasBalancing.default_config())
    layers = tiny.stacked(tiny.transformer_layer(tiny.moe(router=router)))
    model = tiny.model_config(layers, vocab_size=400)
    cfg = tiny.trainer_config("", model=model, max_step=2, evaler=False)
    cfg.learner.set(skip=config_for_function(skip_bad_steps), norms_of=["([^/]+)/.*"])
    cfg.input = LMInput.default_config().set(source=store, seq_len=64, global_batch_size=8)
    validation = cfg.input.clone(mode=InputMode.EVALUATE, max_batches=1)
    cfg.evalers["validation"] = SpmdEvaler.default_config().set(input=validation)
    return cfg


@pytest.fixture(scope="session")
def trainer_dir(trainer_config, tmp_path_factory):
    """Returns the folder of a run of the config."""
    cfg, trainer_dir = trainer_config, str(tmp_path_factory.mktemp("runs") / "first")
    # --8<-- [start:fit]
    result = moelib.fit(cfg, trainer_dir=trainer_dir)
    print(result.step, result.metrics["loss"], result.evaluations["validation"]["perplexity"])
    # --8<-- [end:fit]
    assert result.step == 2
    return trainer_dir
