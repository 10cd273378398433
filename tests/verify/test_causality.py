"""Layers whose output depends on later tokens are found, unless they say that it does by design."""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.variants.expert_choice import ExpertChoiceRouter
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.dispatch import SortedDispatcher
from moelib.verify.outcome import Outcome, Status
from moelib.verify.run import CHECKS, run_checks
from tests.tiny import plain_moe
from tests.verify.tiny import tiny


class WithoutCausalMask(FeedForward):
    """Adds the mean of all tokens of the sequence."""

    def forward(self, x: Any, mask: Any = None) -> Any:
        seen = jnp.broadcast_to(mask[:, None], (*mask.shape, mask.shape[1]))
        return super().forward(x, mask) + self._weighted(seen, x)

    def _weighted(self, seen: Any, x: Any) -> Any:
        weights = seen.astype(x.dtype)
        return weights @ x / jnp.maximum(weights.sum(-1, keepdims=True), 1.0)


class ScansBackwards(WithoutCausalMask):
    """Adds the mean of the token and of those after it."""

    def _weighted(self, seen: Any, x: Any) -> Any:
        return super()._weighted(seen & ~jnp.tri(x.shape[1], k=-1, dtype=bool)[None], x)


class Scans(WithoutCausalMask):
    """No bug: the mean of the token and of those before it."""

    def _weighted(self, seen: Any, x: Any) -> Any:
        return super()._weighted(seen & jnp.tri(x.shape[1], dtype=bool)[None], x)


class Encodes(WithoutCausalMask):
    """No bug: by design."""

    looks_ahead = True


class ChoosesTokens(ExpertChoiceRouter):
    """Experts that choose among all tokens of a sequence, later ones too."""

    mixes_documents = False


def causality(**fields: Any) -> Outcome:
    """Returns the outcome of the check for the tiny model with other fields of its layer."""
    others = [name for name in CHECKS if name not in ("built", "compiled", "causality")]
    with tempfile.TemporaryDirectory() as folder:
        found = list(run_checks(tiny(**fields), [], jax.devices()[:1], folder, without=others))
    (outcome,) = [each for each in found if each.check == "causality"] or found[-1:]
    return outcome


def dense(layer: type[FeedForward]) -> dict[str, Any]:
    return {"feed_forward": layer.default_config().set(hidden_dim=16)}


def chosen_by(router: type[ExpertChoiceRouter]) -> dict[str, Any]:
    experts = plain_moe(
        router=router.default_config(), dispatcher=SortedDispatcher.default_config()
    )
    return {"feed_forward": experts}


@pytest.mark.parametrize(
    "fields",
    [
        dense(WithoutCausalMask),
        dense(ScansBackwards),
        chosen_by(ChoosesTokens),
    ],
    ids=["mask", "scan", "experts"],
)
def test_a_layer_that_sees_later_tokens_is_found(fields):
    outcome = causality(**fields)
    assert outcome.status is Status.FAILED
    assert "with other tokens after them" in outcome.detail


def test_causal_layers_pass_and_those_that_look_ahead_by_design_are_skipped():
    assert causality(**dense(Scans)).status is Status.PASSED
    skipped = causality(**dense(Encodes))
    assert skipped.status is Status.SKIPPED
    assert "by design" in skipped.detail
