"""The reference of `verify`: its batches have no ties, and its bounds hold for small gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.param import specs_by_path
from moelib.layers.embedding import Embedding
from moelib.layers.transformer import ScanStack
from moelib.train.state import TrainerState
from moelib.verify import reference, run
from moelib.verify.batches import packed_batch
from moelib.verify.float64 import in_float64
from moelib.verify.outcome import CheckFailedError
from moelib.verify.plain import Plain, Values
from moelib.verify.reference import Reference, check_rounded_gradients, make_reference
from moelib.verify.step_probe import Observed, Probe
from tests import tiny as models
from tests.verify.tiny import tiny


@pytest.fixture(autouse=True, scope="module")
def of_no_other_file():
    """Frees programs of other files: with those of this one they take many memory maps."""
    jax.clear_caches()


# -- Layers of the plain form ----------------------------------------------------------------------


class UsersStack(ScanStack):
    """A stack without a plain form."""


@pytest.mark.parametrize("stack", [ScanStack, UsersStack])
def test_parameters_are_nested_as_in_the_plain_form(tmp_path, stack):
    layer = models.transformer_layer()
    decoder = models.stacked(layer, stack=stack, num_layers=3, first_layers=[layer])
    model = models.model_config(decoder)
    trainer = models.trainer_config(tmp_path, model=model, evaler=False).instantiate(parent=None)
    plain = Plain(trainer)
    found = plain.layers_apart(jax.device_get(models.initial(trainer.model)))
    want = specs_by_path(plain.model.create_parameter_specs_recursively())
    shapes = {path: x.shape for path, x in tree.by_path(found).items()}
    assert shapes == {path: spec.shape for path, spec in want.items()}


# -- Random numbers --------------------------------------------------------------------------------


class WithARandomLoss(Embedding):
    """An embedding with an auxiliary loss that depends on the random key alone."""

    def forward(self, ids: Any) -> Any:
        self.add_aux_loss("noise", jax.random.uniform(self.prng_key), weight=0.1)
        return super().forward(ids)


def test_a_random_auxiliary_loss_is_seen(tmp_path):
    cfg = tiny().set(dir=str(tmp_path), checkpointer=None)
    cfg.model.embedding = WithARandomLoss.default_config()
    probe = Probe(cfg, {}, jax.devices()[:1])
    assert make_reference(probe, jax.device_get(probe.initial(0))).is_random


# -- Ties ------------------------------------------------------------------------------------------


class ZeroForToken0(Embedding):
    """An embedding in which token 0 is a vector of zeros: at the start of a document, a tie."""

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * (ids > 0)[..., None]


def drawn(*with_ties: bool):
    """Yields batches, the first of which have token 0 at the start of a document, or not."""
    for i, has_tie in enumerate((*with_ties, *[False] * 5)):
        batch = packed_batch(8, 16, 32, seed=i)
        batch["input_ids"] = np.maximum(batch["input_ids"], 1)
        batch["input_ids"][0, 0] = 1 - int(has_tie)
        yield batch


def known(*with_ties: bool, monkeypatch, tmp_path) -> Reference:
    """Returns the reference of a model, given the batches it draws."""
    cfg = tiny().set(dir=str(tmp_path), checkpointer=None)
    cfg.model.embedding = ZeroForToken0.default_config()
    monkeypatch.setattr(reference, "batches_of", lambda trainer: drawn(*with_ties))
    probe = Probe(cfg, {}, jax.devices()[:1])
    return make_reference(probe, jax.device_get(probe.initial(0)))


def test_a_batch_with_a_tie_of_experts_is_drawn_again(monkeypatch, tmp_path):
    found = known(True, False, True, monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert not found.tie
    assert all(batch["input_ids"].all() for batch in found.batches)
    assert min(found.expected.margins.values()) > reference.TOLERANCE
    assert "decoder/layer0/feed_forward/router" in next(iter(found.expected.margins))


def test_of_batches_with_ties_the_least_tie_is_taken():
    margins = iter([2e-7, 0.0, 6e-6, 3e-8, *[1e-7] * 99])

    class OfTies:
        layers_apart = staticmethod(lambda params: params)

        def __call__(self, state, batch):
            return Values({}, {}, {}, {}, [], {"router": next(margins)})

    state = TrainerState(np.int32(0), None, {}, None)
    batch, text = reference._without_ties(OfTies(), state, iter(range(99)))
    assert batch == 2
    assert "differ by 6e-06" in text


def test_two_zeros_are_no_tie():
    """The scores of a ReLU: which of its zeros is chosen depends on no rounding."""
    scores = np.float32([[0.5, 0.0, 0.0], [0.9, 0.7, 0.2]])
    with jax.enable_x64(True):
        _, margins = in_float64(lambda x: jax.lax.top_k(x, 2), scores)(scores)
    (margin,) = margins.values()
    np.testing.assert_allclose(margin, 0.5 / 0.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "dtype", "expected"),
    [
        (jax.nn.relu, "float32", [10 * 1e-6 / 2]),
        (lambda x: jnp.maximum(0.0, x), "float32", [10 * 1e-6 / 2]),
        (jax.nn.softplus, "float32", []),  # It is smooth.
        (lambda x: jnp.maximum(x, 0), "int32", []),  # As of labels, which have no gradient.
    ],
)
def test_the_margin_of_a_relu_is_its_input_next_to_zero(function, dtype, expected):
    x = np.array([[-2.0, 0.0], [1e-6, 1.0]]).astype(dtype)
    with jax.enable_x64(True):
        _, margins = in_float64(function, x)(x)
    np.testing.assert_allclose([*margins.values()], expected, rtol=1e-6)


def test_a_tie_that_all_batches_have_is_named(monkeypatch, tmp_path):
    found = known(*[True] * 99, monkeypatch=monkeypatch, tmp_path=tmp_path)
    note = run._note(found, "loss")
    assert "may be a tie" in note
    assert "decoder/layer0/feed_forward/router" in note


# -- Gradients in fewer bits -----------------------------------------------------------------------


def check(tmp_path, change, noise: float = 0.0) -> None:
    """Compares gradients of 1, of which those of a norm are 1e-3, with changed ones.

    Each step adds random errors of the size `noise` to the changed ones.
    """
    model = models.model_config()
    trainer = models.trainer_config(tmp_path, model=model, evaler=False).instantiate(parent=None)
    plain, rng = Plain(trainer), np.random.default_rng(0)
    start = jax.device_get(models.initial(trainer.model))
    is_small = lambda path: path.endswith("attention_norm/scale")
    full = lambda path, x: np.full_like(x, 1e-3 if is_small(path) else 1.0)
    want = Observed(None, {}, tree.map_by_path(full, start), {}, {})

    def changed(path: str, x: np.ndarray) -> np.ndarray:
        if not is_small(path):
            return x
        return change(x) + noise * rng.standard_normal(x.shape).astype(x.dtype)

    def step(state: Any, batch: Any, gradients: Any) -> Observed:
        return want._replace(gradients=tree.map_by_path(changed, want.gradients))

    state = TrainerState(0, None, start, None)
    known = Reference(lambda *_: want, state, ({},), (want,), False, plain)
    check_rounded_gradients(known, step, state, "in bfloat16")


@pytest.mark.parametrize("factor", [0, -1, 2])
def test_a_small_gradient_that_is_wrong_is_found(tmp_path, factor):
    with pytest.raises(CheckFailedError, match=r"attention_norm/scale in bfloat16"):
        check(tmp_path, lambda x: factor * x)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_an_error_of_rounding_is_allowed_as_large_as_rounding_makes_it(tmp_path, noise):
    check(tmp_path, lambda x: 1.1 * x, noise)
