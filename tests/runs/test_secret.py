"""Secrets: no text, error or copy of a config has one, only its reference."""

import contextlib
import copy
import json
import traceback

import pytest

from moelib.core import config_text
from moelib.core.config import Configurable, InvalidConfigValueError, config_class
from moelib.core.config_types import NonConfigFieldError
from moelib.core.errors import UserError, masked
from moelib.runs.secret import Secret

CANARY = "canary-4f1d9"


class Client(Configurable):
    @config_class
    class Config(Configurable.Config):
        api_key: Secret | None = None
        by_name: dict[str, Secret] = {}
        address: str = ""
        inner: dict[str, Configurable.Config] = {}


@pytest.fixture
def cfg(monkeypatch):
    monkeypatch.setenv("MY_KEY", f"{CANARY}\n")
    return Client.default_config().set(api_key="env:MY_KEY")


def test_only_value_returns_the_secret(cfg, tmp_path):
    assert cfg.api_key.value() == CANARY
    (tmp_path / "key").write_text(f" {CANARY}\n")
    cfg.api_key = f"file:{tmp_path}/key"
    assert cfg.instantiate().config.api_key.value() == CANARY


def test_texts_and_copies_hold_the_reference(cfg):
    copies = [cfg.clone(), copy.deepcopy(cfg), copy.copy(cfg), cfg.instantiate().config]
    copies.append(config_text.parse(cfg.debug_string(), names={f"{__name__}:Client": Client}))
    for other in copies:
        assert other == cfg
        assert type(other.api_key) is Secret
    secret = cfg.api_key
    line = next(x for x in config_text.lines(cfg) if x.path == "api_key")
    texts = [cfg.debug_string(), repr(cfg), str(cfg.to_flat_dict()), line.text, line.origin]
    texts += [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", json.dumps(secret)]
    texts += [str(config_text.diff(cfg, Client.default_config()))]
    assert all(CANARY not in text and "MY_KEY" in text for text in texts if text != line.origin)


BAD = [CANARY, f"env:{CANARY}", "env:lower", f"file:{CANARY}", "file:/", f"'{CANARY}'", "env:", ""]


@pytest.mark.parametrize("value", [*BAD, CANARY.encode(), [CANARY], {"a": CANARY}, 3])
def test_a_value_that_is_no_reference_is_refused_and_not_shown(cfg, value):
    with pytest.raises(InvalidConfigValueError, match=r"api_key.*env:NAME") as error:
        cfg.api_key = value
    assert CANARY not in shown(error.value)


@pytest.mark.parametrize("value", BAD)
def test_a_flag_with_a_secret_is_refused_and_not_shown(cfg, value):
    with pytest.raises(InvalidConfigValueError, match=r"--set api_key: .*env:NAME") as error:
        config_text.set_from_text(cfg, f"api_key={value}")
    assert CANARY not in shown(error.value)


def test_a_secret_in_a_container_or_a_config_file_is_refused_and_not_shown(cfg):
    text = cfg.debug_string().replace("'env:MY_KEY'", repr(CANARY))
    attempts = [
        lambda: cfg.set(by_name={"a": CANARY}),
        lambda: config_text.parse(text, names={f"{__name__}:Client": Client}),
        lambda: cfg.clone(api_key=CANARY),
    ]
    for attempt in attempts:
        with pytest.raises(UserError) as error:
            attempt()
        assert CANARY not in shown(error.value)


@pytest.mark.parametrize("flag", ["address={}", "inner={{'a': '{}'}}", "addres={}", "inner={}"])
@pytest.mark.parametrize("text", ["https://me:{}@host/a", "HF_TOKEN={}", "{{'MY_API_KEY': '{}'}}"])
def test_errors_of_flags_mask_passwords_and_variables_of_secrets(cfg, flag, text):
    text = text.format(CANARY)
    with contextlib.suppress(UserError), not_shown():
        config_text.set_from_text(cfg, flag.format(text))
        assert cfg.address == text  # A string that is no URL.
        assert "://" not in text


def test_a_config_holds_no_url_with_a_password(cfg):
    with pytest.raises(NonConfigFieldError, match=r"address.*me:\*\*\*@host") as error:
        cfg.address = f"https://me:{CANARY}@host/a"
    assert CANARY not in shown(error.value)
    cfg.address = "ssh://git@host:22/a"


def test_a_missing_secret_names_its_reference(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", " ")
    (tmp_path / "empty").touch()
    for reference in ("env:MY_KEY", "env:NO_SUCH_VARIABLE", f"file:{tmp_path}/empty"):
        with pytest.raises(UserError, match=reference):
            cfg.clone(api_key=reference).api_key.value()
    with pytest.raises(UserError, match="no_such_file"):
        cfg.clone(api_key=f"file:{tmp_path}/no_such_file").api_key.value()


def test_masks_keep_the_rest_of_a_text():
    text = "a https://u:pw@h/x?b=1 HF_TOKEN=abc, num_tokens=3 {'API_KEY': 'k', 'N': '1'}"
    assert masked(text) == (
        "a https://u:***@h/x?b=1 HF_TOKEN=***, num_tokens=3 {'API_KEY': '***', 'N': '1'}"
    )
    assert masked("WANDB_API_KEY=env:A http://h:80/a@b") == "WANDB_API_KEY=env:A http://h:80/a@b"


@contextlib.contextmanager
def not_shown():
    """Asserts that no error of the block shows the secret."""
    try:
        yield
    except UserError as error:
        if CANARY in shown(error):
            raise AssertionError(shown(error)) from error
        raise


def shown(error):
    """Returns what a traceback prints, without lines of source code."""
    lines = traceback.TracebackException.from_exception(error, lookup_lines=False)
    return "".join(lines.format_exception_only()) + repr(error) + repr(error.__cause__)
