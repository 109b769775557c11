"""What must not be logged, in the forms in which it turns up; and what must stay readable."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from litestar.exceptions import LitestarException

from conveyor.disk import full
from conveyor.errors import BodyDamaged, DiskFull, EngineFailed
from conveyor.telemetry import metrics
from conveyor.telemetry.logs import configure_log
from conveyor.telemetry.redact import GONE, redact, redact_event

S = "canary5ecret"
KEY = f"cv_{'0' * 26}_{'c' * 64}"
TOKEN = "AQCEAAAAKgAAAAMAAAAA" + "Zm9v/YmFy+YmF6" * 40 + "=="

VECTORS = [
    f"Authorization: Bearer {S}",
    f"authorization=bearer {S}",
    f"AUTHORIZATION:Basic {S}",
    f"{{'Authorization': 'Token {S}', 'accept': '*/*'}}",
    f'{{"authorization": "{S}"}}',
    f"[(b'authorization', b'Bearer {S}')]",
    f"sent Bearer {S}, got 401",
    f"Proxy-Authorization: Basic {S}",
    f"Cookie: theme=dark; session={S}",
    f"set-cookie: id={S}; Path=/",
    f"the key cv_{'0' * 26}_{'c' * 64} was used",
    f"cut off: cv_{'0' * 26}_{'c' * 20}",
    f"whsec_{S}",
    f"postgres://user:{S}@db.internal:5432/conveyor",
    f"postgresql://user:{S}@[::1]/conveyor?sslmode=require",
    f"postgres://user:pa/ss?w#{S}@db/conveyor",
    f"postgres://user:{S}/with@two@db/conveyor",
    f"postgres://user:123/{S}@db/conveyor",
    f"postgres://user:{{{S}|^}}@db/conveyor",
    f"the URL postgres://user:{S}",
    f"api_key%3D{S}%26more",
    f"redis://:{S}@cache:6379/0",
    f"rediss://default:{S}@cache?prefix=x",
    f"redis+cluster://default:{S}@one:6379,two:6379",
    f"rediss+sentinel://me:{S}@one:26379,two/main/0?sentinel_password={S}",
    f"rediss+sentinel://one:26379/main?sentinel_password=a@{S}",
    f"could not connect to 'postgres://u:{S}@h/d'",
    f"https://{S}@example.com/",
    f"https://user:{S}@example.com",
    f"http://example.com/a?b={S}",
    f"http://example.com/a?{S}",
    f"http://example.com?b=1&c={S}#d",
    f"http://example.com/#access_token={S}",
    f"(see http://example.com/a?b={S}).",
    f"<http://example.com/a?b={S}>",
    f"HTTP://EXAMPLE.COM/A?B={S}",
    f"https:\\/\\/u:{S}@example.com\\/a?b={S}",
    f"https://gateway.example/v1?api_key={S}&url=https%3A%2F%2Fexample.com%2F%3Fq%3D{S}",
    f"s3://bucket/key?X-Amz-Signature={S}&X-Amz-Credential={S}",
    f"X-Amz-Signature={S}&X-Amz-Date=20260101",
    f"X-Amz-Security-Token: {S}",
    f"GET /v1/uploads/upload_1/content?signature={S} HTTP/1.1",
    f"/v1/jobs?x={S}",
    f"CONVEYOR_SIGNING_KEY={S}",
    f"CONVEYOR_METRICS_TOKEN={S}",
    f"AWS_SECRET_ACCESS_KEY={S}",
    f"aws_access_key_id = {S}",
    f'{{"password": "{S}", "user": "u"}}',
    f'{{\\"password\\": \\"{S}\\"}}',
    f"password='{S}'",
    f"Settings(signing_key='{S}', port=1)",
    f"client_secret={S}&grant_type=x",
    f"taskToken={S}",
    f"X-Api-Key: {S}",
    f"apikey:{S}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI{S}.{S}",
    f"AKIA{'A' * 16}",
    f"the token {TOKEN} is not known",
    f'Traceback:\n  File "x.py", line 1\nOSError: http://u:{S}@h/p?q={S}\n',
]


@pytest.mark.parametrize("text", VECTORS)
def test_no_secret_is_left(text: str) -> None:
    shown = redact(text)
    for secret in (S, "c" * 20, TOKEN[20:60], f"AKIA{'A' * 16}"):
        assert secret not in shown, shown
    assert GONE in shown
    assert redact(shown) == shown
    # The same in whatever it is a part of.
    for value in (text, [text], {"more": {"deep": text}}, text.encode(), ValueError(text)):
        assert S not in json.dumps(redact_event(None, "info", {"event": "x", "value": value}), default=str)


@pytest.mark.parametrize(
    "text",
    [
        "run moved",
        "job_01jz3v5e8k9m2n4p6q8r0s2t4v run_01jz3v5e8k9m2n4p6q8r0s2t4v",
        "sha256 " + "a" * 64,
        "counts=Counts(succeeded=5, failed=2)",
        "tokens=5 left",
        "127.0.0.1:8080",
        "https://example.com/a/path.html",
        "https://example.com:8443/@user/page",
        "http://[::1]:8080/a@b",
        "Can not listen on 127.0.0.1:80: Address already in use.",
        "No API key: set CONVEYOR_API_KEY, or CONVEYOR_DATA to the directory that `conveyor up` uses.",
        "is it? yes: a=b",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("name", ["authorization", "task_token", "api_key", "password", "webhook_secret", "signature"])
def test_a_value_under_a_secret_name_is_left_out_whatever_it_is(name: str) -> None:
    event = redact_event(None, "info", {name: f"plain {S}", "headers": {name: S}, f"{name}s": 3})
    assert S not in str(event)
    assert event[f"{name}s"] == 3


@given(st.text(max_size=300))
def test_no_text_breaks_it(text: str) -> None:
    shown = redact(text)
    assert redact(shown) == shown


def test_a_long_text_takes_no_long_time() -> None:
    for piece in ("token", "://", "a:b@", "=" * 3, "Authorization:", "?a=", "cv_" + "0" * 26, " " * 10):
        redact(piece * 20_000)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def say_hostile_lines() -> None:
    log = structlog.get_logger()
    log.info("fetched", url=f"http://u:{S}@h/?{S}", authorization=S, job="job_1")
    log.warning("odd\nline \x1b[31m", value="\x1b[2J\n", count=3)
    try:
        raise OSError(f"postgres://u:{S}@h/d")
    except OSError:
        log.exception("failed")
    logging.getLogger("library").warning("no answer from %s", f"https://h/?key={S}")
    logging.getLogger("library").info("not of interest")


def logged(form: str, say: Callable[[], None] = say_hostile_lines, *, terminal: bool = False) -> str:
    """What a few lines come out as."""
    said: Any = _Terminal() if terminal else io.StringIO()
    before, level = logging.getLogger().handlers, logging.getLogger().level
    configured = structlog.get_config()
    try:
        with redirect_stderr(said):
            configure_log("info", form=form)
            say()
    finally:
        structlog.configure(**configured)
        logging.getLogger().handlers = before
        logging.getLogger().setLevel(level)
    return str(said.getvalue())


def test_the_log_is_json_where_nobody_looks() -> None:
    before = dict(metrics.LOGGED.series)
    lines = [json.loads(line) for line in logged("auto").splitlines()]
    assert [line["event"] for line in lines] == [
        "fetched",
        "odd\nline \x1b[31m",
        "failed",
        f"no answer from https://h/?{GONE}",
    ]
    assert lines[0]["job"] == "job_1"
    assert lines[2]["exception"].endswith(f"OSError: postgres://{GONE}@h/d")
    assert lines[3]["logger"] == "library"
    assert {"timestamp", "level"} <= lines[0].keys()
    assert metrics.LOGGED.series["warning",] == before["warning",] + 2
    assert metrics.LOGGED.series["error",] == before["error",] + 1


def test_a_full_disk_is_explained_without_a_traceback() -> None:
    error = full(Path("/data"))

    def say() -> None:
        log = structlog.get_logger()
        try:
            raise error
        except DiskFull:
            log.exception("role tick failed")
        log.error("request failed", exc_info=error)
        log.error("submit failed", exc_info=(type(error), error, error.__traceback__))
        log.error("another", exc_info=EngineFailed("of another kind"))

    *disk, other = [json.loads(line) for line in logged("json", say).splitlines()]
    assert [(line["event"], line["error"], line.get("exception")) for line in disk] == [
        (event, "The disk of /data is full. Free some space; the server resumes by itself.", None)
        for event in ("role tick failed", "request failed", "submit failed")
    ]
    assert "of another kind" in other["exception"]


def test_a_damaged_body_is_explained_without_a_traceback() -> None:
    def say() -> None:
        log = structlog.get_logger()
        damaged = BodyDamaged("a byte is another one")
        log.error("request failed", exc_info=damaged)
        try:
            # As the framework does while it streams a response.
            raise LitestarException("after response started") from ExceptionGroup("tasks", [damaged])
        except LitestarException:
            log.exception("response aborted")
        log.error("another", exc_info=LitestarException("by itself"))
        log.error("another", exc_info=ExceptionGroup("tasks", [damaged, ValueError("a mistake")]))

    *damaged, own, two = [json.loads(line) for line in logged("json", say).splitlines()]
    assert [(line["event"], line.get("error"), line.get("exception")) for line in damaged] == [
        (event, "a byte is another one", None) for event in ("request failed", "response aborted")
    ]
    assert "by itself" in own["exception"]
    assert "a mistake" in two["exception"]


def test_a_child_process_says_nothing_else() -> None:
    code = f"""
import logging
from conveyor.telemetry.plain import configure_plain_log
configure_plain_log("fetcher")
try:
    raise OSError("http://u:{S}@h/?{S}")
except OSError:
    logging.getLogger("asyncio").exception("Task exception was never retrieved: %s", "Bearer {S}")
import sys
assert "structlog" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    [line] = done.stderr.splitlines()
    said = json.loads(line)
    assert (said["level"], said["role"], said["logger"]) == ("error", "fetcher", "asyncio")
    assert said["exception"].endswith(f"OSError: http://{GONE}@h/?{GONE}")
    assert S not in line


def test_the_log_is_for_people_on_a_terminal_and_obeys_nobody() -> None:
    shown = logged("auto", terminal=True)
    assert S not in shown
    assert "\x1b" not in shown
    assert "fetched" in shown and "Traceback" in shown
    assert logged("json", terminal=True).startswith("{")
    assert not logged("console").startswith("{")
    assert sys.stderr is not None
