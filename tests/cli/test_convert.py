"""`moelib convert`: there and back, and what cannot be converted."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load_file

from docs import generate
from moelib.checkpoint.contents import CheckpointRecord
from moelib.cli import convert as cli
from moelib.cli import main
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import END_OF_TEXT, train_bpe
from moelib.huggingface.pretrained import load_pretrained, read_config, save_pretrained
from moelib.runs.loading import as_mesh, load_model
from moelib.train import convert
from tests import tiny

FIXTURES = pathlib.Path(__file__).parents[1] / "huggingface/fixtures"


@pytest.fixture
def hub(tmp_path):
    """A model's folder, with a tokenizer."""
    folder = tmp_path / "hub"
    cfg, _ = read_config(str(FIXTURES / "mixtral"))
    cfg.vocab_size = 280
    params = tiny.initial(cfg.instantiate(parent=None))
    more = {"bos_token_id": 3, "eos_token_id": 256, "max_position_embeddings": 60}
    ends = {"eos_token_id": [256, 7], "temperature": 0.5}
    save_pretrained(str(folder), cfg, params, more_settings=more, generation=ends)
    train_bpe(["some text, and some more of it"], 280, str(folder / "tokenizer.json"))
    about = {"eos_token": {"content": END_OF_TEXT}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_a_model_becomes_a_checkpoint_and_the_same_model_again(hub, tmp_path):
    assert "mixtral" == convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    loaded = load_model(str(tmp_path / "run"))
    want = load_pretrained(str(hub))
    for (path, a), (_, b) in zip(
        tree.flatten_items(loaded.parameters), tree.flatten_items(want.params), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)
    assert loaded.tokenizer.decode([loaded.tokenizer.eos_id]) == END_OF_TEXT

    architecture = convert.to_hugging_face(str(tmp_path / "run"), str(tmp_path / "back"))
    assert architecture == "MixtralForCausalLM"
    before, after = (load_file(f / "model.safetensors") for f in (hub, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values)
    settings = json.loads((tmp_path / "back/config.json").read_text())
    assert settings["architectures"] == ["MixtralForCausalLM"]
    assert settings["eos_token_id"] == loaded.tokenizer.eos_id
    assert (settings["bos_token_id"], settings["max_position_embeddings"]) == (3, 60)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_text() == (hub / name).read_text()
    assert (loaded.stop_ids, loaded.max_length) == ((7, 256), 60)
    (tmp_path / "run/generation_config.json").unlink()
    with pytest.raises(UserError, match=r"run/generation_config\.json .*record of step 0"):
        load_model(str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_checkpoint_of_another_dtype_reads_back_on_any_mesh(hub, tmp_path, dtype):
    mesh = as_mesh("fsdp=2,expert=4")
    convert.from_hugging_face(str(hub), str(tmp_path / "run"), dtype=dtype, mesh=mesh)
    loaded = load_model(str(tmp_path / "run"))
    weights = loaded.parameters["embedding"]["weight"]
    assert weights.dtype == dtype
    convert.to_hugging_face(str(tmp_path / "run"), str(tmp_path / "back"), mesh=mesh)
    back = load_file(tmp_path / "back/model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(back.astype(np.float32), np.asarray(weights, np.float32))


def test_a_tokenizer_of_another_model_is_refused(hub, tmp_path):
    change(hub, eos_token_id=280)
    with pytest.raises(UserError, match=r"eos_token_id is 280.*vocab_size=280"):
        convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    train_bpe(["text"], 281, str(hub / "tokenizer.json"))
    change(hub, vocab_size=250)
    with pytest.raises(UserError, match=r"2\d\d.*vocab_size=250"):
        convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def change(folder, **settings):
    published = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(published | settings))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--from_hf=x", "--to_hf=y"], "--from_hf, --to_hf"),
        (["--from_hf=no/model", "--to=run"], "no/model"),
        (["--trainer_dir=run", "--to_safetensors=out", "--dtype=bfloat16"], "--dtype"),
        (["--trainer_dir=run", "--to_safetensors=out", "--module_dir=m"], "--module_dir"),
        (["--from_hf=no/model", "--to=run", "--step=0"], "--step"),
        (["--from_hf=no/model", "--to=run", "--skip_checksums"], "--skip_checksums"),
        (["--from_hf=no/model", "--to=run", "--module_dir=m"], "--module_dir"),
        (["--trainer_dir=run", "--to_hf=out", "--ignore_settings=a"], "--ignore_settings"),
        (["--trainer_dir=run", "--to_peft=out", "--multi_token_prediction"], "--multi_token"),
    ],
)
def test_what_cannot_be_converted_is_one_line(tmp_path, monkeypatch, capsys, flags, named):
    monkeypatch.chdir(tmp_path)
    assert main.run(["convert", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moelib convert: ")
    assert named in line


def test_nothing_is_written_over(hub, tmp_path):
    (tmp_path / "config.txt").write_text("a run's")
    with pytest.raises(UserError, match=r"config\.txt"):
        convert.from_hugging_face(str(hub), str(tmp_path))


def test_a_tokenizer_without_an_end_of_text_is_refused(hub, tmp_path):
    (hub / "tokenizer_config.json").write_text("{}")
    convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"tokenizer_config\.json.*eos_token"):
        load_model(str(tmp_path / "run"))


def test_a_model_without_a_tokenizer_is_converted_both_ways(hub, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hub / name).unlink()
    convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    convert.to_hugging_face(str(tmp_path / "run"), str(tmp_path / "back"))
    want, got = (load_pretrained(str(folder)) for folder in (hub, tmp_path / "back"))
    assert got.cfg == want.cfg
    assert got.settings == want.settings
    assert not (tmp_path / "back/tokenizer.json").exists()


def test_a_run_of_moved_own_layers_is_converted_with_module_dir(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    convert.from_hugging_face(str(hub), str(tmp_path / "run"))
    path = str(tmp_path / "run/checkpoints/step_00000000")
    record = CheckpointRecord.read(path)
    text = record.config.replace("moelib.layers.norm:RMSNorm", "own_norms:RMSNorm")
    dataclasses.replace(record, config=text).write(path)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/own_norms.py").write_text("from moelib.layers.norm import RMSNorm\n")
    flags = cli.Flags(trainer_dir=str(tmp_path / "run"), to_hf=str(tmp_path / "back"))
    with pytest.raises(UserError, match="--module_dir"):
        cli.run(flags, [])
    to_peft = dataclasses.replace(flags, to_hf=None, to_peft=str(tmp_path / "adapter"))
    with pytest.raises(UserError, match="--module_dir"):
        cli.run(to_peft, [])
    with pytest.raises(UserError, match="adapters"):  # It has none; the module was found.
        cli.run(dataclasses.replace(to_peft, module_dir=str(tmp_path / "moved")), [])
    cli.run(dataclasses.replace(flags, module_dir=str(tmp_path / "moved")), [])
    assert (tmp_path / "back/model.safetensors").exists()


def read_tensors(folder):
    # --8<-- [start:read]
    with open(f"{folder}/tensors.json") as file:
        index = json.load(file)
    arrays = {}
    for name in {tensor["file"] for tensor in index["tensors"].values()}:
        with open(f"{folder}/{name}", "rb") as file:
            tensors = deserialize(file.read())
        for path, tensor in tensors:
            dtype = index["tensors"][path]["dtype"]
            if dtype == "bfloat16":  # Unknown to NumPy: the upper half of a float32.
                bits = np.frombuffer(tensor["data"], np.uint16).astype(np.uint32)
                values = (bits << 16).view(np.float32)
            else:
                values = np.frombuffer(tensor["data"], dtype)
            arrays[path] = values.reshape(tensor["shape"])
    # --8<-- [end:read]
    return index["step"], arrays


def test_arrays_of_a_run_are_read_with_numpy_and_safetensors_alone(tmp_path):
    cfg = tiny.trainer_config(tmp_path / "run", max_step=1, save_every=1, evaler=False)
    cfg.model = tiny.dense_model(32, dim=8, dtype="bfloat16")
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    flags = cli.Flags(trainer_dir=cfg.dir, to_safetensors=str(tmp_path / "tensors"))
    cli.run(flags, [])
    step, found = read_tensors(tmp_path / "tensors")
    assert step == 1
    wanted = tree.by_path(trainer.trainer_state._asdict())
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    alone = "import sys\nfolder = sys.argv[1]\n" + generate.regions(pathlib.Path(__file__))["read"]
    alone += "\nassert not {'jax', 'ml_dtypes', 'moelib'} & set(sys.modules)"
    command = [sys.executable, "-c", alone, str(tmp_path / "tensors")]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert wanted["model/embedding/weight"].dtype == "bfloat16"
