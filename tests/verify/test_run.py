"""`verify_config`: from a config to a report."""

import pytest

from moelib.core.errors import UserError
from moelib.verify.outcome import Status
from moelib.verify.run import verify_config
from tests.verify import planted
from tests.verify.tiny import moe, tiny


def test_a_correct_config_passes_on_the_meshes_of_a_list():
    # The loss is correct, though its name is not that of its field.
    trainer_config = tiny(**moe(planted.WithALossOfItsOwn))
    # --8<-- [start:verify]
    report = verify_config(trainer_config, num_devices=4, meshes="expert=2,model=2")
    for outcome in report.outcomes:
        print(outcome.mesh, outcome.check, outcome.status, outcome.detail)
    # --8<-- [end:verify]
    assert report.status is Status.PASSED, report.lines()
    assert list(report.meshes) == ["expert=2,model=2"]
    skipped = [each.check for each in report.outcomes if each.status is Status.SKIPPED]
    assert skipped == ["exported"]  # No Hugging Face family has such layers.
    assert len(report.outcomes) == 2 + 10 + 1 + 8
    assert {change.path for change in report.changes} >= {"max_step", "input.seq_len"}
    assert trainer_config.max_step == 4  # The config itself is not changed.


@pytest.mark.parametrize("num_devices", [1, 1000])
def test_too_few_devices_are_refused(num_devices):
    with pytest.raises(UserError, match=f"num_devices={num_devices}"):
        verify_config(tiny(), num_devices=num_devices)


def test_the_name_of_a_config_is_no_config():
    with pytest.raises(UserError, match="trainer_config is 'flame'"):
        verify_config("flame")
