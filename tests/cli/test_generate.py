"""`moelib generate`: text on the terminal, and of a file of prompts."""

import functools
import json

import pytest

import moelib
from moelib.cli import generate
from moelib.core.errors import UserError
from moelib.runtime.command_line import parse_flags
from tests.train import small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of a model of 400 tokens on text of 280."""
    folder = tmp_path_factory.mktemp("run")
    cfg = small_run.trainer_config(folder / "run", small_run.make_store(folder / "store"))
    cfg.instantiate(parent=None).run()
    return folder / "run"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    small_run.make_hub(folder)
    return folder


def generate_with(*args):
    """Runs the command with flags."""
    generate.run(*parse_flags(generate.Flags, list(map(str, args))))


@pytest.mark.slow
def test_a_hugging_face_model_gives_the_same_text_on_a_mesh(hub, tmp_path, capsys):
    flags_of_both = (f"--hf_dir={hub}", "--dtype=float32", "--temperature=0")
    generate_with(*flags_of_both, "--prompt=document")
    text = capsys.readouterr().out
    assert text.startswith("document")
    generate_with(*flags_of_both, "--prompt=document", "--mesh=fsdp=4,model=2")
    assert capsys.readouterr().out == text
    (tmp_path / "in").write_text(lines({"prompt": "document number " * 40}))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}")
    with pytest.raises(UserError, match=r"in:1: .* max_length=40"):
        generate_with(*flags_of_both, *files)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--stop="], "--stop"),
        (["--mesh=fsdp=3"], "fsdp=3"),
        (["--step=3"], "step 3"),
        (["--trainer_dir=x"], "--trainer_dir or --hf_dir"),
    ],
)
def test_invalid_flags_of_a_model_are_refused(hub, args, message):
    with pytest.raises(UserError, match=message):
        generate_with(f"--hf_dir={hub}", "--prompt=a", *args)


PROMPTS = ["document", "do", "of many"]


def lines(*records):
    """Returns JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def command(run):
    """Runs the command on the run."""
    return functools.partial(generate_with, f"--trainer_dir={run}", "--max_new_tokens=12")


def test_each_prompt_of_a_file_is_continued_as_alone(command, tmp_path, capsys):
    (tmp_path / "in").write_text(lines(*({"id": i, "prompt": p} for i, p in enumerate(PROMPTS))))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--batch_size=2")
    command(*files, "--temperature=0")
    assert f"{tmp_path / 'out'}: 3 texts" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(record["id"], record["prompt"]) for record in records] == list(enumerate(PROMPTS))
    for record in records:
        assert len(record["tokens"]) <= 12
        command("--prompt", record["prompt"], "--temperature=0")
        assert capsys.readouterr().out == record["prompt"] + record["text"] + "\n"


def test_texts_in_a_notebook(run, capsys):
    trainer_dir = str(run)
    # --8<-- [start:python]
    model = moelib.load_model(trainer_dir)
    prompts = ["document number", "many"]
    for completion in moelib.generate(model, prompts, max_new_tokens=8, temperature=0.0):
        print(completion.text, completion.tokens)
    # --8<-- [end:python]
    texts = capsys.readouterr().out.splitlines()
    assert len(texts) == 2


@pytest.mark.slow
def test_a_padded_model_writes_only_tokens_of_its_tokenizer(command, capsys):
    command("--prompt=document", "--max_new_tokens=60", "--temperature=9", "--top_p=1")
    assert capsys.readouterr().out.startswith("document")


def test_texts_end_before_a_stop_string(command, tmp_path, capsys):
    drawn = ("--temperature=5", "--top_p=1", "--seed=3", "--max_new_tokens=40")
    command("--prompt=do", *drawn)
    free = capsys.readouterr().out
    stop = free[12:14]
    want = free[: 2 + free[2:].index(stop)]
    command("--prompt=do", f"--stop={stop}", *drawn)
    assert capsys.readouterr().out == want + "\n"
    (tmp_path / "in").write_text(lines({"prompt": "do"}))
    files = (f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--batch_size=1")
    command(*files, f"--stop={stop}", *drawn)
    record = json.loads((tmp_path / "out").read_text())
    assert "do" + record["text"] == want
    assert len(record["tokens"]) < 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines({"prompt": "a"}) + '\n{"prompt": "b', r"in:3.*JSON"),
        (lines({"prompt": "a"}, {"promt": "b"}), 'in:2 .*"prompt"'),
        (lines(["prompt"]), "in:1 "),
        (lines({"prompt": "a", "text": "b"}), "in:1 .*'text'"),
        ("\n", "/in "),
        (lines({"prompt": "a"}) + "\n" + lines({"prompt": ""}), "in:3"),
        (lines({"prompt": "document " * 40}), "in:1: .*max_length=30"),
    ],
)
def test_invalid_lines_are_named(command, tmp_path, text, message):
    (tmp_path / "in").write_text(text)
    with pytest.raises(UserError, match=message):
        command(f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--max_length=30")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--prompt or --input"),
        (["--prompt="], "--prompt or --input"),
        (["--prompt=a", "--input=b"], "--prompt or --input"),
        (["--input=a"], "--input and --output"),
        (["--prompt=a", "b"], "'b'"),
        (["--input=a", f"--output={__file__}"], "exists"),
        (["--input=gone", "--output=a"], "--input"),
        (["--prompt=a", "--top_k=0"], "top_k is 0"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(command, args, message):
    with pytest.raises(UserError, match=message):
        command(*args)


def test_a_name_of_the_hub_is_no_folder():
    with pytest.raises(
        UserError, match=r"no folder 'Qwen/Qwen3-0.6B'.*hf download Qwen/Qwen3-0.6B"
    ):
        generate_with("--hf_dir=Qwen/Qwen3-0.6B", "--prompt=a")
