"""Tasks in training: their metrics are added to those of the input."""

import jax
import pytest

from moelib.core.errors import UserError
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.batches.synthetic import SyntheticInput
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.evaluation.evaler import TaskEvaler
from moelib.evaluation.evaluations import run_evaluations
from moelib.evaluation.multiple_choice import task_evaluation
from moelib.evaluation.scoring import Scorer
from moelib.parallel.mesh import create_device_mesh
from moelib.train.evaler import SpmdEvaler
from tests.evaluation import folders
from tests.evaluation.bag_lm import bag_lm

MESH = (1, 2, 1, 4, 1, 1)
SYNTHETIC = SyntheticInput.default_config().set(
    seq_len=8, global_batch_size=8, vocab_size=folders.PADDED_VOCAB_SIZE
)


@pytest.fixture(scope="module")
def lm_input(tokenizer, tmp_path_factory):
    """Returns the config of an input over a store of the tests' tokenizer."""
    store = tmp_path_factory.mktemp("data") / "store"
    texts = [f"document {i} of the store" for i in range(40)]
    prepare(InMemorySource.default_config().set(texts=texts).instantiate(), tokenizer, str(store))
    return LMInput.default_config().set(
        source=TokenStore.default_config().set(path=str(store)),
        seq_len=512,
        global_batch_size=8,
        mode=InputMode.EVALUATE,
    )


def evaler(lm_input, **settings):
    """Returns (an evaler, its parameters)."""
    model, params = bag_lm(folders.PADDED_VOCAB_SIZE)
    cfg = TaskEvaler.default_config().set(
        name="val", input=lm_input, tasks=["arc_easy", "winogrande"], data_dir=str(folders.DATA)
    )
    return cfg.set(**settings).instantiate(parent=None, model=model), params


def test_metrics_are_those_of_the_input_and_the_tasks(lm_input, tokenizer):
    ours, params = evaler(lm_input, num_fewshot=2, limit=3)
    alone = SpmdEvaler.default_config().set(name="val", input=lm_input)
    mesh, batches = create_device_mesh(MESH), []
    model, _ = bag_lm(folders.PADDED_VOCAB_SIZE)
    with jax.set_mesh(mesh):
        found = ours.evaluate(params, mesh, on_batch=batches.append)
        expected = alone.instantiate(parent=None, model=model).evaluate(params, mesh)
        again = ours.evaluate(params, mesh)
    assert found == again
    assert batches[-1] == (4 + 3 + 4) + 3 * 2  # The choices of all questions.
    scorer = Scorer(model=model, vocab_size=tokenizer.vocab_size, max_length=512)
    for name in ("arc_easy", "winogrande"):
        task = task_evaluation(name, str(folders.DATA), tokenizer, num_fewshot=2, limit=3)
        for metric, (value, _) in run_evaluations(scorer, params, [task])[name].items():
            expected[f"{name}/{metric}"] = value
    assert found == expected
    assert {"loss", "perplexity", "arc_easy/acc_norm", "winogrande/acc"} <= found.keys()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data_dir": "gone"}, "gone/ARC-Easy/ARC-Easy-Test.jsonl"),
        ({"tasks": ["arc"]}, "'arc'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"input": SYNTHETIC.clone(max_batches=1)}, "SyntheticTokens"),
    ],
)
def test_invalid_settings_are_refused_before_a_step(lm_input, settings, named):
    ours, _ = evaler(lm_input, **settings)
    mesh = create_device_mesh(MESH)
    with jax.set_mesh(mesh), pytest.raises(UserError, match=named):
        ours.open_input(mesh)


@pytest.mark.parametrize(("batch_tokens", "batch_size"), [(1 << 14, 32), (1 << 13, 16), (1, 8)])
def test_the_batch_size_does_not_depend_on_that_of_training(lm_input, batch_tokens, batch_size):
    large = lm_input.clone(global_batch_size=1 << 12)
    ours, _ = evaler(large, batch_tokens=batch_tokens)
    mesh = create_device_mesh(MESH)
    with jax.set_mesh(mesh):
        ours.open_input(mesh)
        assert ours._scorer._batch_size(100, 512) == batch_size  # The mesh makes 8 parts.
