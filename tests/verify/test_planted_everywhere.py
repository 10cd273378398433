"""Bugs that are wrong on one device too are found, each by the check nearest to its cause."""

import tempfile
from types import SimpleNamespace

import jax
import pytest

from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import Packing
from moelib.train.settings import completed
from moelib.verify import data_checks
from moelib.verify.outcome import CheckFailedError, Status
from moelib.verify.run import run_checks
from tests.huggingface import test_tensor_mapping
from tests.layers import test_initializers, test_rope
from tests.layers.moe import test_layer
from tests.learner import test_schedules
from tests.models import test_loss, test_multi_token_prediction
from tests.oracles.packing import check_epochs, check_mixture
from tests.verify import planted_everywhere as planted


@pytest.mark.slow
@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_each_bug_is_found_by_the_check_nearest_to_it(bug, monkeypatch):
    jax.clear_caches()
    bug.plant(monkeypatch)
    on_mesh = "cast" in bug.name or bug.expected == "bfloat16"
    axes = [{"expert": 2}] if on_mesh else []
    devices = jax.devices()[: 1 + len(axes)]
    with tempfile.TemporaryDirectory() as folder:
        found = list(run_checks(planted.rich(), axes, devices, folder))[-1]
    assert found.status is Status.FAILED, found
    assert found.check == bug.expected
    jax.clear_caches()


def known(lm_input=LMInput, **fields):
    """Returns what checks of data need of a reference, without parameters and a step."""
    cfg = planted.rich()
    cfg.input.source.set(vocab_size=64)
    fields = {n: x for n, x in cfg.input.items() if n != "klass"} | fields
    cfg.input = lm_input.default_config().set(**fields)
    cfg = cfg.set(dir="unused", mesh_shape=(1,) * 6)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    probe = SimpleNamespace(trainer=trainer)
    return SimpleNamespace(probe=probe, config=trainer.config, is_random=False)


def test_the_input_gives_the_same_sequences_on_every_host():
    assert data_checks.data(known()) is None
    assert data_checks.hosts(known()) is None


def a_mixture():
    source = planted.rich().input.source.set(vocab_size=64)
    return Mixture.default_config().set(
        sources={"a": source, "b": source.clone()}, weights={"a": 0.9, "b": 0.1}
    )


OF_DATA = [bug for bug in planted.BUGS if bug.expected == "data"]
OF_EPOCHS = [
    planted.second_epoch_repeats_its_first_sequence,
    planted.epochs_in_the_same_order,
    planted.seed_without_effect,
    planted.full_sequences_that_overlap,
]
OF_MIXTURES = [planted.sources_in_equal_shares, planted.sequences_of_a_mixture_twice]


@pytest.mark.parametrize("bug", OF_DATA, ids=lambda bug: bug.name)
def test_wrong_sequences_are_found(bug, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises(CheckFailedError, match=r"^input: "):
        data_checks.data(known())


def epochs():
    packing = known(packing=Packing.BEST_FIT)
    return completed(packing.config).input


@pytest.mark.parametrize("bug", OF_EPOCHS, ids=lambda bug: bug.name)
def test_the_oracle_finds_wrong_epochs(bug, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"^input: "):
        check_epochs(epochs())


@pytest.mark.parametrize("bug", OF_MIXTURES, ids=lambda bug: bug.name)
def test_the_oracle_finds_wrong_mixtures(bug, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"^input: .*mixture"):
        check_mixture(completed(known(source=a_mixture()).config).input)


OF_TESTS = [
    (
        planted.fastest_pair_slowed_too,
        test_rope.test_yarn_slows_the_pairs_that_published_models_slow,
        ({"truncate": False}, 64, (8.0928, 17.3980)),
    ),
    (
        planted.z_loss_of_half_its_weight,
        test_loss.test_sums_are_over_the_tokens_that_count,
        (0.5, True),
    ),
    *(
        (bug, test_layer.test_auxiliary_losses_are_those_of_all_assignments_of_the_global_batch, ())
        for bug in (planted.router_z_loss_of_padding_too, planted.balance_of_this_micro_batch_alone)
    ),
    (
        planted.every_depth_predicts_the_second_token,
        test_multi_token_prediction.test_each_depth_predicts_the_labels_of_the_same_document,
        (),
    ),
    (
        planted.rate_of_the_step_before,
        test_schedules.test_flame_recipe_equals_that_of_megatron,
        (2121,),
    ),
    (
        planted.fan_out_for_fan_in,
        test_initializers.test_weights_start_with_a_variance_of_one_over_their_number_of_terms,
        (),
    ),
    (
        planted.layers_in_the_order_of_their_names,
        test_tensor_mapping.test_every_tensor_of_a_published_model_is_its_part_of_its_parameter,
        ("mixtral-8x7b",),
    ),
]


@pytest.mark.parametrize(("bug", "test", "arguments"), OF_TESTS)
def test_tests_against_oracles_find_bugs(bug, test, arguments, monkeypatch):
    jax.clear_caches()
    bug.plant(monkeypatch)
    with jax.numpy_dtype_promotion("strict"), pytest.raises(AssertionError):
        test(*arguments)
    jax.clear_caches()


def test_right_batches_pass():
    for fields in ({"source": a_mixture()}, {"packing": Packing.BEST_FIT}):
        assert data_checks.data(known(**fields)) is None
    check_epochs(epochs())
    check_epochs(completed(known().config).input)
    check_mixture(completed(known(source=a_mixture()).config).input)


class WithoutPrompts(LMInput):
    """An input without loss on the first two tokens of each document."""

    def batch(self, step, rows=None):
        batch = super().batch(step, rows)
        batch["target_labels"][batch["positions"] < 2] = -1
        return batch


def test_an_input_without_loss_on_prompts_is_no_failure():
    assert data_checks.data(known(WithoutPrompts)) is None


def test_a_wrong_restore_is_found(monkeypatch):
    planted.restored_at_the_start_of_the_epoch.plant(monkeypatch)
    found = data_checks.hosts(known())
    assert found is not None
    assert found.leaf == "input_ids"
