"""`moelib evaluate`: answers benchmarks and reads texts with the checkpoints of a run.

    moelib evaluate --trainer_dir=RUN --steps=all --tasks=arc_easy,piqa --data_dir=BENCHMARKS

The tasks are those of FLAME-MoE, from local files; with --lm_eval any of lm-eval's own. It prints a
table and writes results.json, results.csv and, of several checkpoints, a plot over steps.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from moelib.core import config_parse
from moelib.core.config import did_you_mean
from moelib.core.errors import UsageError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("trainer_dir", None, "Folder of a training run.")
    flags.DEFINE_integer("step", None, "Checkpoint to take; the newest if unset.")
    flags.DEFINE_string("steps", None, "Checkpoints to take: all, or steps such as 100,200.")
    flags.DEFINE_list("tasks", [], "Benchmarks, such as arc_easy,piqa.")
    flags.DEFINE_string("data_dir", None, "Folder of the benchmarks' files.")
    flags.DEFINE_integer("num_fewshot", None, "Examples before a question; by default the task's.")
    flags.DEFINE_integer("fewshot_seed", 1234, "Decides which examples are drawn.")
    flags.DEFINE_integer("limit", None, "The first questions of a task, documents of a text.")
    flags.DEFINE_list("corpus", [], "Text, JSON lines or Parquet: files or folders to read.")
    flags.DEFINE_bool("lm_eval", False, "Takes --tasks from lm-eval, which must be installed.")
    flags.DEFINE_string("include_path", None, "Folder of task files for --lm_eval.")
    flags.DEFINE_integer("max_length", None, "Tokens the model reads; by default as in training.")
    flags.DEFINE_integer("batch_tokens", 1 << 14, "Tokens of a batch.")
    flags.DEFINE_string("output", None, "Folder of the results; by default RUN/evaluation.")


def run(args: Sequence[str]) -> None:
    """Evaluates, and says what was written where.

    Raises:
        UsageError: If a flag is missing or cannot be carried out.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; --tasks and --corpus say what to evaluate on.")
    if not FLAGS.trainer_dir:
        raise UsageError("--trainer_dir must be set to the folder of a training run.")
    if FLAGS.step is not None and FLAGS.steps is not None:
        raise UsageError("--step and --steps are both set; leave one of them out.")
    if not FLAGS.tasks and not FLAGS.corpus:
        raise UsageError("--tasks or --corpus must be set; `moelib evaluate --help` says to what.")
    if FLAGS.tasks and not FLAGS.lm_eval and not FLAGS.data_dir:
        raise UsageError("--tasks needs --data_dir, the folder of the benchmarks' files.")
    if FLAGS.lm_eval and (FLAGS.data_dir or not FLAGS.tasks):
        raise UsageError("--lm_eval needs --tasks, and takes no --data_dir, but --include_path.")
    if FLAGS.include_path and not FLAGS.lm_eval:
        raise UsageError("--include_path is for --lm_eval; set both, or neither.")
    steps = FLAGS.steps if FLAGS.step is None else str(FLAGS.step)
    try:
        evaluate_run(
            FLAGS.trainer_dir,
            steps=find_steps(FLAGS.trainer_dir, steps),
            tasks=FLAGS.tasks,
            data_dir=FLAGS.data_dir,
            num_fewshot=FLAGS.num_fewshot,
            fewshot_seed=FLAGS.fewshot_seed,
            limit=FLAGS.limit,
            corpus=FLAGS.corpus,
            lm_eval=FLAGS.lm_eval,
            include_path=FLAGS.include_path,
            max_length=FLAGS.max_length,
            batch_tokens=FLAGS.batch_tokens,
            output=FLAGS.output or os.path.join(FLAGS.trainer_dir, "evaluation"),
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def find_steps(trainer_dir: str, wanted: str | None) -> list[int]:
    """Returns the steps of the checkpoints that are asked for, in order.

    Args:
        trainer_dir: Folder of a run.
        wanted: "all", or steps with commas between; None takes the newest.

    Raises:
        UsageError: If there is no such checkpoint, or it is no list of steps.
    """
    from moelib.checkpoint.contents import list_checkpoints

    folder = os.path.join(trainer_dir, "checkpoints")
    there = list(list_checkpoints(folder))
    if not there:
        raise UsageError(f"--trainer_dir {trainer_dir}: there is no checkpoint in {folder}.")
    if wanted is None:
        return there[-1:]
    if wanted == "all":
        return there
    try:
        steps = sorted({int(step) for step in wanted.split(",")})
    except ValueError:
        raise UsageError(f"--steps {wanted}: write all, or steps such as 100,200.") from None
    if missing := [step for step in steps if step not in there]:
        raise UsageError(
            f"{folder} has no checkpoint of step {', '.join(map(str, missing))}; "
            f"there are steps {', '.join(map(str, there))}."
        )
    return steps


def evaluate_run(
    trainer_dir: str,
    *,
    steps: Sequence[int],
    tasks: Sequence[str] = (),
    data_dir: str | None = None,
    num_fewshot: int | None = None,
    fewshot_seed: int = 1234,
    limit: int | None = None,
    corpus: Sequence[str] = (),
    lm_eval: bool = False,
    include_path: str | None = None,
    max_length: int | None = None,
    batch_tokens: int = 1 << 14,
    output: str,
) -> None:
    """Evaluates checkpoints of a run, prints a table and writes the results.

    The arguments are the flags of the command.

    Raises:
        FileNotFoundError: If a file is missing.
        UsageError: If the folder holds no run, a task is unknown, results would be overwritten, or
            the run has no input and max_length is None.
        ValueError: If a file is broken, or an argument out of range.
    """
    written = os.path.join(output, "results.json")
    if os.path.exists(written):
        raise UsageError(f"{written} is there already; set --output to another folder.")
    manager = _lm_eval_manager(tasks, include_path) if lm_eval else _check_tasks(tasks)
    from moelib.evaluation import report
    from moelib.evaluation.evaluations import evaluate
    from moelib.evaluation.multiple_choice import task_evaluation
    from moelib.evaluation.perplexity import corpus_evaluation
    from moelib.evaluation.scoring import Scorer

    run = _open_run(trainer_dir, steps[0])
    max_length = run.seq_len if max_length is None else max_length
    if max_length is None:
        raise UsageError(
            f"--trainer_dir {trainer_dir} was not trained by moelib, so its config.txt has no "
            "input.seq_len; set --max_length to the tokens that the model is to read."
        )
    scorer = Scorer(
        run.model,
        vocab_size=run.tokenizer.vocab_size,
        max_length=max_length,
        batch_tokens=batch_tokens,
        train_dtype=run.config.train_dtype,
    )
    choices = {"num_fewshot": num_fewshot, "limit": limit, "fewshot_seed": fewshot_seed}
    evaluations = [
        corpus_evaluation(path, run.tokenizer, max_length=max_length, limit=limit)
        for path in corpus
    ]
    if not lm_eval:
        evaluations += [task_evaluation(n, data_dir or "", run.tokenizer, **choices) for n in tasks]
    num_requests = sum(len(evaluation.requests) for evaluation in evaluations)

    def found_at(step: int) -> dict[str, Any]:
        params = run.params_at(step)
        with _progress(f"step {step}", num_requests) as on_batch:
            found = evaluate(scorer, params, evaluations, on_batch=on_batch)
        if manager is not None:
            from moelib.evaluation.lm_eval_model import LmEvalModel, run_tasks

            model = LmEvalModel(run.model, params, run.tokenizer, scorer)
            found |= run_tasks(model, manager, tasks, **choices)
        return found

    settings = {
        "trainer_dir": trainer_dir,
        "max_length": max_length,
        "train_dtype": run.config.train_dtype,
        "lm_eval": lm_eval,
        **choices,
        "tasks": {
            e.name: {**e.settings, "num_cut": scorer.num_cut(e.requests)} for e in evaluations
        },
    }
    os.makedirs(output, exist_ok=True)
    results: list[Any] = []
    for step in steps:
        results += report.results_of(step, run.tokens_at(step), found_at(step))
        report.write_results(output, results, settings)  # Kept if a later step fails.
    report.print_results(trainer_dir, results)
    print(f"wrote {written} and results.csv")
    if len(steps) > 1:
        plot = os.path.join(output, "results.png")
        report.plot_results(plot, trainer_dir, results)
        print(f"wrote {plot}")


class _Run(NamedTuple):
    """A run whose checkpoints are evaluated."""

    model: Any
    tokenizer: Any
    config: Any
    params_at: Callable[[int], Any]  # Reads the parameters of a step.

    @property
    def seq_len(self) -> int | None:
        """Tokens of a row of its training; None if it has no input, as a converted model."""
        return getattr(self.config.input, "seq_len", None)

    def tokens_at(self, step: int) -> int | None:
        """Returns the tokens read by a step, padding included; None if that is not known."""
        rows = getattr(self.config.input, "global_batch_size", None)
        return None if rows is None or self.seq_len is None else step * rows * self.seq_len


def _open_run(trainer_dir: str, step: int) -> _Run:
    """Returns a run, opened at a checkpoint."""
    import jax

    from moelib.checkpoint.restore import restore_params_only
    from moelib.train.loading import load_model

    loaded = load_model(trainer_dir, step=step, dtype="stored")
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loaded.parameters)
    with open(os.path.join(trainer_dir, "config.txt"), encoding="utf-8") as file:
        cfg = config_parse.parse(file.read())
    folder = os.path.join(trainer_dir, "checkpoints")
    read = lambda step: restore_params_only(folder, target, step=step).state
    return _Run(loaded.model, loaded.tokenizer, cfg, read)


def _check_tasks(tasks: Sequence[str]) -> None:
    """Raises ValueError if a task is unknown."""
    from moelib.evaluation.tasks import find_task

    for name in tasks:
        find_task(name)


# -- lm-eval -------------------------------------------------------------------------------------


def _lm_eval_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """Returns lm-eval's task manager, which knows the tasks.

    Raises:
        UsageError: If lm-eval is not installed, or a task is unknown.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Read when lm-eval is imported.
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--lm_eval needs lm-eval ({error}): pip install 'moelib[lm-eval]'."
        ) from None
    if include_path is not None:
        if not os.path.isdir(include_path):
            raise UsageError(f"--include_path {include_path}: there is no such folder.")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own  # To find all of lm-eval's takes half a minute.
    manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            raise UsageError(
                f"lm-eval has no task {name!r}; {did_you_mean(name, manager.all_tasks)}"
            )
    return manager


# -- Progress ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields what is to be called with the number of requests done: a bar, or lines elsewhere."""
    if sys.stderr.isatty():
        from rich import console, progress

        columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
        with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    last = time.monotonic()

    def say(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES or done == total:
            last = time.monotonic()
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)

    yield say


_SECONDS_BETWEEN_LINES = 10.0
