"""`moelib quickstart`: from text to a trained model, a comparison and a sample."""

import math
import types

import pytest

from moelib.cli import quickstart
from moelib.core.errors import UserError
from moelib.data.tokens.token_source import InMemoryTokens
from tests.python_process import finish, start

TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}\n\n" for i in range(60_000))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns the path of one file of two megabytes."""
    path = tmp_path_factory.mktemp("text") / "all.txt"
    path.write_text(TEXT)
    return str(path)


def test_one_file_is_prepared_once_and_held_out_in_part(text, tmp_path, capsys):
    made = [quickstart.prepare_text(text, str(tmp_path / "store"), 300) for _ in range(2)]
    assert capsys.readouterr().err.count("a BPE of 300 tokens") == 1
    with pytest.raises(UserError, match=r"300 tokens.*--vocab_size.*290"):
        quickstart.prepare_text(text, str(tmp_path / "store"), 290)
    texts = [list(split.texts()) for split in made[1]]
    assert sorted("".join([*texts[0], *texts[1]])) == sorted(TEXT)
    assert 0.005 < len(texts[1]) / len(texts[0]) < 0.1


def test_too_little_text_and_missing_text_are_errors(tmp_path):
    (tmp_path / "little.txt").write_text("a few words")
    for name, message in (("little", "store"), ("nothing", r"nothing\.txt")):
        with pytest.raises(UserError, match=message):
            quickstart.prepare_text(f"{tmp_path}/{name}.txt", str(tmp_path / "store"), 300)


def test_a_wrong_config_is_an_error_before_text_is_prepared(text, tmp_path):
    warmup = "learner.optimizer.args[1].learning_rate.warmup_steps=50"
    flags = quickstart.Flags(
        data_dir=str(text), trainer_dir=f"{tmp_path}/run", max_step=20, set=(warmup,)
    )
    with pytest.raises(UserError, match="warmup_steps 50 are more than max_step 20"):
        quickstart.run(flags, [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("max_step", "warmup_steps"), [(20, 10), (50, 25), (51, 50), (700, 50)])
def test_the_warmup_is_shorter_than_the_run(max_step, warmup_steps, monkeypatch, tmp_path):
    found = []

    def fit(cfg, **_):
        found.append(cfg.learner.optimizer.args[1].learning_rate.warmup_steps)
        return types.SimpleNamespace(stopped_by="SIGTERM")

    monkeypatch.setattr(quickstart, "prepare_text", lambda *_: (None, None))
    monkeypatch.setattr(quickstart.launch, "fit", fit)
    quickstart.run(quickstart.Flags(trainer_dir=f"{tmp_path}/run", max_step=max_step), [])
    assert found == [warmup_steps]


def test_unigram_bits_are_those_of_smoothed_counts():
    train, validation = (
        InMemoryTokens.default_config().set(documents=documents, vocab_size=4).instantiate()
        for documents in ([[3, 1, 1, 2, 0]], [[3, 1, 2, 0], [1, 0]])
    )
    # Counts of 0 to 3, with 1 added: 2, 3, 2, 1. Targets are 1, 2, 0 and 0; 0 covers no byte.
    bits = -(math.log2(3 / 8) + math.log2(2 / 8) + 2 * math.log2(2 / 8))
    assert quickstart.unigram_bits_per_byte(train, validation) == pytest.approx(bits / 2)


@pytest.mark.slow  # A minute: the whole model is compiled, for two steps.
def test_the_whole_way(text, tmp_path):
    command = ["-m", "moelib.cli.main", "quickstart", f"--data_dir={text}"]
    flags = [f"--trainer_dir={tmp_path}/qs", "--max_step=2", "--vocab_size=300"]
    first, again = (finish(start(*command, *flags, devices=1))[0][0] for _ in range(2))
    for part in ("this model", "gzip -9", "unigram model", "A sample, after '"):
        assert part in first
    assert first[first.index("this model") :] == again[again.index("this model") :]
    run = tmp_path / "qs" / "run"
    assert (run / "checkpoints" / "step_00000002").is_dir()
    assert list((run / "summaries").iterdir())
