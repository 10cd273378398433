"""Multiple choice: prompts with examples, and accuracies, as in lm-eval 0.4.13."""

import math
import os
import random
from collections.abc import Sequence

import numpy as np

from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import Tokenizer
from moelib.evaluation.evaluations import Evaluation, Metric, Metrics
from moelib.evaluation.requests import encode_pairs
from moelib.evaluation.scoring import Score
from moelib.evaluation.tasks import Question, Task, find_task, read_questions

FEWSHOT_SEED = 1234  # The default of lm-eval.


def task_evaluation(
    name: str,
    data_dir: str,
    tokenizer: Tokenizer,
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    fewshot_seed: int = FEWSHOT_SEED,
) -> Evaluation:
    """Returns the evaluation of a task; `evaluate_model` documents the arguments.

    Raises:
        MissingFileError: If a file is missing.
        UserError: If there is no such task, a number is out of range, or a file is invalid.
    """
    task = find_task(name)
    num_fewshot = task.num_fewshot if num_fewshot is None else num_fewshot
    if num_fewshot < 0 or (limit is not None and limit < 1):
        raise UserError(
            f"{name}: num_fewshot is {num_fewshot} and limit is {limit}; set num_fewshot to 0 or "
            "more, and limit to 1 or more."
        )
    questions = read_questions(os.path.join(data_dir, task.file), task.question)[:limit]
    pairs = prompts(task, questions, data_dir, num_fewshot, fewshot_seed)
    return Evaluation(
        name,
        encode_pairs(tokenizer, pairs),
        lambda scores: accuracies(task, questions, scores),
        {"num_fewshot": num_fewshot, "num_questions": len(questions)},
    )


def prompts(
    task: Task, questions: Sequence[Question], data_dir: str, num_fewshot: int, fewshot_seed: int
) -> list[tuple[str, str]]:
    """Returns (context, continuation) of every choice of every question, in their order.

    Raises:
        MissingFileError: If examples are requested and their file is missing.
        UserError: If that file is invalid or has too few questions.
    """
    pool: list[Question] = []
    if num_fewshot:
        path = os.path.join(data_dir, task.shots_file)
        pool = read_questions(path, task.question)
        needed = num_fewshot + task.draws_spare
        if len(pool) < needed:
            raise UserError(
                f"{path} has {len(pool)} questions, but num_fewshot={num_fewshot} needs {needed}; "
                f"set num_fewshot to {len(pool) - task.draws_spare} or less."
            )
    rng = random.Random(fewshot_seed)
    pairs = []
    for question in questions:
        shots = _draw(rng, pool, num_fewshot, question if task.draws_spare else None)
        above = "".join(_shot(shot) for shot in shots)
        choices = zip(question.queries, question.endings, strict=True)
        pairs += [(above + query, " " + ending) for query, ending in choices]
    return pairs


def _draw(
    rng: random.Random, pool: Sequence[Question], num: int, omitted: Question | None
) -> Sequence[Question]:
    """Returns examples, drawn as by lm-eval's default sampler."""
    if not num or omitted is None:
        return rng.sample(pool, num)
    others = lambda questions: [q for q in questions if q.line != omitted.line]
    drawn = others(rng.sample(pool, num + 1))
    if len(drawn) < num:  # The pool holds the question more than once.
        drawn = rng.sample(others(pool), num)
    return drawn[:num]


def _shot(question: Question) -> str:
    """Returns a question and its answer as an example."""
    return f"{question.queries[question.gold]} {question.endings[question.gold]}\n\n"


def accuracies(task: Task, questions: Sequence[Question], scores: Sequence[Score]) -> Metrics:
    """Returns the shares of questions that are answered correctly, with standard errors.

    The answer is the ending with the highest log-probability for `acc`, and with the highest
    log-probability per character (Unicode code point) for `acc_norm`.
    """
    remaining = iter(scores)
    hits: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for question in questions:
        log_probs = np.array([next(remaining).log_prob for _ in question.endings])
        lengths = np.array([float(len(ending)) for ending in question.endings])
        with np.errstate(divide="ignore"):  # An empty ending is never chosen.
            normed = log_probs / lengths
        hits["acc"].append(float(np.argmax(log_probs) == question.gold))
        hits["acc_norm"].append(float(np.argmax(normed) == question.gold))
    return {name: _mean(hits[name]) for name in task.metrics}


def _mean(values: Sequence[float]) -> Metric:
    """Returns the mean and, of two values or more, its standard error."""
    if len(values) < 2:
        return Metric(float(np.mean(values)))
    return Metric(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)))
