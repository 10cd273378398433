"""Cloud TPU VMs: a queued resource whose hosts install moelib and train, without a cluster.

Sources: cloud.google.com/tpu/docs/queued-resources, and the flags of `gcloud compute tpus
queued-resources create` in the reference of the Google Cloud CLI.
"""

import functools
import os
import posixpath
import shlex
from collections.abc import Mapping, Sequence

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.errors import UserError
from moelib.runtime.table import print_table

from .bundle import Bundle, bundle
from .job import LABEL, Job, check_form

_SCRIPT, _BUNDLE, _LIST = "startup.sh", "bundle.tar.gz", "bundle.txt"
_FORMS = {
    "name": (rf"(?=[a-z]){LABEL}", "at most 63 characters of a-z, 0-9 and -, first a letter"),
    "zone": ("[a-z]+-[a-z]+[0-9]+-[a-z]", "a zone such as us-east5-b"),
    "accelerator_type": ("v[0-9]+[a-z]*-[0-9]+", "a version and size such as v6e-16"),
    "runtime_version": (r"[a-z0-9.-]+", "a runtime such as v2-alpha-tpuv6e"),
    "bucket": (r"gs://[^\s/]\S*", "the URL of a bucket or folder, such as gs://bucket/jobs"),
}


class TpuVmJob(Job):
    """A queued resource of Cloud TPU; the hosts of its slices run a process each.

    A startup script installs moelib and the current folder, and starts the run again while its
    status is one after which it continues. A Spot VM that was preempted is deleted with its
    queued resource suspended: launch the job again.
    """

    shares_files = False

    @config_class
    class Config(Job.Config):
        program: Sequence[str] = ("moelib",)  # Command on the hosts before the arguments.
        zone: Required[str] = REQUIRED  # Zone, such as us-east5-b.
        accelerator_type: Required[str] = REQUIRED  # TPU version and size, such as v6e-16.
        runtime_version: Required[str] = REQUIRED  # Software of the hosts: v2-alpha-tpuv6e.
        bucket: Required[str] = REQUIRED  # gs:// folder that the code is uploaded to.
        project: str | None = None  # Project; None for that of gcloud's configuration.
        num_slices: int = 1  # Number of slices, which train together.
        spot: bool = False  # Whether Spot VMs are requested, which may be preempted.
        reserved: bool = False  # Whether a reservation is used.
        service_account: str | None = None  # Service account of the hosts; it reads the bucket.
        network: str | None = None  # Network; None for `default`.
        # Requirement that is installed; ./dist/NAME.whl[tpu] for a wheel in the current folder.
        package: str = "moelib[gcs,tpu]"
        setup: Sequence[str] = ()  # Shell commands before the run, such as mounts of a bucket.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for field, (form, what) in _FORMS.items():
            check_form(field, getattr(cfg, field), form, what)
        if cfg.num_processes != 1:
            raise UserError(
                f"num_processes={cfg.num_processes}: leave it unset; each host of "
                f"{cfg.accelerator_type} runs one process."
            )
        if cfg.num_slices < 1:
            raise UserError(f"num_slices={cfg.num_slices}: set 1 or more.")
        if cfg.spot and cfg.reserved:
            raise UserError("spot and reserved are both set: set one.")
        if any(letter in cfg.folder for letter in ",="):
            raise UserError(f"folder={cfg.folder!r}: gcloud reads no path with a comma or =.")

    def check_trainer_dir(self, folder: str) -> None:
        """Raises UserError if the folder of the run is relative: it would lie on the hosts' disks.

        An absolute folder must be on a file system that `setup` mounts on all hosts. A URL is that
        of an object store.
        """
        if not posixpath.isabs(folder) and "://" not in folder:
            raise UserError(
                f"--trainer_dir={folder}: it is deleted with the TPU VMs; set a bucket, such as "
                "gs://BUCKET/NAME, or an absolute path on a file system that setup mounts."
            )

    def files(self) -> Mapping[str, str]:
        """Returns the list of files to send, and the script that hosts run as root at each boot."""
        cfg = self.config
        url = shlex.quote(self._url())
        script = [
            "#!/bin/bash",
            "set -eu",
            'exec >>"${MOELIB_LOG:-/var/log/moelib.log}" 2>&1',
            'export HOME="${HOME:-/root}" PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1',
            'work="${MOELIB_WORK:-/opt/moelib}"',
            'mkdir -p "$work/code"',
            'cd "$work/code"',
            "",
            "again() {  # Five times, where the network may fail.",
            "    local i",
            '    for i in 1 2 3 4; do "$@" && return; sleep "${MOELIB_PAUSE:-10}"; done',
            '    "$@"',
            "}",
            f'again gcloud storage cp {url} "$work/{_BUNDLE}"',
            f'tar -xzf "$work/{_BUNDLE}"',
            "# The Python of the runtimes is older than moelib's.",
            "again pip install --quiet uv",
            'again uv venv --quiet --clear --python 3.12 "$work/venv"',
            'again uv pip install --quiet --python "$work/venv/bin/python" '
            + shlex.quote(cfg.package),
            'export PATH="$work/venv/bin:$PATH"',
            *(f"export {name}={shlex.quote(text)}" for name, text in cfg.env.items()),
            *cfg.setup,
            "",
            "stopped= child=",
            "trap 'stopped=1; kill -TERM $child' TERM",
            "restarts=0",
            "while true; do",
            f"    {shlex.join(self.command_of_process())} &",
            "    child=$! status=0",
            '    wait "$child" || status=$?',
            "    # A signal ends wait, not the run.",
            '    while kill -0 "$child" 2>/dev/null; do',
            '        status=0; wait "$child" || status=$?',
            "    done",
            '    echo "The run ended with status $status."',
            f"    case $status in {'|'.join(map(str, self.continued))}) ;; *) break ;; esac",
            f'    if [ -n "$stopped" ] || [ "$restarts" -ge {cfg.max_restarts} ]; then break; fi',
            "    restarts=$((restarts + 1))",
            f'    echo "Restart $restarts of at most {cfg.max_restarts}."',
            "done",
            "exit $status",
        ]
        sent = "".join(f"./{path}\n" for path in self._bundle.files)
        return {_LIST: sent, _SCRIPT: "\n".join(script) + "\n"}

    @functools.cached_property
    def _bundle(self) -> Bundle:
        package = self.config.package.partition("[")[0]
        if package.startswith("./") and not os.path.isfile(package):
            raise UserError(f"package={self.config.package!r}: no such file; build the wheel.")
        return bundle(self.config.folder, [package] if package.startswith("./") else [])

    def launch(self) -> int:
        """Prints what is sent, and launches the job."""
        print_table(self._bundle.table(self._url()))
        return super().launch()

    def _url(self) -> str:
        return f"{self.config.bucket.rstrip('/')}/{self.config.name}/{_BUNDLE}"

    def commands(self) -> Sequence[Sequence[str]]:
        """Returns the commands that bundle and upload the files, and request the TPUs."""
        cfg, archive = self.config, self.path(_BUNDLE)
        nodes = {"node-id": cfg.name}
        if cfg.num_slices > 1:
            nodes = {"node-count": str(cfg.num_slices), "node-prefix": cfg.name}
        fields = (
            "project",
            "zone",
            "accelerator_type",
            "runtime_version",
            "service_account",
            "network",
        )
        options = {
            **{field.replace("_", "-"): getattr(cfg, field) for field in fields},
            **nodes,
            "scopes": "cloud-platform",
            "metadata-from-file": f"startup-script={self.path(_SCRIPT)}",
        }
        flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
        flags += [f"--{name}" for name in ("spot", "reserved") if getattr(cfg, name)]
        return [
            ["tar", "-czf", archive, "-T", self.path(_LIST)],
            ["gcloud", "storage", "cp", archive, self._url()],
            ["gcloud", "compute", "tpus", "queued-resources", "create", cfg.name, *flags],
        ]
