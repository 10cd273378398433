"""Perplexity and bits per byte of texts, as in lm-eval's `loglikelihood_rolling`."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from moelib.core.errors import UserError
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.tokens.tokenizer import Tokenizer
from moelib.evaluation.evaluations import Evaluation, Metric, Metrics
from moelib.evaluation.requests import Ids, Request, encode_texts
from moelib.evaluation.scoring import Score


def corpus_evaluation(
    path: str,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    limit: int | None = None,
) -> Evaluation:
    """Returns the evaluation of the perplexity of the first `limit` documents, or of all.

    The path is a text file, which is one document, a file of JSON lines or Parquet with a document
    per record in `text`, or a folder of such files. Windows have `max_length` tokens.

    Raises:
        FileNotFoundError: If there is no such file.
        UserError: If the file is invalid or has no text, or limit is not positive.
    """
    if limit is not None and limit < 1:
        raise UserError(f"{path}: limit is {limit}; set it to 1 or more.")
    source = source_for_path(path).instantiate()
    texts = list(itertools.islice(source.documents(), limit))
    if not any(texts):
        raise UserError(f"{path} has no text; set corpus to files with text.")
    requests = [
        window
        for ids in encode_texts(tokenizer.encode_batch, texts)
        for window in rolling_windows(ids, max_length, tokenizer.prefix_id)
    ]
    return Evaluation(
        path, requests, lambda scores: perplexities(texts, scores), {"num_documents": len(texts)}
    )


def rolling_windows(ids: Ids, max_length: int, prefix_id: int) -> Iterator[Request]:
    """Yields windows that score each token of a document once.

    The context of the first token is `prefix_id`. Windows of `max_length` tokens follow one
    another; the last one, which has fewer tokens to score, begins earlier and is as long.
    """
    first = np.array([prefix_id], np.int32)
    for start in range(0, len(ids), max_length):
        end = min(start + max_length, len(ids))
        context = ids[end - max_length - 1 : start] if start else first
        yield Request(context, ids[start:end])


def perplexities(texts: Sequence[str], scores: Sequence[Score]) -> Metrics:
    """Returns `word_perplexity`, `byte_perplexity` and `bits_per_byte` from the windows' scores.

    Words are separated by white space, as by `re.split`; bytes are those of UTF-8.
    """
    nats = -sum(score.log_prob for score in scores)
    num_words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    return {
        "word_perplexity": Metric(_exp(nats / num_words)),
        "byte_perplexity": Metric(_exp(nats / num_bytes)),
        "bits_per_byte": Metric(nats / num_bytes / math.log(2)),
    }


def _exp(x: float) -> float:
    """Returns the exponential, or infinity if it exceeds the range of a float."""
    return math.exp(x) if x < 709 else math.inf
