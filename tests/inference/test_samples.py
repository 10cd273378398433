"""Samples while a model trains: the texts that its checkpoints write, and what is refused."""

import math

import jax
import jax.numpy as jnp
import pytest

import moelib
from moelib.core.errors import UserError
from moelib.inference.samples import Samples
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.runs.folder import RunFolder
from tests import tiny
from tests.train import small_run

pytestmark = pytest.mark.usefixtures("promotion_of_optimizers")
PROMPTS = ["document number", "of"]


@pytest.fixture
def promotion_of_optimizers():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_run.make_store(tmp_path_factory.mktemp("data") / "store")


def with_samples(cfg):
    # --8<-- [start:config]
    samples = Samples.default_config().set(prompts=["document number", "of"], every_n_steps=2)
    cfg.watchers["samples"] = samples
    # --8<-- [end:config]
    samples.max_new_tokens = 12
    return cfg


def run_of(folder, store, **axes):
    cfg = small_run.trainer_config(folder, store, max_step=3)
    return cfg.set(mesh_shape=mesh_shape_from_axes(**axes))


def build(cfg):
    return cfg.instantiate(parent=None, devices=jax.devices()[: math.prod(cfg.mesh_shape)])


def sampled(folder):
    return [x for x in RunFolder(folder).events() if x["event"] == "sample"]


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "expert": 2}])
def test_samples_are_the_texts_of_the_checkpoints(store, tmp_path, axes, capsys):
    plain = build(run_of(tmp_path / "plain", store, **axes)).run()
    watched = build(with_samples(run_of(tmp_path / "run", store, **axes))).run()
    assert watched["loss"] == plain["loss"]
    found = sampled(tmp_path / "run")
    assert [(x["step"], x["prompt"]) for x in found] == [(s, p) for s in (2, 3) for p in PROMPTS]
    for step in (2, 3):
        model = moelib.load_model(tmp_path / "run", step=step)
        texts = [x.text for x in moelib.generate(model, PROMPTS, max_new_tokens=12)]
        assert [x["text"] for x in found if x["step"] == step] == texts
    assert f'step 3: "{PROMPTS[0]}' in capsys.readouterr().err


def test_without_finite_logits_training_goes_on(store, tmp_path, monkeypatch, caplog):
    cfg = with_samples(run_of(tmp_path / "run", store))
    trainer = build(cfg)
    bad = lambda _, params: jax.tree.map(lambda x: x * jnp.nan, params)
    monkeypatch.setattr(trainer.learner, "eval_params", bad)
    trainer.run()
    assert trainer.step == 3
    assert sampled(tmp_path / "run") == []
    assert "NO SAMPLES of step 2" in caplog.text


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", ""], "Prompt 1 has no tokens"),
        (["of many " * 60], "Prompt 0 has .* tokens, which leaves no room in max_length=64"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_before_training(
    store, tmp_path, prompts, message
):
    cfg = with_samples(run_of(tmp_path / "run", store))
    cfg.watchers["samples"].prompts = prompts
    with pytest.raises(UserError, match=message) as error:
        build(cfg)
    assert "watchers.samples" in "".join([str(error.value), *error.value.__notes__])


def test_a_run_without_text_is_refused(tmp_path):
    cfg = with_samples(tiny.trainer_config(tmp_path, max_step=1))
    with pytest.raises(UserError, match="has no tokenizer"):
        build(cfg)
