"""A batch as text, with the boundaries of its documents: for a look at the data."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moelib.core.errors import UserError
from moelib.data.batches.input import TOKEN_ARRAYS, Input, State
from moelib.data.batches.skip_batches import position_of
from moelib.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moelib.core.tree import Batch

_Ints = npt.NDArray[np.integer]
_BYTES = "target_num_bytes"  # An array that not all inputs have.


def batch_of_step(
    opened: Input, step: int, ranges: Sequence[Sequence[int]] = (), before: State | None = None
) -> tuple[int, "Batch"]:
    """Returns (position, the global batch there) that a training step reads.

    Args:
        opened: The training input.
        step: Number of the step, from 1.
        ranges: Ranges [first, stop] of batches that the run skips.
        before: Position of an earlier step, from which the input goes on; None for its beginning.

    Raises:
        UserError: If there is no such batch, or it depends on parameters, or has no tokens.
    """
    name, position = type(opened).__name__, position_of(step, ranges)
    if opened.reads_parameters:
        raise UserError(f"{name} makes batches of the parameters of a run; they cannot be shown.")
    batches, batch = opened.iterator(), None
    if before is not None:
        batches.follow(before)
    if batches.can_seek:
        batches.seek(position)
        batch = next(batches, None)
    else:  # A stream is read from there on.
        for _ in range(position + 1 - batches.state()["step"]):
            batch = next(batches, None)
    if batch is None:
        raise UserError(f"step={step}: the input ends before batch {position}; set a smaller one.")
    if missing := [array for array in TOKEN_ARRAYS if array not in batch]:
        raise UserError(f"The batches of {name} have no {', '.join(missing)}: they are no text.")
    return position, batch


def describe_batch(
    batch: "Batch",
    tokenizer: Tokenizer | None = None,
    *,
    first_sequence: int = 0,
    max_sequences: int = 4,
    max_chars: int | None = 200,
    sources: Sequence[str] = (),
    end_id: int | None = None,
    in_colour: bool = False,
) -> str:
    """Returns the sequences of a batch as text, a paragraph each and a line per document.

    A line has the document's tokens in the sequence, its first and last position, the text, and the
    last target, which the model predicts but does not read. Tokens after which nothing is predicted
    are in double brackets:

        sequence 0 of web: 2 documents, 16 of 16 tokens, 41 bytes of targets
          1: 10 tokens, positions 5 to 14: ' the end of one' > '<|endoftext|>'
          2: 6 tokens, 4 with a target, positions 0 to 5: [['Next']] 'document' > ' begins'

    Args:
        batch: The batch.
        tokenizer: The input's (`load_tokenizer`); token ids are shown without it.
        first_sequence: Index of the first sequence that is shown.
        max_sequences: Number of sequences that are shown.
        max_chars: Characters of a text, of which a longer one shows its beginning and its end; None
            for whole texts.
        sources: Name of the source of each sequence of the batch; empty for none.
        end_id: Token that ends a document, where several are one segment.
        in_colour: Whether tokens after which one is predicted are green, for terminals.

    Raises:
        UserError: If the tokenizer lacks a token id.
    """
    ids, targets, segments = (np.asarray(batch[name]) for name in TOKEN_ARRAYS[:3])
    if tokenizer is not None and max(ids.max(), targets.max()) >= tokenizer.vocab_size:
        raise UserError(
            f"token id {max(ids.max(), targets.max())} is beyond the tokenizer's vocabulary of "
            f"{tokenizer.vocab_size}; use the tokenizer of the input."
        )

    def text(tokens: _Ints) -> str:
        shown = repr(tokenizer.decode(tokens)) if tokenizer else " ".join(map(str, tokens))
        if max_chars is None or len(shown) <= max_chars:
            return shown
        return f"{shown[: max_chars // 2]} ... {shown[-max_chars // 2 :]}"

    def run_text(row: int, run: _Ints) -> str:
        shown = text(ids[row][run])
        if targets[row][run[0]] < 0:
            return f"[[{shown}]]"
        return f"\x1b[32m{shown}\x1b[0m" if in_colour else shown

    lines = []
    for row in range(first_sequence, min(len(ids), first_sequence + max_sequences)):
        documents = _documents(ids[row], segments[row], end_id)
        of = f" of {sources[row]}" if sources else ""
        lines.append(
            f"sequence {row}{of}: {len(documents)} documents, {np.sum(segments[row] > 0)} of "
            f"{ids.shape[1]} tokens"
            + (f", {batch[_BYTES][row]} bytes of targets" if _BYTES in batch else "")
        )
        for number, mine in enumerate(documents, 1):
            first, last = batch["positions"][row][mine[[0, -1]]]
            has_target = targets[row][mine] >= 0
            counted = "" if has_target.all() else f" {has_target.sum()} with a target,"
            runs = np.split(mine, np.flatnonzero(np.diff(has_target)) + 1)
            shown = " ".join(run_text(row, run) for run in runs)
            target = text(targets[row][mine[-1:]]) if has_target[-1] else "(none)"
            lines.append(
                f"  {number}: {len(mine)} tokens,{counted} positions {first} to {last}: "
                f"{shown} > {target}"
            )
    return "\n".join(lines)


def _documents(ids: _Ints, segments: _Ints, end_id: int | None) -> list[_Ints]:
    """Returns the indices of each document's tokens in a sequence, padding excluded."""
    (used,) = np.nonzero(segments > 0)
    if not len(used):
        return []
    ends = np.diff(segments[used]) != 0
    if end_id is not None:
        ends |= ids[used][:-1] == end_id
    return np.split(used, np.flatnonzero(ends) + 1)
