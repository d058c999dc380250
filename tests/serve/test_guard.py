"""Who may read the live page, and what can be read: the token, host names, methods, headers, paths and links."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from dora_rl.apps.serve.app import VIEWS, static_files
from dora_rl.apps.serve.guard import is_loopback
from tests.serve.conftest import TOKEN, client_of, get

VIEW_PATHS = (f"/api/runs/small/{name}".replace("{number:int}", "0") for name in VIEWS)
PATHS = ["/", "/static/app.js", "/api/runs", "/api/runs/small/stream", *VIEW_PATHS]


# -- the token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_token(runs: Path, path: str) -> None:
    for header in ("", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
        answer = client_of(runs, authorization=header).get(path)
        assert answer.status_code == 401
        assert "small" not in answer.text


def test_the_token_in_the_address_becomes_a_cookie_that_scripts_cannot_read(runs: Path) -> None:
    client = client_of(runs, authorization="")
    assert client.get("/?token=wrong").status_code == 401
    assert client.get(f"/api/runs?token={TOKEN}").status_code == 401, "only the page takes it from the address"
    entry = client.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (entry.status_code, entry.headers["location"]) == (303, "/"), "the token does not stay in the address"
    cookie = entry.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert client.get("/").status_code == 200
    assert get(client, "/api/runs")["runs"][0]["id"] == "small"


def test_a_cookie_of_another_server_on_this_machine_does_not_matter(runs: Path) -> None:
    client = client_of(runs, authorization="")
    client.cookies.set("dora_rl", "other")
    client.get(f"/?token={TOKEN}")
    other = client_of(runs, token="another-token", authorization="")
    other.cookies.update(client.cookies)
    assert other.get("/").status_code == 401
    other.get("/?token=another-token")
    assert len(other.cookies) == 3


def test_without_a_token_on_this_machine_the_page_is_open(runs: Path) -> None:
    assert client_of(runs, token=None, authorization="").get("/api/runs").status_code == 200


# -- hosts and methods --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_foreign_host_name_is_refused(runs: Path, host: str) -> None:
    """A site that lets its name resolve to this machine can't read the page."""
    assert client_of(runs, token=None, host="127.0.0.1").get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8642", "192.0.2.7:8642", "Node7.cluster:8642"])
def test_addresses_and_the_given_name_are_answered(runs: Path, host: str) -> None:
    client = client_of(runs, host="node7.cluster")
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/small/overview", "/none"])
def test_there_is_no_way_to_write(runs: Path, method: str, path: str) -> None:
    assert client_of(runs).request(method, path).status_code == 405


def test_loopback_is_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.7", "example.org", "localhost.example.org")))


# -- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/runs/none/overview", "/none"])
@pytest.mark.parametrize("authorization", ["", f"Bearer {TOKEN}"])
def test_every_answer_allows_scripts_and_data_from_itself_only(runs: Path, path: str, authorization: str) -> None:
    headers = client_of(runs, authorization=authorization).get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert all(value in ("'self'", "'none'") for value in policy.values())
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


def test_the_page_needs_no_other_server_and_no_inline_script(runs: Path) -> None:
    client = client_of(runs)
    page = client.get("/").text
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", page)
    size = 0
    for name in static_files():
        text = client.get("/" if name == "index.html" else f"/static/{name}").text
        size += len(text.encode())
        addresses = set(re.findall(r"https?://[^\"' )]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        # Text of a run is never parsed as HTML, and no code is made from text.
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text
        )
    assert size < 60_000


# -- paths and links ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/static/../../secret.txt",
        "/static/%2e%2e%2f%2e%2e%2fapp.py",
        "/static//etc/passwd",
        "/api/runs/../secret/overview",
        "/api/runs/%2e%2e/overview",
        "/api/runs/%2e%2e%2fsecret/overview",
        "/api/runs/..%5csecret/overview",
        "/api/runs/./overview",
        "/api/runs//overview",
        "/api/runs/small%00/overview",
        "/api/runs/small%2f..%2f..%2fsecret/overview",
        "/api/runs/%2fetc/overview",
    ],
)
def test_no_path_leads_out_of_the_folder(runs: Path, path: str) -> None:
    shutil.copytree(runs / "small", runs.parent / "secret")
    (runs.parent / "secret.txt").write_text("secret")
    answer = client_of(runs).get(path)
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_a_run_that_is_a_link_is_not_served(runs: Path) -> None:
    shutil.move(runs / "small", runs.parent / "elsewhere")
    (runs / "small").symlink_to(runs.parent / "elsewhere")
    client = client_of(runs)
    assert get(client, "/api/runs")["runs"] == []
    assert client.get("/api/runs/small/overview").status_code == 404


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "activity.jsonl", "samples.jsonl", "ledger.db", "ledger.db-wal", "logs"]
)
def test_a_run_with_a_linked_file_is_not_served(runs: Path, name: str) -> None:
    client = client_of(runs)
    assert client.get("/api/runs/small/overview").status_code == 200
    path, outside = runs / "small" / name, runs.parent / "outside"
    if path.exists():
        shutil.move(path, outside)
    else:
        outside.touch()
    path.symlink_to(outside)
    assert client.get("/api/runs/small/overview").status_code == 404
    assert client.get("/api/runs/small/stream").status_code == 404


def test_the_folder_of_one_run_is_served_alone(runs: Path) -> None:
    shutil.copytree(runs / "small", runs / "other")
    client = client_of(runs / "small")
    assert [run["id"] for run in get(client, "/api/runs")["runs"]] == ["small"]
    assert client.get("/api/runs/other/overview").status_code == 404
