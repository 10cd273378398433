"""A launch script of XManager, which runs the image of a run in Docker on this machine.

Source: xmanager 0.8.5 (github.com/google-deepmind/xmanager): xm.Container, xm_local.Local.
"""

from collections.abc import Mapping, Sequence

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.errors import UserError

from .job import Job, check_form, is_below

_SCRIPT = "launch_xm.py"
_TEXT = '''"""An experiment of XManager; `xmanager launch` runs this script."""

from absl import app
from xmanager import xm, xm_local


def main(_):
    requirements = xm.JobRequirements({requirements})
    options = xm_local.DockerOptions(volumes={volumes!r}, mount_gcs_path=False)
    executor = xm_local.Local(requirements=requirements, docker_options=options)
    with xm_local.create_experiment(experiment_title={name!r}) as experiment:
        image = xm.Container(image_path={image!r})
        [executable] = experiment.package([xm.Packageable(image, executor.Spec())])
        experiment.add(
            xm.Job(executable, executor, name={name!r}, args={arguments!r}, env_vars={env!r})
        )


if __name__ == "__main__":
    app.run(main)
'''


class XManagerJob(Job):
    """One process in a container, as an experiment of XManager, which does not restart it.

    The entry point of the image must be `moelib`, as that of docker/Dockerfile is.
    """

    shares_files = False

    @config_class
    class Config(Job.Config):
        program: Sequence[str] = ()  # None: the entry point of the image is the command.
        max_restarts: int = 0  # XManager starts a job once.
        image: Required[str] = REQUIRED  # Image in a registry, or file of `docker save`.
        gpus: int | None = None  # GPUs of this machine; None for none.
        volumes: dict[str, str] = {}  # {path in the container: folder of this machine}.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        check_form("image", cfg.image, r"[^\s-]\S*", "an image such as registry.example/small:1")
        for field, known in (("num_processes", 1), ("max_restarts", 0), ("program", ())):
            if (value := getattr(cfg, field)) != known:
                raise UserError(
                    f"{field}={value!r}: an XManager job has {known!r}; leave it unset."
                )
        if cfg.gpus is not None and cfg.gpus < 1:
            raise UserError(f"gpus={cfg.gpus}: set 1 or more, or None for no GPU.")

    def check_trainer_dir(self, folder: str) -> None:
        """Raises UserError if the folder of the run is in no volume: the run would be lost."""
        if "://" not in folder and not is_below(folder, self.config.volumes):
            raise UserError(
                f"--trainer_dir={folder}: the container loses it; set an absolute path in a "
                "volume: --job_set \"volumes={'/runs': '/home/me/runs'}\" --trainer_dir=/runs/NAME"
            )

    def files(self) -> Mapping[str, str]:
        """Returns the launch script."""
        cfg = self.config
        text = _TEXT.format(
            name=cfg.name,
            requirements="" if cfg.gpus is None else f"local_gpu={cfg.gpus}",
            volumes={host: path for path, host in cfg.volumes.items()},
            image=cfg.image,
            arguments=list(cfg.arguments),
            env=dict(cfg.env),
        )
        return {_SCRIPT: text}

    def commands(self) -> Sequence[Sequence[str]]:
        """Returns the command that runs the launch script."""
        return [["xmanager", "launch", self.path(_SCRIPT)]]
