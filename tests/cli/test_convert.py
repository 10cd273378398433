"""`moelib convert`: there and back, and what cannot be converted."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from moelib.cli import convert, generate
from moelib.core import tree
from moelib.data.tokenizer import END_OF_TEXT, train_bpe
from moelib.launch import UsageError
from moelib.train.pretrained import load_pretrained

FIXTURES = pathlib.Path(__file__).parents[1] / "models/huggingface/fixtures"


@pytest.fixture
def hub(tmp_path):
    """A model's folder, with a tokenizer."""
    folder = tmp_path / "hub"
    shutil.copytree(FIXTURES / "mixtral", folder)
    (folder / "expected.safetensors").unlink()
    train_bpe(["some text, and some more of it"], 280, str(folder / "tokenizer.json"))
    about = {"eos_token": {"content": END_OF_TEXT}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_a_model_becomes_a_checkpoint_and_the_same_model_again(hub, tmp_path):
    assert "mixtral" in convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    loaded = generate.load_for_inference(str(tmp_path / "run"))
    want = load_pretrained(str(hub))
    for (path, a), (_, b) in zip(
        tree.flatten_items(loaded.params), tree.flatten_items(want.params), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)
    assert loaded.tokenizer.decode([loaded.tokenizer.eos_id]) == END_OF_TEXT

    said = convert.to_hugging_face(str(tmp_path / "run"), str(tmp_path / "back"))
    assert said.startswith("MixtralForCausalLM is in")
    before, after = (load_file(f / "model.safetensors") for f in (hub, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values)
    settings = json.loads((tmp_path / "back/config.json").read_text())
    assert settings["architectures"] == ["MixtralForCausalLM"]
    assert settings["eos_token_id"] == loaded.tokenizer.eos_id
    text = (tmp_path / "back/tokenizer.json").read_text()
    assert text == (hub / "tokenizer.json").read_text()


def test_nothing_is_written_over(hub, tmp_path):
    (tmp_path / "config.txt").write_text("a run's")
    with pytest.raises(FileExistsError, match=r"config\.txt is there already"):
        convert.from_hugging_face(str(hub), str(tmp_path))


def test_a_tokenizer_without_an_end_of_text_is_refused(hub, tmp_path):
    (hub / "tokenizer_config.json").write_text("{}")
    convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"tokenizer_config\.json names no eos_token"):
        generate.load_for_inference(str(tmp_path / "run"))


def moelib(*args):
    command = [sys.executable, "-m", "moelib.cli.main", "convert", *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_flags_that_do_not_belong_together_are_one_line():
    done = moelib("--from_hf=x", "--to_hf=y")
    assert done.returncode == 2
    message = "set --from_hf and --to, or --trainer_dir and --to_hf; given: --from_hf, --to_hf."
    assert done.stderr.splitlines()[-1] == f"moelib convert: {message}"


def test_what_is_no_model_is_one_line(tmp_path):
    done = moelib(f"--from_hf={tmp_path}", f"--to={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "moelib convert: There is no " in done.stderr.splitlines()[-1]
