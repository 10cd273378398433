"""The `moelib` command: help, unknown commands and flags, and errors on one line."""

import os
import subprocess
import sys

import pytest

import moelib
from moelib.cli import main

TINY = ("train", "--module=experiments.flame_moe", "--config=flame-moe-tiny")


def run_moelib(*args, module="moelib", cwd=None, **env):
    """Runs a command in a process of its own."""
    command = [sys.executable, "-m", module, *args]
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=cwd, env=env
    )


def test_help_lists_every_command(capsys):
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in main.COMMANDS)


def test_no_command_is_an_error_that_shows_the_help(capsys):
    assert main.run([]) == 2
    assert "Usage: moelib" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys):
    assert main.run(["trian"]) == 2
    assert "'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_version(capsys):
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"moelib {moelib.__version__}\n"


def test_unknown_flag_names_the_nearest(capsys):
    assert main.run(["config", "--modul", "m"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moelib config: unknown flag '--modul'; did you mean '--module'")


def test_missing_flags_are_one_line(capsys):
    assert main.run(["config"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moelib config: --module and --config")
    assert error.count("\n") == 1


def test_help_of_a_command_shows_its_flags(capsys):
    assert main.run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--config, -c: " in text
    assert "(cpu|gpu|tpu)" in text


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
        "import sys; from moelib.cli import main; main.run(['--help']); main.run(['train', '-h']);"
        "heavy = {'jax', 'tensorflow', 'optax', 'tokenizers', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("module", ["moelib", "moelib.launch"])
def test_a_missing_store_is_one_line_that_names_the_cure(module, tmp_path):
    args = TINY if module == "moelib" else TINY[1:]
    done = run_moelib(
        *args, f"--data_dir={tmp_path}", f"--trainer_dir={tmp_path}/run", module=module
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"{tmp_path}/text" in last
    assert "moelib prepare" in last
    assert "Traceback" not in done.stderr


def test_machines_without_tpus_print_nothing_of_them(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    env.pop("JAX_PLATFORMS", None)
    code = (
        "import sys; from moelib.core import platforms; platforms.hide_absent_tpus();"
        "import jax; print(jax.devices()[0].platform)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("open('/no/such/file')", "Traceback"),
        ("raise ValueError('a bug')", "Traceback"),
        ("from experiments import flame_moe; flame_moe.tiny().set(max_stp=3)", "broken.py:1; "),
    ],
)
def test_an_error_of_the_users_module_names_its_line(line, shown, tmp_path):
    (tmp_path / "broken.py").write_text(f"{line}\n")
    done = run_moelib("config", "--module=broken", "--config=a", cwd=tmp_path)
    assert done.returncode == (1 if shown == "Traceback" else 2)
    assert shown in done.stderr
    assert "broken.py" in done.stderr
    shown_on_request = run_moelib(
        "config", "--module=broken", "--config=a", "--traceback", cwd=tmp_path
    )
    assert 'broken.py", line 1' in shown_on_request.stderr
