"""Values that a user set wrong: one line that names the field and the value, no traceback."""

import pytest

from moelib.cli import main
from moelib.data.prepare import prepare
from moelib.data.source import InMemorySource
from moelib.data.tokenizer import train_bpe

BLOCK = "model.decoder.block[0]"
SCHEDULE = "learner.optimizer.args[1].learning_rate"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Returns a folder with a token store of some 30,000 tokens."""
    folder = tmp_path_factory.mktemp("data")
    texts = [f"document number {i} of many, many words" for i in range(3000)]
    tokenizer = train_bpe(texts[:100], 300, str(folder / "tokenizer.json"))
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    prepare(source, tokenizer, str(folder / "text"), splits={"train": 0.9, "validation": 0.1})
    return folder


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("input.seq_len", "100000000", "100000000"),
        ("input.vocab_size", "100", "100"),
        ("model.vocab_size", "100", "100"),
        ("mesh_shape", "fsdp=3", "fsdp=3"),
        ("mesh_shape", "fdsp=8", "'fdsp'; did you mean 'fsdp'"),
        ("num_microbatches", "3", "num_microbatches"),
        ("input.global_batch_size", "7", "7"),
        (f"{BLOCK}.self_attention.num_heads", "3", "num_heads"),
        (f"{BLOCK}.feed_forward.num_experts_per_token", "99", "99"),
        ("model.decoder.num_layers", "0", "0"),
        (f"{SCHEDULE}.warmup_steps", "5000", "5000"),
        ("checkpointer.save_policy.n", "0", "n=0"),
        ("max_step", "three", "'three'"),
        ("max_stp", "3", "did you mean 'max_step'"),
    ],
)
def test_a_wrong_value_is_one_line(field, value, named, data_dir, tmp_path, capsys):
    flags = ["--module=flame_moe", "--config=flame-moe-tiny", f"--data_dir={data_dir}"]
    status = main.run(["train", *flags, f"--trainer_dir={tmp_path}", f"--set={field}={value}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("moelib train: ")
    assert named in line
    owner, _, name = field.rpartition(".")
    assert name in line
    assert owner in line or not owner.startswith(BLOCK)
