"""Perplexity: each token is scored once, in the longest context; lm-eval's definitions."""

import json
import math

import numpy as np
import pytest

from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer
from moelib.evaluation.evaluations import run_evaluations
from moelib.evaluation.perplexity import corpus_evaluation, perplexities, rolling_windows
from moelib.evaluation.scoring import Score, Scorer
from moelib.huggingface.published_tokenizer import PublishedTokenizer
from tests.evaluation import folders
from tests.evaluation.bag_lm import bag_lm

FIXTURE = json.loads(folders.FIXTURES.read_text(encoding="utf-8"))["rolling"]
EOS = 99


@pytest.mark.parametrize("max_length", [1, 4, 7, 40])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 8, 23, 40])
def test_each_token_is_scored_once(num_tokens, max_length):
    ids = np.arange(num_tokens, dtype=np.int32)
    windows = list(rolling_windows(ids, max_length, EOS))
    scored = [token for window in windows for token in window.continuation]
    assert scored == list(range(num_tokens))
    for window in windows:
        read = [*window.context, *window.continuation][:-1]
        before = [EOS, *range(num_tokens)]
        start = before.index(window.context[0])
        assert read == before[start : start + len(read)]
        assert len(read) == min(max_length, num_tokens)  # The last one goes back for its context.


def test_perplexities_are_lm_evals():
    tokenizer = Tokenizer.default_config().set(path=str(folders.DATA)).instantiate()
    model, params = bag_lm(folders.PADDED_VOCAB_SIZE)
    path = str(folders.DATA / "corpus.jsonl")
    corpus = corpus_evaluation(path, tokenizer, max_length=32)
    scorer = Scorer(model=model, vocab_size=tokenizer.vocab_size, max_length=32)
    assert scorer.num_cut(corpus.requests) == 0
    scores = scorer.score(params, corpus.requests)
    assert sum(s.log_prob for s in scores) == pytest.approx(sum(FIXTURE["log_probs"]), rel=1e-7)
    found = run_evaluations(scorer, params, [corpus])[path]
    values = {name: metric.value for name, metric in found.items()}
    assert values == pytest.approx(FIXTURE["metrics"], rel=1e-5)
    assert corpus.settings == {"num_documents": 3}


def test_a_document_of_a_published_model_begins_after_bos(tmp_path):
    cfg = PublishedTokenizer.default_config().set(path=str(folders.DATA), bos_token="a")
    tokenizer = cfg.set(add_bos_token=True).instantiate()
    (tmp_path / "a.txt").write_text("a rose")
    (request,) = corpus_evaluation(str(tmp_path), tokenizer, max_length=32).requests
    assert list(request.context) == [tokenizer.bos_id]
    assert list(request.continuation) == tokenizer.encode("a rose")


def test_perplexities_of_a_uniform_model():
    texts = ["two words", "Straße"]  # 9 and 7 bytes.
    scores = [Score(-16 * math.log(2), False), Score(0.0, True)]
    found = {name: metric.value for name, metric in perplexities(texts, scores).items()}
    assert found == pytest.approx(
        {"bits_per_byte": 1.0, "byte_perplexity": 2.0, "word_perplexity": 2 ** (16 / 3)}
    )


def test_a_word_perplexity_beyond_floats_is_infinite():
    assert perplexities(["x" * 99], [Score(-1000.0, False)])["word_perplexity"].value == math.inf


def test_a_text_file_is_one_document_and_a_limit_takes_the_first(tmp_path):
    tokenizer = ByteTokenizer.default_config().instantiate()
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three")
    corpus = corpus_evaluation(str(tmp_path), tokenizer, max_length=5, limit=1)
    assert corpus.settings == {"num_documents": 1}
    assert [len(request.continuation) for request in corpus.requests] == [5, 3]


def test_a_corpus_without_text_is_refused(tmp_path):
    tokenizer = ByteTokenizer.default_config().instantiate()
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty.txt"):
        corpus_evaluation(str(tmp_path / "empty.txt"), tokenizer, max_length=5)
    with pytest.raises(ValueError, match=r"empty.txt:.*0"):
        corpus_evaluation(str(tmp_path / "empty.txt"), tokenizer, max_length=5, limit=0)
    with pytest.raises(FileNotFoundError, match="gone"):
        corpus_evaluation(str(tmp_path / "gone"), tokenizer, max_length=5)
