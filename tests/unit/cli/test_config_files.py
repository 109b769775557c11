"""conveyor.toml: what it may have, what wins, and that an error names file, line and key."""

import json
from pathlib import Path

import pytest

from conveyor.cli import main
from conveyor.cli.job_defaults import job_defaults, with_job_defaults
from conveyor.errors import BadInput, InvalidSetting
from conveyor.settings import Settings, setting_sources


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to be in, and a home of the user."""
    (tmp_path / "home" / "conveyor").mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place: Path, text: str) -> None:
    (place / "conveyor.toml").write_text(text)


def test_flags_then_variables_then_the_directory_then_the_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place / "home" / "conveyor", 'url = "https://jobs.example.com"\nport = 1\nworkers = 2\nhost = "::1"\n')
    write(place, "port = 3\nworkers = 4\ningesters = 5\n")
    monkeypatch.setenv("CONVEYOR_WORKERS", "6")
    settings = Settings.load(ingesters=7)
    found = (settings.url, settings.host, settings.port, settings.workers, settings.ingesters)
    assert found == ("https://jobs.example.com", "::1", 3, 6, 7)
    assert Settings.load({}).port == Settings().port, "an environment that is given has no files"
    user = place / "home" / "conveyor" / "conveyor.toml"
    assert setting_sources() == {
        "url": f"{user}, line 1",
        "host": f"{user}, line 4",
        "port": "conveyor.toml, line 1",
        "workers": "CONVEYOR_WORKERS",
        "ingesters": "conveyor.toml, line 3",
    }


def test_a_home_that_may_not_be_read_has_no_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / ("long" * 100)))
    assert Settings.load().port == Settings().port


def test_options_of_jobs(place: Path) -> None:
    write(place / "home" / "conveyor", "[job]\ntimeout = 9\n[job.breaker]\nenabled = true\npatience = 1\n")
    write(place, '[job]\nconcurrency = 3\nbreaker = { patience = 2 }\nheaders = { "X-A" = "1" }\n')
    spec = with_job_defaults({"concurrency": 8, "headers": {"X-B": "2"}})
    assert spec == {
        "timeout": 9,
        "concurrency": 8,
        "breaker": {"enabled": True, "patience": 2},
        "headers": {"X-A": "1", "X-B": "2"},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nprot = 1\n", "conveyor.toml, line 2: unknown setting `prot`"),
        ("port = 'x'\n", "conveyor.toml, line 1: `port`: Expected `int`"),
        ("# a\n\nport = 99999\n", "conveyor.toml, line 3: `port` must be between"),
        ("port =\n", "conveyor.toml is not valid TOML: .* line 1"),
        ("job = 1\n", "line 1: `job` must be a table"),
        ('url = "https://example.com"\n', "line 1: `url` is not read from the file of a directory"),
        ('api_key = "x"\n', "line 1: `api_key` is not read"),
        ("[job]\nconcurency = 1\n", "line 2: unknown option `concurency` of a job"),
        ("[job]\nconcurrency = 0\n", "line 2: `concurrency` must be between"),
        ("[job.backoff]\n\ncap = 'x'\n", "conveyor.toml, line 1: .*backoff"),
        ("[job]\ndeadline = 2026-01-01\n", "line 2: `deadline` has a value that JSON does not have"),
        ("[job]\ntasks = []\n", "line 2: unknown option `tasks`"),
    ],
)
def test_an_error_names_file_line_and_key(place: Path, text: str, said: str) -> None:
    write(place, text)
    with pytest.raises((InvalidSetting, BadInput), match=said):
        Settings.load()
        job_defaults()


def test_doctor_says_where_a_value_comes_from(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place / "home" / "conveyor", 'gateway = "http://u:hidden-1@proxy"\n')
    write(place, '[job]\nattempts = 2\nheaders = { Authorization = "hidden-2" }\n')
    monkeypatch.setenv("CONVEYOR_API_KEY", "hidden-3")
    with pytest.raises(SystemExit):
        main(["doctor", "--show-options", "--json"])
    printed = capsys.readouterr().out
    assert "hidden-" not in printed
    shown = {row["name"]: (row["value"], row["from"]) for row in json.loads(printed)}
    assert shown["job.attempts"] == ("2", "conveyor.toml, line 2")
    assert shown["api_key"] == ("(hidden)", "CONVEYOR_API_KEY")
    assert set(shown) >= {"gateway", "job.headers"}
