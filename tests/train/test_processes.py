"""Runs that are killed, and runs in several processes, equal an uninterrupted run."""

import json
import os
import pkgutil
import re

import jax
import numpy as np
import pytest

from moelib.checkpoint.contents import list_checkpoints
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.tokenizer import train_bpe
from moelib.runs.folder import RunFolder
from moelib.runs.routing_file import RoutingLog, log_folder
from moelib.train.watchers.bad_steps import BAD_STEP, SUSPECTED
from tests import python_process, tiny
from tests.python_process import free_port
from tests.two_processes import run_as_two


def start(directory, *args, devices=8):
    command = "-m", "tests.train.process", "--dir", directory
    return python_process.start(*command, *args, devices=devices)


def finish(process, code=0):
    [(out, err)] = python_process.finish(process, code=code)
    return (json.loads(out.splitlines()[-1]) if code == 0 else None), err


def start_two(directory, *args):
    """Starts two processes of two devices each."""
    args = (*args, "--coordinator", f"localhost:{free_port()}", "--num_processes", 2)
    return [start(directory, *args, "--process_id", i, devices=2) for i in range(2)]


def finish_two(directory, *args):
    """Runs in two processes of two devices each, and returns their results."""
    return [finish(process)[0] for process in start_two(directory, *args)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("unbroken")
    tiny.trainer_config(directory).instantiate(parent=None).run()
    return tiny.losses(directory)


def test_run_stopped_by_sigterm_saves_and_resumes_with_the_same_losses(tmp_path, expected):
    step = 5  # Not a multiple of the save interval.
    out, err = finish(start(tmp_path, "--signal_at", step, "--save_every", 100))
    assert out["stopped_by"] == "SIGTERM"
    assert f"saving and stopping after step {out['step']}" in err
    assert step <= out["step"] <= step + 1
    assert os.listdir(tmp_path / "checkpoints") == [f"step_{out['step']:08d}"]
    tiny.trainer_config(tmp_path).instantiate(parent=None).run()
    assert tiny.losses(tmp_path) == expected


def test_killed_run_resumes_from_its_last_checkpoint(tmp_path, expected):
    finish(start(tmp_path, "--signal_at", 6, "--signal", "SIGKILL"), code=-9)
    assert 4 in list_checkpoints(tmp_path / "checkpoints")
    tiny.trainer_config(tmp_path).instantiate(parent=None).run()
    assert tiny.losses(tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "flips"), [(1, False), (2, False), (2, True)])
def test_killed_processes_resume_from_local_checkpoints(tmp_path, expected, num_processes, flips):
    args = ("--save_every", 100, "--local_dir", tmp_path / "local")
    killed = ("--signal_at", 7, "--signal", "SIGKILL")
    for process in start_two(tmp_path / "run", *args, *killed):
        process.communicate(timeout=120)
    [folder] = (tmp_path / "local").iterdir()
    *older, step = sorted(set.intersection(*(set(list_checkpoints(x)) for x in folder.iterdir())))
    assert step in (4, 6)  # The last one may be incomplete.
    if flips:  # A bit, in the replicas of one process.
        file = folder / f"process_0001/step_{step:08d}/shards.bin"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        step = older[-1]
    if num_processes == 2:
        processes = start_two(tmp_path / "run", *args)
    else:
        processes = [start(tmp_path / "run", *args, devices=4)]
    logs = [finish(process)[1] for process in processes]
    assert f"restored step {step}" in logs[0]
    assert not list((tmp_path / "local").iterdir())
    assert tiny.losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_sigint_saves_too(tmp_path):
    out, _ = finish(start(tmp_path, "--signal_at", 2, "--signal", "SIGINT"))
    assert out["stopped_by"] == "SIGINT"


@pytest.mark.slow
def test_number_of_processes_may_change_and_sigterm_stops_all(tmp_path, expected):
    finished = [finish(process) for process in start_two(tmp_path, "--signal_at", 3)]
    outs = [out for out, _ in finished]
    assert re.search(r"Process 1 of 2: .*, 2 x cpu, mesh \w+=2-3", finished[0][1])
    assert outs[0] == outs[1]
    assert outs[0]["stopped_by"] == "SIGTERM"
    assert 3 <= outs[0]["step"] < 8
    tiny.trainer_config(tmp_path).instantiate(parent=None).run()
    assert tiny.losses(tmp_path) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_each_of_two_processes_resumes_at_its_own_position_in_the_data(tmp_path, expected):
    finish_two(tmp_path, "--own_positions", "--max_step", 3)
    outs = finish_two(tmp_path, "--own_positions")
    assert [out["step"] for out in outs] == [8, 8]
    assert tiny.losses(tmp_path) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_two_processes_take_a_bad_step_again_and_name_their_hardware(tmp_path):
    for out in finish_two(tmp_path, "--corrupt_after", 6):
        assert (out["step"], out["stopped_by"]) == (8, None)
    finish_two(tmp_path / "unbroken")
    assert tiny.losses(tmp_path) == tiny.losses(tmp_path / "unbroken")
    events = RunFolder(tmp_path).events()
    bad, suspected = (e for e in events if e["event"] in (BAD_STEP, SUSPECTED))
    assert (bad["step"], bad["action"], suspected["step"]) == (7, "rewind", 7)
    named = [line.split(":")[0] for line in suspected["devices"]]
    assert named == ["Process 0 of 2", "Process 1 of 2"]


@pytest.mark.slow
def test_processes_with_different_configs_are_refused_by_all(tmp_path):
    for process in start_two(tmp_path, "--seeds", 0, 7):
        _, err = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "input.seed is 0 in process 0, and 7 in process 1" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other_which_names_it(tmp_path, lost, name):
    args = ("--signal_at", 3, "--signal", name, "--signal_to", lost, "--max_step", 1_000_000)
    processes = start_two(tmp_path, *args)
    try:  # With JAX's own timeout of heartbeats, it takes 100 s more.
        _, err = processes[1 - lost].communicate(timeout=90)
    finally:
        for process in processes:
            process.kill()
        processes[lost].communicate()
    assert processes[1 - lost].returncode != 0
    if name == "SIGKILL":
        assert f"Process {lost} of 2 is lost" in err


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        ("train.trainer.check_readable", 1),
        ("runs.folder.RunFolder.locked", 0),
        ("runs.folder.RunFolder.events", 0),
        ("runs.course.check_directory", 1),
        ("train.trainer.check_tokenizers", 1),
        ("runs.folder.RunFolder.write_config", 0),
        ("runs.summary_writer.SummaryWriter.start_trackers", 0),
        ("runs.routing_file.list_data", 0),
        ("data.batches.lm_input.LMInput.__init__", 1),
        ("runs.identity.tree.by_path", 1),
        ("data.batches.lm_input.LMInput.iterator", 1),
        ("train.trainer.save_tokenizer", 0),
    ],
)
def test_a_step_of_the_start_that_fails_in_one_process_fails_in_all(
    tmp_path, monkeypatch, name, failing
):
    run = lambda n: (
        tiny.trainer_config(tmp_path, max_step=n, save_every=1).instantiate(parent=None).run()
    )
    run(1)
    target = f"moelib.{name}"
    real = pkgutil.resolve_name(target)

    def fail(*args, **options):
        if jax.process_index() == failing:
            raise OSError("planted")
        return real(*args, **options)

    monkeypatch.setattr(target, fail)
    found = run_as_two(monkeypatch, lambda _: run(2))
    assert ["planted" in str(error) for error in found] == [True, True], found


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_the_user_in_one_process_ends_both(tmp_path, failing):
    texts = [f"document number {i} of many, many words" for i in range(3000)]
    tokenizer = train_bpe(texts[:100], 300, str(tmp_path / "tokenizer.json"))
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    splits = {"train": 0.9, "validation": 0.1}
    prepare(source, tokenizer, str(tmp_path / "data/text"), splits=splits)
    command = [
        *("-m", "moelib", "train", "--module=flame_moe", "--config=flame-moe-tiny"),
        *(f"--trainer_dir={tmp_path / 'run'}", "--max_step=1000000", "--jax_backend=cpu"),
        *(f"--distributed_coordinator=localhost:{free_port()}", "--num_processes=2"),
    ]
    folders = [tmp_path / ("missing" if index == failing else "data") for index in range(2)]
    processes = [
        python_process.start(*command, f"--data_dir={data}", f"--process_id={index}")
        for index, data in enumerate(folders)
    ]
    errors = [err for _, err in python_process.finish(*processes, code=2)]
    reason = "MissingFileError: There is no token store at"
    assert f"process {failing} failed, and all with it: {reason}" in errors[1 - failing]
    assert "moelib train: There is no token store" in errors[failing]


@pytest.mark.slow
def test_two_processes_write_each_sequence_of_a_routing_log_once(tmp_path):
    args = ("--routing_log", "--max_step", 1)
    finish_two(tmp_path / "two", *args)
    finish(start(tmp_path / "one", *args, devices=4))
    logs = [RoutingLog(log_folder(str(tmp_path / name), "val", 1)) for name in ("one", "two")]
    assert [len(log.header.files) for log in logs] == [2, 4]  # A file per batch and process.
    fields = ("sequence", "input_ids", "expert_ids")
    for layer in logs[0].layers:
        for batches in zip(*(log.layer(layer, *fields) for log in logs), strict=True):
            for one, two in zip(*batches, strict=True):
                np.testing.assert_array_equal(one, two)
