"""Texts as tokens: where a continuation begins."""

from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.evaluation.requests import encode_pairs, encode_texts
from moelib.huggingface.published_tokenizer import PublishedTokenizer
from tests.evaluation import folders


def test_spaces_at_the_end_of_a_context_go_to_the_continuation(tokenizer):
    spaced, plain = encode_pairs(tokenizer, [("To sit \n", "use"), ("To sit", " \nuse")])
    assert list(spaced.context) == list(plain.context) == tokenizer.encode("To sit")
    assert list(spaced.continuation) == list(plain.continuation)
    assert tokenizer.decode(spaced.continuation) == " \nuse"


def test_a_continuation_has_the_tokens_of_the_whole_beyond_the_context(tokenizer):
    whole = tokenizer.encode("the answer is the answer")
    cut = len(tokenizer.encode("the ans"))
    (request,) = encode_pairs(tokenizer, [("the ans", "wer is the answer")])
    assert list(request.continuation) == whole[cut:]


def test_contexts_of_a_published_model_begin_with_bos(tokenizer):
    cfg = PublishedTokenizer.default_config().set(path=str(folders.DATA), bos_token="a")
    tokenizer = cfg.set(add_bos_token=True).instantiate()
    plain = [("To sit", " use"), ("", "use")]
    with_bos = encode_pairs(tokenizer, plain)
    for (context, continuation), (ids, rest) in zip(plain, with_bos, strict=True):
        assert list(ids) == [tokenizer.bos_id, *tokenizer.encode(context)]
        assert list(rest) == tokenizer.encode(continuation)
    tokenizer = cfg.set(add_bos_token=False).instantiate()
    sit, use = encode_pairs(tokenizer, plain)
    assert list(sit.context) == tokenizer.encode("To sit")
    assert list(use.context) == [tokenizer.bos_id]


def test_an_empty_context_is_the_end_of_text():
    tokenizer = ByteTokenizer.default_config().instantiate()
    eos = tokenizer.eos_id
    empty, spaces = encode_pairs(tokenizer, [("", "ab"), ("  ", "ab")])
    assert (list(empty.context), list(empty.continuation)) == ([eos], [97, 98])
    assert (list(spaces.context), list(spaces.continuation)) == ([eos], [32, 32, 97, 98])


def test_many_texts_are_encoded_like_one(tokenizer):
    texts = [f"question {i} " * (i % 3) for i in range(2100)]
    found = [list(ids) for ids in encode_texts(tokenizer.encode_batch, iter(texts))]
    assert found == [tokenizer.encode(text) for text in texts]
