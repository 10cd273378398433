"""`moelib config`: values, counts, differences, and where values were set."""

import pytest

from experiments import flame_moe
from moelib.cli import config, main
from moelib.core import config_text
from moelib.core.config import InvalidConfigNameError
from moelib.core.errors import UsageError, UserError
from moelib.runtime.command_line import parse_flags


@pytest.fixture
def tiny():
    return flame_moe.tiny()


def test_counts_include_every_array_and_need_no_folder_and_no_data(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = config.count(tiny)
    assert not list(tmp_path.iterdir())
    assert counts["parameter_bytes"] == 4 * counts["total_parameters"]
    # AdamW keeps two moments, and a few counters.
    assert 0 <= counts["learner_bytes"] - 2 * counts["parameter_bytes"] < 100
    assert counts["active_parameters"] < counts["total_parameters"]
    embeddings = 2 * tiny.model.vocab_size * tiny.model.dim
    assert counts["active_non_embedding_parameters"] == counts["active_parameters"] - embeddings


def test_diff_shows_both_sides_of_what_differs(tiny, capsys):
    config.print_diff(tiny, tiny.clone(max_step=9), "a", "b")
    assert capsys.readouterr().out == f"--- a\n+++ b\n- max_step: {tiny.max_step}\n+ max_step: 9\n"
    config.print_diff(tiny, tiny.clone(), "a", "b")
    assert capsys.readouterr().out.endswith("(no difference)\n")


def test_explained_values_name_the_line_or_flag_that_set_them(tiny, capsys):
    config_text.set_from_text(tiny, "max_step=9")
    config.print_origins(tiny, ["max_step", "input.seq_len", "log_every_n_steps"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("#")[1].strip().split(":")[0] for line in lines] == [
        "experiments/flame_moe.py",
        "--set max_step=9",
        "default of moelib.train.trainer",
    ]


def test_path_that_leads_nowhere_names_the_nearest(tiny):
    for paths, message in [
        (["max_stp"], r"max_stp.*'max_step'"),
        (["max_step", "model.dimm"], r"model has no 'dimm'.*'dim'"),
    ]:
        with pytest.raises(UserError, match=message):
            config.print_origins(tiny, paths)


def run_config(*arguments):
    config.run(*parse_flags(config.Flags, arguments))


def test_both_sides_of_a_diff_have_the_flags_and_paths_select_its_lines(tmp_path, capsys):
    named = ["--module=experiments.flame_moe", "--config=flame-moe-tiny"]
    same = ["--diff=flame-moe-tiny", f"--data_dir={tmp_path}", "--max_step=7"]
    run_config(*named, *same)
    assert capsys.readouterr().out.endswith("(no difference)\n")
    run_config(*named, *same, "--set=prng_seed=9", "--set=model.dim=64", "model")
    assert [line[2:] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "model.dim: 64",
        "model.dim: 128",
    ]
    with pytest.raises(UserError, match=r"'max_stp'.*'max_step'"):
        run_config(*named, *same, "max_stp")


@pytest.mark.parametrize("asked", ["--count", "--shardings"])
def test_paths_are_refused_where_they_select_nothing(asked):
    named = ["--module=experiments.flame_moe", "--config=flame-moe-tiny"]
    with pytest.raises(UsageError, match=f"no.such.path: {asked} "):
        run_config(*named, asked, "no.such.path")


def test_module_alone_lists_its_names(capsys):
    run_config("--module=experiments.flame_moe")
    assert "flame-moe-tiny" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("asked", ["--diff=b", "--explain", "--count", "model"])
def test_what_needs_a_config_is_refused_without(capsys, asked):
    with pytest.raises(UsageError, match="--config"):
        run_config("--module=experiments.flame_moe", asked)
    assert not capsys.readouterr().out
    with pytest.raises(InvalidConfigNameError, match=r"json .*named_trainer_configs"):
        run_config("--module=json")


def test_values_that_are_none_are_shown(capsys):
    run_config("--module=flame_moe", "--config=flame-moe-tiny", "train_dtype", "model.decoder")
    lines = capsys.readouterr().out.splitlines()
    assert "train_dtype: None" in lines
    assert "model.decoder.block[0].self_attention.num_kv_heads: None" in lines
    assert all(line.startswith(("train_dtype", "model.decoder")) for line in lines)


def test_shardings_of_every_parameter_are_printed(capsys):
    arguments = ["--module=experiments.flame_moe", "--config=flame-moe-tiny", "--shardings"]
    run_config(*arguments, "--mesh=fsdp=4,model=2")
    shown = capsys.readouterr().out
    line = next(x for x in shown.splitlines() if "experts/down " in x)
    assert "(None, ('model', 'fsdp'), None)" in line  # Shards of the width are no whole tiles.
    assert "65.5 kB" in line  # 16 x 64 x 128 float32 in eight parts.
    assert "expert_ffn, expert_embed over model, fsdp" in line
    with pytest.raises(UsageError, match="--model_shards=2 requires --mesh=auto"):
        run_config(*arguments, "--model_shards=2")
    for unused in ("--mesh=fsdp=4", "--model_shards=2"):
        with pytest.raises(UsageError, match=f"{unused} requires --shardings"):
            run_config(*arguments[:2], unused)


def test_twin_prints_a_config_that_can_be_read(capsys):
    run_config("--module=experiments.flame_moe", "--config=flame-moe-tiny", "--twin=flops")
    output = capsys.readouterr()
    cfg = config_text.parse(output.out)
    assert cfg.model.decoder.block[0].feed_forward.hidden_dim == 264
    assert "hidden_dim of decoder.block[0].feed_forward 264" in output.err
    assert "(+0." in output.err


@pytest.mark.parametrize(
    ("flag", "paths"),
    [
        ("--set=lr=1", ["learner.optimizer.args[1].learning_rate.peak_lr"]),
        ("--set=learning_rate=1", ["did you mean 'learner.optimizer.args[1].learning_rate'?"]),
        ("--set=batch_size=4", ["'input.global_batch_size' or 'evalers.validation.input"]),
        ("--set=model.num_layers=3", ["did you mean 'model.decoder.num_layers'?"]),
        ("--lr=3", ["unknown flag '--lr'", "--set=lr="]),
    ],
)
def test_names_of_deeper_fields_are_found(flag, paths, capsys):
    named = ["--module=experiments.flame_moe", "--config=flame-moe-tiny"]
    assert main.run(["config", *named, flag]) == 2
    error = capsys.readouterr().err
    assert all(path in error for path in paths)
