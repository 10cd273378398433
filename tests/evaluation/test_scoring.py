"""Scores: independence of the batch, cut contexts, the vocabulary and meshes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.jaxpr import walk
from moelib.core.param import is_spec
from moelib.evaluation import scoring
from moelib.evaluation.evaluations import Evaluation, Metric, run_evaluations
from moelib.evaluation.requests import Request
from moelib.evaluation.scoring import Scorer
from moelib.parallel.mesh import create_device_mesh
from tests import tiny
from tests.evaluation.bag_lm import bag_lm, bag_log_probs, bag_params
from tests.inference.models import compiled_whole_logits

VOCAB = 50


def request(rng, context, continuation, vocab_size=VOCAB):
    ids = rng.integers(0, vocab_size, context + continuation).astype(np.int32)
    return Request(ids[:context], ids[context:])


def some_requests(num=23, longest=150, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, [longest, 9], (num, 2))
    return [request(rng, context, continuation) for context, continuation in lengths]


def alone(params, request, vocab_size=VOCAB, max_length=10**6):
    """Returns (log-probability, whether it is greedy) of one request, by NumPy."""
    ids = np.concatenate(request)[-(max_length + 1) :]
    num = len(request.continuation)
    rows = bag_log_probs(params, ids[:-1], vocab_size)[-num:]
    log_prob = sum(rows[i, token] for i, token in enumerate(request.continuation))
    return log_prob, all(rows.argmax(-1) == request.continuation)


@pytest.fixture(scope="module")
def model():
    return bag_lm(VOCAB)


def scorer(model, **settings):
    return Scorer(model=model[0], **{"vocab_size": VOCAB, "max_length": 200, **settings})


def test_scores_do_not_depend_on_other_requests(model):
    requests = some_requests()
    scores = scorer(model).score(model[1], requests)
    for score, of in zip(scores, requests, strict=True):
        log_prob, is_greedy = alone(bag_params(VOCAB), of)
        assert score.log_prob == pytest.approx(log_prob, abs=1e-4)
        assert score.is_greedy == is_greedy


def test_greedy_is_what_greedy_decoding_gives(model):
    rng = np.random.default_rng(1)
    params = bag_params(VOCAB)
    context = rng.integers(0, VOCAB, 70).tolist()
    ids = list(context)
    for _ in range(5):
        ids.append(int(bag_log_probs(params, ids, VOCAB)[-1].argmax()))
    likely = np.array(ids[70:], np.int32)
    other = likely.copy()
    other[2] = (other[2] + 1) % VOCAB
    requests = [Request(np.array(context, np.int32), tail) for tail in (likely, other)]
    scores = scorer(model).score(model[1], requests)
    assert [score.is_greedy for score in scores] == [True, False]


@pytest.mark.parametrize("batch_tokens", [1, 300, 1 << 14])
def test_order_and_batch_size_do_not_matter(model, batch_tokens):
    requests = some_requests()
    base = scorer(model).score(model[1], requests)
    order = np.random.default_rng(2).permutation(len(requests))
    done = []
    split = scorer(model, batch_tokens=batch_tokens)
    mixed = split.score(model[1], [requests[i] for i in order], on_batch=done.append)
    for i, score in zip(order, mixed, strict=True):
        assert score.log_prob == pytest.approx(base[i].log_prob, rel=1e-5)
        assert score.is_greedy == base[i].is_greedy
    assert done == sorted(done)
    assert done[-1] == len(requests)
    assert (batch_tokens == 1) == (len(done) == len(requests))


def test_each_length_is_compiled_once():
    model = bag_lm(VOCAB)
    rng = np.random.default_rng(3)
    contexts = [*range(10, 60, 7), *range(70, 120, 9), *range(140, 190, 9)]
    requests = [request(rng, context, 3) for context in contexts]
    before = scoring._score._cache_size()
    for _ in range(2):
        scorer(model, batch_tokens=128).score(model[1], requests)
    assert scoring._score._cache_size() - before == 3  # 64, 128, and 200, the longest.


@pytest.mark.parametrize("num_scored", [8, 2048])
def test_logits_of_a_large_vocabulary_are_held_in_parts(num_scored):
    vocab_size, shape = 151_936, (8, 2048)
    model = tiny.dense_model(vocab_size).instantiate(parent=None)
    params = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    names = ("input_ids", "target_labels", "segment_ids", "positions")
    batch = dict.fromkeys(names, ids) | {"first_scored": jax.ShapeDtypeStruct((8,), jnp.int32)}
    traced = scoring._score.trace(model, vocab_size, None, num_scored, params, batch)
    results = [x.aval for site in walk(traced.jaxpr) for x in site.eqn.outvars]
    logits = [x.size * 4 for x in results if vocab_size in x.shape and tiny.DIM not in x.shape]
    assert 8 * vocab_size * 4 <= max(logits) <= 1 << 27  # All at once take 10 GB.


def test_long_contexts_are_cut_from_the_left_and_counted(model, caplog):
    rng = np.random.default_rng(4)
    requests = [request(rng, context, 4) for context in (300, 77, 76, 20)]
    short = scorer(model, max_length=80)
    assert short.num_cut(requests) == 1  # 77 + 4 tokens are 80 that are read and one that is not.
    with caplog.at_level(logging.WARNING):
        scores = short.score(model[1], requests)
    assert "1 of 4 requests exceed max_length=80" in caplog.text
    for score, of in zip(scores, requests, strict=True):
        expected, _ = alone(bag_params(VOCAB), of, max_length=80)
        assert score.log_prob == pytest.approx(expected, abs=1e-4)
    assert scores[0].log_prob != pytest.approx(alone(bag_params(VOCAB), requests[0])[0], abs=1e-2)


def test_a_padded_vocabulary_takes_no_probability(model):
    requests = [
        Request(np.array([1, 2], np.int32), np.array([token], np.int32)) for token in range(30)
    ]
    scores = scorer(model, vocab_size=30).score(model[1], requests)
    assert sum(np.exp(score.log_prob) for score in scores) == pytest.approx(1.0, abs=1e-5)
    assert sum(score.is_greedy for score in scores) == 1
    assert scores[7].log_prob == pytest.approx(alone(bag_params(50), requests[7], 30)[0], abs=1e-5)


@pytest.fixture(scope="module")
def mixture():
    layer = tiny.transformer_layer(tiny.plain_moe(hidden_dim=16), num_heads=2, num_kv_heads=None)
    model = tiny.model_config(tiny.stacked(layer), vocab_size=VOCAB).instantiate(parent=None)
    rng = np.random.default_rng(7)
    draw = lambda spec: rng.normal(0, 0.5, spec.shape).astype(np.float32)
    return model, jax.tree.map(draw, model.create_parameter_specs_recursively(), is_leaf=is_spec)


@pytest.fixture(scope="module")
def mixture_requests():
    rng = np.random.default_rng(5)
    return [request(rng, n, 3) for n in (2, 30, 9, 61, 40)]


@pytest.fixture(scope="module")
def mixture_scores(mixture, mixture_requests):
    scores = scorer(mixture, max_length=100).score(mixture[1], mixture_requests)
    return [score.log_prob for score in scores]


def test_a_mixture_of_experts_scores_as_it_does_without_padding(
    mixture, mixture_requests, mixture_scores
):
    ids = np.concatenate(mixture_requests[1])
    logits = compiled_whole_logits(*mixture, ids[None, :-1])
    rows = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)[-3:]
    log_prob = sum(rows[n, token] for n, token in enumerate(mixture_requests[1].continuation))
    assert mixture_scores[1] == pytest.approx(log_prob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2, 2, 1, 1), (1, 1, 2, 1, 2, 2)])
def test_scores_do_not_depend_on_the_mesh(shape, mixture, mixture_requests, mixture_scores):
    mesh = create_device_mesh(shape)
    with jax.set_mesh(mesh):
        split = scorer(mixture, max_length=100, mesh=mesh, batch_tokens=128)
        scores = split.score(mixture[1], mixture_requests)
    assert [score.log_prob for score in scores] == pytest.approx(mixture_scores, abs=1e-5)


def test_sequences_are_padded_to_two_pieces_per_device_that_splits_them(model):
    mesh = create_device_mesh((1, 1, 1, 1, 3, 1), devices=jax.devices()[:3])
    with jax.set_mesh(mesh):
        assert scorer(model, max_length=99, mesh=mesh)._padded(99, 3) == (102, 16)


def test_parameters_are_cast_to_the_dtype_of_training(mixture, mixture_requests, mixture_scores):
    low = scorer(mixture, max_length=100, train_dtype="bfloat16")
    scores = [score.log_prob for score in low.score(mixture[1], mixture_requests)]
    assert scores != mixture_scores
    assert scores == pytest.approx(mixture_scores, rel=0.01)


@pytest.mark.parametrize(
    ("context", "continuation", "named"),
    [
        ([], [1], r"Request 1.*0 tokens.*1"),
        ([1], [], r"Request 1.*1 tokens.*0"),
        ([1], [2] * 65, r"Request 1.*65 tokens.*max_length.*64"),
    ],
)
def test_invalid_requests_are_named(model, context, continuation, named):
    bad = Request(np.array(context, np.int32), np.array(continuation, np.int32))
    with pytest.raises(ValueError, match=named):
        scorer(model, max_length=64).score(model[1], [*some_requests(1), bad])


def test_parameters_that_are_not_finite_are_an_error(model):
    broken = {**model[1], "head": model[1]["head"] * np.nan}
    with pytest.raises(ValueError, match="request 0"):
        scorer(model).score(broken, some_requests(1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"vocab_size": 51}, r"vocab_size=51.*vocab_size=50"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
    ],
)
def test_invalid_sizes_are_refused(model, settings, named):
    with pytest.raises(ValueError, match=named):
        scorer(model, **settings)


def test_evaluations_get_their_own_scores(model):
    requests = some_requests(num=6)
    total = lambda scores: {"nats": Metric(-sum(score.log_prob for score in scores))}
    parts = [Evaluation("a", requests[:2], total, {}), Evaluation("b", requests[2:], total, {})]
    found = run_evaluations(scorer(model), model[1], parts)
    for part in parts:
        nats = -sum(alone(bag_params(VOCAB), request)[0] for request in part.requests)
        assert found[part.name]["nats"].value == pytest.approx(nats, rel=1e-5)
