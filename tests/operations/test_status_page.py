"""The status page: its answers, what it refuses, and the page in a browser."""

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from moelib import launch
from moelib.core.errors import UsageError, UserError
from moelib.operations.status_page import status_page
from moelib.runs.folder import RunFolder
from tests.operations import browser
from tests.operations.test_runs import write_run


def secret_folder(tmp_path):
    """Returns a folder with a run, and secrets in and next to it."""
    run = write_run(tmp_path / "runs/a", config="note: '<script>alert(1)</script>'\n")
    RunFolder(run).log("start", num_processes=2)
    RunFolder(run).log("sample", step=20, prompt="Once", text=" <b>upon</b>")
    (run / "process_0.log").write_text("from process 0\n")
    for secret in (tmp_path / "secret.txt", run / ".lock", run / "run.json", run / "other.txt"):
        secret.write_text("a secret")
    (run / "process_1.log").symlink_to(tmp_path / "secret.txt")
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with status_page(str(secret_folder(tmp_path_factory.mktemp("page"))), 0) as url:
        yield url


def get(url, path, **headers):
    """Returns status, headers and body of the answer to a path, which is sent as it is."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    method = headers.pop("method", "GET")
    connection.request(method, path, headers={"Host": "localhost", **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_a_run_is_shown_with_the_numbers_of_its_files(url):
    status, headers, body = get(url, "/run.json?run=a")
    found = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert (found["name"], found["step"], found["max_step"]) == ("a", 30, 30)
    charts = {chart["title"]: chart["series"] for chart in found["charts"]}
    assert [x["name"] for x in charts["Loss"]] == ["mean_loss", "val/loss"]
    assert [x[:2] for x in charts["Loss"][1]["points"]] == [[10, 10], [20, 0], [30, 10]]
    assert ["loss", "2.0000"] in found["tiles"]
    assert [x[1:] for x in found["events"]] == [["start", "num processes 2"]]
    assert found["samples"] == [["20", "Once", " <b>upon</b>"]]
    assert found["sample_columns"] == ["Step", "Prompt", "Text"]
    assert found["files"] == ["config.txt", "events.jsonl", "metrics.jsonl", "process_0.log"]


def test_several_runs_are_listed_also_new_ones(tmp_path):
    write_run(tmp_path / "a")
    with status_page(str(tmp_path), 0) as url:
        assert json.loads(get(url, "/runs.json")[2]) == {"names": ["a"]}
        write_run(tmp_path / "b/c", 2)
        found = json.loads(get(url, "/runs.json")[2])
        assert found["names"] == [row[0] for row in found["rows"]] == ["a", "b/c"]
        assert json.loads(get(url, "/run.json?run=b%2Fc")[2])["step"] == 20


def test_a_list_of_long_runs_is_read_over_several_requests(tmp_path, monkeypatch):
    """Of 100 lines of each run, a request reads at least 20."""
    monkeypatch.setattr("moelib.operations.status_page._SECONDS_PER_READ", -1)
    for name in "ab":
        write_run(tmp_path / name, 50, max_step=500)
    with status_page(str(tmp_path), 0) as url:
        found = [json.loads(get(url, "/runs.json")[2]) for _ in range(6)]
    assert [x["is_complete"] for x in found] == [False] * 5 + [True]
    rows = [[row[x] for x in (2, 4, 6)] for row in found[-1]["rows"]]
    assert rows == [["500 / 500", "480.0000", "500,000 tokens/s"]] * 2


def test_files_of_the_run_are_sent_as_text(url):
    status, headers, body = get(url, "/file?run=a&name=config.txt")
    assert (status, body) == (200, b"max_step: 30\nnote: '<script>alert(1)</script>'\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    status, headers, body = get(url, "/file?run=a&name=process_0.log", method="HEAD")
    assert (status, headers["Content-Length"], body) == (200, "15", b"")


@pytest.mark.parametrize(
    "path",
    [
        *("/file?run=a&name=../../secret.txt", "/file?run=a&name=%2e%2e%2f%2e%2e%2fsecret.txt"),
        *("/file?run=..&name=secret.txt", "/file?run=a/../..&name=secret.txt"),
        *("/file?run=a&name=/etc/passwd", "/file?run=/etc&name=passwd", "/../../secret.txt"),
        *("/file?run=a&name=.lock", "/file?run=a&name=run.json", "/file?run=a&name=other.txt"),
        *("/file?run=a&name=process_1.log", "/file?run=a&name=config.txt%00.txt", "/file"),
        *("/%2e%2e/secret.txt", "/run.json?run=..", "/run.json?run=%2e%2e%2f", "/a/config.txt"),
        *("//etc/passwd", "//[", "/file?run=a&name=config.txt/", "/run.json?run=missing"),
    ],
)
def test_no_other_path_is_answered(url, path):
    status, _, body = get(url, path)
    assert status == 404
    assert b"secret" not in body.replace(b"secret.txt", b"")


@pytest.mark.parametrize("name", ["config.txt", "metrics.jsonl", "events.jsonl"])
def test_a_run_whose_files_are_links_is_not_shown(tmp_path, name):
    folder = secret_folder(tmp_path)
    (folder / "a" / name).unlink()
    (folder / "a" / name).symlink_to(tmp_path / "secret.txt")
    with status_page(str(folder), 0) as url:
        assert json.loads(get(url, "/runs.json")[2])["names"] == []
        assert get(url, f"/file?run=a&name={name}")[0] == 404
        assert get(url, "/run.json?run=a")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get_and_head_are_answered(url, method):
    assert get(url, "/", method=method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("localhost:9999", 200), ("127.0.0.1:80", 200), ("[::1]", 200)),
        *(("evil.example", 403), ("localhost.evil.example", 403), ("", 403), ("[", 403)),
    ],
)
def test_names_of_other_sites_are_refused(url, host, status):
    found = [get(url, path, Host=host)[0] for path in ("/", "/runs.json", "/file?run=a&name=x")]
    assert found == [status, status, 404 if status == 200 else status]


def test_an_address_of_ipv6_is_bound(tmp_path, caplog):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with status_page(str(tmp_path), 0, "::1") as url:
        assert re.fullmatch(r"http://\[::1\]:\d+", url)
        assert get(url, "/", Host=url.removeprefix("http://"))[0] == 200
    assert not caplog.text  # Others cannot reach it.


def test_the_full_name_of_this_machine_is_no_other_site(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.getfqdn", lambda *_: "Node1.cluster.example")
    with status_page(str(tmp_path), 0, "127.0.0.2") as url:
        hosts = "node1.cluster.example:80", "evil.example"
        assert [get(url, "/", Host=host)[0] for host in hosts] == [200, 403]


def test_the_policy_allows_the_own_script_and_nothing_else(url):
    _, headers, body = get(url, "/")
    policy = headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(rb"(src|href)=.?http|@import|url\(", body)  # No resource from elsewhere.
    assert b"innerHTML" not in body


def test_a_port_in_use_is_an_error_and_a_warning_of_a_run(tmp_path, url, caplog):
    port = urllib.parse.urlsplit(url).port
    with pytest.raises(UserError, match=f"port {port} "), status_page(str(tmp_path), port):
        pass
    with launch.TrainFlags(status_port=port).status_page(str(tmp_path)):
        pass
    assert f"--status_port: port {port} " in caplog.text


def test_a_host_for_others_is_a_warning_and_requires_a_port(tmp_path, caplog):
    with pytest.raises(UsageError, match=r"--status_host=0\.0\.0\.0"):
        launch.TrainFlags(status_host="0.0.0.0").status_page(str(tmp_path)).__enter__()
    with launch.TrainFlags(status_host="127.0.0.2", status_port=0).status_page(str(tmp_path)):
        assert "no authentication" in caplog.text


def test_a_folder_that_is_created_later_is_shown_then(tmp_path):
    with status_page(str(tmp_path / "new"), 0) as url:
        assert json.loads(get(url, "/run.json?run=.")[2])["step"] == 0
        write_run(tmp_path / "new")
        found = json.loads(get(url, "/run.json?run=.")[2])
        assert (found["name"], found["step"]) == ("new", 30)


def test_no_thread_is_left_and_a_stalled_client_does_not_block_others(tmp_path):
    before = threading.active_count()
    with status_page(str(write_run(tmp_path)), 0) as url:
        address = urllib.parse.urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as stalled:
            stalled.sendall(b"GET / HTTP/1.1\r\n")
            assert get(url, "/")[0] == 200
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


# -- In a browser ----------------------------------------------------------------------------------

_POINTS = "JSON.parse(document.querySelector('[data-metric=\"{}\"]').dataset.points)"


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_draws_the_metrics_and_their_updates(tmp_path):
    name = 'layer<img src=x onerror="document.title=1">'
    run = write_run(tmp_path / "a <b>run", max_step=50, config="note: '<b>'\n")
    RunFolder(run).log("end", error="Error: <script>alert(1)</script>")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (tmp_path / "profile").mkdir()
    with (
        status_page(str(tmp_path), 0) as url,
        browser.open_page(tmp_path / "profile") as page,
        open(run / "metrics.jsonl", "a", encoding="utf-8", buffering=1) as file,
    ):
        file.write(json.dumps({"step": 30, f"{name}/entropy": 1.0, "mean_loss": 2.0}) + "\n")
        page.show(url)
        page.wait_for("document.querySelector('svg') !== null")
        expected = [[x["step"], x["mean_loss"]] for x in lines if "mean_loss" in x]
        expected[-1] = [30, 2.0]
        assert page.value(_POINTS.format("mean_loss")) == expected
        text = page.value("document.querySelector('main').textContent")
        assert text.startswith("a <b>run")
        assert "<script>alert(1)</script>" in text  # Shown as text.
        assert page.value("document.querySelector('main :is(b b, h1 b, script, img)')") is None
        script = "[...document.querySelectorAll('[data-metric]')].map(x => x.{})"
        assert page.value(script.format("dataset.metric")) == [
            *("mean_loss", "val/loss", "tokens_per_second", "time/step", f"{name}/entropy")
        ]
        assert all("NaN" not in x for x in page.value(script.format("getAttribute('d')")))
        file.write(json.dumps({"step": 40, "mean_loss": 1.25}) + "\n")
        page.wait_for(f"{_POINTS.format('mean_loss')}.length === 4")
        assert page.value(_POINTS.format("mean_loss"))[-1] == [40, 1.25]
        assert "step 40 of 50" in page.value("document.querySelector('#steps').textContent")
        write_run(tmp_path / "other", config="input.seq_len: 64\n")
        page.show(url)
        page.wait_for("document.querySelectorAll('input').length === 2")
        page.value("document.querySelectorAll('input').forEach(x => x.click())")
        page.value("document.querySelector('button').click()")
        page.wait_for("document.querySelectorAll('[data-metric=mean_loss]').length === 2")
        text = page.value("document.querySelector('main').textContent")
        assert "other: training" in text
        assert "sequence, tokens64" in text
        shutil.rmtree(tmp_path / "other")
        for width in (1300, 390):
            page.show(url, width)
            page.wait_for("document.querySelector('svg') !== null")
            assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value("document.title") != "1"
        assert page.messages == []
    assert os.listdir(tmp_path / "profile")
