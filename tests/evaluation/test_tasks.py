"""The six tasks: questions from lines, and invalid files."""

import json

import pytest

from moelib.evaluation.tasks import TASKS, find_task, read_questions


def written(tmp_path, *lines, name="lines.jsonl"):
    path = tmp_path / name
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "line", "queries", "endings", "gold"),
    [
        (
            "arc_challenge",
            {
                "id": "Q1",
                "question": {
                    "stem": "Which is hot?",
                    "choices": [{"text": "ice", "label": "1"}, {"text": "fire", "label": "2"}],
                },
                "answerKey": "2",
            },
            ["Question: Which is hot?\nAnswer:"] * 2,
            ["ice", "fire"],
            1,
        ),
        (
            "openbookqa",
            {
                "question_stem": "The sun is",
                "choices": {"text": ["cold", "bright"], "label": ["A", "B"]},
                "answerKey": " B",
            },
            ["The sun is"] * 2,
            ["cold", "bright"],
            1,
        ),
        (
            "hellaswag",
            {
                "activity_label": "Home",
                "ctx_a": " [header] How to sit [title] Find a chair.  Any will do.",
                "ctx_b": "THE chair",
                "endings": ["[step] holds you.", "flies."],
                "label": "0",
            },
            ["Home:  How to sit. Find a chair. Any will do. The chair"] * 2,
            [" holds you.", "flies."],
            0,
        ),
        (
            "piqa",
            {"goal": "To sit", "sol1": "run.", "sol2": "use a chair.", "label": 1},
            ["Question: To sit\nAnswer:"] * 2,
            ["run.", "use a chair."],
            1,
        ),
        (
            "winogrande",
            {
                "qID": "1",
                "sentence": "Ann saw Eve, and _ waved.",
                "option1": "Ann",
                "option2": "Eve",
                "answer": "2",
            },
            ["Ann saw Eve, and Ann", "Ann saw Eve, and Eve"],
            ["waved.", "waved."],
            1,
        ),
    ],
)
def test_a_line_becomes_a_question(name, line, queries, endings, gold, tmp_path):
    (question,) = read_questions(written(tmp_path, line), TASKS[name].question)
    assert (list(question.queries), list(question.endings)) == (queries, endings)
    assert question.gold == gold


def test_labels_in_a_second_file_belong_to_the_lines(tmp_path):
    lines = [{"goal": str(i), "sol1": "a", "sol2": "b"} for i in range(3)]
    path = written(tmp_path, *lines, name="valid.jsonl")
    (tmp_path / "valid-labels.lst").write_text("0\n1\n1\n")
    assert [q.gold for q in read_questions(path, TASKS["piqa"].question)] == [0, 1, 1]
    (tmp_path / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(ValueError, match=r"2 labels.*valid.jsonl.*3 lines"):
        read_questions(path, TASKS["piqa"].question)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa", '{"goal": "g", "sol1": "a", "sol2": "b"}', r"lines.jsonl:1:.*'label'"),
        (
            "piqa",
            '{"goal": "g", "sol1": "a", "sol2": "b", "label": -1}',
            r"lines.jsonl:1:.*-1.*0.*1",
        ),
        (
            "hellaswag",
            '{"activity_label": "A", "ctx_a": "a", "ctx_b": "b", "endings": ["c"], "label": "1"}',
            r"lines.jsonl:1:.*1.*0.*0",
        ),
        ("piqa", "\n[1]", r"lines.jsonl:2.*JSON"),
        ("piqa", '{"goal"', r"lines.jsonl:1.*JSON"),
        ("piqa", "\n", r"lines.jsonl"),
        (
            "arc_easy",
            '{"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": ""}',
            r"lines.jsonl:1:.*list",
        ),
        (
            "winogrande",
            '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}',
            r"lines.jsonl:1",
        ),
    ],
)
def test_an_invalid_line_is_named(name, content, message, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(str(path), TASKS[name].question)


def test_a_missing_file_and_an_unknown_task_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        read_questions(str(tmp_path / "gone.jsonl"), TASKS["piqa"].question)
    with pytest.raises(ValueError, match=r"'mmlu'.*arc_challenge, arc_easy"):
        find_task("mmlu")
