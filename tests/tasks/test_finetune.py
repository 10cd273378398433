"""Fine-tuning of a Hugging Face folder: what is trained, exported and refused."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import moelib
from moelib.core.errors import MissingFileError, UserError
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.tasks.fine_tuning import FineTuning
from moelib.tasks.finetune import finetune, finetune_config, parameter_table
from moelib.train import convert
from tests.tasks.base_model import save_base


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folders of a model, and of text tokenized for it."""
    root = tmp_path_factory.mktemp("base")
    tokenizer = save_base(root / "model")
    texts = [f"sentence number {i} of many" for i in range(64)]
    prepare(
        InMemorySource.default_config().set(texts=texts).instantiate(),
        tokenizer,
        str(root / "store"),
    )
    return root / "model", root / "store"


def settings(folders, trainer_dir, **fields):
    model, store = map(str, folders)
    fields = {"max_step": 6, "batch_size": 8, "seq_len": 64, "lr": 1e-2} | fields
    fields |= {} if "full" in fields else {"lora_rank": fields.get("lora_rank", 4)}
    return FineTuning(model=model, data=store, trainer_dir=str(trainer_dir), **fields)


def scale_of(found, name):
    """Returns alpha / r of a module or parameter in the settings of PEFT."""
    of = lambda patterns, default: next(
        (x for regex, x in found[patterns].items() if re.fullmatch(regex, name)), found[default]
    )
    return of("alpha_pattern", "lora_alpha") / of("rank_pattern", "r")


def test_adapters_are_trained_and_written_merged_and_for_peft(folders, tmp_path, capsys):
    model, store = folders
    run = tmp_path / "run"
    # --8<-- [start:finetune]
    settings = FineTuning(
        model=str(model),  # A folder of Hugging Face.
        data=str(store),  # A token store, prepared with the model's tokenizer.
        trainer_dir=str(run),
        lora_rank=4,
        max_step=6,
        batch_size=8,
        seq_len=64,
        lr=1e-2,
        dtype="float32",
    )
    result = finetune(settings)
    convert.to_peft(str(run), str(run / "adapter"))
    convert.to_hugging_face(str(run), str(run / "merged"), merge=True)
    # --8<-- [end:finetune]
    assert result.step == 6
    out = capsys.readouterr().out
    assert "trained" in out
    assert f"starts from {model}\n" in out
    base, merged = (load_file(x / "model.safetensors") for x in (model, run / "merged"))
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    found = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert found["base_model_name_or_path"] == str(model)
    assert base.keys() == merged.keys()
    name = "model.layers.1.self_attn.k_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    change = scale_of(found, name) * b @ a
    assert np.abs(change).max() > 1e-4
    np.testing.assert_allclose(merged[f"{name}.weight"] - base[f"{name}.weight"], change, atol=1e-6)
    # Gate and up of an expert are one matrix there: A is stacked, and B block diagonal.
    of_experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert of_experts in found["target_parameters"]
    name = "base_model.model.model.layers.0.mlp.experts.base_layer"
    a = adapter[f"{name}.lora_A.weight"].reshape(4, 4, 16)  # [E, n r, in], r = 4 / K.
    b = adapter[f"{name}.lora_B.weight"].reshape(48, 4, 4)  # [out, n r, E]
    scale = scale_of(found, of_experts)
    for e in range(4):
        expert = f"model.layers.0.block_sparse_moe.experts.{e}"
        both = [
            np.concatenate([x[f"{expert}.{w}.weight"] for w in ("w1", "w3")])
            for x in (merged, base)
        ]
        np.testing.assert_allclose(both[0] - both[1], scale * b[:, :, e] @ a[e], atol=1e-6)
    for name in base:
        if "norm" in name or "gate" in name or "embed" in name:
            np.testing.assert_array_equal(base[name], merged[name])


@pytest.mark.parametrize("full", [True, False])
def test_the_loss_of_texts_that_are_held_out_falls(folders, tmp_path, full):
    text = tmp_path / "held_out.txt"
    text.write_text("sentence number 100 of many")  # Training has the numbers 0 to 63.
    finetune(settings(folders, tmp_path / "run", max_step=20, full=full, dtype="float32"))
    before, after = (
        {
            each.metric: each.value
            for each in moelib.evaluate(model, corpus=[str(text)], max_length=64)
        }
        for model in map(moelib.load_model, map(str, (folders[0], tmp_path / "run")))
    )
    assert after["bits_per_byte"] < 0.8 * before["bits_per_byte"]


def test_an_adapted_run_is_not_written_without_its_adapters(folders, tmp_path):
    finetune(settings(folders, tmp_path, max_step=1))
    with pytest.raises(UserError, match="--merge"):
        convert.to_hugging_face(str(tmp_path), str(tmp_path / "hf"))


def test_all_parameters_are_trained_without_a_rank(folders, tmp_path):
    cfg = finetune_config(settings(folders, tmp_path, full=True, lr=None))
    (trained, frozen) = parameter_table(cfg).rows
    assert frozen[1] == "0"
    assert trained[2] == "100.00%"
    assert cfg.learner.optimizer.args[1].learning_rate.peak_lr == 2e-5


def test_frozen_weights_are_stored_in_the_compute_dtype(folders, tmp_path):
    cfg = finetune_config(settings(folders, tmp_path))
    (trained, frozen) = parameter_table(cfg).rows
    numbers = [int(row[1].replace(",", "")) for row in (trained, frozen)]
    # Attention: q, k, v, o of rank 4; experts: gate, up, down of rank 2.
    attention, experts = 4 * (32 + 24 + 24 + 32), 4 * 2 * (40 + 40 + 40)
    assert numbers[0] == 2 * (attention + experts)
    assert cfg.model.dtype == "bfloat16"


def test_conversations_are_prepared_and_their_answers_learned(folders, tmp_path, capsys):
    lines = [{"prompt": f"{i} + 1 = ?", "completion": f"{i + 1}"} for i in range(40)]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"chat_template": "plain", "max_step": 2, "dtype": "float32"}
    cfg = finetune_config(settings((folders[0], data), tmp_path / "run", **fields))
    batch = cfg.input.instantiate().batch(0)
    labels = batch["target_labels"][batch["target_labels"] >= 0]
    answers = bytes(labels[labels < 256].astype(np.uint8)).decode()
    assert answers.isdecimal()
    assert np.sum(labels == 256) == sum(row.max() for row in batch["segment_ids"])
    assert finetune(settings((folders[0], data), tmp_path / "run", **fields)).step == 2
    assert "is prepared already" in capsys.readouterr().err
    assert (tmp_path / "run/chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.jsonl", None, r"absent\.jsonl"),
        ("chat.jsonl", "{}", "no chat template; set chat_template"),
    ],
)
def test_data_without_conversations_or_template_are_refused(folders, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        finetune_config(settings((folders[0], tmp_path / name), tmp_path / "run"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ absent.field }}", ": line 1: .*absent.*; .*--chat_template"),
        ("{% for m in messages %}x{% endfor %}", " does not write the content"),
    ],
)
def test_a_template_that_fails_is_blamed_instead_of_the_data(folders, tmp_path, template, message):
    data, file = tmp_path / "chat.jsonl", tmp_path / "own.jinja"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    file.write_text(template)
    with pytest.raises(UserError, match=r"own\.jinja" + message):
        finetune_config(settings((folders[0], data), tmp_path / "run", chat_template=str(file)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "a:b"}, "--reward is of the objective grpo or gspo, not sft; remove it"),
        ({"beta": 0.5}, "--beta is of the objective dpo, not sft"),
        ({"full": True, "train_router": True}, "train_router .* is of adapters, but full"),
        ({"accept_changes": ("dada",)}, "has 'dada'; did you mean 'data'"),
    ],
)
def test_settings_without_an_effect_are_refused(folders, tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        finetune_config(settings(folders, tmp_path / "run", **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, r"lr \(--lr\) is -1.0; set it above 0"),
        ({"lr": float("nan")}, r"lr \(--lr\) is nan"),
        ({"dtype": "int8"}, r"dtype \(--dtype\) is 'int8'; (did you mean|choose)"),
        ({"targets": "(["}, r"'\(\[' is no regular expression .*; set it to one"),
    ],
)
def test_settings_are_checked_before_data_are_prepared(folders, tmp_path, fields, message):
    data = tmp_path / "chat.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match=message):
        finetune_config(
            settings((folders[0], data), tmp_path / "run", chat_template="plain", **fields)
        )
    assert [*tmp_path.iterdir()] == [data]


def test_devices_and_weights_are_checked_before_data_are_prepared(folders, tmp_path):
    data = tmp_path / "chat.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    fields = {"chat_template": "plain", "mesh": "fsdp=5"}
    with pytest.raises(UserError, match="mesh fsdp=5 takes 5 devices, but there are 8"):
        finetune(settings((folders[0], data), tmp_path / "run", **fields))
    shutil.copytree(folders[0], tmp_path / "model")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/pytorch_model.bin")
    with pytest.raises(MissingFileError, match=r"There is no file .*; save the pickled model"):
        finetune_config(settings((tmp_path / "model", data), tmp_path / "run"))
    assert not (tmp_path / "run.data").exists()


def test_adapters_larger_than_the_model_are_warned_of(folders, tmp_path, caplog):
    for rank, warns in [(4, False), (5000, True)]:
        finetune_config(settings(folders, tmp_path / "run", lora_rank=rank))
        assert ("set lora_rank (--lora_rank) lower" in caplog.text) is warns


def test_the_cures_of_bad_conversations_are_flags_of_the_command(folders, tmp_path):
    data, fields = tmp_path / "chat.jsonl", {"chat_template": "plain"}
    lines = '{"prompt": "a", "completion": "b"}\n{"prompt": 3}\n'
    data.write_text(lines + r'{"prompt": "\ud800", "completion": "b"}' + "\n")
    asked = settings((folders[0], data), tmp_path / "run", **fields)
    with pytest.raises(UserError, match="--skip_bad_lines"):
        finetune_config(asked)
    finetune_config(dataclasses.replace(asked, skip_bad_lines=True))
    data.write_text('{"prompt": "c", "completion": "d"}\n')
    with pytest.raises(
        UserError, match=r"run\.data .* different source \(source: --data; .* another tr"
    ):
        finetune_config(asked)
    data.write_text(json.dumps({"prompt": "a" * 99, "completion": "b"}))
    with pytest.raises(UserError, match=r"1 conversations left out \(.*1\).* length \(--seq_len\)"):
        finetune_config(settings((folders[0], data), tmp_path / "long", **fields))
