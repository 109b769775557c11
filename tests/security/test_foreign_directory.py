"""Commands and SDK in a directory of somebody else: its data directory and its conveyor.toml get no key of the user."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from conveyor.cli import main
from conveyor.client import Client
from conveyor.client.server_address import server_key, server_url
from conveyor.config_files import USER_ONLY
from conveyor.errors import ConveyorError, InvalidSetting
from conveyor.settings import Settings

SECRET = "cv_of_the_user"
COMMANDS = [
    ["jobs"],
    ["show", "job_1"],
    ["watch", "job_1"],
    ["submit", "urls.txt"],
    ["export", "job_1", "-o", "out.zip"],
    ["schedules", "list"],
    ["webhooks", "list"],
    ["dead-letters", "list"],
    ["dashboard"],
    ["doctor"],
]


class Stranger(NamedTuple):
    """A server of somebody else, and the Authorization of each request that it got."""

    url: str
    heard: list[str | None]


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    heard: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers["Authorization"])
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Stranger(f"http://127.0.0.1:{server.server_port}", heard)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: Stranger) -> Path:
    """The current directory, with a data directory that names the stranger."""
    (tmp_path / "conveyor-data").mkdir()
    (tmp_path / "conveyor-data" / "local.url").write_text(stranger.url + "\n")
    (tmp_path / "urls.txt").write_text("https://example.com/\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(command)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.usefixtures("place")
def test_a_key_of_the_user_goes_to_no_address_of_the_directory(
    stranger: Stranger, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVEYOR_API_KEY", SECRET)
    run(command)
    assert not any(stranger.heard), "the stranger got the key"


def test_the_user_is_told_and_decides(
    place: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVEYOR_API_KEY", SECRET)
    run(["jobs"])
    assert f"Your API key is not sent to {stranger.url}" in capsys.readouterr().err
    monkeypatch.setenv("CONVEYOR_URL", stranger.url)
    run(["jobs"])
    assert stranger.heard == [f"Bearer {SECRET}"]


def test_the_key_beside_the_address_goes_there(place: Path, stranger: Stranger) -> None:
    (place / "conveyor-data" / "local.key").write_text("cv_of_the_directory\n")
    run(["jobs"])
    assert stranger.heard == ["Bearer cv_of_the_directory"]


@pytest.mark.usefixtures("place")
def test_an_address_of_the_user_wins_even_if_it_is_the_default(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVEYOR_API_KEY", SECRET)
    monkeypatch.setenv("CONVEYOR_URL", "http://127.0.0.1:8080")
    with Client() as client:
        assert client._session.transport.url == "http://127.0.0.1:8080"
    assert stranger.heard == []


@pytest.mark.usefixtures("place")
def test_the_sdk_follows_the_same_rule(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="is not sent"):
        Client(key=SECRET)
    monkeypatch.setenv("CONVEYOR_API_KEY", SECRET)
    with pytest.raises(InvalidSetting, match="is not sent"):
        Client()
    with Client(stranger.url) as client:
        assert client._session.transport._key == SECRET, "an address in the program is the user's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["local.url", "local.key"])
def test_files_of_another_user_are_not_used(place: Path, stranger: Stranger, name: str) -> None:
    (place / "conveyor-data" / "local.key").write_text("cv_of_the_directory\n")
    os.chown(place / "conveyor-data" / name, 65534, 65534)
    with pytest.raises(ConveyorError, match="belongs to another user"):
        Client()
    # Who names the directory in full means it.
    named = Settings(data=place / "conveyor-data")
    assert (server_url(named), server_key(named)) == (stranger.url, "cv_of_the_directory")


@pytest.mark.parametrize("name", sorted(USER_ONLY))
def test_a_directory_does_not_say_where_data_goes_or_which_code_runs(place: Path, name: str) -> None:
    (place / "conveyor.toml").write_text(f'{name} = "x"\n')
    with pytest.raises(InvalidSetting, match=f"line 1: `{name}` is not read from the file of a directory"):
        Settings.load()


def test_a_directory_names_no_gateway(place: Path) -> None:
    (place / "conveyor.toml").write_text('[job]\ntimeout = 9\ngateway = { proxy = "http://127.0.0.1:1" }\n')
    with pytest.raises(InvalidSetting, match="line 3: `gateway` is not read from the file of a directory"):
        Settings.load()
    (place / "home" / "conveyor").mkdir(parents=True)
    (place / "conveyor.toml").rename(place / "home" / "conveyor" / "conveyor.toml")
    Settings.load()


def test_each_setting_that_is_no_number_is_the_users_unless_it_is_harmless() -> None:
    """A new setting is decided on: the file of a directory may have it, or not."""
    words = {field.name for field in msgspec.structs.fields(Settings) if field.type not in {int, float}}
    harmless = {"force_task_shards", "webhook_retries", "log_level", "log_format", "cloudwatch_namespace"}
    assert words - USER_ONLY == harmless
