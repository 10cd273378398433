"""`moelib data show`: the batch that a step of a run reads, as text."""

import re

import pytest

from moelib.checkpoint.contents import CheckpointRecord, RunRecord, step_path
from moelib.cli import main
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.tokens.token_source import InMemoryTokens
from moelib.data.tokens.token_store import TokenStore
from moelib.runs.folder import RunFolder
from moelib.runs.phases import Phase
from tests import tiny
from tests.train import small_run

MODULE = "tests.cli.test_data"


def named_trainer_configs():
    """Returns runs on a mixture of stores in {data_dir}, on one store, and on synthetic tokens."""

    def mixture():
        cfg = tiny.trainer_config("unused", model=tiny.dense_model(400, dim=8), evaler=False)
        store = TokenStore.default_config()
        sources = {name: store.clone(path=f"{{data_dir}}/{name}") for name in ("code", "web")}
        mixed = Mixture.default_config().set(sources=sources, weights={"code": 1.0, "web": 3.0})
        cfg.input = LMInput.default_config().set(source=mixed, seq_len=24, global_batch_size=8)
        return cfg

    def phased():
        large = Phase.default_config().set(after_step=2, changes={"input.global_batch_size": 16})
        return tiny.trainer_config("unused").set(phases={"large": large})

    def turns():
        cfg = tiny.trainer_config("unused")
        source = InMemoryTokens.default_config().set(documents=[[5, 0, 6, 0, 7, 0]], vocab_size=8)
        cfg.input = LMInput.default_config().set(source=source, seq_len=5, global_batch_size=8)
        return cfg

    synthetic = lambda: tiny.trainer_config("unused")
    return {"mixture": mixture, "synthetic": synthetic, "phased": phased, "turns": turns}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in ("code", "web"):
        small_run.make_store(folder / name)
    return folder


@pytest.fixture
def show(data_dir, monkeypatch, capsys):
    """Returns a function (arguments) -> (status, lines of the output, text of the errors)."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(*arguments, action=("show",), config="mixture"):
        flags = [f"--module={MODULE}", f"--config={config}", f"--data_dir={data_dir}"]
        status = main.run(["data", *action, *flags, *arguments])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


def test_documents_and_sources_of_a_batch_are_shown(show, data_dir):
    status, lines, _ = show("--step=3", "--sequences=2:6")
    assert status == 0
    assert lines[0] == "step 3: batch 2 of the data; sequences 2 to 5 of 8"
    headers = [line for line in lines if line.startswith("sequence ")]
    assert [line.split(":")[0] for line in headers] == [
        f"sequence {row} of {name}" for row, name in enumerate(names_at(data_dir, 2)[:6]) if row > 1
    ]
    assert any("'document number " in line and line.endswith("> '<end>'") for line in lines)


def names_at(data_dir, position):
    cfg = named_trainer_configs()["mixture"]().input
    for name, source in cfg.source.sources.items():
        source.path = str(data_dir / name)
    opened = cfg.instantiate()
    return [opened.source_names[k] for k in opened.source_ids(position)]


def test_batches_that_a_config_or_a_run_skips_are_skipped(show, tmp_path):
    want = show("--step=6")[1]
    got = show("--step=2", "--set", 'skip_batches=["1:5"]')[1]
    assert got[0].startswith("step 2: batch 5 of the data, after skipped batches [[1, 5]]")
    assert got[1:] == want[1:]
    (tmp_path / "config.txt").write_text("")
    RunFolder(tmp_path).log("skipped_ranges", step=0, ranges=[[1, 2]])
    RunFolder(tmp_path).log("bad_step", step=2, first=2, stop=5, action="skip_batches")
    assert show("--step=2", f"--trainer_dir={tmp_path}")[1] == got


def test_a_step_of_a_phase_has_the_sequences_after_those_before(show, tmp_path):
    want = [show(f"--step={i}", "--sequences=0:8", config="synthetic")[1] for i in (3, 4)]
    wanted = "--step=3", "--sequences=0:16", f"--trainer_dir={tmp_path}"
    (tmp_path / "config.txt").write_text("")
    status, _, err = show(*wanted, config="phased")
    assert status == 2
    assert "--step=3: a phase changes the input after step 2" in err
    batches = named_trainer_configs()["phased"]().input.instantiate().iterator()
    record = RunRecord(step=2, input=batches.state() | {"step": 2})
    CheckpointRecord.of(record, {}, {}).write(step_path(str(tmp_path / "checkpoints"), 2))
    got = show(*wanted, config="phased")[1]
    documents = lambda lines: [line for line in lines if line.startswith("  ")]
    assert documents(got) == documents(want[0]) + documents(want[1])


@pytest.mark.parametrize(("boundary", "num"), [("RESET", 1), ("CONTINUE", 3)])
def test_ends_within_a_segment_end_documents_only_if_documents_share_segments(show, boundary, num):
    flag = f"--set=input.document_boundary={boundary}"
    status, lines, err = show("--step=1", flag, config="turns")
    assert status == 0, err
    assert lines[1].startswith(f"sequence 0: {num} documents, 5 of 5 tokens")


def test_token_ids_are_shown_where_no_tokenizer_made_them(show):
    status, lines, err = show("--step=1", config="synthetic")
    assert status == 0
    assert "no tokenizer" in err
    assert "tokens, positions 0 to" in lines[2]
    assert "'" not in lines[2]


@pytest.mark.parametrize(
    ("arguments", "action", "named"),
    [
        ([], ["show"], "--step"),
        (["--step=0"], ["show"], "--step"),
        (["--step=1"], ["look"], "look: .*show"),
        (["--step=1", "--sequences=4"], ["show"], "--sequences=4"),
        (["--step=1", "--sequences=8:9"], ["show"], "--sequences=8:9"),
        (["--step=1", "--trainer_dir=missing"], ["show"], "--trainer_dir=missing"),
        (["--step=9", "--set=input.max_batches=8"], ["show"], "step=9"),
    ],
)
def test_wrong_flags_are_one_line(show, arguments, action, named):
    status, _, err = show(*arguments, action=action)
    assert status == 2
    assert re.match(f"moelib data: .*{named}", err), err
    assert err.count("\n") == 1
