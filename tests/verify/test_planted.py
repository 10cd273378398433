"""Planted bugs are found, each by its own check."""

import pytest

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.config import config_for_function
from moelib.layers.remat import remat
from moelib.verify.outcome import Status
from tests.verify import planted
from tests.verify.tiny import moe, outcomes, tiny


def failure(cfg, *axes):
    found = outcomes(cfg, *axes)
    assert [each.status for each in found[:-1]].count(Status.FAILED) == 0
    assert found[-1].status is Status.FAILED, found
    return found[-1]


@pytest.mark.slow
def test_a_sum_over_the_wrong_axis():
    layer = planted.SumOverTheWrongAxis.default_config()
    found = failure(tiny(feed_forward=layer), {"data": 4}, {"data": 2, "model": 2})
    assert (found.mesh, found.check) == ("data=2,model=2", "loss")
    assert "error" in found.detail


@pytest.mark.slow
def test_gradients_of_experts_that_are_too_large():
    cfg = tiny()
    experts = planted.ExpertsWithLargerGradients.default_config()
    cfg.model.decoder.block[0].feed_forward.experts = experts
    found = failure(cfg, {"data": 4}, {"expert": 4})
    assert (found.mesh, found.check) == ("expert=4", "gradients")
    assert "feed_forward/experts/" in found.detail


@pytest.mark.slow
def test_a_balance_loss_of_each_device():
    found = failure(tiny(**moe(planted.BalancedOnEachDevice)), {"model": 2, "data": 2})
    assert found.check == "loss"  # The objective is what differs.
    assert "objective" in found.detail


@pytest.mark.slow
def test_an_auxiliary_loss_that_does_not_arrive():
    cfg = tiny()
    stack = planted.LayersWithoutTheirLosses.default_config()
    cfg.model.decoder = stack.set(num_layers=1, block=cfg.model.decoder.block)
    found = failure(cfg)
    assert found.check == "auxiliary"
    assert "decoder/layer0/feed_forward/load_balance_loss has weight 0.1" in found.detail


@pytest.mark.slow
def test_an_auxiliary_loss_that_counts_twice():
    found = failure(tiny(**moe(planted.BalancedTwice)))
    assert found.check == "auxiliary"
    assert "weight 0.1, but the objective contains it with weight 0.2" in found.detail


@pytest.mark.slow
def test_checks_that_an_odd_batch_size_excludes_are_skipped():
    cfg = tiny()
    cfg.input.global_batch_size = 3
    found = outcomes(cfg)
    assert not [each for each in found if each.status is Status.FAILED]
    skipped = {each.check: each.detail for each in found if each.status is Status.SKIPPED}
    assert "global_batch_size=3" in skipped["doubled"]
    assert "global_batch_size=3" in skipped["hosts"]


def test_a_mesh_rule_that_raises():
    found = failure(tiny().set(mesh_rules=[("gpu-.*", planted.BrokenRule.default_config())]))
    assert found.check == "rules"
    assert "mesh_rules[0]: ValueError: this mesh rule is broken" in found.detail


@pytest.mark.slow
def test_padding_that_counts():
    found = failure(tiny(**moe(planted.PaddingAsTokens)))
    assert found.check == "padding"


@pytest.mark.slow
def test_counts_of_tokens_and_documents_that_mix_by_design_are_no_failure():
    layer = planted.CountsAndMixes.default_config().set(hidden_dim=24)
    found = outcomes(tiny(feed_forward=layer))
    assert not [each for each in found if each.status is Status.FAILED]
    packing = next(each for each in found if each.check == "packing")
    assert (packing.status, "feed_forward" in packing.detail) == (Status.SKIPPED, True)
    assert next(each for each in found if each.check == "doubled").status is Status.PASSED


def test_experts_that_begin_alike():
    cfg = tiny()
    init = config_for_function(planted.same_for_all_experts)
    cfg.model.decoder.block[0].feed_forward.experts.param_init = init
    found = failure(cfg)
    assert found.check == "initial"
    assert "experts/down, experts 0 and decoder" in found.detail


def test_a_remat_name_that_is_misspelt():
    cfg = tiny()
    cfg.model.decoder.remat = config_for_function(remat).set(keep=["attention_contxt"])
    found = failure(cfg)
    assert found.mesh == "1 device"
    assert "attention_contxt" in found.detail
    assert "attention_context" in found.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [planted.moments_that_a_mesh_forgets, planted.learner_state_that_a_step_on_a_mesh_loses]
)
def test_state_that_is_lost_between_steps(bug, monkeypatch):
    bug(monkeypatch.setattr)
    found = failure(tiny(), {"data": 4})
    assert (found.mesh, found.check) == ("data=4", "curve")


@pytest.mark.slow
def test_a_checkpoint_of_one_ranks_experts():
    cfg = tiny()
    fields = dict(Checkpointer.default_config().items())
    del fields["klass"]
    cfg.checkpointer = planted.OneRanksExperts.default_config().set(**fields)
    found = failure(cfg, {"data": 4}, {"expert": 2, "data": 2})
    assert (found.mesh, found.check) == ("expert=2,data=2", "restored")
    assert "/experts/" in found.detail
