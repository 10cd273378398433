"""The six tasks of FLAME-MoE as data: the files of their questions, and the prompts.

Lines have the fields that the benchmarks' authors published, or those of Hugging Face's data sets.
The prompts are those of lm-eval 0.4.13 in its tasks of the same names.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.config import did_you_mean
from moelib.core.errors import MissingFileError, UserError
from moelib.runtime.storage import parse_json, read_text

Line = Mapping[str, Any]


class Question(NamedTuple):
    """A question with choices, one of which is correct."""

    # Text before the ending of each choice; they differ if they contain the choice.
    queries: Sequence[str]
    endings: Sequence[str]  # Text to score of each choice.
    gold: int  # Index of the correct choice.
    line: Line  # Line of the file; questions with equal lines are the same question.


class Task(NamedTuple):
    """A benchmark."""

    file: str  # File of the questions, relative to the data folder.
    shots_file: str  # File of the questions that examples are drawn from.
    num_fewshot: int  # Number of examples before a question in FLAME-MoE's evaluations.
    # Function from a line to a question; raises KeyError, TypeError or ValueError.
    question: Callable[[Line], Question]
    metrics: Sequence[str] = ("acc", "acc_norm")  # Names of the reported metrics.
    # Whether one more example is drawn, in case that one is the question itself, as lm-eval does in
    # tasks without a test split.
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
    """Returns a text of WikiHow without the marks in brackets that HellaSwag has."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _piqa(line: Line) -> Question:
    choices = [line["sol1"], line["sol2"]]
    return _question(f"Question: {line['goal']}\nAnswer:", choices, int(line["label"]), line)


def _winogrande(line: Line) -> Question:
    """Partial scoring (Trinh and Le, arXiv:1806.02847): the text after the blank is scored."""
    before, blank, after = line["sentence"].partition("_")
    if not blank:
        raise ValueError("the sentence has no blank, '_'")
    queries = [before + line["option1"], before + line["option2"]]
    unnamed = {field: value for field, value in line.items() if field != "qID"}
    return Question(queries, [after.strip()] * 2, ["1", "2"].index(line["answer"]), unnamed)


TASKS: Mapping[str, Task] = {
    "arc_easy": Task("ARC-Easy/ARC-Easy-Test.jsonl", "ARC-Easy/ARC-Easy-Train.jsonl", 10, _arc),
    "arc_challenge": Task(
        "ARC-Challenge/ARC-Challenge-Test.jsonl",
        "ARC-Challenge/ARC-Challenge-Train.jsonl",
        10,
        _arc,
    ),
    "hellaswag": Task(
        "hellaswag/hellaswag_val.jsonl",
        "hellaswag/hellaswag_train.jsonl",
        10,
        _hellaswag,
        draws_spare=True,
    ),
    "piqa": Task("piqa/valid.jsonl", "piqa/train.jsonl", 10, _piqa, draws_spare=True),
    "openbookqa": Task("openbookqa/test.jsonl", "openbookqa/train.jsonl", 0, _openbookqa),
    "winogrande": Task(
        "winogrande/dev.jsonl",
        "winogrande/train_xl.jsonl",
        0,
        _winogrande,
        metrics=("acc",),
        draws_spare=True,
    ),
}


def find_task(name: str) -> Task:
    """Returns the task of a name. Raises UserError, with the nearest name, if there is none."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; {did_you_mean(name, TASKS)}")
    return TASKS[name]


def read_questions(path: str, question: Callable[[Line], Question]) -> list[Question]:
    """Returns the questions of a file of JSON lines.

    The labels in a second file, as PIQA has (`valid.jsonl`, `valid-labels.lst`), become the field
    `label` of the lines. `question` makes a question of a line, see `Task`.

    Raises:
        MissingFileError: If there is no such file.
        UserError: If a line is not such a question, or the file is empty.
    """
    questions = []
    for location, line in _read_lines(path):
        try:
            read = question(line)
            num = len(read.endings)
            if not 0 <= read.gold < num:
                raise ValueError(f"the label is {read.gold}, and must be from 0 to {num - 1}")
            questions.append(read)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            reason = reason.replace("is not in list", "(its answer) is the label of no choice")
            raise UserError(
                f"{location}: {reason}; use the benchmark's own file, with answers."
            ) from error
    if not questions:
        raise UserError(f"{path} is empty; use the benchmark's own file.")
    return questions


def _read_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("file:line", object of the line), with the label of a second file if there is one."""
    if not os.path.isfile(path):
        raise MissingFileError(
            f"There is no {path}; put the benchmark's own file there (docs/how_to/evaluate.md)."
        )
    lines = enumerate(read_text(path).split("\n"), 1)
    numbered = [(f"{path}:{i}", line) for i, line in lines if line.strip()]
    labels_path = f"{os.path.splitext(path)[0]}-labels.lst"
    labels: list[str] | None = None
    if os.path.isfile(labels_path):
        labels = read_text(labels_path).split()
        if len(labels) != len(numbered):
            raise UserError(
                f"{labels_path} has {len(labels)} labels, but {path} has {len(numbered)} lines; "
                "take both from the same release."
            )
    for i, (location, text) in enumerate(numbered):
        try:
            line = parse_json(text)
        except ValueError as error:
            raise UserError(f"{location} is not JSON: {error}.") from None
        if not isinstance(line, dict):
            raise UserError(f"{location} is not a JSON object.")
        yield location, line if labels is None else {**line, "label": int(labels[i])}
