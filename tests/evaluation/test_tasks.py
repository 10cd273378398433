"""The six tasks: labels in a second file, and invalid files.

The fixtures of test_multiple_choice.py have the questions that valid lines become.
"""

import pytest

from moelib.evaluation.tasks import TASKS, read_questions


def test_the_second_context_of_hellaswag_begins_with_its_only_capital():
    line = {"activity_label": "A", "ctx_a": "a.", "ctx_b": "THE b", "endings": ["c"], "label": "0"}
    assert TASKS["hellaswag"].question(line).queries == ["A: a. The b"]


def test_labels_in_a_second_file_belong_to_the_lines(tmp_path):
    path = tmp_path / "valid.jsonl"
    path.write_text('{"goal": "g", "sol1": "a", "sol2": "b"}\n' * 3)
    (tmp_path / "valid-labels.lst").write_text("0\n1\n1\n")
    assert [q.gold for q in read_questions(str(path), TASKS["piqa"].question)] == [0, 1, 1]
    (tmp_path / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(ValueError, match=r"2 labels.*valid.jsonl.*3 lines"):
        read_questions(str(path), TASKS["piqa"].question)


PIQA = '{"goal": "g", "sol1": "a", "sol2": "b"'
HELLASWAG = '{"activity_label": "A", "ctx_a": "a", "ctx_b": "b", "endings": ["c"], "label": "1"}'
ARC = '{"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": ""}'
WINOGRANDE = '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa", PIQA + "}", r"lines.jsonl:1:.*'label'"),
        ("piqa", PIQA + ', "label": -1}', r"lines.jsonl:1:.*-1.*0.*1"),
        ("hellaswag", HELLASWAG, r"lines.jsonl:1:.*1.*0.*0"),
        ("piqa", "\n[1]", r"lines.jsonl:2.*JSON"),
        ("piqa", '{"goal"', r"lines.jsonl:1.*JSON"),
        ("piqa", "\n", r"lines.jsonl"),
        ("arc_easy", ARC, r"lines.jsonl:1:.*label of no choice"),
        ("winogrande", WINOGRANDE, r"lines.jsonl:1"),
    ],
)
def test_an_invalid_line_is_named(name, content, message, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(str(path), TASKS[name].question)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        read_questions("gone.jsonl", TASKS["piqa"].question)
