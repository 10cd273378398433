"""lm-eval itself: the fixtures are what it gives today, and it gives the same for our model.

Run where `pip install 'moelib[lm-eval]'` has been: `pytest -m slow tests/evaluation`.
"""

import importlib.util
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from moelib.cli import evaluate
from moelib.core.errors import UsageError
from moelib.core.module import functional
from moelib.data.tokenizer import Tokenizer
from moelib.evaluation.scoring import Scorer
from moelib.inference.generate import Settings, generate_tokens
from tests import tiny
from tests.evaluation import folders
from tests.evaluation.bag_lm import bag_lm

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed: pip install 'moelib[lm-eval]'", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from moelib.evaluation.lm_eval_model import LmEvalModel, TaskManager, run_tasks
    from tests.evaluation import lm_eval_reference

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

FIXTURES = json.loads(folders.FIXTURES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.default_config().set(path=str(folders.DATA)).instantiate()


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lm_eval_reference.write_tasks(str(folder))
    return folder


def bag_in_lm_eval(tokenizer, max_length):
    model, params = bag_lm(folders.PADDED_VOCAB_SIZE)
    scorer = Scorer(model, vocab_size=tokenizer.vocab_size, max_length=max_length)
    return LmEvalModel(model, params, tokenizer, scorer)


def flattened(metrics):
    values = {name: metric.value for name, metric in metrics.items()}
    errors = {name: metric.stderr for name, metric in metrics.items() if metric.stderr is not None}
    return values | {f"{name}_stderr": error for name, error in errors.items()}


def test_the_fixtures_are_what_lm_eval_gives():
    found = lm_eval_reference.reference()
    assert found.keys() == FIXTURES.keys()
    for case, fixture in FIXTURES.items():
        assert found[case]["metrics"] == pytest.approx(fixture["metrics"], rel=1e-9)
        samples = found[case].get("samples", [])
        for sample, expected in zip(samples, fixture.get("samples", []), strict=True):
            assert sample["contexts"] == expected["contexts"]
            assert sample["continuations"] == expected["continuations"]
            assert sample["log_probs"] == pytest.approx(expected["log_probs"], rel=1e-9)


@pytest.mark.parametrize("case", FIXTURES)
def test_lm_eval_gives_the_same_metrics_for_our_model(case, tokenizer, task_folder):
    fixture = FIXTURES[case]
    length = lm_eval_reference.ROLLING_LENGTH if case == "rolling" else 1024
    found = run_tasks(
        bag_in_lm_eval(tokenizer, length),
        TaskManager(include_path=str(task_folder), include_defaults=False),
        [case],
        num_fewshot=fixture.get("num_fewshot"),
        limit=None,
        fewshot_seed=fixture.get("fewshot_seed", 1234),
    )
    assert flattened(found[case]) == pytest.approx(fixture["metrics"], rel=1e-5)


def causal_lm(vocab_size):
    model = tiny.dense_model(vocab_size).instantiate(parent=None)
    params = jax.jit(model.initialize_parameters_recursively)(jax.random.key(0))
    return model, jax.tree.map(lambda x: 3 * x, params)


class Request:
    """What lm-eval asks with."""

    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def generator(tokenizer):
    model, params = causal_lm(tokenizer.vocab_size)
    scorer = Scorer(model, vocab_size=tokenizer.vocab_size, max_length=64)
    return LmEvalModel(model, params, tokenizer, scorer)


def test_greedy_text_ends_before_the_first_of_the_stops(generator, tokenizer):
    model, params = generator._model, generator._params
    ids = tokenizer.encode("A rose")
    length = len(ids)
    for _ in range(12):
        batch = {"input_ids": jnp.asarray([ids], jnp.int32)}
        logits, _ = functional(model, None, params, (batch,), is_training=False, method="logits")
        ids.append(int(np.argmax(logits[0, -1])))
    text = tokenizer.decode(ids[length:])
    ask = lambda **settings: generator.generate_until([Request("A rose", settings)])[0]
    assert ask(max_gen_toks=12, until=[]) == text
    stops = [text[7:9], text[4:6]]
    expected = text[: min(map(text.index, stops))]
    assert ask(max_gen_toks=12, until=stops) == expected
    assert ask(max_gen_toks=12, until=stops[1]) == text[: text.index(stops[1])]
    assert ask(max_tokens=3, until=[]) == tokenizer.decode(ids[length : length + 3])


def test_text_is_generated_in_the_dtype_of_training(generator, tokenizer):
    model, params = generator._model, generator._params
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    settings = {"vocab_size": tokenizer.vocab_size, "max_length": 64, "train_dtype": "bfloat16"}
    trained_low = LmEvalModel(model, params, tokenizer, Scorer(model, **settings))
    ids = tokenizer.encode("A rose")
    greedy = Settings(max_new_tokens=12, temperature=0.0, vocab_size=tokenizer.vocab_size)
    (want,) = generate_tokens(model, low, [ids], greedy)
    request = Request("A rose", {"max_gen_toks": 12, "until": []})
    assert trained_low.generate_until([request]) == [tokenizer.decode(want)]
    assert trained_low._params["embedding"]["weight"].dtype == jnp.bfloat16


def test_requests_with_their_own_settings_are_answered_in_order(generator, tokenizer):
    texts = ["A rose", "x", "The river, says the old map", "It has thorns"]
    requests = [
        Request(text, {"max_gen_toks": 3 + i % 2, "until": []}) for i, text in enumerate(texts)
    ]
    alone = [generator.generate_until([request])[0] for request in requests]
    assert generator.generate_until(requests) == alone
    assert len(set(alone)) > 1


def test_repeated_requests_are_drawn_anew(generator):
    settings = {"max_gen_toks": 12, "until": [], "do_sample": True, "temperature": 1.0}
    requests = [Request("A rose", settings)] * 2
    first, second = generator.generate_until(requests)
    assert first != second
    assert generator.generate_until(requests) == [first, second]


def test_long_contexts_are_cut_to_leave_room(generator, caplog):
    settings = {"max_gen_toks": 12, "until": []}
    long, cut = "a b c d e f g h " * 9, []
    ids = generator.tok_encode(long)
    assert len(ids) > 52
    short = generator._tokenizer.decode(ids[-52:])
    assert generator.tok_encode(short) == ids[-52:]
    cut = generator.generate_until([Request(long, settings), Request(short, settings)])
    assert cut[0] == cut[1]
    assert "1 of 2 contexts leave no room" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"until": [], "num_beams": 3}, "generation_kwargs has num_beams; known are until"),
        ({"until": [], "max_gen_toks": 64}, "max_gen_toks is 64, and the model reads 64"),
    ],
)
def test_what_cannot_be_generated_is_refused(generator, settings, message):
    with pytest.raises(ValueError, match=message):
        generator.generate_until([Request("A rose", settings)])


def test_a_task_that_generates_runs(generator, task_folder):
    task = {
        "task": "copy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folders.DATA / "corpus.jsonl")}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"max_gen_toks": 8, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    }
    (task_folder / "copy.yaml").write_text(yaml.safe_dump(task))
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    found = run_tasks(generator, manager, ["copy"], num_fewshot=None, limit=2, fewshot_seed=0)
    assert found["copy"]["exact_match"].value == 0.0


def test_tasks_of_a_folder_are_found_and_others_are_not(task_folder):
    manager = evaluate._lm_eval_manager(["piqa", "rolling"], str(task_folder))
    assert {"piqa", "rolling"} <= set(manager.all_tasks)
    with pytest.raises(UsageError, match="lm-eval has no task 'piqua'; did you mean 'piqa'"):
        evaluate._lm_eval_manager(["piqua"], str(task_folder))
    with pytest.raises(UsageError, match="--include_path gone: there is no such folder"):
        evaluate._lm_eval_manager(["piqa"], "gone")
