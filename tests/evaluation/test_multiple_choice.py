"""Questions with choices: prompts, scores and accuracies are those of lm-eval."""

import json

import pytest

from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.evaluation.evaluations import run_evaluations
from moelib.evaluation.multiple_choice import accuracies, prompts, task_evaluation
from moelib.evaluation.scoring import Score, Scorer
from moelib.evaluation.tasks import TASKS, Question, read_questions
from tests.evaluation import folders
from tests.evaluation.bag_lm import bag_lm

FIXTURES = json.loads(folders.FIXTURES.read_text(encoding="utf-8"))
CASES = [name for name in FIXTURES if name != "rolling"]


@pytest.fixture(scope="module")
def scored(tokenizer):
    """Returns (vocabulary padded beyond the tokenizer's) scorer and parameters."""
    model, params = bag_lm(folders.PADDED_VOCAB_SIZE)
    return Scorer(model=model, vocab_size=tokenizer.vocab_size, max_length=1024), params


def pairs_of(case):
    return [
        (context, continuation)
        for sample in FIXTURES[case]["samples"]
        for context, continuation in zip(
            sample["contexts"] * (len(sample["continuations"]) // len(sample["contexts"])),
            sample["continuations"],
            strict=True,
        )
    ]


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_lm_evals_byte_for_byte(case):
    task = TASKS[case.removesuffix("_3")]
    questions = read_questions(str(folders.DATA / task.file), task.question)
    expected = FIXTURES[case]
    settings = expected["num_fewshot"], expected["fewshot_seed"]
    assert prompts(task, questions, str(folders.DATA), *settings) == pairs_of(case)


@pytest.mark.parametrize("case", CASES)
def test_scores_and_accuracies_are_lm_evals(case, tokenizer, scored):
    expected = FIXTURES[case]
    evaluation = task_evaluation(
        case.removesuffix("_3"),
        str(folders.DATA),
        tokenizer,
        num_fewshot=expected["num_fewshot"],
        fewshot_seed=expected["fewshot_seed"],
    )
    scorer, params = scored
    scores = scorer.score(params, evaluation.requests)
    samples = expected["samples"]
    log_probs = [value for sample in samples for value in sample["log_probs"]]
    assert [score.log_prob for score in scores] == pytest.approx(log_probs, abs=1e-5, rel=1e-6)
    assert [s.is_greedy for s in scores] == [value for s in samples for value in s["greedy"]]
    found = run_evaluations(scorer, params, [evaluation])[evaluation.name]
    flat = {name: metric.value for name, metric in found.items()}
    flat |= {f"{name}_stderr": metric.stderr for name, metric in found.items()}
    assert flat == pytest.approx(expected["metrics"], abs=1e-12)


def test_the_fixtures_tell_accuracies_apart():
    metrics = [FIXTURES[case]["metrics"] for case in CASES]
    assert len({found["acc"] for found in metrics}) > 2
    assert any(found["acc"] != found.get("acc_norm", found["acc"]) for found in metrics)


@pytest.mark.parametrize("name", TASKS)
def test_hugging_face_fields_give_the_same_questions(name, tmp_path):
    task = TASKS[name]
    folders.write_hugging_face_files(tmp_path)
    for file in (task.file, task.shots_file):
        published = read_questions(str(folders.DATA / file), task.question)
        converted = read_questions(str(tmp_path / file), task.question)
        assert [q[:3] for q in converted] == [q[:3] for q in published]


def test_a_limit_takes_the_first_questions_with_the_same_examples(tokenizer):
    whole = task_evaluation("piqa", str(folders.DATA), tokenizer)
    part = task_evaluation("piqa", str(folders.DATA), tokenizer, limit=3)
    assert part.settings == {"num_fewshot": 10, "num_questions": 3}
    assert len(part.requests) == 6
    for ours, other in zip(part.requests, whole.requests, strict=False):
        assert all(map(list.__eq__, map(list, ours), map(list, other)))


def test_an_empty_ending_is_never_chosen_and_one_question_has_no_standard_error():
    question = Question(["q", "q"], ["", "b"], 1, {})
    found = accuracies(TASKS["arc_easy"], [question], [Score(-0.5, False), Score(-9.0, False)])
    assert found == {"acc": (0.0, None), "acc_norm": (1.0, None)}


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("arc_eazy", {}, r"'arc_eazy'.*'arc_easy'"),
        ("piqa", {"num_fewshot": -1}, "num_fewshot is -1"),
        ("piqa", {"limit": 0}, "limit is 0"),
        ("piqa", {"num_fewshot": 12}, r"12 questions.*num_fewshot=12.*11"),
        ("arc_easy", {"num_fewshot": 13}, r"12 questions.*12"),
    ],
)
def test_invalid_settings_are_refused(name, settings, named):
    tokenizer = ByteTokenizer.default_config().instantiate()
    with pytest.raises(UserError, match=named):
        task_evaluation(name, str(folders.DATA), tokenizer, **settings)
