"""Evaluation of trained models on benchmarks, texts and the tasks of lm-eval."""

import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import jax

from moelib.core.config_types import refuse_unknown
from moelib.core.errors import ExistingFileError, UserError, refuse_single_strings
from moelib.core.metrics import Scalars
from moelib.evaluation import report
from moelib.evaluation.evaluations import Evaluation, Metrics, run_evaluations
from moelib.evaluation.multiple_choice import FEWSHOT_SEED, task_evaluation
from moelib.evaluation.perplexity import corpus_evaluation
from moelib.evaluation.report import Result
from moelib.evaluation.scoring import BATCH_TOKENS, Scorer
from moelib.runs.loading import LoadedModel
from moelib.runtime import storage
from moelib.runtime.processes import on_process_0
from moelib.runtime.progress import Progress
from moelib.tasks.run import Examples, evaluate_task
from moelib.tasks.task import Task

logger = logging.getLogger(__name__)


@overload
def evaluate(model: Task.Config, tasks: Examples, **settings: Any) -> Scalars: ...


@overload
def evaluate(
    model: LoadedModel,
    tasks: Sequence[str] = (),
    *,
    data_dir: str | None = ...,
    corpus: Sequence[str] = ...,
    steps: Sequence[int] = ...,
    num_fewshot: int | None = ...,
    fewshot_seed: int = ...,
    limit: int | None = ...,
    lm_eval: bool = ...,
    include_path: str | None = ...,
    max_length: int | None = ...,
    batch_tokens: int = ...,
    output: str | None = ...,
) -> list[Result]: ...


def evaluate(
    model: LoadedModel | Task.Config, tasks: Any = (), **settings: Any
) -> list[Result] | Scalars:
    """Returns the metrics of a model on benchmarks and texts, or of a task on its examples.

        model = moelib.load_model("runs/flame")
        for result in moelib.evaluate(model, ["piqa"], data_dir="benchmarks"):
            print(result.task, result.metric, result.value)

    Of a task (`moelib.tasks.task`), it returns {name: value}: the loss and its metrics over all
    examples, the `metric` of the task, and `weight`, that of the loss.

        scores = moelib.evaluate(task, examples, trainer_dir="runs/digits")

    Args:
        model: The model, from `moelib.load_model`; or a task.
        tasks: Names of benchmarks; of a task, its examples.
        settings: Further arguments of `evaluate_model`: `corpus`, `data_dir`, `limit`, `output`,
            ...; of a task, those of `moelib.predict`.

    Raises:
        UserError: If an argument or a file is invalid or missing, or results would be overwritten.
    """
    if isinstance(model, Task.Config):
        return evaluate_task(model, tasks, **settings)
    refuse_unknown("evaluate", settings, inspect.signature(evaluate_model).parameters)
    return evaluate_model(model, tasks, **settings)


def evaluate_model(
    model: LoadedModel,
    tasks: Sequence[str] = (),
    *,
    data_dir: str | None = None,
    corpus: Sequence[str] = (),
    steps: Sequence[int] = (),
    num_fewshot: int | None = None,
    fewshot_seed: int = FEWSHOT_SEED,
    limit: int | None = None,
    lm_eval: bool = False,
    include_path: str | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    output: str | None = None,
) -> list[Result]:
    """Returns the metrics of a language model, and writes them to a folder if one is given.

    Args:
        model: The model, from `moelib.load_model`.
        tasks: Names of benchmarks in `moelib.evaluation.tasks.TASKS`, or of lm-eval's tasks.
        data_dir: Folder of the benchmarks' files.
        corpus: Text files, JSON lines, Parquet files, or folders of them, for perplexity.
        steps: Steps of the run's checkpoints to evaluate; by default that of `model`.
        num_fewshot: Number of examples before a question; None for each task's default.
        fewshot_seed: Seed of the draw of examples.
        limit: Number of questions of each task and documents of each corpus; None for all.
        lm_eval: Whether the tasks are lm-eval's, which must be installed.
        include_path: Folder of further task files for lm-eval.
        max_length: Maximum number of tokens of a sequence; None for that of the model at each step.
        batch_tokens: Number of tokens of a batch, padding included.
        output: Folder for results.json, results.csv and, of several steps, results.png, which
            process 0 writes; results are kept if a later step fails. None writes nothing.

    Raises:
        UserError: If an argument or a file is invalid or missing, or results would be overwritten.
    """
    _check_what(model, tasks, corpus, data_dir="" if lm_eval else data_dir)
    length = _length(model, max_length)
    scorer = Scorer(
        model=model.model,
        vocab_size=model.tokenizer.vocab_size,
        max_length=length,
        batch_tokens=batch_tokens,
        mesh=model.mesh,
    )
    options = {"num_fewshot": num_fewshot, "limit": limit, "fewshot_seed": fewshot_seed}
    evaluations = _of_corpora(corpus, model, length, limit)
    manager = _lm_eval_manager(tasks, include_path) if lm_eval else None
    if manager is None:
        evaluations += [
            task_evaluation(n, data_dir or "", model.tokenizer, **options) for n in tasks
        ]
    _check_output(output)  # After the data, whose errors are those of a first attempt too.
    record: dict[str, Any] = {
        "folder": model.folder,
        "max_length": length,
        "dtype": model.dtype,
        "lm_eval": lm_eval,
        **options,
        "tasks": {
            e.name: {**e.settings, "num_cut": scorer.num_cut(e.requests)} for e in evaluations
        },
    }
    results: list[Result] = []
    lengths: dict[int | None, int] = {}  # `max_length` by step.
    for step in steps or [model.step]:
        if step != model.step:
            model = dataclasses.replace(model, parameters={})  # Frees those of the previous step.
            model = model.at_step(step)
            # Another model if the run's config changed between the steps.
            scorer = dataclasses.replace(scorer, model=model.model)
        lengths[model.step] = length = _length(model, max_length)
        if length != scorer.max_length:
            scorer = dataclasses.replace(scorer, max_length=length)
            evaluations[: len(corpus)] = _of_corpora(corpus, model, length, limit)
        if len({*lengths.values()}) > 1:
            record["max_length"] = lengths
        with model.on_mesh():
            found = _scored(model, scorer, evaluations)
            if manager is not None:
                from moelib.evaluation.lm_eval_model import LmEvalModel, run_tasks

                found |= run_tasks(LmEvalModel(model, scorer), manager, tasks, **options)
        results += report.results_of(model.step, _num_tokens_read(model), found)
        if output is not None:
            args = (output, model.folder, results, record)
            on_process_0(functools.partial(report.write_results, *args))
    _warn_of_lengths(lengths)
    return results


def _length(model: LoadedModel, max_length: int | None) -> int:
    """Returns the maximum number of tokens of a sequence. Raises UserError if it is unknown."""
    length = model.max_length if max_length is None else max_length
    if length is None:
        raise UserError(
            f"{model.folder} does not state the length of sequences that the model was trained on; "
            "set max_length (--max_length)."
        )
    return length


def _warn_of_lengths(lengths: Mapping[int | None, int]) -> None:
    """Warns if steps were evaluated at different lengths."""
    if len({*lengths.values()}) > 1:
        logger.warning(
            "steps have max_length as in their training, %s, so that their results differ by it "
            "too; set max_length (--max_length) for the same at all steps.",
            lengths,
        )


def _of_corpora(
    corpus: Sequence[str], model: LoadedModel, length: int, limit: int | None
) -> list[Evaluation]:
    """Returns the evaluations on texts, in windows of `length` tokens."""
    return [
        corpus_evaluation(path, model.tokenizer, max_length=length, limit=limit) for path in corpus
    ]


def _scored(
    model: LoadedModel, scorer: Scorer, evaluations: Sequence[Evaluation]
) -> dict[str, Metrics]:
    title = "requests" if model.step is None else f"step {model.step}: requests"
    total = sum(len(evaluation.requests) for evaluation in evaluations)
    is_main = jax.process_index() == 0
    with Progress(title, total, enabled=is_main, seconds_between_lines=10.0) as progress:
        return run_evaluations(scorer, model.parameters, evaluations, on_batch=progress.update)


def _num_tokens_read(model: LoadedModel) -> int | None:
    """Returns the number of tokens that a run had read, padding included; None if unknown.

    It is unknown in a later phase, or after another change of the input: earlier sizes are not
    recorded.
    """
    position = {} if model.record is None else model.record.input or {}
    if getattr(model.config, "phase", None) is not None or "begin" in position:
        return None
    cfg = model.config and model.config.input
    batch_size, seq_len = getattr(cfg, "global_batch_size", None), getattr(cfg, "seq_len", None)
    if model.step is None or batch_size is None or seq_len is None:
        return None
    return model.step * batch_size * seq_len


def _lm_eval_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Read when lm-eval is imported.
    try:
        from moelib.evaluation.lm_eval_model import task_manager
    except ModuleNotFoundError as error:
        raise UserError(
            f"lm_eval (--lm_eval) needs lm-eval ({error}): pip install 'moelib[lm-eval]'."
        ) from None
    return task_manager(tasks, include_path)


def _check_what(
    model: Any, tasks: Sequence[str], corpus: Sequence[str], *, data_dir: str | None
) -> None:
    """Raises UserError unless a model and, in lists, something to evaluate it on are given."""
    refuse_single_strings(tasks=tasks, corpus=corpus)
    if not tasks and not corpus:
        raise UserError("tasks and corpus are empty; set one of them to what to evaluate on.")
    if not isinstance(model, LoadedModel):
        raise UserError(f"model is {model!r}; pass a model from moelib.load_model.")
    if tasks and data_dir is None:
        raise UserError("tasks need data_dir (--data_dir), the folder of the benchmarks' files.")


def _check_output(output: str | None) -> None:
    """Raises ExistingFileError if a folder has results."""
    path = "" if output is None else os.path.join(output, report.RESULTS_FILE)
    if path and on_process_0(lambda: storage.exists(path)):
        raise ExistingFileError(
            f"{path} exists; set output (--output) to another folder, or remove the file."
        )
