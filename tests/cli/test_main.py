"""The `moelib` command: help, unknown commands and flags, and errors on one line."""

import os
import signal
import subprocess
import sys

import pytest

import moelib
from moelib.cli import main
from moelib.core.config import UnknownFieldError
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.tokenizer import train_bpe
from tests.python_process import finish, start

TINY = ("train", "--module=experiments.flame_moe", "--config=flame-moe-tiny")


def test_help_lists_every_command_and_its_flags(capsys):
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in main.COMMANDS)
    assert main.run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--config, -c: " in text
    assert "(cpu|gpu|tpu)" in text


def test_no_command_is_an_error_that_shows_the_help(capsys):
    assert main.run([]) == 2
    assert "Usage: moelib" in capsys.readouterr().out
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"moelib {moelib.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "'trian'; did you mean 'train'"),
        (
            ["config", "--modul", "m"],
            "moelib config: unknown flag '--modul'; did you mean '--module'",
        ),
        (["config"], "moelib config: --module and --config"),
    ],
)
def test_wrong_commands_and_flags_are_one_line(capsys, arguments, message):
    assert main.run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_flags_of_commands_are_described_for_the_documentation():
    commands = main.describe_commands()
    assert {"train", "config", "quickstart"} <= set(commands)
    for name, command in commands.items():
        assert command.summary.endswith("."), name
        assert f"`moelib {name}`" in command.text
        for info in command.flags:
            assert info.help[0].isupper(), (name, info)
            assert info.help.endswith("."), (name, info)


def test_commands_import_nothing_heavy_for_help():
    code = (
        "import sys; from moelib.cli import main; main.run(['--help']);"
        "assert 'numpy' not in sys.modules; main.run(['train', '-h']);"
        "heavy = {'jax', 'tensorflow', 'optax', 'tokenizers', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    finish(start("-c", code))


def test_a_missing_store_is_one_line_that_names_the_cure(tmp_path, capsys):
    assert main.run([*TINY, f"--data_dir={tmp_path}", f"--trainer_dir={tmp_path}/run"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("moelib train: ")
    assert f"{tmp_path}/text" in last
    assert "moelib prepare" in last


@pytest.mark.parametrize("module", ["moelib", "moelib.launch", "benchmarks"])
def test_commands_print_nothing_about_absent_tpus(module, tmp_path):
    pytest.importorskip("libtpu")
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os; atexit.register(lambda: print(os.environ.get('TPU_SKIP_MDS_QUERY')))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.getcwd()])
    command = [sys.executable, "-m", module, *(["config"] if module == "moelib" else []), "--no"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stdout.split()[-1] == "1"
    assert "'--no'" in done.stdout + done.stderr


def test_machines_without_tpus_print_nothing_about_them():
    env = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    env.pop("JAX_PLATFORMS", None)
    code = (
        "import sys; from moelib.runtime import platforms; platforms.hide_absent_tpus();"
        "import jax; print(jax.devices()[0].platform)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Returns a function that runs `moelib config` on a module of one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(line, *flags):
        (tmp_path / "broken.py").write_text(f"{line}\n")
        monkeypatch.delitem(sys.modules, "broken", raising=False)
        return main.run(["config", "--module=broken", "--config=a", *flags])

    return run


def test_an_error_of_the_user_names_the_line_of_their_module(broken, capsys):
    line = "from experiments import flame_moe; flame_moe.tiny().set(max_stp=3)"
    assert broken(line) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("moelib config: ")
    assert "'max_stp'" in error
    assert "(broken.py:1; --traceback" in error
    with pytest.raises(UnknownFieldError):
        broken(line, "--traceback")


@pytest.mark.parametrize(
    ("line", "error"),
    [("open('/no/such/file')", FileNotFoundError), ("raise ValueError('a bug')", ValueError)],
)
def test_other_errors_of_the_users_module_keep_their_traceback(broken, line, error):
    with pytest.raises(error):
        broken(line)


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


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run", interrupted)
    monkeypatch.setattr("sys.argv", ["moelib", "chat"])
    with pytest.raises(SystemExit, match=str(128 + signal.SIGINT)):
        main.main()
    assert capsys.readouterr().err == "moelib: interrupted\n"
    monkeypatch.setattr("sys.argv", ["moelib", "chat", "--traceback"])
    with pytest.raises(KeyboardInterrupt):
        main.main()
