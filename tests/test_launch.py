"""From flags to a config: names, modules with errors of their own, settings, data and meshes."""

import ast
import dataclasses
import os

import pytest

from moelib import launch
from moelib.core import config_text
from moelib.core.config import (
    REQUIRED,
    Configurable,
    InvalidConfigNameError,
    InvalidConfigValueError,
    UnknownFieldError,
    config_class,
)
from moelib.core.config_modifier import ConfigModifier
from moelib.core.errors import UsageError, UserError
from tests.python_process import finish, free_port, start

MODULE = """
from tests.test_launch import Job

def named_trainer_configs():
    return {"small": lambda: Job.default_config(), "large": lambda: Job.default_config()}
"""


class Job(Configurable):
    """Stands for a trainer: only its config matters here."""

    @config_class
    class Config(Configurable.Config):
        """Config of `Job`."""

        dir: str = REQUIRED
        max_step: int = 10
        path: str = "{data_dir}/tokens"
        nested: dict[str, object] = {}
        mesh_shape: tuple[int, ...] = (1,)
        mesh_axis_names: tuple[str, ...] = ("data",)
        mesh_rules: list[tuple[str, object]] = []


class TwoSteps(ConfigModifier):
    """Returns another config than it was given."""

    def __call__(self, cfg):
        return cfg.clone(max_step=2)


class Append(ConfigModifier):
    """Changes the config in place."""

    @config_class
    class Config(ConfigModifier.Config):
        text: str = REQUIRED

    def __call__(self, cfg):
        return cfg.set(path=cfg.path + self.config.text)


class ReturnsNone(ConfigModifier):
    """Forgets to return."""

    def __call__(self, cfg):
        cfg.set(max_step=2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path


def write(folder, name, text):
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_config_is_found_in_the_current_folder_and_changed_by_flags(folder):
    write(folder, "found_here", MODULE)
    cfg = launch.load_config("found_here", "small", sets=["mesh_shape=(2, 4)"], max_step=7)
    assert cfg.mesh_shape == (2, 4)
    assert cfg.max_step == 7
    assert cfg.origin("max_step") == "--max_step max_step=7"
    assert cfg.origin("mesh_shape") == "--set mesh_shape=(2, 4)"


@pytest.mark.parametrize("text", ["fsdp=4,data=2", "(2, 4)", "2,4", "[2, 4]"])
def test_a_mesh_is_set_by_axes_or_by_numbers(text):
    cfg = Job.default_config().set(mesh_axis_names=("data", "fsdp"))
    launch.set_field(cfg, f"mesh_shape={text}", flag="--mesh")
    assert tuple(cfg.mesh_shape) == (2, 4)
    assert cfg.origin("mesh_shape") == f"--mesh mesh_shape={text}"


def test_a_mesh_of_unknown_axes_is_refused():
    with pytest.raises(UserError, match=r"mesh_shape 'fdsp=4': .*'fdsp'"):
        launch.set_field(Job.default_config(), "mesh_shape=fdsp=4")
    with pytest.raises(UserError, match=r"mesh_shape 'auto': .*such as fsdp=4,expert=2"):
        launch.set_field(Job.default_config(), "mesh_shape=auto")


def test_skipped_checksums_are_a_setting_of_the_checkpointer():
    flags = launch.TrainFlags(module="flame_moe", config="flame-moe-tiny")
    assert not flags.load().checkpointer.skip_checksums
    assert dataclasses.replace(flags, skip_checksums=True).load().checkpointer.skip_checksums


def test_unknown_config_names_the_nearest(folder):
    write(folder, "two_names", MODULE)
    with pytest.raises(InvalidConfigNameError, match=r"'smal'.*'small'"):
        launch.load_config("two_names", "smal")


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ("max_stp=3", UnknownFieldError, "'max_step'"),
        ("max_step=three", InvalidConfigValueError, r"'three'.*int"),
        ("max_step", InvalidConfigValueError, "expected path=value"),
    ],
)
def test_bad_settings_say_what_is_wrong(folder, assignment, error, message):
    write(folder, "settings", MODULE)
    with pytest.raises(error, match=message):
        launch.load_config("settings", "small", sets=[assignment])


def test_settings_that_are_no_list_are_refused():
    with pytest.raises(UserError, match=r"sets='x=1'.*\['x=1'\]"):
        launch.load_config("flame_moe", "flame-moe-tiny", sets="x=1")


@pytest.mark.parametrize(
    ("module", "configs", "message"),
    [
        ("bad.py", "", "--module=bad,"),
        ("./bad.py", "", "--module=bad,"),
        ("own-bad.py", "", r"name it 'own_bad' .*--module=own_bad\."),
        ("3b.py", "", r"name it '_3b' .*--module=_3b\."),
        ("own/bad.py", "", r"--module=own\.bad,"),
        ("a_list", "[Job.default_config]", "a_list has no .*dict of functions"),
        ("a_config", "{'small': Job.default_config()}", "a_config.*Job.Config.* as 'small'"),
        ("a_model", "{'small': RMSNorm.default_config}", "--config=small: .*RMSNorm"),
        (
            "an_argument",
            "{'small': lambda x: x}",
            r"--config=small: .*\(x\).*take \(\)",
        ),
    ],
)
def test_what_is_no_named_config_of_a_trainer_is_refused(folder, module, configs, message):
    imports = "from moelib.layers.norm import RMSNorm\nfrom tests.test_launch import Job\n"
    write(folder, module.removesuffix(".py"), f"{imports}named_trainer_configs = lambda: {configs}")
    with pytest.raises((UsageError, InvalidConfigNameError), match=message):
        launch.load_config(module, "small")


def test_missing_module_names_both_places_that_were_looked_at():
    with pytest.raises(UsageError, match=r"'nowhere' or 'experiments\.nowhere'"):
        launch.import_module("nowhere")


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("broken_name", "undefined_name + 1", NameError, "undefined_name"),
        ("broken_key", "{}['absent']", KeyError, "absent"),
    ],
)
def test_error_inside_an_experiment_is_raised_as_it_is(folder, name, text, error, message):
    write(folder, name, text)
    with pytest.raises(error, match=message) as info:
        launch.import_module(name)
    assert f"{name}.py" in str(info.traceback[-1].path)


def test_a_package_that_a_module_lacks_is_named_with_the_line(folder):
    write(folder, "broken_import", "\nimport no_such_package_anywhere")
    (folder / "pack").mkdir()
    write(folder / "pack", "__init__", "import importlib\nimportlib.import_module('absent')")
    write(folder / "pack", "configs", "")
    write(folder, "says_more", "raise ModuleNotFoundError('pip install more')")
    with pytest.raises(UsageError, match=r"broken_import\.py:2 imports 'no_such_package_anywhere'"):
        launch.import_module("broken_import")
    with pytest.raises(UsageError, match=r"__init__\.py:2 imports 'absent'"):
        launch.import_module("pack.configs")
    with pytest.raises(ModuleNotFoundError, match="pip install more"):
        launch.import_module("says_more")


def test_a_module_that_is_no_python_is_named_with_its_line(folder):
    write(folder, "broken_syntax", "\nreturn 1")
    with pytest.raises(
        UsageError, match=r"--module=broken_syntax: .*broken_syntax\.py:2: 'return'"
    ):
        launch.import_module("broken_syntax")


def test_module_without_configs_is_told_what_to_define(folder):
    write(folder, "no_configs", "")
    with pytest.raises(InvalidConfigNameError, match="named_trainer_configs"):
        launch.load_config("no_configs", "small")


def test_data_dir_replaces_its_placeholder_everywhere():
    cfg = Job.default_config()
    with pytest.raises(UsageError, match=r"path='{data_dir}/tokens'.*--data_dir"):
        launch.check_data_dir(cfg)
    launch.set_data_dir(cfg, "/data/")
    launch.check_data_dir(cfg)
    assert cfg.path == "/data/tokens"
    assert cfg.origin("path") == "--data_dir=/data/"
    cfg.nested = {"input.source.path": "{data_dir}/books", "paths": ("{data_dir}/a", 3)}
    with pytest.raises(UsageError, match=r"nested={.*{data_dir}/books.*--data_dir"):
        launch.check_data_dir(cfg)
    launch.set_data_dir(cfg, "/data")
    launch.check_data_dir(cfg)
    assert cfg.nested == {"input.source.path": "/data/books", "paths": ("/data/a", 3)}


@pytest.mark.parametrize("url", ["gs://bucket/data", "gs://bucket/data/"])
def test_data_dir_becomes_absolute_unless_it_is_a_url(folder, url):
    cfgs = [Job.default_config(), Job.default_config()]
    launch.set_data_dir(cfgs[0], "data")
    launch.set_data_dir(cfgs[1], url)
    assert [cfg.path for cfg in cfgs] == [f"{os.getcwd()}/data/tokens", "gs://bucket/data/tokens"]


def test_mesh_selector_takes_the_first_rule_that_matches():
    rules = [("gpu-.*", (8, 1)), (".*", TwoSteps.default_config())]
    cfg = Job.default_config().set(mesh_rules=rules)
    assert launch.select_mesh(cfg, "gpu-h100").mesh_shape == (8, 1)


def test_what_a_mesh_rule_returns_is_used():
    cfg = Job.default_config().set(mesh_rules=[("tpu", TwoSteps.default_config())])
    assert launch.select_mesh(cfg, "tpu").max_step == 2
    assert cfg.max_step == 10


def test_a_list_of_modifiers_is_applied_in_order():
    rule = [Append.default_config().set(text=text) for text in ("/a", "/b")]
    cfg = Job.default_config().set(path="", mesh_rules=[("tpu", rule)])
    assert launch.select_mesh(cfg, "tpu").path == "/a/b"


def test_a_modifier_that_returns_nothing_is_named():
    cfg = Job.default_config().set(mesh_rules=[("tpu", ReturnsNone.default_config())])
    with pytest.raises(UserError, match=r"ReturnsNone.*None"):
        launch.select_mesh(cfg, "tpu")


def test_selector_without_a_rule_names_the_rules():
    cfg = Job.default_config().set(mesh_rules=[("gpu-.*", (8, 1))])
    with pytest.raises(UsageError, match=r"--mesh_selector=cpu:.*'gpu-\.\*'"):
        launch.select_mesh(cfg, "cpu")


def test_config_text_of_a_loaded_config_reads_back(folder):
    write(folder, "reads_back", MODULE)
    cfg = launch.load_config("reads_back", "small", sets=["max_step=3"])
    assert config_text.parse(cfg.debug_string()) == cfg


def test_function_that_returns_no_config_is_named(folder):
    (folder / "forgetful.py").write_text(
        "def named_trainer_configs():\n    return {'a': lambda: None}\n"
    )
    with pytest.raises(UsageError, match=r"--config=a.* None"):
        launch.load_config("forgetful", "a")


@pytest.mark.parametrize(
    ("coordinator", "index", "named"),
    [
        ("localhost", 0, "distributed_coordinator=localhost: set host:port"),
        ("localhost:1234", 2, "process_id=2"),
    ],
)
def test_wrong_flags_of_a_job_are_refused(coordinator, index, named):
    flags = launch.DeviceFlags(
        distributed_coordinator=coordinator, num_processes=2, process_id=index
    )
    with pytest.raises(UsageError, match=named):
        flags.set_up()


def test_the_coordinator_listens_at_its_address_only():
    code = (
        "import pathlib, sys\n"
        "from moelib.launch import DeviceFlags\n"
        "port, index = map(int, sys.argv[1:])\n"
        "flags = DeviceFlags(distributed_coordinator=f'127.0.0.1:{port}', num_processes=2, "
        "process_id=index)\n"
        "flags.set_up()\n"
        "lines = [x for x in ('tcp', 'tcp6') for x in pathlib.Path(f'/proc/net/{x}').open()]\n"
        "print([x.split()[1] for x in lines if f':{port:04X} ' in x and x.split()[3] == '0A'])\n"
    )
    port = free_port()
    [(out, _), _] = finish(*(start("-c", code, port, i) for i in range(2)))
    (address,) = ast.literal_eval(out.splitlines()[-1])
    assert "0100007F:" in address  # 127.0.0.1, also as an IPv6 address.


def test_an_automatic_mesh_is_fsdp_over_what_tensor_parallelism_leaves():
    flags = launch.TrainFlags(module="flame_moe", config="flame-moe-tiny", mesh="auto")
    assert not launch.TrainFlags(module="flame_moe", config="flame-moe-tiny").load().auto_sharding
    cfg = dataclasses.replace(flags, model_shards=2).load()
    assert cfg.auto_sharding
    assert cfg.mesh_shape == (1, 1, 1, -1, 1, 2)
    assert dataclasses.replace(flags, mesh="expert=4,data=2").load().mesh_shape == (
        1,
        2,
        4,
        1,
        1,
        1,
    )
