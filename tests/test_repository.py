"""The repository as a whole: pins, dependencies, imports and files."""

import ast
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import moelib

_ROOT = pathlib.Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_MODULES = sorted((_ROOT / "moelib").rglob("*.py"))

# Names that do not describe the content of a file.
_EMPTY_NAMES = {"utils", "common", "helpers", "misc", "components", "protocols"}


def _pins() -> dict[str, Version]:
    """Returns the version of each package in requirements.txt."""
    lines = (_ROOT / "requirements.txt").read_text().split()
    return {name: Version(version) for name, version in (line.split("==") for line in lines)}


def _requirements(extra: str | None = None) -> list[Requirement]:
    """Returns the requirements of the project or of an extra, with the extras it includes."""
    if extra is None:
        return [Requirement(text) for text in _PROJECT["dependencies"]]
    found = []
    for requirement in map(Requirement, _PROJECT["optional-dependencies"][extra]):
        if requirement.name == _PROJECT["name"]:
            found += [r for other in requirement.extras for r in _requirements(other)]
        else:
            found.append(requirement)
    return found


def _tracked_texts() -> dict[str, str]:
    """Returns the text of each file that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = {}
    for name in listed.stdout.splitlines():
        path = _ROOT / name
        if path.is_file():  # A file may be deleted and not yet committed.
            texts[name] = path.read_text(encoding="utf-8", errors="ignore")
    return texts


def _loaded_by(statement: str) -> set[str]:
    """Returns the top-level packages that a new Python process has loaded after a statement."""
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-W", "error", "-c", code]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_versions_agree():
    assert moelib.__version__ == _PROJECT["version"]
    python = Requirement(f"python{_PROJECT['requires-python']}")
    assert (_ROOT / ".python-version").read_text().strip() in python.specifier


@pytest.mark.parametrize("extra", [None, "dev"])
def test_every_requirement_is_pinned_in_its_range(extra):
    pins = _pins()
    for requirement in _requirements(extra):
        assert requirement.name in pins, f"{requirement.name} has no line in requirements.txt"
        pinned = pins[requirement.name]
        assert requirement.specifier.contains(pinned), f"{requirement} is pinned to {pinned}"


_IMPORTERS = ("import_module", "_import")  # Functions that import the module that they are given.


def _imported() -> dict[str, set[str]]:
    """Returns the files of moelib/ that import each package outside the standard library."""
    files: dict[str, set[str]] = {}
    for path in _MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_IMPORTERS):
                names += [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            for name in {name.partition(".")[0] for name in names} - {"moelib"}:
                if name not in sys.stdlib_module_names:
                    files.setdefault(name, set()).add(str(path.relative_to(_ROOT)))
    return files


def test_requirements_are_the_imports_of_the_library():
    required = {requirement.name for requirement in _requirements()}
    extras = "tfds", "lm-eval", "wandb", "mlflow"
    optional = {r.name for extra in extras for r in _requirements(extra)}
    distributions = {"mlflow": ["mlflow-skinny"]} | importlib.metadata.packages_distributions()
    imported = {
        name: set(map(canonicalize_name, distributions.get(name, [name]))) for name in _imported()
    }
    undeclared = {name for name, found in imported.items() if not found & (required | optional)}
    assert not undeclared, {name: _imported()[name] for name in undeclared}
    unused = (required | optional) - set().union(*imported.values())
    assert not unused, f"declared in pyproject.toml, imported nowhere in moelib/: {unused}"


def test_tensorflow_is_optional():
    required = {requirement.name for requirement in _requirements()}
    optional = {requirement.name for requirement in _requirements("tfds")}
    assert {"tensorflow", "tensorflow-datasets", "array-record"} <= optional - required


def test_pins_are_names_and_versions_only():
    lines = (_ROOT / "requirements.txt").read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    for line in lines:
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line), line


def test_no_file_names_a_registry():
    # Written in halves, so that this file passes too.
    hosts = "|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + r"js\.", "deb" + r"\.debian"))
    for name, text in _tracked_texts().items():
        found = re.search(hosts, text)
        assert found is None, f"{name} names {found and found.group()}"
        assert pathlib.Path(name).name not in {"uv.lock", "poetry.lock", "Pipfile.lock"}


def test_importing_the_library_is_light():
    heavy = {"jax", "tensorflow", "tensorflow_datasets", "matplotlib", "numpy", "orbax"}
    assert not _loaded_by("import moelib") & heavy


def test_configs_load_no_jax():
    assert "jax" not in _loaded_by("import moelib.core.config")


def test_every_folder_is_a_package_and_every_name_describes_its_content():
    for path in _MODULES:
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"
        assert not _EMPTY_NAMES & set(path.relative_to(_ROOT).with_suffix("").parts), path


def test_the_wheel_holds_the_library_the_named_configs_and_the_launchers(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    stem = f"moelib-{moelib.__version__}.dist-info"
    packages = {"moelib", "moelib_experiments", "moelib_cloud"}
    assert {name.split("/")[0] for name in names} == {*packages, stem}
    assert {"moelib_experiments/flame_moe.py", "moelib_cloud/slurm.py"} <= set(names)
    assert {"moelib/operations/status_page.html", "moelib/py.typed"} <= set(names)
    assert {f"moelib_cloud/docker/Dockerfile{x}" for x in ("", ".dockerignore")} <= set(names)
    assert f"{stem}/licenses/LICENSE" in names


# One forbidden import for each rule: the file, and the module that it imports.
_PLANTED = {
    "layers": ("core/planted.py", "moelib.layers"),
    "kernels-users": ("train/planted.py", "moelib.kernels"),
    "kernels": ("kernels/planted.py", "moelib.core"),
    "no-layers": ("learner/planted.py", "moelib.layers"),
    "data": ("data/sources/planted.py", "moelib.data.tokens"),
    "analysis": ("analysis/planted.py", "moelib.train"),
    "config": ("core/config.py", "jax"),
    "library": ("cli/planted.py", "experiments"),
}


def _rules() -> dict[str, str]:
    """Returns the name of each import rule by its id."""
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["id"]: contract["name"] for contract in settings["contracts"]}


def _broken_rules(root: pathlib.Path) -> set[str]:
    """Returns the names of the import rules that the package in a folder breaks."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(root / "pyproject.toml")]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)", output, re.MULTILINE))
    assert set(verdicts) == set(_rules().values()), output
    return {name for name, verdict in verdicts.items() if verdict == "BROKEN"}


def test_every_import_rule_catches_what_it_forbids(tmp_path):
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "experiments.py").touch()
    for path in (_ROOT / "moelib").rglob("*.py"):
        empty = tmp_path / path.relative_to(_ROOT)
        empty.parent.mkdir(parents=True, exist_ok=True)
        empty.touch()
    assert _broken_rules(tmp_path) == set()
    for path, imported in _PLANTED.values():
        (tmp_path / "moelib" / path).write_text(f"import {imported}\n")
    assert _broken_rules(tmp_path) == {_rules()[rule] for rule in _PLANTED}
    assert set(_rules()) == set(_PLANTED)


def test_an_undeclared_folder_breaks_the_layers(tmp_path):
    shutil.copytree(_ROOT / "moelib", tmp_path / "moelib")
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "moelib/surprise.py").touch()
    assert _rules()["layers"] in _broken_rules(tmp_path)
