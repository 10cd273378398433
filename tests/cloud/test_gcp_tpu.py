"""Queued resources of Cloud TPU: their commands, and the startup script with fake programs."""

import os
import shlex
import signal
import subprocess
import tarfile
import time

import pytest

from cloud.gcp_tpu import TpuVmJob
from moelib.cli.main import run
from moelib.core.errors import UserError

_FIELDS = {
    "zone": "us-east5-b",
    "accelerator_type": "v6e-16",
    "runtime_version": "v2-alpha-tpuv6e",
    "bucket": "gs://b/jobs",
}


def job(**fields):
    fields = {"name": "small", "arguments": ["train"], "folder": "jobs/small", **_FIELDS, **fields}
    return TpuVmJob.default_config().set(**fields).instantiate()


def test_the_command_requests_slices():
    more = {"spot": True, "num_slices": 2, "service_account": "a@p.iam", "network": "n"}
    bundle, upload, create = job(**more, project="p").commands()
    assert bundle[0] == "tar"
    url = "gs://b/jobs/small/bundle.tar.gz"
    assert upload == ["gcloud", "storage", "cp", "jobs/small/bundle.tar.gz", url]
    # The synopsis of the command in the reference of the Google Cloud CLI.
    assert shlex.join(create[:6]) == "gcloud compute tpus queued-resources create small"
    assert set(create[6:]) == {
        *("--project=p", "--zone=us-east5-b", "--accelerator-type=v6e-16", "--node-count=2"),
        *("--runtime-version=v2-alpha-tpuv6e", "--node-prefix=small", "--network=n", "--spot"),
        *("--service-account=a@p.iam", "--scopes=cloud-platform"),
        "--metadata-from-file=startup-script=jobs/small/startup.sh",
    }
    assert "--node-id=small" in job().commands()[-1]


_AWKWARD = "a b\n'c' \"d\" $(touch injected) `touch injected`"

# Each fake program notes its arguments; the fake moelib ends with the next status of a list.
_NOTE = '#!/bin/bash\nprintf "%q " "${0##*/}" "$@" >>calls; echo >>calls\n'
_FAKES = {
    "gcloud": _NOTE + 'cp "$BUNDLE" "${@: -1}"\n',
    "pip": _NOTE + "[ -e ../failed ] || { touch ../failed; exit 1; }\n",
    "uv": _NOTE,
    "moelib": _NOTE
    + 'printf "%s" "$TEXT" >text; printf "%s" "${@: -1}" >argument; trap "exit 75" TERM\n'
    + "read -r status <../statuses; sed -i 1d ../statuses\n"
    + '[ "$status" = w ] && { touch waiting; while true; do sleep 0.05; done; }; exit "$status"\n',
}


def start(folder, statuses, **fields):
    """Starts the script of a job where fake programs are on the path."""
    for name, text in _FAKES.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "my_model.py").write_text("")
    with tarfile.open(folder / "code.tar.gz", "w:gz") as bundle:
        bundle.add(folder / "my_model.py", "my_model.py")
    work = folder / "work"
    work.mkdir()
    (work / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    script = folder / "startup.sh"
    script.write_text(job(**fields).files()["startup.sh"])
    subprocess.run(["bash", "-n", str(script)], check=True)
    env = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "BUNDLE": str(folder / "code.tar.gz"),
        "MOELIB_WORK": str(work),
        "MOELIB_LOG": str(folder / "log"),
        "MOELIB_PAUSE": "0",
    }
    return subprocess.Popen(["bash", str(script)], env=env), work / "code"


def test_a_host_installs_the_code_and_starts_the_run(tmp_path):
    arguments = ["train", f"--set=x={_AWKWARD}"]
    process, code = start(tmp_path, [0], arguments=arguments, env={"TEXT": _AWKWARD})
    assert process.wait() == 0
    assert (code / "my_model.py").exists()
    assert (code / "text").read_text() == _AWKWARD
    assert not (code / "injected").exists()
    assert (code / "argument").read_text() == arguments[-1]
    calls = [x.split() for x in (code / "calls").read_text().splitlines()]
    assert calls.pop()[:2] == ["moelib", "train"]
    assert [call[0] for call in calls] == ["gcloud", "pip", "pip", "uv", "uv"]  # pip failed once.
    assert calls[-1][-1] == r"moelib\[gcs\,tpu\]"


@pytest.mark.parametrize(
    ("statuses", "status", "num"),
    [([75, 88, 0], 0, 3), ([1], 1, 1), ([2], 2, 1), ([137, 137, 137, 0], 137, 3)],
)
def test_a_run_restarts_where_it_can_continue(tmp_path, statuses, status, num):
    process, code = start(tmp_path, statuses, max_restarts=2)
    assert process.wait() == status
    assert (code / "calls").read_text().count("moelib train") == num
    assert f"ended with status {status}" in (tmp_path / "log").read_text()


def test_a_host_that_shuts_down_lets_the_run_save(tmp_path):
    process, code = start(tmp_path, ["w", 0])
    while not (code / "waiting").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    assert (code / "calls").read_text().count("moelib train") == 1


_KEY = '{"type": "service_account", "private_key": "x"}'
_SENT = {"my_model.py": "", "my/runs/x.py": "", "sub/a.py": "", "data.json": "{}"}
_SECRETS = {".ssh/id": "", ".aws/x": "", ".netrc": "", ".env": "", "a/b.pem": "", "my/k.json": _KEY}
_OUTPUTS = {"runs/a/x": "", "out/small/bundle.tar.gz": ""}


@pytest.mark.parametrize("in_git", [True, False])
def test_code_is_sent_but_no_secret_and_no_output(tmp_path, monkeypatch, capsys, in_git):
    monkeypatch.chdir(tmp_path)
    wheel = {"dist/m.whl": ""}
    for name, text in {**_SENT, **_SECRETS, **_OUTPUTS, **wheel, "gone.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if in_git:
        (tmp_path / ".gitignore").write_text("dist\nignored\n")
        (tmp_path / "ignored").write_text("")
        for command in ("init -q .", "init -q sub", "add gone.py my_model.py"):
            subprocess.run(["git", *command.split()], check=True)
    (tmp_path / "gone.py").unlink()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gcloud").write_text("#!/bin/sh\n")
    (tmp_path / "bin/gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert job(folder="out/small", package="./dist/m.whl[tpu]").launch() == 0
    with tarfile.open("out/small/bundle.tar.gz") as bundle:
        files = {member.name for member in bundle if member.isfile()}
    expected = {f"./{x}" for x in (*_SENT, *wheel, "bin/gcloud", *[".gitignore"] * in_git)}
    assert files == expected
    out = capsys.readouterr().out
    assert "my_model.py" in out
    assert "my/k.json" in out.partition("Not sent: ")[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "A b"}, "name='A b'"),
        ({"zone": "us-east5"}, "zone='us-east5'.*us-east5-b"),
        ({"accelerator_type": "v6e"}, "accelerator_type='v6e'"),
        ({"bucket": "b/jobs"}, "bucket='b/jobs'.*gs://"),
        ({"runtime_version": "a b"}, "runtime_version='a b'"),
        ({"num_processes": 4}, "num_processes=4"),
        ({"num_slices": 0}, "num_slices=0"),
        ({"spot": True, "reserved": True}, "spot and reserved"),
        ({"folder": "a,b"}, "folder='a,b'"),
    ],
)
def test_what_gcloud_would_refuse_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        job(**fields)


def test_a_relative_folder_is_refused(capsys):
    fields = [f"--job_set={name}={value}" for name, value in _FIELDS.items()]
    command = ["launch", "--job=gcp_tpu", "--module=tests.cli.test_launch", "--config=tiny"]
    assert run([*command, *fields, "--dry_run", "--trainer_dir=runs/a"]) == 2
    assert "--trainer_dir=runs/a" in capsys.readouterr().err
    assert run([*command, *fields, "--dry_run", "--trainer_dir=gs://b/runs/a"]) == 0
