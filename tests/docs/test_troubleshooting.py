"""The messages on docs/troubleshooting.md and docs/checkpoints.md are those of today's commands."""

import pathlib

import pytest

from docs.generate import ROOT
from experiments import flame_moe
from moelib.checkpoint.contents import CheckpointRecord, RunRecord
from moelib.cli.main import run

TINY = "--module=experiments.flame_moe --config=flame-moe-tiny"
TRAIN = f"train {TINY} --data_dir=nowhere --trainer_dir=runs/a"


def words(text: str) -> str:
    """Returns a text with line breaks and indentation as single spaces."""
    return " ".join(text.split())


def page(name: str) -> str:
    return words((ROOT / f"docs/{name}.md").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train --modle=x",
            "unknown flag '--modle'; did you mean '--module'?",
        ),
        (
            f"config {TINY} --set model.decoder.block[0].feed_forward.num_expert=8",
            "model.decoder.block[0].feed_forward has no 'num_expert'; did you mean 'num_experts'",
        ),
        (
            "config --module=experiments.flame_moe --config=flame-moe-tyny",
            "experiments.flame_moe has no config 'flame-moe-tyny'; did you mean 'flame-moe-tiny'",
        ),
        ("config --module=smal", "--module=smal: there is no module 'smal' or 'experiments.smal'"),
        (f"train {TINY} --trainer_dir=runs/a", "set --data_dir to the folder of the data."),
        (TRAIN, "make one with `moelib prepare`, or set path to one."),
        (f"{TRAIN} --set mesh_shape=fsdp=3", "mesh_shape fsdp=3 takes 3 devices, but there are"),
        (
            f"{TRAIN} --set mesh_shape=data=4,model=2 --set num_microbatches=4",
            "input.global_batch_size is 8 and num_microbatches is",
        ),
    ],
)
def test_a_message_is_on_the_page(command, message, capsys):
    assert run(command.split()) == 2
    assert message in words(capsys.readouterr().err)
    assert message in page("troubleshooting")


@pytest.mark.parametrize("name", ["checkpoints", "troubleshooting"])
def test_a_folder_of_another_run_is_refused_as_the_page_shows(name, capsys):
    cfg = flame_moe.tiny().set(dir="runs/a")
    run_record = RunRecord(step=5, config=cfg.debug_string())
    CheckpointRecord.of(run_record, {}, {}).write("runs/a/checkpoints/step_00000005")
    assert run(f"{TRAIN} --set input.global_batch_size=16".split()) == 2
    message = "runs/a belongs to another run: input.global_batch_size is 8 there, and 16 in this"
    assert message in words(capsys.readouterr().err)
    assert message in page(name)
