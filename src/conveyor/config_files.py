"""conveyor.toml: defaults in a file. At its top are settings by their names; the table [job] has options of the jobs
that `run`, `submit` and `schedules create` make. The file of the current directory goes before the user's own.

The file of a directory may be another's: cloned or unpacked. It may tune what a command does, and is refused what
decides where keys, lists and results go, what is let in, and which code runs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from conveyor.errors import InvalidSetting

NAME = "conveyor.toml"
JOB = "job"

# Settings that the file of a directory may not have.
USER_ONLY = frozenset(
    {
        # Where keys, lists and results go.
        "url",
        "data",
        "records",
        "tasks",
        "other_tasks",
        "queue",
        "coordinator",
        "blobs",
        "gateway",
        "source_buckets",
        "export_buckets",
        "step_functions",
        "event_targets",
        "otlp_endpoint",
        "public_url",
        # What is let in, and reached.
        "host",
        "metrics_host",
        "allowed_hosts",
        "trusted_proxies",
        "allow_private_targets",
        "allow_insecure",
        "ca_bundle",
        "intake",
        "intake_tenant",
        # Which code runs.
        "app",
        "crash_at",
        # Secrets.
        "api_key",
        "signing_key",
        "previous_signing_key",
        "metrics_token",
    }
)
# Options of jobs that it may not have: a gateway sees the URLs and the headers of all requests, and so does anyone on
# the way if no certificate is verified.
_USER_ONLY_OPTIONS = frozenset({"gateway", "insecure"})
_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\"' -]+?)\s*\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=")


class ConfigFile(NamedTuple):
    """One file: its settings, the options of its jobs, and the line of each key."""

    path: Path
    settings: Mapping[str, Any]
    job: Mapping[str, Any]
    lines: Mapping[str, int]

    def place(self, key: str) -> str:
        """Where the key, or the table that it is in, is set."""
        while key not in self.lines and "." in key:
            key = key.rpartition(".")[0]
        line = self.lines.get(key)
        return str(self.path) if line is None else f"{self.path}, line {line}"


def config_files(directory: Path, environ: Mapping[str, str], known: Sequence[str]) -> list[ConfigFile]:
    """The files that there are, the one that wins first. `known` are the names of settings. Raises InvalidSetting."""
    found: list[ConfigFile] = []
    for path, is_own in ((directory / NAME, False), (_user_file(environ), True)):
        changed = None if path is None else _changed_at(path)
        if path is not None and changed is not None and all(path != file.path for file in found):
            found.append(_checked(_read(path, changed), known, is_own))
    return found


def job_options(files: Sequence[ConfigFile]) -> dict[str, Any]:
    """The options of jobs in all files. Options with parts, such as `breaker`, are merged part by part."""
    merged: dict[str, Any] = {}
    for file in reversed(files):
        for name, value in file.job.items():
            before = merged.get(name)
            merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def place_of(files: Sequence[ConfigFile], key: str) -> str | None:
    """Where a setting, or an option as `job.NAME`, is set; None if in no file."""
    name = key.removeprefix(f"{JOB}.").partition(".")[0]
    for file in files:
        if name in (file.job if key.startswith(f"{JOB}.") else file.settings):
            return file.place(key)
    return None


def _user_file(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CONFIG_HOME")
    if base:
        return Path(base) / "conveyor" / NAME
    home = environ.get("HOME")
    return Path(home) / ".config" / "conveyor" / NAME if home else None


def _changed_at(path: Path) -> int | None:
    """When the file was changed; None if there is none, or it is where this process may not look."""
    try:
        return path.stat().st_mtime_ns if path.is_file() else None
    except OSError:
        return None


@cache
def _read(path: Path, _: int) -> ConfigFile:
    import tomllib  # noqa: PLC0415  (commands without a file are spared it)

    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSetting(f"{path} is not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}") from None
    job = values.pop(JOB, {})
    file = ConfigFile(path, values, job if isinstance(job, dict) else {}, dict(_lines(text)))
    if not isinstance(job, dict):
        raise InvalidSetting(f"{file.place(JOB)}: `job` must be a table, [job], with options of jobs.")
    return file


def _checked(file: ConfigFile, known: Sequence[str], is_own: bool) -> ConfigFile:
    for name in file.settings:
        if name not in known:
            raise InvalidSetting(
                f"{file.place(name)}: unknown setting `{name}`. Options of jobs go under [job]; a setting has the name "
                "of its variable, in lower case and without CONVEYOR_."
            )
        if name in USER_ONLY and not is_own:
            raise _foreign(file, name, name, f"Set CONVEYOR_{name.upper()}")
    for name in file.job:
        if name in _USER_ONLY_OPTIONS and not is_own:
            raise _foreign(file, f"{JOB}.{name}", name, f"Pass --{name}")
    return file


def _foreign(file: ConfigFile, key: str, name: str, instead: str) -> InvalidSetting:
    return InvalidSetting(
        f"{file.place(key)}: `{name}` is not read from the file of a directory, which may be another's. {instead}, or "
        f"put it into ~/.config/conveyor/{NAME}."
    )


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Each key with the tables that it is in, and its line."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _plain(header[1])
            yield table, number
        elif key := _KEY.match(line):
            yield f"{table}.{_plain(key[1])}" if table else _plain(key[1]), number


def _plain(key: str) -> str:
    return ".".join(part.strip(" \"'") for part in key.split("."))
