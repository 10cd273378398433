"""Bugs that are wrong on one device too are found, each by the check nearest to its cause."""

import tempfile
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moelib.verify import data_checks, layer_checks
from moelib.verify.outcome import CheckFailedError, Outcome, Status
from moelib.verify.run import run_checks
from moelib.verify.single_device import THOROUGH_CHECKS
from tests.tiny import initial
from tests.verify import planted_everywhere as planted

# The check that finds each bug; several checks fail, and the first one is named.
CHECKS = {
    "mask_off_by_one_at_blocks": "kernels",
    "document_at_a_block_sees_its_predecessor": "kernels",
    "weight_of_the_first_expert_for_the_second": "plain",
    "attention_scale_of_the_model_width": "layers",
    "z_loss_of_the_probabilities": "layers",
    "balance_loss_counts_only_the_best_expert": "layers",
    "root_of_the_mean_magnitude": "layers",
    "latent_attention_with_other_scores": "layers",
    "half_the_output_of_dense_layers": "layers",
    "sigmoid_for_silu": "layers",
    "rotation_of_neighbors": "layers",
    "hidden_states_of_another_scale": "layers",
    "sinks_with_half_their_gradient": "kernels",
    "weight_gradient_without_the_last_row": "kernels",
    "restored_at_the_start_of_the_epoch": "hosts",
    "fan_out_for_fan_in": "scale",
    "outputs_with_the_scale_of_other_weights": "scale",
    "position_ahead_of_the_step": "interrupted",
    "casts_at_use_without_gradient": "derivatives",  # Tables are cast where nothing else is.
    "casts_to_bfloat16_with_twice_the_gradient": "bfloat16",
    "cast_parameters_twice": "loss",
    "checkpoint_with_two_layers_swapped": "saved",
    "tpu_kernel_without_window": "kernels",
    "bias_that_rises_with_the_load": "balanced",
    "bias_that_stays": "balanced",
}
OF_LETTERS = {"b": "derivatives", "c": "plain", "d": "learner", "e": "data"}
BUGS = [(letter, bug) for letter, bugs in planted.BUGS.items() for bug in bugs]


def outcomes(bug, monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    bug(monkeypatch.setattr)
    axes = [{"expert": 2}] if "cast" in bug.__name__ else []
    with tempfile.TemporaryDirectory() as folder:
        devices = jax.devices()[: 1 + len(axes)]
        return list(run_checks(planted.rich(), axes, devices, folder, without=THOROUGH_CHECKS))


@pytest.mark.slow
@pytest.mark.parametrize(("letter", "bug"), BUGS, ids=lambda x: getattr(x, "__name__", x))
def test_each_bug_is_found_by_the_check_nearest_to_it(letter, bug, monkeypatch):
    jax.clear_caches()
    found = outcomes(bug, monkeypatch)[-1]
    assert found.status is Status.FAILED, found
    assert found.check == CHECKS.get(bug.__name__, OF_LETTERS.get(letter))
    jax.clear_caches()


def known():
    """Returns what data and layers need of a reference, without a step."""
    cfg = planted.rich().set(dir="unused", mesh_shape=(1,) * 6)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    start = SimpleNamespace(model=jax.tree.map(np.asarray, initial(trainer.model)))
    probe = SimpleNamespace(trainer=trainer)
    return SimpleNamespace(probe=probe, config=trainer.config, start=start, is_random=False)


def test_the_input_gives_each_token_once_per_epoch_on_every_host():
    assert data_checks.data(known()) is None
    assert data_checks.hosts(known()) is None


@pytest.mark.parametrize("bug", planted.BUGS["e"][:3], ids=lambda bug: bug.__name__)
def test_wrong_batches_are_found(bug, monkeypatch):
    bug(monkeypatch.setattr)
    with pytest.raises(CheckFailedError, match=r"^input: "):
        data_checks.data(known())


def test_a_wrong_restore_is_found(monkeypatch):
    planted.restored_at_the_start_of_the_epoch(monkeypatch.setattr)
    found = data_checks.hosts(known())
    assert found is not None
    assert found.leaf == "input_ids"


@pytest.mark.slow
def test_kernels_equal_their_formulas():
    model = known().probe.trainer.model
    assert layer_checks._kernels(model, "xla") is None  # Others are interpreted: slow.


def test_layers_are_compared_with_formulas(monkeypatch):
    planted.z_loss_of_the_probabilities(monkeypatch.setattr)
    found = layer_checks.layers(known())
    assert found is not None
    assert found.leaf == "decoder/layer1/feed_forward: router_z_loss"
