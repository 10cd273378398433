"""The six tasks of FLAME-MoE, as data: where their questions lie, and how each is asked.

Lines are read as the benchmarks' authors published them, or with the fields that Hugging Face gives
them. What is asked, and how, is what lm-eval 0.4.13 asks in its tasks of the same names.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.config import did_you_mean

Line = Mapping[str, Any]


class Question(NamedTuple):
    """A question with choices, one of them right.

    Attributes:
        queries: What stands before each choice's ending; they differ where the choice is in them.
        endings: What is scored of each choice.
        gold: Which choice is right, from 0.
        line: What it was read from; questions with equal lines are the same.
    """

    queries: Sequence[str]
    endings: Sequence[str]
    gold: int
    line: Line


class Task(NamedTuple):
    """A benchmark and how it is asked.

    Attributes:
        file: Its questions, below the data folder.
        shots_file: The questions that examples are drawn from.
        num_fewshot: Examples before a question, in FLAME-MoE's evaluations.
        question: Makes a question of a line; raises KeyError, TypeError or ValueError.
        metrics: Those that are reported.
        draws_spare: Whether an example more is drawn, in case that one is the question itself:
            lm-eval does so in tasks without a test split.
    """

    file: str
    shots_file: str
    num_fewshot: int
    question: Callable[[Line], Question]
    metrics: Sequence[str] = ("acc", "acc_norm")
    draws_spare: bool = False


def _question(query: str, choices: Sequence[str], gold: int, line: Line) -> Question:
    return Question([query] * len(choices), choices, gold, line)


def _arc(line: Line) -> Question:
    stem, choices, labels = _stem_and_choices(line, "question")
    gold = labels.index(line["answerKey"])
    return _question(f"Question: {stem}\nAnswer:", choices, gold, line)


def _openbookqa(line: Line) -> Question:
    stem, choices, labels = _stem_and_choices(line, "question_stem")
    return _question(stem, choices, labels.index(line["answerKey"].lstrip()), line)


def _stem_and_choices(line: Line, stem_field: str) -> tuple[str, list[str], list[str]]:
    """Returns (stem, texts of choices, their labels) of a line of AI2's benchmarks."""
    published = line.get("question")
    if isinstance(published, dict):
        choices = published["choices"]
        texts, labels = ([choice[field] for choice in choices] for field in ("text", "label"))
        return published["stem"], texts, labels
    return line[stem_field], line["choices"]["text"], line["choices"]["label"]


def _hellaswag(line: Line) -> Question:
    context = line["ctx_a"] + " " + line["ctx_b"].capitalize()
    query = _without_marks(line["activity_label"] + ": " + context)
    endings = [_without_marks(ending) for ending in line["endings"]]
    return _question(query, endings, int(line["label"]), line)


def _without_marks(text: str) -> str:
    """Returns text of WikiHow without the marks in brackets that it has in HellaSwag."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _piqa(line: Line) -> Question:
    choices = [line["sol1"], line["sol2"]]
    return _question(f"Question: {line['goal']}\nAnswer:", choices, int(line["label"]), line)


def _winogrande(line: Line) -> Question:
    """Partial scoring (Trinh and Le, arXiv:1806.02847): scored is what follows the blank."""
    before, blank, after = line["sentence"].partition("_")
    if not blank:
        raise ValueError("the sentence has no blank, '_'")
    queries = [before + line["option1"], before + line["option2"]]
    unnamed = {field: value for field, value in line.items() if field != "qID"}
    return Question(queries, [after.strip()] * 2, ["1", "2"].index(line["answer"]), unnamed)


TASKS: Mapping[str, Task] = {
    "arc_easy": Task(
        file="ARC-Easy/ARC-Easy-Test.jsonl",
        shots_file="ARC-Easy/ARC-Easy-Train.jsonl",
        num_fewshot=10,
        question=_arc,
    ),
    "arc_challenge": Task(
        file="ARC-Challenge/ARC-Challenge-Test.jsonl",
        shots_file="ARC-Challenge/ARC-Challenge-Train.jsonl",
        num_fewshot=10,
        question=_arc,
    ),
    "hellaswag": Task(
        file="hellaswag/hellaswag_val.jsonl",
        shots_file="hellaswag/hellaswag_train.jsonl",
        num_fewshot=10,
        question=_hellaswag,
        draws_spare=True,
    ),
    "piqa": Task(
        file="piqa/valid.jsonl",
        shots_file="piqa/train.jsonl",
        num_fewshot=10,
        question=_piqa,
        draws_spare=True,
    ),
    "openbookqa": Task(
        file="openbookqa/test.jsonl",
        shots_file="openbookqa/train.jsonl",
        num_fewshot=0,
        question=_openbookqa,
    ),
    "winogrande": Task(
        file="winogrande/dev.jsonl",
        shots_file="winogrande/train_xl.jsonl",
        num_fewshot=0,
        question=_winogrande,
        metrics=("acc",),
        draws_spare=True,
    ),
}


def find_task(name: str) -> Task:
    """Returns the task of a name. Raises ValueError if there is none; the nearest is named."""
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; {did_you_mean(name, TASKS)}")
    return TASKS[name]


def read_questions(path: str, question: Callable[[Line], Question]) -> list[Question]:
    """Returns the questions of a file of JSON lines.

    Labels that lie beside it, as PIQA's do (`valid.jsonl`, `valid-labels.lst`), are the field
    `label` of its lines.

    Args:
        path: The file.
        question: Makes a question of a line.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is no such question, or there is none.
    """
    questions = []
    for place, line in _read_lines(path):
        try:
            questions.append(_checked(question(line)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{place}: {reason}; put the benchmark's own file there, one with answers."
            ) from error
    if not questions:
        raise ValueError(f"{path} is empty; put the benchmark's own file there.")
    return questions


def _checked(question: Question) -> Question:
    """Returns the question. Raises ValueError if its label names none of its endings."""
    num_endings = len(question.endings)
    if not 0 <= question.gold < num_endings:
        raise ValueError(f"the label is {question.gold}, and must be from 0 to {num_endings - 1}")
    return question


def _read_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file:line", the line's object), with its label if that lies beside the file."""
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"There is no {path}; put the benchmark's own file there (docs/how_to/evaluate.md)."
        )
    with open(path, encoding="utf-8") as file:
        numbered = [(f"{path}:{i}", line) for i, line in enumerate(file, 1) if line.strip()]
    labels_path = f"{os.path.splitext(path)[0]}-labels.lst"
    labels: list[str] | None = None
    if os.path.isfile(labels_path):
        with open(labels_path, encoding="utf-8") as file:
            labels = file.read().split()
        if len(labels) != len(numbered):
            raise ValueError(
                f"{labels_path} has {len(labels)} labels, and {path} has {len(numbered)} lines; "
                "take both from the same release."
            )
    for i, (place, text) in enumerate(numbered):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{place} is not JSON: {error}.") from None
        if not isinstance(line, dict):
            raise ValueError(f"{place} is not a JSON object.")
        yield place, line if labels is None else {**line, "label": int(labels[i])}
