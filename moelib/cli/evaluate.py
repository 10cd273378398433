"""`moelib evaluate`: answers benchmarks and reads texts with the checkpoints of a run.

    moelib evaluate --trainer_dir=RUN --steps=all --tasks=arc_easy,piqa --data_dir=BENCHMARKS
    moelib evaluate --hf_dir=MODEL --corpus=TEXTS --mesh=fsdp=8

The tasks are those of FLAME-MoE, from local files; with --lm_eval, those of lm-eval. The command
prints a table and writes results.json, results.csv and, of several checkpoints, a plot over steps.
"""

import dataclasses
import os
from collections.abc import Sequence

from moelib.cli.generate import ModelFlags
from moelib.core.errors import UsageError
from moelib.runtime import storage
from moelib.runtime.command_line import flag, no_arguments
from moelib.runtime.table import print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Flags that are arguments of `evaluate_model`."""

    tasks: tuple[str, ...] = flag((), "Benchmarks, such as arc_easy,piqa.", split=True)
    data_dir: str | None = flag(None, "Folder of the benchmarks' files.")
    corpus: tuple[str, ...] = flag(
        (), "Files or folders of text, JSON lines or Parquet, for perplexity.", split=True
    )
    num_fewshot: int | None = flag(None, "Examples before a question; by default the task's.")
    fewshot_seed: int = flag(1234, "Seed of the draw of examples.")
    limit: int | None = flag(None, "Number of questions of a task and of documents of a corpus.")
    lm_eval: bool = flag(False, "Whether --tasks are lm-eval's, which must be installed.")
    include_path: str | None = flag(None, "Folder of task files for --lm_eval.")
    max_length: int | None = flag(None, "Tokens of a sequence; by default as in training.")
    batch_tokens: int = flag(1 << 14, "Number of tokens of a batch.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(ModelFlags, EvaluationFlags):
    """Flags of the command."""

    steps: str | None = flag(None, "Checkpoints: all, or steps such as 100,200.")
    output: str | None = flag(None, "Folder of the results; by default evaluation in the run.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Evaluates, and prints the results and their folder."""
    no_arguments(arguments, Flags)
    if flags.step is not None and flags.steps is not None:
        raise UsageError("--step and --steps exclude each other; unset one.")
    if not flags.tasks and not flags.corpus:
        raise UsageError("set --tasks or --corpus to what to evaluate on.")
    if flags.lm_eval and (flags.data_dir or not flags.tasks):
        raise UsageError("--lm_eval requires --tasks, and takes --include_path, not --data_dir.")
    if flags.include_path and not flags.lm_eval:
        raise UsageError("--include_path requires --lm_eval; set both or neither.")
    steps = [] if flags.steps is None else find_steps(flags.folder, flags.steps)
    from moelib.evaluation.evaluate import evaluate_model
    from moelib.evaluation.report import results_table

    output = flags.output or os.path.join(flags.folder, "evaluation")
    options = {f.name: getattr(flags, f.name) for f in dataclasses.fields(EvaluationFlags)}
    flags = dataclasses.replace(flags, step=steps[0]) if steps else flags
    # No reference to the model is kept, so that the next step replaces its parameters.
    results = evaluate_model(flags.load(), steps=steps, output=output, **options)
    print_table(results_table(flags.folder, results))
    print(f"wrote {', '.join(sorted(storage.list_names(output)))} in {output}")


def find_steps(trainer_dir: str, wanted: str) -> list[int]:
    """Returns steps of a run's checkpoints in ascending order: "all", or those separated by commas.

    Raises:
        UsageError: If there is no such checkpoint, or the text is not a list of steps.
    """
    from moelib.checkpoint.contents import list_checkpoints
    from moelib.checkpoint.restore import warn_lost
    from moelib.runs.folder import RunFolder

    folder = RunFolder(trainer_dir).checkpoints
    available = list(list_checkpoints(folder))
    if not available:
        raise UsageError(f"--trainer_dir {trainer_dir}: there is no checkpoint in {folder}.")
    if wanted == "all":
        warn_lost(folder, available[-1])
        return available
    try:
        steps = sorted({int(step) for step in wanted.split(",")})
    except ValueError:
        raise UsageError(f"--steps {wanted}: write all, or steps such as 100,200.") from None
    if missing := [step for step in steps if step not in available]:
        raise UsageError(
            f"--steps {wanted}: {folder} has no checkpoint of step {missing[0]}; it has steps "
            f"{', '.join(map(str, available))}."
        )
    return steps
