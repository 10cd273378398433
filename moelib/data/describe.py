"""A batch as text, with the boundaries of its documents: for a look at the data."""

from typing import TYPE_CHECKING

import numpy as np

from moelib.core.errors import UserError
from moelib.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moelib.core.tree import Batch


def describe_batch(
    batch: "Batch",
    tokenizer: Tokenizer | None = None,
    *,
    max_sequences: int = 4,
    max_chars: int = 200,
) -> str:
    """Returns the sequences of a batch as text, a paragraph each and a line per document.

    A line has the document's tokens in the sequence, its first and last position, the text, and the
    last target, which the model predicts but does not read:

        sequence 0: 2 documents, 16 of 16 tokens, 41 bytes of targets
          1: 10 tokens, positions 5 to 14: ' the end of one' > '<|endoftext|>'
          2: 6 tokens, positions 0 to 5: 'The next document' > ' begins'

    Without the input's tokenizer (`load_tokenizer`), token ids are shown. Of a long document, the
    beginning and the end are shown. Raises UserError if the tokenizer lacks a token id.
    """
    ids, targets, segments, positions = (
        np.asarray(batch[name])
        for name in ("input_ids", "target_labels", "segment_ids", "positions")
    )
    if tokenizer is not None and max(ids.max(), targets.max()) >= tokenizer.vocab_size:
        raise UserError(
            f"token id {max(ids.max(), targets.max())} is beyond the tokenizer's vocabulary of "
            f"{tokenizer.vocab_size}; use the tokenizer of the input."
        )

    def text(tokens: np.ndarray) -> str:
        shown = repr(tokenizer.decode(tokens)) if tokenizer else " ".join(map(str, tokens))
        if len(shown) <= max_chars:
            return shown
        return f"{shown[: max_chars // 2]} ... {shown[-max_chars // 2 :]}"

    lines = []
    for row in range(min(len(ids), max_sequences)):
        labels, counts = np.unique(segments[row][segments[row] > 0], return_counts=True)
        lines.append(
            f"sequence {row}: {len(labels)} documents, {counts.sum()} of {ids.shape[1]} tokens, "
            f"{batch['target_num_bytes'][row]} bytes of targets"
        )
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            (mine,) = np.nonzero(segments[row] == label)
            first, last = positions[row][mine[0]], positions[row][mine[-1]]
            lines.append(
                f"  {label}: {count} tokens, positions {first} to {last}: "
                f"{text(ids[row][mine])} > {text(targets[row][mine[-1:]])}"
            )
    return "\n".join(lines)
