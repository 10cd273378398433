"""A language model of a Hugging Face folder is fine-tuned and written as one."""

import jax
import pytest

import moelib
from experiments.tasks import causal_lm


@pytest.mark.slow
def test_fine_tunes(tmp_path, monkeypatch):
    train, test = causal_lm.manual()
    monkeypatch.setattr(causal_lm, "manual", lambda: (train, test[:64]))
    model, tokenizer = causal_lm.small_model()
    task = causal_lm.task_of(model, tokenizer)
    causal_lm.export(str(tmp_path / "base"), model, task.init(jax.random.key(0)), tokenizer)
    found = causal_lm.run(str(tmp_path), max_step=6)
    assert found["after"] < found["before"] - 0.5
    params = moelib.load_model(tmp_path / "fine-tuned").parameters
    exported = moelib.evaluate(task, causal_lm.manual()[1], params=params)
    assert exported["bits_per_token"] == pytest.approx(found["after"], rel=1e-5)


@pytest.mark.slow
def test_score(tmp_path):
    found = causal_lm.run(str(tmp_path))
    assert found["before"] > 3.3  # Source code is not English.
    assert found["after"] < 2.9
    model = moelib.load_model(tmp_path / "fine-tuned")
    assert len(next(moelib.generate(model, ["The "], max_new_tokens=20)).tokens) == 20
