"""The check of exported parameters: those that no optimizer updates are compared too."""

import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.huggingface.pretrained import load_pretrained
from moelib.learner.learner import Learner, UpdateType
from moelib.learner.optimizers import adamw_optimizer
from moelib.train.adapters import add_adapters
from moelib.verify import export_checks
from moelib.verify.outcome import CheckSkippedError

FOLDER = pathlib.Path(__file__).parents[1] / "huggingface/fixtures/deepseek_v3"
FROZEN = (".*/self_attention/.*", UpdateType.NO_UPDATE)


@pytest.fixture(name="known", scope="module")
def fixture_known():
    """Returns what the check needs of the reference of a DeepSeek-V3 with frozen attention."""
    cfg, params, _ = load_pretrained(str(FOLDER))
    params = tree.map_by_path(lambda p, x: np.asarray(0 * x if p.endswith("bias") else x), params)
    model = cfg.clone(name="model").instantiate(parent=None)
    optimizer = config_for_function(adamw_optimizer).set(learning_rate=0.1)
    learner = Learner.default_config().set(optimizer=optimizer, update_rules=[FROZEN])
    learner = learner.clone(name="learner").instantiate(
        parent=None, param_specs=model.create_parameter_specs_recursively()
    )
    shardings = SimpleNamespace(model=jax.tree.map(lambda _: jax.devices()[0], params))
    trainer = SimpleNamespace(learner=learner, model=model)
    probe = SimpleNamespace(shardings=shardings, trainer=trainer)
    config = SimpleNamespace(model=cfg)
    return SimpleNamespace(config=config, probe=probe, start=SimpleNamespace(model=params))


def test_a_model_with_balancing_biases_passes(known):
    assert export_checks.exported(known) is None


@pytest.mark.parametrize("changed", ["bias_balancing/bias", "self_attention/q_down"])
def test_a_wrong_tensor_that_is_not_trained_is_found(known, changed, monkeypatch):
    save = export_checks.save_pretrained

    def reversed_experts(folder, cfg, params):
        reverse = lambda path, x: x[..., ::-1] if path.endswith(changed) else x
        return save(folder, cfg, tree.map_by_path(reverse, params))

    monkeypatch.setattr(export_checks, "save_pretrained", reversed_experts)
    assert changed in export_checks.exported(known).leaf


def test_a_model_with_adapters_is_skipped(known):
    cfg = add_adapters(known.config.model.clone(), ".*self_attention")
    adapted = SimpleNamespace(**vars(known) | {"config": SimpleNamespace(model=cfg)})
    with pytest.raises(CheckSkippedError, match="adapters"):
        export_checks.exported(adapted)
