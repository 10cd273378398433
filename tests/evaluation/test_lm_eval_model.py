"""The adapter to lm-eval: prompts, scores and texts; with lm-eval itself, its own results.

Without lm-eval, a stub of its interface replaces it. Tests of its results are run where
`pip install 'moelib[lm-eval]'` has been: `pytest -m slow tests/evaluation`.
"""

import dataclasses
import importlib.util
import json
import sys
import warnings

import jax
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.evaluation.requests import Request, encode_pairs
from moelib.evaluation.scoring import Scorer
from moelib.huggingface.published_tokenizer import PublishedTokenizer
from moelib.runs.loading import LoadedModel
from tests import tiny
from tests.evaluation import folders, lm_eval_stub
from tests.evaluation.bag_lm import bag_lm
from tests.inference.models import compiled_whole_logits

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
FIXTURES = json.loads(folders.FIXTURES.read_text(encoding="utf-8"))

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def adapter():
    """Returns the module of the adapter; without lm-eval, over a stub that is removed after."""
    if not HAS_LM_EVAL:
        lm_eval_stub.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("moelib.evaluation.lm_eval_model")
    if not HAS_LM_EVAL:
        for name in [n for n in sys.modules if n.partition(".")[0] == "lm_eval"]:
            del sys.modules[name]
        del sys.modules["moelib.evaluation.lm_eval_model"]


def loaded(model, parameters, tokenizer):
    """Returns a model as `load_model` does."""
    return LoadedModel(
        folder="folder",
        model=model,
        parameters=parameters,
        tokenizer=tokenizer,
        stop_ids=(tokenizer.eos_id,),
        config=None,
        step=None,
        max_length=64,
        dtype=None,
        mesh=None,
    )


def wrapped(adapter, model, max_length):
    """Returns the adapter of a loaded model."""
    vocab_size = model.tokenizer.vocab_size
    scorer = Scorer(model=model.model, vocab_size=vocab_size, max_length=max_length)
    return adapter.LmEvalModel(model, scorer)


@pytest.fixture(scope="module")
def bag(adapter, tokenizer):
    return wrapped(adapter, loaded(*bag_lm(folders.PADDED_VOCAB_SIZE), tokenizer), 64)


@pytest.fixture(scope="module")
def generator(adapter, tokenizer):
    model = tiny.dense_model(tokenizer.vocab_size, dim=16).instantiate(parent=None)
    parameters = jax.jit(model.initialize_parameters_recursively)(jax.random.key(0))
    parameters = jax.tree.map(lambda x: 3 * x, parameters)
    return wrapped(adapter, loaded(model, parameters, tokenizer), 64)


def asked(text, **settings):
    """Returns a request to generate."""
    return lm_eval_stub.Instance(text, {"until": [], "max_gen_toks": 12, **settings})


# -- Scores --------------------------------------------------------------------------------------


def test_pairs_are_scored_as_our_own_tasks_score_them(bag, tokenizer):
    pairs = [("To sit", " use a chair"), ("A rose has", " thorns"), ("To", " go")]
    got = bag.loglikelihood([lm_eval_stub.Instance(*pair) for pair in pairs])
    want = bag._scorer.score(bag._model.parameters, encode_pairs(tokenizer, pairs))
    assert got == [tuple(score) for score in want]


def test_documents_are_scored_as_a_whole(bag, tokenizer):
    ids = np.array(tokenizer.encode("the answer " * 9), np.int32)
    (got,) = bag.loglikelihood_rolling([lm_eval_stub.Instance(tokenizer.decode(ids))])
    start = np.array([tokenizer.eos_id], np.int32)
    (want,) = bag._scorer.score(bag._model.parameters, [Request(start, ids)])
    assert got == pytest.approx(want.log_prob, rel=1e-6)


def test_prompts_of_a_published_model_begin_with_bos(adapter, bag, tokenizer):
    cfg = PublishedTokenizer.default_config().set(path=str(folders.DATA), bos_token="a")
    published = cfg.set(add_bos_token=True).instantiate()
    with_bos = dataclasses.replace(bag._model, tokenizer=published)
    model = wrapped(adapter, with_bos, 64)
    bos = published.bos_id
    assert (model.prefix_token_id, model.eot_token_id) == (bos, tokenizer.eos_id)
    assert model.tok_encode("rose") == [bos, *tokenizer.encode("rose")]
    assert model.tok_encode("rose", add_special_tokens=False) == tokenizer.encode("rose")
    ids = np.array(tokenizer.encode("rose"), np.int32)
    (got,) = model.loglikelihood_rolling([lm_eval_stub.Instance("rose")])
    request = Request(np.array([bos], np.int32), ids)  # BOS itself is not scored.
    (want,) = model._scorer.score(with_bos.parameters, [request])
    assert got == pytest.approx(want.log_prob, rel=1e-6)


# -- Texts ---------------------------------------------------------------------------------------


def test_greedy_text_ends_before_the_first_stop_string(generator, tokenizer):
    ids = tokenizer.encode("A rose")
    length = len(ids)
    model, parameters = generator._model.model, generator._model.parameters
    for _ in range(12):
        padded = np.array([[*ids, *[0] * (32 - len(ids))]], np.int32)
        logits = compiled_whole_logits(model, parameters, padded)
        ids.append(int(np.argmax(logits[0, len(ids) - 1])))
    text = tokenizer.decode(ids[length:])
    ask = lambda **settings: generator.generate_until([asked("A rose", **settings)])[0]
    assert ask() == text
    stops = [text[7:9], text[4:6]]
    assert ask(until=stops) == text[: min(map(text.index, stops))]
    assert ask(until=stops[1]) == text[: text.index(stops[1])]
    assert ask(max_gen_toks=3) == tokenizer.decode(ids[length : length + 3])


def test_requests_with_their_own_settings_are_answered_in_order(generator):
    texts = ["A rose", "x", "The river, says the old map", "It has thorns"]
    requests = [asked(text, max_gen_toks=3 + i % 2) for i, text in enumerate(texts)]
    alone = [generator.generate_until([request])[0] for request in requests]
    assert generator.generate_until(requests) == alone
    assert len(set(alone)) > 1


def test_repeated_requests_have_draws_of_their_own(generator):
    requests = [asked("A rose", do_sample=True, temperature=1.0)] * 2
    first, second = generator.generate_until(requests)
    assert first != second
    assert generator.generate_until(requests) == [first, second]


def test_long_contexts_are_cut_from_the_left(generator, tokenizer, caplog):
    long = "a b c d e f g h " * 9
    ids = generator.tok_encode(long)
    assert len(ids) > 52
    short = tokenizer.decode(ids[-52:])
    assert generator.tok_encode(short) == ids[-52:]
    first, second = generator.generate_until([asked(long), asked(short)])
    assert first == second
    assert "1 of 2 contexts" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"num_beams": 3}, "'num_beams'"), ({"max_gen_toks": 64}, r"max_gen_toks.*64.*63")],
)
def test_unsupported_settings_are_refused(generator, settings, message):
    with pytest.raises(UserError, match=message):
        generator.generate_until([asked("A rose", **settings)])


def test_metrics_keep_values_and_standard_errors(adapter):
    results = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "x,none": 2.0}
    found = adapter._metrics(results)
    assert found == {"acc": (0.5, 0.1), "em,strict": (1.0, None), "x": (2.0, None)}


# -- With lm-eval --------------------------------------------------------------------------------

needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="lm-eval is not installed")


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    from tests.evaluation import lm_eval_reference

    folder = tmp_path_factory.mktemp("tasks")
    lm_eval_reference.write_tasks(str(folder))
    return folder


@pytest.mark.slow
@needs_lm_eval
def test_the_fixtures_are_what_lm_eval_gives():
    from tests.evaluation import lm_eval_reference

    found = lm_eval_reference.reference()
    assert found.keys() == FIXTURES.keys()
    for case, fixture in FIXTURES.items():
        assert found[case]["metrics"] == pytest.approx(fixture["metrics"], rel=1e-9)
        samples = found[case].get("samples", [])
        for sample, expected in zip(samples, fixture.get("samples", []), strict=True):
            assert sample["contexts"] == expected["contexts"]
            assert sample["continuations"] == expected["continuations"]
            assert sample["log_probs"] == pytest.approx(expected["log_probs"], rel=1e-9)


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.parametrize("case", FIXTURES)
def test_lm_eval_gives_the_same_metrics_for_our_model(case, adapter, bag, task_folder):
    fixture = FIXTURES[case]
    found = adapter.run_tasks(
        wrapped(adapter, bag._model, 32 if case == "rolling" else 1024),
        adapter.TaskManager(include_path=str(task_folder), include_defaults=False),
        [case],
        num_fewshot=fixture.get("num_fewshot"),
        limit=None,
        fewshot_seed=fixture.get("fewshot_seed", 1234),
    )
    values = {name: metric.value for name, metric in found[case].items()}
    errors = {f"{name}_stderr": metric.stderr for name, metric in found[case].items()}
    errors = {name: error for name, error in errors.items() if error is not None}
    assert values | errors == pytest.approx(fixture["metrics"], rel=1e-5)


@pytest.mark.slow
@needs_lm_eval
def test_a_task_that_generates_runs(adapter, generator, task_folder):
    import yaml

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
    manager = adapter.TaskManager(include_path=str(task_folder), include_defaults=False)
    how = {"num_fewshot": None, "limit": 2, "fewshot_seed": 0}
    found = adapter.run_tasks(generator, manager, ["copy"], **how)
    assert found["copy"]["exact_match"].value == 0.0


@pytest.mark.slow
@needs_lm_eval
def test_tasks_of_a_folder_are_found_and_others_are_not(adapter, task_folder):
    manager = adapter.task_manager(["piqa", "rolling"], str(task_folder))
    assert {"piqa", "rolling"} <= set(manager.all_tasks)
    with pytest.raises(UserError, match=r"'piqua'.*'piqa'"):
        adapter.task_manager(["piqua"], str(task_folder))
    with pytest.raises(UserError, match="gone "):
        adapter.task_manager(["piqa"], "gone")
