"""`moelib data`: shows the batches of a config as a training step reads them.

moelib data show --module=M --config=C --data_dir=DATA --step=100
moelib data show --module=M --config=C --data_dir=DATA --step=100 --trainer_dir=RUN
moelib data show --module=M --config=C --step=1 --sequences=8:12 --max_chars=200

Documents, sources of a mixture and padding are those of the batch, after packing and skipped
batches. No accelerator is used, and nothing is written.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from moelib import launch
from moelib.core.errors import UsageError
from moelib.runtime import storage
from moelib.runtime.command_line import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.ConfigFlags):
    """Flags of the command."""

    step: int | None = flag(None, "Training step whose batch is shown, from 1.", lower_bound=1)
    sequences: str = flag("0:4", "Sequences of the batch to show, first:stop.")
    max_chars: int | None = flag(
        None, "Characters of a document to show, from both ends; all if not set.", lower_bound=2
    )
    trainer_dir: str | None = flag(
        None,
        "Folder of a run of the config: its position in the data, and the batches that it skipped.",
    )


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the batch."""
    if list(arguments) != ["show"]:
        raise UsageError(f"{' '.join(arguments) or 'no action'}: the only action is show.")
    if flags.step is None:
        raise UsageError("--step is required: the training step whose batch is shown, from 1.")
    found = re.fullmatch(r"(\d+):(\d+)", flags.sequences)
    if not found or int(found[1]) >= int(found[2]):
        raise UsageError(f"--sequences={flags.sequences}: set first:stop with first < stop.")
    cfg = flags.load()
    os.environ["JAX_PLATFORMS"] = "cpu"  # No accelerator is taken.
    print(show(flags, cfg, int(found[1]), int(found[2])))


def show(flags: Flags, cfg: Any, first: int, stop: int) -> str:
    """Returns the text of sequences [first, stop) of the batch of a step."""
    from moelib.data.batches.describe import batch_of_step, describe_batch
    from moelib.data.batches.input import load_tokenizer
    from moelib.data.batches.packing import DocumentBoundary
    from moelib.data.tokens.tokenizer import NoTokenizerError
    from moelib.launch import check_data_dir
    from moelib.runs import phases
    from moelib.train.settings import check_config, completed

    cfg = cfg.clone(dir=flags.trainer_dir or cfg.dir or "unused")
    check_config(cfg)
    check_data_dir(cfg)
    assert flags.step is not None
    cfg = phases.of_step(cfg, flags.step) if cfg.phase is None else cfg
    ranges = _skipped(cfg, flags.trainer_dir)
    lm_input = completed(cfg).input
    opened: Any = lm_input.instantiate()
    before = _position_before(cfg, flags.trainer_dir, flags.step)
    position, batch = batch_of_step(opened, flags.step, ranges, before)
    num = cfg.input.global_batch_size
    if first >= num:
        raise UsageError(f"--sequences={flags.sequences}: a batch has {num} sequences.")
    try:
        tokenizer = load_tokenizer(lm_input)
    except NoTokenizerError as error:
        print(f"Token ids are shown instead of text: {error}", file=sys.stderr)
        tokenizer = None
    end_id = None  # Other documents are segments, which may have several ends: conversations.
    if getattr(lm_input, "document_boundary", None) is DocumentBoundary.CONTINUE:
        end_id = getattr(opened, "eos_id", None) if tokenizer is None else tokenizer.eos_id
    names = opened.source_names
    text = describe_batch(
        batch,
        tokenizer,
        first_sequence=first,
        max_sequences=stop - first,
        max_chars=flags.max_chars,
        sources=[names[k] for k in opened.source_ids(position)] if names else (),
        end_id=end_id,
        in_colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )
    skipped = f", after skipped batches {ranges}" if ranges else ""
    shown = f"sequences {first} to {min(stop, num) - 1} of {num:,}"
    return f"step {flags.step}: batch {position} of the data{skipped}; {shown}\n{text}"


def _skipped(cfg: Any, trainer_dir: str | None) -> list[list[int]]:
    """Returns the ranges of batches that a config and its run skip."""
    from moelib.data.batches.skip_batches import merged
    from moelib.runs.course import course_of, ranges_to_skip
    from moelib.runs.folder import CONFIG_FILE, RunFolder

    if trainer_dir is None:
        return ranges_to_skip(cfg, [], None)
    folder = RunFolder(trainer_dir)
    if not storage.exists(folder.config_file):
        raise UsageError(f"--trainer_dir={trainer_dir}: there is no {CONFIG_FILE}; name a run.")
    noted = [e["ranges"] for e in folder.events() if e["event"] == "skipped_ranges"]
    before = noted[-1] if noted else []  # Of earlier starts with other flags, too.
    return merged([*ranges_to_skip(cfg, course_of(folder), None), *before])


def _position_before(cfg: Any, trainer_dir: str | None, step: int) -> dict[str, Any] | None:
    """Returns the position in the newest checkpoint of a run before a step; None without one."""
    from moelib.checkpoint.contents import list_checkpoints
    from moelib.runs.folder import RunFolder

    of_input = [x for x in cfg.phases.values() if any(y.startswith("input") for y in x.changes)]
    begin = max((x.after_step for x in of_input if x.after_step < step), default=0)
    record = None
    if trainer_dir is not None:
        folder = RunFolder(trainer_dir)
        saved = [each for each in list_checkpoints(folder.checkpoints) if begin <= each < step]
        record = folder.record(saved[-1]) if saved else None
    if record is None and begin:
        raise UsageError(
            f"--step={step}: a phase changes the input after step {begin}, and its position in the "
            f"data is in the checkpoints of steps {begin} to {step - 1}; set --trainer_dir to a "
            "run that has one."
        )
    position = None if record is None else record.input
    return position if position and "step" in position else None  # Not that of several hosts.
