"""`load_model`: runs are self-contained; dtypes, meshes, tokenizers and own modules."""

import dataclasses
import importlib
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.checkpoint.contents import CheckpointRecord, DamagedCheckpointError
from moelib.core import tree, trusted_code
from moelib.core.errors import UserError
from moelib.data.batches.mixture import Mixture
from moelib.runs.folder import RunFolder
from moelib.runs.loading import load_model
from tests import tiny
from tests.train import small_run

OWN_MODULE = """
from moelib.layers.feed_forward import FeedForward

class Gated(FeedForward):
    pass
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run on a mixture, of a layer of one's own, in bfloat16.

    It was started in a folder to which the paths of its data and its module are relative.
    """
    home = tmp_path_factory.mktemp("home")
    for name in ("a", "b"):
        small_run.make_store(home / name)
    (home / "own_layers.py").write_text(OWN_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.syspath_prepend(str(home))
        gated = importlib.import_module("own_layers").Gated

        store = small_run.TokenStore.default_config()
        sources = {name: store.clone(path=name) for name in ("a", "b")}
        mixture = Mixture.default_config().set(sources=sources, weights={"a": 1.0, "b": 2.0})
        cfg = small_run.trainer_config(home / "run", mixture, max_step=2)
        cfg.checkpointer.keep_last_n = 2
        cfg.model.decoder.block[0].feed_forward = gated.default_config().set(hidden_dim=16)
        cfg.set(train_dtype=jnp.bfloat16)
        cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
        del sys.modules["own_layers"]
    return home / "run"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch):
    """Changes the current folder; modules imported in a test are forgotten."""
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trusted_code, "_folders", set())
    yield
    sys.modules.pop("own_layers", None)


def load_own(run, **settings):
    """Returns the model of a run, whose module the user allows."""
    return load_model(str(run), module_dir=str(run.parent), **settings)


@pytest.fixture
def moved(run, tmp_path):
    """Returns the folder of a copy of the run and its module; the module's folder is gone."""
    shutil.copytree(run, tmp_path / "run")
    shutil.copy(run.parent / "own_layers.py", tmp_path)
    (tmp_path / "run/run.json").write_text(json.dumps({"module_dirs": ["/gone"]}))
    return tmp_path / "run"


def change_records(run, steps=(1, 2), **values):
    """Changes values in the records of a run's checkpoints."""
    for step in steps:
        path = str(run / f"checkpoints/step_0000000{step}")
        dataclasses.replace(CheckpointRecord.read(path), **values).write(path)


def damage_newest(run):
    """Changes the checksum of an array in the record of step 2."""
    record = CheckpointRecord.read(str(run / "checkpoints/step_00000002"))
    checksums = record.checksums | {"model/lm_head/weight": "0" * 16}
    change_records(run, [2], checksums=checksums)


def test_a_run_is_loaded_from_anywhere_without_its_data(moved):
    model = load_own(moved)
    assert (model.step, model.max_length, model.dtype) == (2, 64, "bfloat16")
    assert model.tokenizer.eos_token == small_run.END
    assert model.tokenizer.bos_id is None
    assert model.stop_ids == (model.tokenizer.eos_id,)
    assert model.config.input.seq_len == 64
    assert type(model.model.decoder.children["repeated0"].feed_forward).__name__ == "Gated"


def without_norms(model):
    """Returns the parameters of a model that may be cast."""
    return [x for path, x in tree.flatten_items(model.parameters) if "norm" not in path]


def test_parameters_have_the_dtype_of_training_or_another(run):
    dtypes = lambda model: {str(x.dtype) for x in without_norms(model)}
    trained, stored, half = (load_own(run, dtype=x) for x in (None, "stored", "float16"))
    assert [dtypes(x) for x in (trained, stored, half)] == [{"bfloat16"}, {"float32"}, {"float16"}]
    for a, b in zip(*(jax.tree.leaves(x.parameters) for x in (trained, stored)), strict=True):
        np.testing.assert_array_equal(a, b.astype(a.dtype))


def test_a_mesh_holds_the_parameters_in_parts(run):
    whole, split = load_own(run), load_own(run, mesh="fsdp=4,model=2")
    assert split.mesh is not None
    jax.tree.map(np.testing.assert_array_equal, whole.parameters, split.parameters)
    table = split.parameters["embedding"]["weight"]
    assert table.addressable_shards[0].data.size == table.size // 8
    with split.on_mesh():
        assert dict(jax.sharding.get_abstract_mesh().shape)["fsdp"] == 4


def test_checkpoints_are_named_by_step(run):
    first, last = (load_own(run, step=step) for step in (1, 2))
    again = last.at_step(1)
    assert (first.step, again.step, again.model) == (1, 1, last.model)
    leaves = [jax.tree.leaves(x.parameters)[0] for x in (first, last, again)]
    np.testing.assert_array_equal(leaves[0], leaves[2])
    assert not np.array_equal(leaves[0], leaves[1])


def test_damaged_parameters_are_refused_unless_checksums_are_skipped(moved):
    shutil.rmtree(moved / "checkpoints/step_00000001")
    damage_newest(moved)
    with pytest.raises(DamagedCheckpointError, match="'model/lm_head/weight' differs"):
        load_own(moved)
    loaded = load_own(moved, skip_checksums=True)
    assert (loaded.step, loaded.at_step(2).step) == (2, 2)


def test_an_own_module_is_named_and_found_in_module_dir(moved, monkeypatch):
    monkeypatch.chdir(moved.parent)  # The current folder holds the module.
    monkeypatch.syspath_prepend(str(moved.parent))
    with pytest.raises(UserError, match=r"'own_layers'.*--module_dir.*/gone"):
        load_model(str(moved))
    load_own(moved)


def test_a_module_that_the_user_has_imported_may_be_named(run, monkeypatch):
    monkeypatch.syspath_prepend(str(run.parent))
    importlib.import_module("own_layers")
    assert load_model(str(run)).step == 2


def test_the_config_is_that_of_the_checkpoint(moved, caplog):
    file, eps = moved / "config.txt", "model.output_norm.eps: 1e-0"
    load_own(moved)
    assert not caplog.records
    file.write_text(file.read_text().replace(f"{eps}6", f"{eps}1"))
    assert load_own(moved).config.model.output_norm.eps == 1e-6
    (line,) = (record.message for record in caplog.records)
    assert f"{file} is not the config of step 2" in line
    assert load_own(moved, skip_checksums=True).config.model.output_norm.eps == 0.1
    file.unlink()
    assert load_own(moved).config.max_step == 2


def test_each_step_has_the_config_that_trained_it(run, moved, monkeypatch):
    monkeypatch.syspath_prepend(str(run.parent))
    importlib.import_module("own_layers")
    config = (moved / "config.txt").read_text()
    config = config.replace("model.output_norm.eps: 1e-06", "model.output_norm.eps: 1e-01")
    change_records(moved, [1], config=config.replace("'bfloat16'", "'float16'"))
    read = lambda model: (model.step, model.model.config.output_norm.eps, model.dtype)
    newest = load_model(moved, mesh="data=8")
    assert read(newest) == (2, 1e-6, "bfloat16")
    other = newest.at_step(1)
    assert read(other) == read(load_model(moved, step=1)) == (1, 0.1, "float16")
    assert (other.mesh, read(other.at_step(None))) == (newest.mesh, read(newest))
    damage_newest(moved)
    assert read(load_model(moved)) == read(other)
    change_records(moved, [1], files={"tokenizer.json": "0"})
    with pytest.raises(UserError, match="record of step 1"):
        newest.at_step(1)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_or_missing_file_of_the_tokenizer_is_named(moved, name):
    file = moved / name
    for change in (lambda: file.write_text(file.read_text() + " "), file.unlink):
        change()
        with pytest.raises(UserError, match=rf"{file} .*record of step 2.*--skip_checksums"):
            load_own(moved, require_tokenizer=False)
    load_own(moved, skip_checksums=True, require_tokenizer=False)


def test_a_tokenizer_that_changes_before_the_first_checkpoint_is_named(tmp_path):
    cfg = small_run.trainer_config(tmp_path / "run", small_run.make_store(tmp_path / "data"))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    file = tmp_path / "run/tokenizer.json"
    tiny.after_each_step(trainer, lambda _: file.write_text(file.read_text() + " "))
    trainer.run()
    with pytest.raises(UserError, match=rf"{file} has changed.*record of step 1"):
        load_model(tmp_path / "run")


def test_a_run_without_a_tokenizer_has_that_of_its_input(run, moved, monkeypatch):
    change_records(moved, files={})
    (moved / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_own(moved)
    monkeypatch.chdir(run.parent)
    assert load_own(moved).tokenizer.eos_token == small_run.END
    shutil.copy("a/tokenizer.json", moved)
    (moved / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json.*eos_token"):
        load_own(moved)


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("model.vocab_size: 400\n", "", "vocab_size"),
        ("own_layers:", "own_layers:Gone.", r"\.klass: 'own_layers:Gone\..*import it in"),
        ("own_layers:", "gone:", r"\.klass: .*'gone'.*--module_dir.*import it in gone"),
    ],
)
def test_a_config_that_no_longer_fits_is_named(moved, line, changed, message):
    text = (moved / "config.txt").read_text()
    assert line in text
    change_records(moved, config=text.replace(line, changed))
    with pytest.raises(UserError, match=message):
        load_own(moved)


def test_a_folder_without_a_model_or_a_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.txt.*config\.json"):
        load_model(str(tmp_path))
    RunFolder(tmp_path).write_config(tiny.trainer_config(tmp_path))
    with pytest.raises(UserError, match="SyntheticTokens"):
        load_model(str(tmp_path))


# -- Hugging Face --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    small_run.make_hub(folder)
    return folder


def test_a_hugging_face_model_is_read_as_it_was_published(hub):
    model = load_model(hub)
    assert model.folder == str(hub)
    assert {x.dtype for x in without_norms(model)} == {jnp.dtype("bfloat16")}
    norm = model.parameters["output_norm"]["scale"]
    assert norm.dtype == jnp.float32
    assert model.tokenizer.encode_prompts(["document"])[0][0] == 256
    assert (model.stop_ids, model.max_length, model.config) == ((7, 256), 40, None)
    full = load_model(str(hub), dtype="float32", mesh="fsdp=8")
    found = {(str(x.dtype), len(x.devices())) for x in jax.tree.leaves(full.parameters)}
    assert found == {("float32", 8)}


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("tokenizer_config.json", {"eos_token": None}, r"tokenizer_config\.json.*eos_token"),
        ("config.json", {"eos_token_id": [7, 288]}, "eos_token_id is 288.*vocab_size=288"),
        ("generation_config.json", {"eos_token_id": 288}, "eos_token_id is 288.*vocab_size=288"),
        ("config.json", {"vocab_size": 270}, "2[78]. tokens.*vocab_size=270"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(hub, tmp_path, file, settings, message):
    shutil.copytree(hub, tmp_path / "hub")
    path = tmp_path / "hub" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UserError, match=message):
        load_model(str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"step": 3}, "step 3"),
        ({"mesh": "fsdb=8"}, "fsdb"),
        ({"mesh": "fsdp=3"}, "fsdp=3"),
    ],
)
def test_invalid_arguments_are_refused(hub, arguments, message):
    with pytest.raises(UserError, match=message):
        load_model(str(hub), **arguments)
