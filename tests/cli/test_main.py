"""The `moelib` command: help, commands and flags that do not exist, errors in one line."""

import os
import subprocess
import sys

import pytest

from moelib.cli import main


def moelib(*args):
    """Runs a command in a process of its own, as flags are defined once a process."""
    command = [sys.executable, "-m", "moelib.cli.main", *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command(capsys):
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in main.COMMANDS)


def test_no_command_is_an_error_that_shows_the_help(capsys):
    assert main.run([]) == 2
    assert "Usage: moelib" in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys):
    assert main.run(["trian"]) == 2
    assert "no command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_unknown_flag_names_the_nearest():
    done = moelib("config", "--modul", "m")
    assert done.returncode == 2
    assert "Unknown command line flag 'modul'. Did you mean: module" in done.stderr


def test_help_of_a_command_shows_its_flags():
    done = moelib("prepare", "--help")
    assert done.returncode == 0
    assert "tokenizes a corpus" in done.stdout
    assert "--skip_bad_lines: Counts broken records" in done.stdout


def test_missing_flags_are_one_line():
    done = moelib("config")
    assert done.returncode == 2
    assert done.stderr.startswith("moelib config: --module and --config name what")
    assert done.stderr.count("\n") == 1


def test_commands_import_nothing_heavy_for_help():
    code = (
        "import sys; from moelib.cli import main; main.run(['--help']);"
        "heavy = {'jax', 'tensorflow', 'optax', 'tokenizers', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_missing_store_is_one_line_that_says_how_to_make_it(tmp_path):
    run = ["train", "--module", "experiments.flame_moe", "--config", "flame-moe-tiny"]
    done = moelib(*run, f"--data_dir={tmp_path}", f"--trainer_dir={tmp_path}/run")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"moelib train: There is no token store at {tmp_path}/text; make one")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "open('/no/such/file')",
        "raise FileNotFoundError('no table of sizes')",
        "from experiments import flame_moe; flame_moe.tiny().set(max_stp=3)",
    ],
)
def test_an_error_of_the_users_module_keeps_its_traceback(line, tmp_path):
    (tmp_path / "broken.py").write_text(f"import sys; sys.path.append({os.getcwd()!r})\n{line}\n")
    command = [sys.executable, "-m", "moelib.cli.main", "config", "--module=broken", "--config=a"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert 'broken.py", line 2' in done.stderr
