"""A run folder and a token store that an earlier version of the library wrote still work.

`old_run/run.zip` holds `run` (config.txt, metrics.jsonl and a checkpoint after two steps, on one
device) and `store`, made by commit a374c7d from the folder that holds both. The model has a dense
and a latent attention, ragged and capacity dispatch, balancing by loss and by bias, and a scan; the
learner has a chain, two update rules, an average of the parameters and a skip policy.
`expected.json` holds the metrics of step 3, and the tokens generated greedily from step 2, by that
commit.
"""

import json
import pathlib
import shutil

import jax
import pytest

from moelib.core.config_parse import parse
from moelib.inference.generate import generate
from moelib.train.loading import load_model

_FOLDER = pathlib.Path(__file__).parent / "old_run"
EXPECTED = json.loads((_FOLDER / "expected.json").read_text())


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """Unpacks the run, and makes its parent the current folder: its paths are relative."""
    shutil.unpack_archive(_FOLDER / "run.zip", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.mark.slow
def test_resumes_with_the_loss_of_the_code_that_wrote_it(old_run):
    cfg = parse((old_run / "config.txt").read_text()).set(max_step=3)
    out = cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
    assert out["step"] == 3
    found = out["aux"] | {
        f"validation/{name}": value for name, value in out["evaler_summaries"]["validation"].items()
    }
    metrics = {name: x for name, x in EXPECTED.items() if isinstance(x, int | float)}
    assert {name: found[name] for name in metrics} == pytest.approx(metrics, rel=2e-6)
    lines = map(json.loads, (old_run / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


@pytest.mark.slow
def test_generates_the_tokens_of_the_code_that_wrote_it(old_run):
    model = load_model(str(old_run))
    num = len(EXPECTED["generated"])
    (text,) = generate(model, [EXPECTED["prompt"]], temperature=0.0, max_new_tokens=num)
    assert text.tokens == EXPECTED["generated"]
