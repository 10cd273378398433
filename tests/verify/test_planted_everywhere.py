"""Bugs that are wrong on one device too are found, each by the check nearest to its cause."""

import tempfile
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moelib.data.lm_input import LMInput
from moelib.data.mixture import Mixture
from moelib.data.packing import Packing
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
    "router_cast_to_bfloat16": "bfloat16",
    "sums_of_gradients_cast_to_bfloat16": "bfloat16",
    "new_parameters_cast_to_bfloat16": "bfloat16",
    "checkpoint_with_two_layers_swapped": "saved",
    "tpu_kernel_without_window": "kernels",
    "bias_that_rises_with_the_load": "balanced",
    "bias_that_stays": "balanced",
    "bias_of_ten_times_the_rate": "balanced",
    "bias_of_two_experts_only": "balanced",
    "bias_by_the_last_microbatch": "balanced",
    "batch_that_repeats_its_first_sequence": "interrupted",
    "balance_loss_without_earlier_microbatches": "layers",
    "balance_loss_of_the_last_layer": "layers",
    "positions_of_the_first_sequence": "layers",
    "positions_to_15": "layers",
    "capacity_for_the_last_tokens": "layers",
    "capacity_of_half_the_tokens": "layers",
    "step_that_keeps_norms": "stepped",
    "layers_that_update_in_a_skipped_step": "stepped",
    "norm_cast_to_bfloat16": "layers",
    "gate_and_up_swapped_in_files": "exported",
}
OF_LETTERS = {"b": "derivatives", "c": "plain", "d": "learner", "e": "data"}
BUGS = [(letter, bug) for letter, bugs in planted.BUGS.items() for bug in bugs]


def outcomes(bug, monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    bug(monkeypatch.setattr)
    axes = [{"expert": 2}] if "cast" in bug.__name__ else []
    with tempfile.TemporaryDirectory() as folder:
        devices = jax.devices()[: 1 + len(axes)]
        cfg = planted.CONFIGS.get(bug.__name__, planted.rich)()
        return list(run_checks(cfg, axes, devices, folder, without=THOROUGH_CHECKS))


@pytest.mark.slow
@pytest.mark.parametrize(("letter", "bug"), BUGS, ids=lambda x: getattr(x, "__name__", x))
def test_each_bug_is_found_by_the_check_nearest_to_it(letter, bug, monkeypatch):
    jax.clear_caches()
    found = outcomes(bug, monkeypatch)[-1]
    assert found.status is Status.FAILED, found
    assert found.check == CHECKS.get(bug.__name__, OF_LETTERS.get(letter))
    jax.clear_caches()


def known(lm_input=LMInput, **fields):
    """Returns what data and layers need of a reference, without a step."""
    cfg = planted.rich()
    cfg.input.source.set(vocab_size=64)
    fields = {n: x for n, x in cfg.input.items() if n != "klass"} | fields
    cfg.input = lm_input.default_config().set(**fields)
    cfg = cfg.set(dir="unused", mesh_shape=(1,) * 6)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    start = SimpleNamespace(model=jax.tree.map(np.asarray, initial(trainer.model)))
    probe = SimpleNamespace(trainer=trainer)
    return SimpleNamespace(probe=probe, config=trainer.config, start=start, is_random=False)


def test_the_input_gives_each_token_once_per_epoch_on_every_host():
    assert data_checks.data(known()) is None
    assert data_checks.hosts(known()) is None


@pytest.mark.parametrize("bug", planted.BUGS["e"][:5], ids=lambda bug: bug.__name__)
def test_wrong_batches_are_found(bug, monkeypatch):
    bug(monkeypatch.setattr)
    with pytest.raises(CheckFailedError, match=r"^input: "):
        data_checks.data(known())


def a_mixture():
    source = planted.rich().input.source.set(vocab_size=64)
    return Mixture.default_config().set(
        sources={"a": source, "b": source.clone()}, weights={"a": 0.9, "b": 0.1}
    )


@pytest.mark.parametrize(
    "bug", [planted.sources_in_equal_shares, planted.sequences_of_a_mixture_twice]
)
def test_a_wrong_mixture_is_found(bug, monkeypatch):
    assert data_checks.data(known(source=a_mixture())) is None
    bug(monkeypatch.setattr)
    with pytest.raises(CheckFailedError, match=r"^input: .*mixture"):
        data_checks.data(known(source=a_mixture()))


def test_pieces_of_long_documents_that_overlap_are_found(monkeypatch):
    assert data_checks.data(known(packing=Packing.BEST_FIT)) is None
    planted.full_sequences_that_overlap(monkeypatch.setattr)
    with pytest.raises(CheckFailedError, match="repeated"):
        data_checks.data(known(packing=Packing.BEST_FIT))


class WithoutPrompts(LMInput):
    """An input without loss on the first two tokens of each document."""

    def host_batch(self, step, host_index, num_hosts):
        batch = super().host_batch(step, host_index, num_hosts)
        batch["target_labels"][batch["positions"] < 2] = -1
        return batch


def test_an_input_without_loss_on_prompts_is_no_failure():
    assert data_checks.data(known(WithoutPrompts)) is None


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
