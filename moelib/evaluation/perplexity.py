"""Perplexity and bits per byte of texts, as lm-eval's `loglikelihood_rolling` defines them."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from moelib.data.source_for_path import source_for_path
from moelib.data.tokenizer import Tokenizer
from moelib.evaluation.evaluations import Evaluation, Metric
from moelib.evaluation.requests import Ids, Request, encode_texts
from moelib.evaluation.scoring import Score


def corpus_evaluation(
    path: str,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    text_field: str = "text",
    limit: int | None = None,
) -> Evaluation:
    """Returns the perplexity of what lies at a path, tokenized.

    Args:
        path: A text file, which is one document, JSON lines or Parquet with a document each, or a
            folder of such files.
        tokenizer: Of the model.
        max_length: The most tokens that the model is to read at a time.
        text_field: The field or column of a record that holds the document.
        limit: Takes the first so many documents; None takes all.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not of its kind, there is no text in it, or limit is not positive.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"{path}: limit is {limit}; set it to 1 or more.")
    source = source_for_path(path, text_field=text_field).instantiate()
    texts = list(itertools.islice(source.documents(), limit))
    if not any(texts):
        raise ValueError(f"{path} has no text; name a file with some.")
    requests = [
        window
        for ids in encode_texts(tokenizer, texts)
        for window in rolling_windows(ids, max_length, tokenizer.eos_id)
    ]
    return Evaluation(
        path, requests, lambda scores: perplexities(texts, scores), {"num_documents": len(texts)}
    )


def rolling_windows(ids: Ids, max_length: int, eos_id: int) -> Iterator[Request]:
    """Yields windows that score each token of a document once.

    The first token comes after an end of text. Windows follow one another, `max_length` tokens
    each; the last one, which has fewer left to score, begins earlier, so that it is as long.
    """
    first = np.array([eos_id], np.int32)
    for start in range(0, len(ids), max_length):
        end = min(start + max_length, len(ids))
        context = ids[end - max_length - 1 : start] if start else first
        yield Request(context, ids[start:end])


def perplexities(texts: Sequence[str], scores: Sequence[Score]) -> Mapping[str, Metric]:
    """Returns `word_perplexity`, `byte_perplexity` and `bits_per_byte` of texts.

    Args:
        texts: The documents. Words are what white space splits them into, as by `re.split`; bytes
            are those of UTF-8.
        scores: Of all their tokens.
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
    """Returns e to the x, or infinity where that is too large for a float."""
    return math.exp(x) if x < 709 else math.inf
