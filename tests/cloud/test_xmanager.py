"""Launch scripts of XManager, with modules in its place that note what the script calls."""

import sys
import types
import typing
from unittest import mock

import pytest

from cloud.xmanager import XManagerJob
from moelib.cli.main import run
from moelib.core.errors import UserError


def job(**fields):
    fields = {"arguments": ["train"], "folder": "jobs/a", "image": "small:1", **fields}
    return XManagerJob.default_config().set(**fields).instantiate()


def test_the_script_adds_one_job(monkeypatch):
    arguments = ["train", "--set=x='a \"b\"'\n"]
    volumes = {"/runs": "/home/me/my runs"}
    text = job(arguments=arguments, gpus=8, volumes=volumes, env={"A": "b\n'c'"}).files()
    xmanager = types.ModuleType("xmanager")
    xmanager.xm, xmanager.xm_local = mock.MagicMock(), mock.MagicMock()
    experiment = xmanager.xm_local.create_experiment.return_value.__enter__.return_value
    experiment.package.return_value = ["executable"]
    monkeypatch.setitem(sys.modules, "xmanager", xmanager)
    names: dict[str, typing.Any] = {"__name__": "launch_xm"}
    exec(compile(text["launch_xm.py"], "launch_xm.py", "exec"), names)
    names["main"](None)
    xmanager.xm.JobRequirements.assert_called_once_with(local_gpu=8)
    xmanager.xm.Container.assert_called_once_with(image_path="small:1")
    options = xmanager.xm_local.DockerOptions.call_args.kwargs
    assert options["volumes"] == {"/home/me/my runs": "/runs"}
    called = xmanager.xm.Job.call_args
    assert called.args[0] == "executable"
    assert called.kwargs == {"name": "moelib", "args": arguments, "env_vars": {"A": "b\n'c'"}}
    experiment.add.assert_called_once_with(xmanager.xm.Job.return_value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": ""}, "image=''"),
        ({"num_processes": 2}, "num_processes=2"),
        ({"max_restarts": 3}, "max_restarts=3"),
        ({"gpus": 0}, "gpus=0"),
    ],
)
def test_what_xmanager_cannot_do_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        job(**fields)


@pytest.mark.parametrize(
    ("folder", "status"), [("/runs/a", 0), ("runs/a", 2), ("/other/a", 2), ("/runs/../a", 2)]
)
def test_the_run_must_be_in_a_volume(capsys, folder, status):
    fields = "--job_set=image=small:1", "--job_set=volumes={'/runs': '/home/me/runs'}"
    command = ["launch", "--job=xmanager", "--module=tests.cli.test_launch", "--config=tiny"]
    assert run([*command, *fields, "--dry_run", f"--trainer_dir={folder}"]) == status
    if not status:
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == "xmanager launch jobs/a/launch_xm.py"
