"""A run over a site that answers with every oddity, beside curl: the bytes that both keep are the same, or the page
docs/reference/responses.md says why not. CONVEYOR_TEST_RESPONSES=1 writes the table there."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from tests.docs.blocks import DOCS
from tests.flow.test_cli import Cli
from tests.support.odd_site import ANSWERS, odd_site

PAGE = DOCS / "reference" / "responses.md"
_TABLE = re.compile(r"(?<=<!-- measured -->\n\n).*?(?=\n\n<!-- end -->)", re.S)
_MAX_REDIRECTS = "10"
# Of curl, in Debian 12: the one that the page was measured with.
VERSION = "7.88.1"


class Kept(NamedTuple):
    """What a client makes of an answer: its status, an error, and the bytes that it keeps."""

    status: int | None
    error: str | None
    body: bytes | None

    def text(self) -> str:
        if self.error is not None:
            return f"`{self.error}`"
        return f"{self.status}, {'no body' if not self.body else f'{len(self.body):,} bytes'}"


# What differs, and why that is so.
EXPLAINED = {
    "lengths-differ": "curl takes the last length. No length can be trusted, so the task fails (RFC 9112, 6.3)",
    "gzip-two-members": "curl reads the first member only. A gzip file may have several (RFC 1952, 2.2): all are kept",
    "gzip-cut": "curl keeps what it could decode, and says nothing. A body that is not whole fails the task",
}


async def curl(site: str, name: str, place: Path) -> Kept:
    """As a careful user calls it: decoded, redirected with the cookies that were set on the way."""
    file = place / "curl" / name
    process = await asyncio.create_subprocess_exec(
        *(
            "curl",
            "--silent",
            "--compressed",
            "--location",
            "--cookie",
            "",
            "--max-redirs",
            _MAX_REDIRECTS,
            "--max-time",
            "20",
        ),
        *("--proto-redir", "=http,https", "--output", str(file), "--write-out", "%{http_code}", f"{site}/{name}"),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    if process.returncode:
        return Kept(None, f"curl: ({process.returncode})", None)
    return Kept(int(said), None, file.read_bytes() if file.exists() else b"")


async def conveyor(site: str, place: Path) -> dict[str, Kept]:
    cli = Cli(place, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    cli.write("odd.jsonl", *(json.dumps({"url": f"{site}/{name}", "id": name}) for name in ANSWERS))
    options = ("--attempts", "1", "--no-breaker", "--timeout", "20", "--option", f"max_redirects={_MAX_REDIRECTS}")
    done = await asyncio.to_thread(cli, "run", "odd.jsonl", "-o", "out/", *options)
    assert done.returncode == 3, done.stderr
    lines = [json.loads(line) for line in (place / "out" / "manifest.jsonl").read_text().splitlines()]
    return {line["id"]: kept(line, place / "out") for line in lines}


def kept(line: dict[str, object], place: Path) -> Kept:
    body = (place / str(line["file"])).read_bytes() if line["file"] else b""
    error = line["error"]["code"] if isinstance(line["error"], dict) else None
    status = line["http_status"]
    assert status is None or isinstance(status, int)
    # A status is not an error of the exchange, to curl.
    return Kept(status, None if error is None or error.startswith("http_") else error, body)


async def test_the_same_bytes_as_curl(tmp_path: Path) -> None:
    (tmp_path / "curl").mkdir()
    async with odd_site() as site:
        ours = await conveyor(site, tmp_path)
        answers = await asyncio.gather(*(curl(site, name, tmp_path) for name in ANSWERS))
    theirs = dict(zip(ANSWERS, answers, strict=True))
    assert ours.keys() == theirs.keys()
    written = PAGE.read_text()
    # What Conveyor keeps is the same beside any curl; what curl does differs between its versions.
    if not os.environ.get("CONVEYOR_TEST_RESPONSES"):
        kept_here = {name: ours[name].text() for name in ANSWERS}
        assert kept_here == {name: column_of(written, name) for name in ANSWERS}
    if await curl_version() != VERSION:
        return
    rows = [f"| {name} | {theirs[name].text()} | {ours[name].text()} | {EXPLAINED.get(name, '')} |" for name in ANSWERS]
    table = "\n".join(["| answer | curl | Conveyor | |", "|---|---|---|---|", *rows])
    if os.environ.get("CONVEYOR_TEST_RESPONSES"):
        PAGE.write_text(_TABLE.sub(lambda _: table, written))
    differing = {name for name in ANSWERS if not agree(ours[name], theirs[name])}
    assert differing == set(EXPLAINED), {name: (theirs[name], ours[name]) for name in differing ^ set(EXPLAINED)}
    assert table in PAGE.read_text(), "run it with CONVEYOR_TEST_RESPONSES=1"


def column_of(page: str, name: str) -> str:
    """What the page says that Conveyor keeps."""
    row = next((line for line in page.splitlines() if line.startswith(f"| {name} |")), "| | | |")
    return row.split(" | ")[2]


async def curl_version() -> str:
    process = await asyncio.create_subprocess_exec("curl", "--version", stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return said.decode().split()[1]


async def test_the_same_headers_as_curl(tmp_path: Path) -> None:
    names = [name for name in ANSWERS if name.startswith("header") and name != "header-no-colon"]
    cli = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    async with odd_site() as site:
        cli.write("odd.txt", *(f"{site}/{name}" for name in names))
        done = await asyncio.to_thread(cli, "run", "odd.txt", "-o", "out.jsonl")
        assert done.returncode == 0, done.stderr
        told = await asyncio.gather(*(curl_headers(f"{site}/{name}") for name in names))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {name: line["headers"] for name, line in zip(names, lines, strict=True)} == dict(
        zip(names, told, strict=True)
    )


async def curl_headers(url: str) -> list[list[str]]:
    call = ("curl", "--silent", "--dump-header", "-", "--output", "/dev/null", url)
    process = await asyncio.create_subprocess_exec(*call, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    _, *lines = said.decode("latin-1").replace("\r\n ", " ").split("\r\n")
    return [[name.strip().lower(), value.strip()] for name, _, value in (line.partition(":") for line in lines) if name]


def agree(ours: Kept, theirs: Kept) -> bool:
    """Both fail, or both have the same status and bytes."""
    if ours.error or theirs.error:
        return bool(ours.error and theirs.error)
    return (ours.status, ours.body) == (theirs.status, theirs.body)
