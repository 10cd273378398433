"""Bugs that are wrong on one device too are found, each by the check nearest to its cause."""

import tempfile
from types import SimpleNamespace

import jax
import pytest

from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.batches.packing import Packing
from moelib.verify import data_checks
from moelib.verify.outcome import CheckFailedError, Status
from moelib.verify.run import run_checks
from moelib.verify.single_device import THOROUGH_CHECKS
from tests.verify import planted_everywhere as planted


@pytest.mark.slow
@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_each_bug_is_found_by_the_check_nearest_to_it(bug, monkeypatch):
    jax.clear_caches()
    bug.plant(monkeypatch)
    axes = [{"expert": 2}] if "cast" in bug.name else []
    devices = jax.devices()[: 1 + len(axes)]
    cfg = (bug.config or planted.rich)()
    with tempfile.TemporaryDirectory() as folder:
        found = list(run_checks(cfg, axes, devices, folder, without=THOROUGH_CHECKS))[-1]
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


def test_the_input_gives_each_token_once_per_epoch_on_every_host():
    assert data_checks.data(known()) is None
    assert data_checks.hosts(known()) is None


def a_mixture():
    source = planted.rich().input.source.set(vocab_size=64)
    return Mixture.default_config().set(
        sources={"a": source, "b": source.clone()}, weights={"a": 0.9, "b": 0.1}
    )


OF_DATA = [bug for bug in planted.BUGS if bug.expected == "data"]
OF_MIXTURES = [planted.sources_in_equal_shares, planted.sequences_of_a_mixture_twice]


@pytest.mark.parametrize(
    ("bug", "fields", "names"),
    [
        *((bug, dict, "^input: ") for bug in OF_DATA),
        *((bug, lambda: {"source": a_mixture()}, "^input: .*mixture") for bug in OF_MIXTURES),
        (planted.full_sequences_that_overlap, lambda: {"packing": Packing.BEST_FIT}, "repeated"),
    ],
)
def test_wrong_batches_are_found(bug, fields, names, monkeypatch):
    bug.plant(monkeypatch)
    with pytest.raises(CheckFailedError, match=names):
        data_checks.data(known(**fields()))


def test_right_batches_pass():
    for fields in ({"source": a_mixture()}, {"packing": Packing.BEST_FIT}):
        assert data_checks.data(known(**fields)) is None


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
