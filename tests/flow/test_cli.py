"""The command line as a user has it: real processes of `conveyor`, a real target site, a real server."""

import atexit
import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.demo_site import demo_site
from tests.support.forked_commands import Commands
from tests.support.zstd_library import zstd

CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
MANIFEST_FIELDS = {
    "index",
    "task_id",
    "input",
    "status",
    "http_status",
    "attempts",
    "file",
    "size",
    "sha256",
    "content_type",
    "error",
}
PATIENCE = 60


def environment(**more: str) -> dict[str, str]:
    """Without what the developer has set, and without a terminal's colours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    # One fetcher: what is fetched here is little, and a process takes its time to start.
    return {**clean, "NO_COLOR": "1", "COLUMNS": "200", "CONVEYOR_FETCHERS": "1", **more}


@cache
def _commands() -> Commands:
    commands = Commands(environment())
    atexit.register(commands.close)
    return commands


@dataclass(frozen=True)
class Cli:
    """`conveyor` in a directory of its own."""

    place: Path
    settings: dict[str, str]

    def __call__(self, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return _commands().run(arguments, self.place, environment(**self.settings), given, PATIENCE)

    def json(self, *arguments: str) -> Any:
        answered = self(*arguments, "--json")
        assert answered.returncode == 0, answered.stderr
        return json.loads(answered.stdout)

    def start(self, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [CONVEYOR, *arguments],
            cwd=self.place,
            env=environment(**self.settings),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def write(self, name: str, *lines: str) -> str:
        (self.place / name).write_text("".join(line + "\n" for line in lines))
        return name


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with demo_site() as url:
        yield url


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})


@contextmanager
def serving(place: Path, *arguments: str, **more: str) -> Iterator[Cli]:
    """`conveyor up` on a free port, and a command line that knows its address; it ends by SIGTERM, cleanly."""
    settings = {"CONVEYOR_DATA": str(place / "data"), "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"}
    # The tests share a server and a site: that pages of one fail must not open a breaker for the next.
    settings |= {"CONVEYOR_BREAKER_LEAST": "1000000", **more}
    # Into a file: a pipe that nobody reads fills up, and then the server waits for it.
    log = place / "up.log"
    with (
        log.open("w") as said,
        Cli(place, settings).start("up", "--port", "0", *arguments, stderr=said.fileno()) as process,
    ):
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            url = re.search(r"http://\S+", first)
            assert url is not None, first + log.read_text()
            yield Cli(place, {**settings, "CONVEYOR_URL": url[0]})
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0, log.read_text()[-5000:]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with serving(tmp_path_factory.mktemp("up")) as cli:
        yield cli


def manifest(path: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]


def compressed(lines: list[str], suffix: str) -> bytes:
    data = "".join(line + "\n" for line in lines).encode()
    return gzip.compress(data) if suffix == "gz" else zstd.compress(data)


def broken_gzip(lines: list[str]) -> bytes:
    return compressed(lines, "gz")[:-20]


def one_line(answered: subprocess.CompletedProcess[str], code: str) -> str:
    """The command said one line, on standard error, with this code."""
    lines = answered.stderr.splitlines()
    assert len(lines) == 1, answered.stderr
    assert lines[0].startswith("conveyor: ")
    assert lines[0].endswith(f"[{code}]"), lines[0]
    return lines[0]


def test_run_with_all_succeeded(cli: Cli, site: str) -> None:
    urls = [f"{site}/quick/{number}" for number in range(20)] + [f"{site}/redirect/1"]
    cli.write("urls.txt", "# pages", "", *urls)
    done = cli("run", "urls.txt", "-o", "out.zip")
    assert done.returncode == 0, done.stderr
    assert "21" in done.stdout
    assert "out.zip" in done.stdout
    lines = manifest(cli.place / "out.zip")
    assert [line["input"] for line in lines] == urls
    with zipfile.ZipFile(cli.place / "out.zip") as archive:
        # An index is the number of a line: two of them have no task.
        for index, line in enumerate(lines, start=2):
            assert set(line) >= MANIFEST_FIELDS
            assert line["index"] == index
            assert line["status"] == "succeeded"
            assert (line["http_status"], line["attempts"], line["error"]) == (200, 1, None)
            assert line["content_type"].startswith("text/html")
            body = archive.read(line["file"])
            assert (len(body), sha256(body).hexdigest()) == (line["size"], line["sha256"])
    assert sorted(path.name for path in cli.place.iterdir()) == ["out.zip", "urls.txt"]


def test_run_with_some_failed(cli: Cli, site: str) -> None:
    cli.write("urls.txt", f"{site}/quick/1", f"{site}/missing/2", f"{site}/flaky/{os.getpid()}")
    done = cli("run", "urls.txt", "-o", "out.zip", "--json")
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert report["archive"] == "out.zip"
    assert report["job"]["state"] == "completed"
    counts = report["job"]["run"]["counts"]
    assert counts == {"pending": 0, "running": 0, "succeeded": 2, "failed": 1, "cancelled": 0, "unchanged": 0}
    quick, missing, flaky = manifest(cli.place / "out.zip")
    assert quick["status"] == "succeeded"
    assert (missing["status"], missing["http_status"]) == ("failed", 404)
    assert set(missing["error"]) == {"code", "message"}
    assert (flaky["status"], flaky["attempts"]) == ("succeeded", 2)
    assert report["job"]["top_errors"] == [{"code": missing["error"]["code"], "count": 1}]


def test_run_from_standard_input_and_several_lists(cli: Cli, site: str) -> None:
    cli.write("more.jsonl", json.dumps({"url": f"{site}/quick/2", "id": "mine"}))
    cli.write("rows.csv", "url,tag", f"{site}/quick/3,red")
    done = cli("run", "-", "more.jsonl", "rows.csv", "-o", "out.zip", given=f"{site}/quick/1\n")
    assert done.returncode == 0, done.stderr
    assert [line["input"] for line in manifest(cli.place / "out.zip")] == [
        f"{site}/quick/1",
        {"url": f"{site}/quick/2", "id": "mine"},
        {"url": f"{site}/quick/3", "tag": "red"},
    ]


def test_run_refuses_private_targets_unless_told(tmp_path: Path, site: str) -> None:
    closed = Cli(tmp_path, {})
    closed.write("urls.txt", f"{site}/quick/1")
    assert closed("run", "urls.txt", "-o", "out.zip").returncode == 3
    assert manifest(tmp_path / "out.zip")[0]["http_status"] is None
    assert closed("run", "urls.txt", "-o", "out.zip", "--allow-private-targets", "--overwrite").returncode == 0


def test_run_with_python_handler(cli: Cli) -> None:
    app = "import conveyor\n\n\n@conveyor.task('double')\ndef double(value):\n    return value * 2\n"
    (cli.place / "mine.py").write_text(app)
    cli.write("numbers.jsonl", "1", "2", "21")
    done = cli("run", "numbers.jsonl", "-o", "out.zip", "--app", "mine", "--handler", "double")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(cli.place / "out.zip") as archive:
        bodies = [json.loads(archive.read(line["file"])) for line in manifest(cli.place / "out.zip")]
    assert bodies == [2, 4, 42]


@pytest.mark.parametrize(
    ("arguments", "lines", "code"),
    [
        (["absent.txt", "-o", "out.zip"], [], "list_unreadable"),
        (["list.txt", "-o", "out.zip"], ["", "# nothing"], "no_tasks"),
        (["list.txt", "-o", "out.zip"], [], "no_tasks"),
        (["bad.gz", "-o", "out.zip"], [], "list_unreadable"),
        (["list.csv", "-o", "out.zip"], [], "list_unreadable"),
        (["list.txt", "-o", "absent/out.zip"], ["https://example.com"], "bad_input"),
        (["list.txt", "-o", "."], ["https://example.com"], "bad_input"),
        (["list.txt", "-o", "/"], ["https://example.com"], "bad_input"),
        (["list.txt", "-o", "out.zip", "--data", "list.txt"], ["https://example.com"], "bad_input"),
        (["list.txt", "-o", "out.zip", "--resume"], ["https://example.com"], "bad_input"),
        (["list.txt", "-o", "out.zip", "--header", "nonsense"], ["https://example.com"], "bad_input"),
        (["list.txt", "-o", "out.zip", "--header", "X: a\nY: b"], ["https://example.com"], "invalid_field"),
        (["list.txt", "-o", "out.zip", "--concurrency", "1000000"], ["https://example.com"], "invalid_field"),
        (["list.txt", "-o", "out.zip", "--gateway", "nonsense"], ["https://example.com"], "invalid_field"),
    ],
)
def test_run_with_bad_input(cli: Cli, arguments: list[str], lines: list[str], code: str) -> None:
    cli.write("list.txt", *lines)
    cli.write("list.csv", "name,color", "a,red")
    (cli.place / "bad.gz").write_bytes(broken_gzip(["https://example.com"] * 1000))
    before = sorted(cli.place.iterdir())
    refused = cli("run", *arguments)
    assert refused.returncode == 2
    assert refused.stdout == ""
    one_line(refused, code)
    assert sorted(cli.place.iterdir()) == before, "nothing is left behind"


def test_run_with_lines_that_are_no_task(cli: Cli, site: str) -> None:
    bad = [f"no url {number}" for number in range(12)]
    cli.write("list.txt", f"{site}/quick/1", *bad, f"{site}/quick/2")
    refused = cli("run", "list.txt", "-o", "out.zip", "--on-invalid", "reject")
    assert refused.returncode == 2
    assert refused.stdout == ""
    *shown, last = refused.stderr.splitlines()
    assert [line.split(":")[0].strip() for line in shown] == [f"line {number}" for number in range(2, 12)]
    assert "no url 9" in shown[-1]
    assert "12 invalid lines" in last
    assert "--on-invalid skip" in last
    assert last.endswith("[list_rejected]")
    assert [path.name for path in cli.place.iterdir()] == ["list.txt"], "nothing is left behind"

    done = cli("run", "list.txt", "-o", "out.zip")
    assert done.returncode == 0, done.stderr
    assert "12 invalid lines" in done.stdout
    assert [line["index"] for line in manifest(cli.place / "out.zip")] == [0, 13]
    left_out = [json.loads(line) for line in (cli.place / "out.zip.invalid.jsonl").read_text().splitlines()]
    assert [line["line"] for line in left_out] == list(range(2, 14))
    assert left_out[0]["text"] == "no url 0"

    cli.write("worse.txt", *bad)
    refused = cli("run", "worse.txt", "-o", "worse.zip", "--on-invalid", "skip")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("[no_tasks]")
    assert len(refused.stderr.splitlines()) == 11


def test_a_csv_from_a_spreadsheet(cli: Cli, up: Cli, site: str) -> None:
    rows = ["\ufeffSKU;Link;Price", f"a1;{site}/quick/1;1,50", f"a2;{site}/quick/2;"]
    expected = [
        {"url": f"{site}/quick/1", "data": {"SKU": "a1", "Price": "1,50"}},
        {"url": f"{site}/quick/2", "data": {"SKU": "a2"}},
    ]
    cli.write("products.csv", *rows)
    refused = cli("run", "products.csv", "-o", "out.zip")
    assert refused.returncode == 2
    assert "no column `url`. Its columns are `SKU`, `Link`, `Price`" in refused.stderr
    done = cli("run", "products.csv", "-o", "out.zip", "--url-column", "link")
    assert done.returncode == 0, done.stderr
    assert [line["input"] for line in manifest(cli.place / "out.zip")] == expected
    up.write("products.csv", *rows)
    for lists in (["products.csv"], ["products.csv", "products.csv"]):
        done = up("submit", *lists, "--url-column", "Link", "--wait", "--json")
        assert done.returncode == 0, done.stderr
        results = up.json("results", json.loads(done.stdout)["id"])
        assert [item["input"] for item in sorted(results, key=lambda item: item["index"])] == expected * len(lists)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_run_of_a_compressed_list(cli: Cli, site: str, suffix: str) -> None:
    urls = [f"{site}/quick/{number}" for number in range(50)]
    (cli.place / f"urls.txt.{suffix}").write_bytes(compressed(urls, suffix))
    done = cli("run", f"urls.txt.{suffix}", "-o", "out.zip")
    assert done.returncode == 0, done.stderr
    assert [line["input"] for line in manifest(cli.place / "out.zip")] == urls


def test_a_setting_that_is_not_valid(tmp_path: Path) -> None:
    refused = Cli(tmp_path, {"CONVEYOR_PORT": "many"})("jobs")
    assert refused.returncode == 2
    assert "CONVEYOR_PORT" in one_line(refused, "invalid_setting")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_and_resume(cli: Cli, site: str, number: signal.Signals) -> None:
    urls = [f"{site}/slow/{index}" for index in range(60)]
    cli.write("urls.txt", *urls)
    command = ["run", "urls.txt", "-o", "out.zip", "--concurrency", "4"]
    with cli.start(*command) as process:
        database = cli.place / "out.zip.conveyor" / "run.json"
        assert process.stderr is not None
        wait_for(lambda: database.exists() and "job_" in database.read_text())
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(PATIENCE) == 128 + number
    assert "--resume" in said
    assert not (cli.place / "out.zip").exists()

    refused = cli(*command)
    assert refused.returncode == 2
    assert "--resume" in one_line(refused, "bad_input")

    cli.write("other.txt", f"{site}/quick/1")
    refused = cli("run", "other.txt", "-o", "out.zip", "--resume")
    assert refused.returncode == 2
    assert "another list" in one_line(refused, "bad_input")

    done = cli(*command, "--resume")
    assert done.returncode == 0, done.stderr
    lines = manifest(cli.place / "out.zip")
    assert [line["input"] for line in lines] == urls
    assert all(line["attempts"] == 1 for line in lines)
    assert not (cli.place / "out.zip.conveyor").exists()


def test_killed_and_resumed_in_a_named_directory(cli: Cli, site: str) -> None:
    cli.write("urls.txt", *(f"{site}/slow/{index}" for index in range(60)))
    command = ["run", "urls.txt", "-o", "out.zip", "--concurrency", "8", "--data", "mine"]
    with cli.start(*command) as process:
        mark = cli.place / "mine" / "run.json"
        wait_for(lambda: mark.exists() and "job_" in mark.read_text())
        process.kill()
    done = cli(*command, "--resume")
    assert done.returncode == 0, done.stderr
    assert len(manifest(cli.place / "out.zip")) == 60
    assert (cli.place / "mine").is_dir()
    assert not mark.exists()
    assert cli(*command, "--overwrite").returncode == 0, "a finished run is no obstacle"


def wait_for(condition: Any) -> None:
    """Until a process outside has come so far; its speed is not ours to set."""
    import time

    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_submit_watch_results_export(up: Cli, site: str) -> None:
    up.write("urls.txt", *(f"{site}/quick/{index}" for index in range(30)), f"{site}/missing/1")
    submitted = up("submit", "urls.txt", "--name", "nightly")
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    assert re.fullmatch(r"job_[0-9a-z]{26}", job_id)

    watched = up("watch", job_id)
    assert watched.returncode == 3, watched.stderr
    assert "31 of 31 done" in watched.stdout

    shown = up.json("show", job_id)
    assert {"id", "state", "reason", "kind", "mode", "task_shard_count", "run"} <= set(shown)
    assert (shown["state"], shown["kind"], shown["mode"]) == ("completed", "fetch", "closed")
    assert {"id", "number", "state", "total", "counts"} <= set(shown["run"])
    assert shown["run"]["counts"] == {
        "pending": 0,
        "running": 0,
        "succeeded": 30,
        "failed": 1,
        "cancelled": 0,
        "unchanged": 0,
    }
    assert "nightly" in up("show", job_id, "--events").stdout

    assert job_id in [job["id"] for job in up.json("jobs")]
    assert len(up.json("jobs", "--limit", "1")) == 1
    assert job_id in up("jobs").stdout

    assert sorted(task["index"] for task in up.json("results", job_id)) == list(range(31))
    assert [task["http_status"] for task in up.json("results", job_id, "--status", "failed")] == [404]
    assert len(up.json("results", job_id, "--limit", "7")) == 7
    assert f"{site}/missing/1" in up("results", job_id, "--status", "failed").stdout

    exported = up("export", job_id, "-o", "out.zip")
    assert exported.returncode == 0, exported.stderr
    assert re.fullmatch(r"out\.zip \(.* KiB\)\n", exported.stdout)
    assert len(manifest(up.place / "out.zip")) == 31


def test_exports_of_every_form(up: Cli, site: str) -> None:
    up.write("urls.txt", *(f"{site}/quick/{index}" for index in range(300)), f"{site}/missing/1")
    job_id = json.loads(up("submit", "urls.txt", "--wait", "--json").stdout)["id"]

    made = up.json("export", job_id, "-o", "out.jsonl.gz", "--bodies", "text")
    assert (made["job"], made["archive"], made["counts"]["tasks"]) == (job_id, "out.jsonl.gz", 301)
    lines = [json.loads(line) for line in gzip.decompress((up.place / "out.jsonl.gz").read_bytes()).splitlines()]
    assert [line["index"] for line in lines] == list(range(301))
    assert "quick page 7<" in lines[7]["body"]

    assert up("export", job_id, "-o", "failed.csv", "--status", "failed").returncode == 0
    [failed] = csv.DictReader((up.place / "failed.csv").read_text().splitlines())
    assert (failed["index"], failed["http_status"], failed["input"]) == ("300", "404", f"{site}/missing/1")

    made = up.json("export", job_id, "-o", "parts.zip", "--part-size", "64K", "--compression", "none")
    assert len(made["files"]) > 1
    assert made["archive"] is None
    assert made["files"][0] == "parts-0001.zip"
    indexes = [line["index"] for name in made["files"] for line in manifest(up.place / name)]
    assert indexes == list(range(301))
    listed = json.loads((up.place / "parts.zip.manifest.json").read_text())
    assert [part["size"] for part in listed["parts"]] == [(up.place / name).stat().st_size for name in made["files"]]

    # A part that is there is not downloaded again; one that is gone is.
    (up.place / made["files"][1]).unlink()
    again = up.json("export", job_id, "-o", "parts.zip", "--id", made["export"])
    assert again["files"] == made["files"]
    assert (up.place / made["files"][1]).exists()

    refused = up("export", job_id, "-o", "out.xyz")
    assert (refused.returncode, "--format" in refused.stderr) == (2, True)
    refused = up("export", job_id, "-o", "out.csv", "--bodies", "text")
    assert (refused.returncode, "invalid_field" in refused.stderr) == (2, True)
    refused = up("export", job_id, "-o", "new.zip", "--part-size", "many")
    assert (refused.returncode, "--part-size" in refused.stderr) == (2, True)
    assert sorted(path.name for path in up.place.glob("*.part")) == []


def test_a_job_takes_the_place_of_another(up: Cli, site: str) -> None:
    old = up("submit", "-", "--rate", "0.1", given="".join(f"{site}/quick/{index}\n" for index in range(9)))
    job_id = old.stdout.strip()
    done = up("submit", "-", "--replaces", job_id, "--wait", given=f"{site}/quick/1\n")
    assert done.returncode == 0, done.stderr
    shown = up.json("show", job_id)
    assert (shown["state"], shown["reason_code"]) == ("cancelled", "replaced")
    assert "replaced by job_" in shown["reason"]
    unknown = up("submit", "-", "--replaces", "job_" + "0" * 26, given=f"{site}/quick/1\n")
    assert unknown.returncode != 0
    assert "not found" in unknown.stderr


def test_submit_and_wait(up: Cli, site: str) -> None:
    done = up("submit", "-", "--wait", "--json", given=f"{site}/quick/1\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "completed"
    assert json.loads(up("submit", "-", "--json", given=f"{site}/quick/1\n").stdout)["id"].startswith("job_")


_WITH_MEMORY = """
import sys
from conveyor.cli import main
try:
    main(sys.argv[1:])
finally:
    # Not ru_maxrss: a child has that of the parent it was forked from.
    print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""


def submit_measured(cli: Cli, path: str) -> tuple[str, int]:
    """The job's id, and the most memory of the process that submitted it, in KiB."""
    done = subprocess.run(
        [sys.executable, "-c", _WITH_MEMORY, "submit", path, "--concurrency", "1", "--attempts", "1"],
        cwd=cli.place,
        env=environment(**cli.settings),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout.strip(), int(re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)[0])


def test_submit_takes_no_more_memory_for_a_long_list(up: Cli) -> None:
    memory = {}
    # The first of these is sent in several pieces, too: what is under way of a list is then the same for both.
    for count in (20_000, 400_000):
        up.write("long.txt", *(f"http://127.0.0.1:9/{number}" for number in range(count)))
        job_id, memory[count] = submit_measured(up, "long.txt")
        wait_for(lambda job_id=job_id: up.json("show", job_id)["state"] != "ingesting")
        shown = up.json("show", job_id)
        assert (shown["run"]["total"], shown["ingest"]["tasks"], shown["ingest"]["invalid"]) == (count, count, 0)
        assert up("delete", job_id, "--yes").returncode == 0
    print(memory)
    assert memory[400_000] < 1.1 * memory[20_000]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_submit_of_a_compressed_list(up: Cli, site: str, suffix: str) -> None:
    lines = [json.dumps({"url": f"{site}/quick/{number}"}) for number in range(1500)]
    (up.place / f"pages.jsonl.{suffix}").write_bytes(compressed(lines, suffix))
    done = up("submit", f"pages.jsonl.{suffix}", "--wait")
    assert done.returncode == 0, done.stderr
    assert "1,500 of 1,500 done" in done.stdout


def test_submit_of_several_lists_and_standard_input(up: Cli, site: str) -> None:
    (up.place / "some.txt.gz").write_bytes(compressed([f"{site}/quick/1"], "gz"))
    up.write("rows.csv", "url,tag", f"{site}/quick/2,red")
    done = up("submit", "some.txt.gz", "-", "rows.csv", "--wait", "--json", given=f"# page\n{site}/quick/3\n")
    assert done.returncode == 0, done.stderr
    tasks = sorted(up.json("results", json.loads(done.stdout)["id"]), key=lambda task: task["index"])
    assert [task["input"] for task in tasks] == [
        f"{site}/quick/1",
        f"{site}/quick/3",
        {"url": f"{site}/quick/2", "tag": "red"},
    ]


def test_submit_of_lines_that_are_no_task(up: Cli, site: str) -> None:
    up.write("mixed.txt", f"{site}/quick/1", "no url", f"{site}/quick/2", "ftp://example.com")
    done = up("submit", "mixed.txt", "--wait")
    assert done.returncode == 0, done.stderr
    assert "2 invalid lines" in done.stdout
    job_id = done.stdout.partition(":")[0]
    lines = up.json("invalid", job_id)
    assert [(line["line"], line["text"]) for line in lines] == [(2, "no url"), (4, "ftp://example.com")]
    assert "ftp://example.com" in up("invalid", job_id).stdout
    assert len(up.json("invalid", job_id, "--limit", "1")) == 1
    assert "2 invalid lines" in up("show", job_id).stdout
    listed = next(line for line in up("jobs").stdout.splitlines() if job_id in line)
    assert re.search(r" 2 +2 +0 +2 ", f"{listed} "), listed
    # Nothing but the id is on standard output.
    sent = up("submit", "mixed.txt")
    assert f"2 invalid lines skipped; `conveyor invalid {sent.stdout.strip()}` lists them." in sent.stderr

    done = up("submit", "mixed.txt", "--wait", "--on-invalid", "reject")
    assert done.returncode == 2, done.stderr
    assert "2 invalid lines" in done.stdout
    assert up.json("invalid", done.stdout.partition(":")[0]) == lines


def test_a_list_without_a_task_is_refused_before_there_is_a_job(up: Cli, site: str) -> None:
    before, schedules = len(up.json("jobs")), up.json("schedules", "list")
    up.write("worse.txt", "# none", "no url", "", "ftp://example.com")
    up.write("worse.csv", "url,tag", "no url,a")
    for command in (
        ["submit", "worse.txt"],
        ["submit", "worse.txt", "--wait"],
        ["submit", "worse.txt", "worse.csv"],
        ["submit", "worse.txt", "--on-invalid", "reject", "--json"],
        ["schedules", "create", "0 6 * * *", "worse.txt"],
    ):
        refused = up(*command)
        assert (refused.returncode, refused.stdout) == (2, ""), command
        *lines, last = refused.stderr.splitlines()
        assert any("ftp://example.com" in line for line in lines)
        assert f"The list has no tasks ({len(lines)} invalid lines). [no_tasks]" in last
    assert up("submit", "worse.csv").returncode == 2
    up.write("one.csv", "link,tag", *["no url,a"] * 30, f"{site}/quick/1,b")
    assert up("submit", "one.csv", "--url-column", "link").returncode == 0
    assert len(up.json("jobs")) == before + 1
    (up.place / "book.xlsx").write_bytes(b"PK\x03\x04" + bytes(100))
    (up.place / "one.txt.xz").write_bytes(b"\xfd7zXZ" + bytes(100))
    for name, said in (("book.xlsx", "Excel file"), ("one.txt.xz", "compressed with xz")):
        for command in (["submit", name], ["submit", name, "one.csv"], ["schedules", "create", "0 6 * * *", name]):
            refused = up(*command)
            assert (refused.returncode, refused.stdout) == (2, ""), command
            assert said in refused.stderr
    assert len(up.json("jobs")) == before + 1
    assert up.json("schedules", "list") == schedules


def test_exhausted_retries_are_redriven_by_error_and_job(tmp_path: Path) -> None:
    with serving(tmp_path) as cli:
        (tmp_path / "down.txt").write_text("".join(f"http://127.0.0.1:9/{n}\n" for n in range(3)))
        parked = ("--attempts", "1", "--on-exhausted", "dead_letter")
        done = cli("submit", "down.txt", "--wait", "--json", *parked)
        assert done.returncode == 3
        job_id = json.loads(done.stdout)["id"]
        assert {letter["index"] for letter in cli.json("dead-letters", "list", "--job", job_id)} == {0, 1, 2}
        assert cli.json("dead-letters", "list", "--error-code", "timeout") == []
        assert f"{job_id}:1:0" in cli("dead-letters").stdout
        assert cli("dead-letters", "redrive", f"{job_id}:1:0", "--all").returncode == 2
        assert cli.json("dead-letters", "redrive", "--error-code", "connect_failed")["redriven"] == 3
        wait_for(lambda: cli.json("show", job_id)["state"] == "completed")
        dry = cli("dead-letters", "redrive", "--job", job_id, "--dry-run").stdout
        assert dry == f"3 would be redriven, 0 skipped.\n{job_id}: a rerun of 3 dead letters would start.\n"
        again = cli("dead-letters", "redrive", "--job", job_id, "--wait")
        assert "3 redriven, 0 skipped" in again.stdout
        assert f"{job_id}: 0 succeeded, 3 failed." in again.stdout
        assert again.returncode == 3
        assert cli.json("dead-letters", "redrive", f"{job_id}:3:2")["redriven"] == 1


def test_dead_letters_rerun_and_delete(tmp_path: Path) -> None:
    with serving(tmp_path) as cli:
        (tmp_path / "bad.txt.gz").write_bytes(broken_gzip([f"http://127.0.0.1:9/{n}" for n in range(1000)]))
        done = cli("submit", "bad.txt.gz", "--wait", "--json")
        assert done.returncode == 2
        job_id = json.loads(done.stdout)["id"]
        (letter,) = cli.json("dead-letters")
        assert (letter["job_id"], letter["queue"]) == (job_id, "control")
        assert "ends too early" in letter["reason"]
        assert cli.json("dead-letters", "list") == [letter]
        assert job_id in cli("dead-letters").stdout

        assert cli("dead-letters", "redrive").returncode == 2
        one_line(cli("dead-letters", "redrive", "999999"), "not_found")
        done = cli.json("dead-letters", "redrive", letter["id"])
        assert done == {"redriven": 1, "skipped": 0, "runs": [], "requeued": 1, "blocked": 0}
        wait_for(lambda: len(cli.json("dead-letters")) == 1 and cli.json("show", job_id)["state"] == "failed")
        assert "1 redriven" in cli("dead-letters", "redrive", "--all").stdout
        wait_for(lambda: cli.json("show", job_id)["state"] == "failed")
        assert job_id in cli("rerun", job_id).stdout
        wait_for(lambda: cli.json("show", job_id)["state"] == "failed")

        assert "--yes" in one_line(cli("delete", job_id), "bad_input")
        assert cli("delete", job_id, "--yes").returncode == 0
        one_line(cli("show", job_id), "not_found")
        one_line(cli("delete", job_id, "--yes"), "not_found")
        one_line(cli("rerun", job_id), "not_found")
        assert cli.json("jobs") == []


def test_tasks_are_run_again(up: Cli, site: str) -> None:
    done = up("submit", "-", "--wait", "--json", "--attempts", "1", given=f"{site}/quick/1\n{site}/missing/1\n")
    assert done.returncode == 3, done.stderr
    job_id = json.loads(done.stdout)["id"]
    (failed,) = up.json("results", job_id, "--status", "failed")
    said = up("rerun", job_id, "--failed", "--attempts", "2", "--wait")
    assert (said.returncode, "1 failed" in said.stdout) == (3, True), said.stderr
    (again,) = up.json("results", job_id, "--run", "2")
    assert (again["index"], again["attempts"]) == (failed["index"], failed["attempts"])
    assert again["task_id"] != failed["task_id"]
    assert [item["status"] for item in up.json("results", job_id, "--run", "1", "--status", "failed")] == ["failed"]
    # The job is its whole self: both tasks, each with its latest outcome.
    whole = {item["task_id"]: item["status"] for item in up.json("results", job_id)}
    assert (len(whole), whole[again["task_id"]]) == (2, "failed")
    assert up("export", job_id, "-o", "whole.jsonl").returncode == 0
    assert {json.loads(line)["task_id"] for line in (up.place / "whole.jsonl").read_text().splitlines()} == set(whole)
    listed = next(line for line in up("jobs").stdout.splitlines() if job_id in line)
    assert re.search(r" 2 +2 +1 +0 ", f"{listed} "), listed
    assert up.json("show", job_id, "--run", "2")["total"] == 1
    assert up.json("results", job_id, "--tag", "nobody's") == []
    shown = up("show", job_id, "--verify")
    assert "2: completed, 1 tasks, 1 failed" in shown.stdout
    assert "counts match the task rows" in shown.stdout
    assert up.json("show", job_id, "--verify")["verify"]["drift"] == 0
    code = failed["error"]["code"]
    assert up.json("rerun", job_id, "--error-code", code)["run"]["number"] == 3
    assert up("watch", job_id).returncode == 3
    # A rerun of which every task succeeds: the other one has still failed, and the exit code is the job's.
    assert up.json("rerun", job_id, "--http-status", "200")["counts"]["failed"] == 1
    watched = up("watch", job_id, "--json")
    assert (watched.returncode, json.loads(watched.stdout)["run"]["counts"]["failed"]) == (3, 0)
    one_line(up("rerun", job_id, "--error-code", "timeout"), "nothing_to_rerun")
    one_line(up("rerun", job_id, "--all", "--tag", "x"), "bad_input")
    copied = up("duplicate", job_id, "--name", "copy", "--option", "concurrency=3", "--wait", "--json")
    copy = json.loads(copied.stdout)
    assert (copied.returncode, copy["name"], copy["total"]) == (3, "copy", 2), copied.stderr
    # A rerun may have changed the attempts: those of the job now are copied.
    assert copy["options"] == {**up.json("show", job_id)["options"], "concurrency": 3}
    one_line(up("duplicate", job_id, "--option", "concurrency=0"), "invalid_field")


def test_a_job_is_paused_changed_resumed_and_cancelled(up: Cli, site: str) -> None:
    (up.place / "slow.txt").write_text("".join(f"{site}/slow/{number}\n" for number in range(2000)))
    job_id = up("submit", "slow.txt", "--concurrency", "1", "--rate", "1").stdout.strip()
    assert up("pause", job_id).stdout == f"{job_id} is paused.\n"
    assert up.json("show", job_id)["waiting"]["code"] == "paused"
    assert up("change", job_id, "--concurrency", "3", "--no-rate").stdout == (
        f"Changed {job_id}: concurrency, rate_per_host.\n"
    )
    assert up.json("show", job_id)["options"] == {"concurrency": 3}
    assert up.json("change", job_id, "--max-failed", "7")["options"]["failure_threshold"]["failed"] == 7
    one_line(up("change", job_id), "bad_input")
    one_line(up("change", job_id, "--rate", "2", "--no-rate"), "bad_input")
    assert up.json("resume", job_id)["state"] in ("running", "ingesting")
    assert up("cancel", job_id).stdout.startswith(f"{job_id} is cancelled")
    one_line(up("pause", job_id), "job_ended")
    one_line(up("change", job_id, "--rate", "2"), "job_ended")


@pytest.mark.parametrize("mode", ["skip", "reject"])
def test_stop_while_a_long_list_is_ingested(cli: Cli, mode: str) -> None:
    """With `reject` it is still looked over, with `skip` some of it is written."""
    import time

    (cli.place / "urls.txt.gz").write_bytes(compressed([f"http://127.0.0.1:9/{n}" for n in range(1_000_000)], "gz"))
    with cli.start("run", "urls.txt.gz", "-o", "out.zip", "--on-invalid", mode, "--concurrency", "1") as process:
        data = cli.place / "out.zip.conveyor"
        wait_for(lambda: (data / "run.json").exists() and "job_" in (data / "run.json").read_text())
        if mode == "skip":
            wait_for(lambda: (data / "conveyor.db-wal").stat().st_size > 4_000_000)
        stopped = time.monotonic()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
        seconds = time.monotonic() - stopped
        assert process.returncode == 130, said
    assert "--resume" in said
    assert seconds < 5, "far less than the list takes"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["show", "job_00000000000000000000000000"], 1, "not_found"),
        (["watch", "nonsense"], 1, "not_found"),
        (["export", "nonsense", "-o", "nothing.zip"], 1, "not_found"),
        (["results", "nonsense"], 1, "not_found"),
        (["submit", "absent.txt"], 2, "list_unreadable"),
        (["submit", "empty.txt"], 2, "no_tasks"),
        (["submit", "one.txt", "--header", "Host: x"], 2, "invalid_field"),
        (["submit", "one.txt", "--handler", "a b"], 2, "invalid_field"),
        (["up", "--port", "0"], 1, "data_directory_in_use"),
        (["keys", "create", "--tenant", "Not Valid"], 2, "invalid_field"),
        (["keys", "revoke", "nonsense"], 1, "not_found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_of_a_server(up: Cli, arguments: list[str], exit_code: int, code: str) -> None:
    up.write("empty.txt")
    up.write("one.txt", "https://example.com")
    refused = up(*arguments)
    assert refused.returncode == exit_code
    assert refused.stdout == ""
    one_line(refused, code)
    assert not (up.place / "nothing.zip").exists()


def test_run_in_a_directory_that_a_server_owns(up: Cli) -> None:
    up.write("one.txt", "https://example.com")
    refused = Cli(up.place, {})("run", "one.txt", "-o", "nothing.zip", "--data", "data")
    assert refused.returncode == 1
    one_line(refused, "data_directory_in_use")
    assert not (up.place / "data" / "run.json").exists()


def test_no_server_and_no_key(tmp_path: Path) -> None:
    assert one_line(Cli(tmp_path, {})("jobs"), "missing_key")
    lonely = Cli(tmp_path, {"CONVEYOR_API_KEY": "x", "CONVEYOR_URL": "http://127.0.0.1:9"})
    refused = lonely("jobs")
    assert refused.returncode == 1
    one_line(refused, "server_unreachable")


def test_keys_without_a_server(cli: Cli) -> None:
    made = cli("keys", "create", "--tenant", "acme", "--name", "for CI")
    assert made.returncode == 0, made.stderr
    assert re.fullmatch(r"cv_[0-9a-z]{26}_[0-9a-f]{64}\n", made.stdout)
    secret = made.stdout.strip().rpartition("_")[2]
    (key,) = cli.json("keys", "list")
    assert (key["tenant"], key["name"], key["revoked_at"]) == ("acme", "for CI", None)
    assert secret not in json.dumps(key)
    assert cli("keys", "revoke", key["key_id"]).returncode == 0
    assert cli.json("keys", "list")[0]["revoked_at"] is not None
    assert cli.json("keys", "list", "--tenant", "other") == []
    for path in (cli.place / "conveyor-data").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()


def test_keys_while_a_server_owns_the_directory(up: Cli, site: str) -> None:
    made = up("keys", "create", "--tenant", "acme")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert re.fullmatch(r"cv_[0-9a-z]{26}_[0-9a-f]{64}", key)
    acme = Cli(up.place, {**up.settings, "CONVEYOR_API_KEY": key})
    assert acme.json("jobs") == []
    assert acme("submit", "-", "--wait", given=f"{site}/quick/1\n").returncode == 0
    assert len(acme.json("jobs")) == 1

    (listed,) = up.json("keys", "list", "--tenant", "acme")
    assert up("keys", "revoke", listed["key_id"]).returncode == 0
    wait_for(lambda: acme("jobs").returncode == 1)
    assert one_line(acme("jobs"), "invalid_key")


def test_a_csv_without_the_column_is_refused_before_it_is_sent(up: Cli) -> None:
    up.write("wrong.csv", "link,id", "https://example.com,1")
    before = len(up.json("jobs"))
    assert one_line(up("submit", "wrong.csv"), "list_unreadable")
    assert one_line(up("submit", "wrong.csv", "--url-column", "URL"), "list_unreadable")
    assert len(up.json("jobs")) == before
    typed = up("sumbit", "wrong.csv")
    assert "Did you mean 'submit'? See `conveyor --help`." in typed.stderr


def test_the_local_key_is_for_its_owner_only(up: Cli) -> None:
    assert (up.place / "data" / "local.key").stat().st_mode & 0o777 == 0o600


def test_jobs_survive_a_restart_of_the_server(tmp_path: Path, site: str) -> None:
    with serving(tmp_path) as cli:
        cli.write("urls.txt", *(f"{site}/slow/{index}" for index in range(40)))
        job_id = cli("submit", "urls.txt", "--concurrency", "4").stdout.strip()
        key = (tmp_path / "data" / "local.key").read_text()
    with serving(tmp_path) as cli:
        assert cli("watch", job_id).returncode == 0
        assert (tmp_path / "data" / "local.key").read_text() == key


def test_doctor(up: Cli, tmp_path: Path) -> None:
    found = {check["name"]: check["verdict"] for check in up.json("doctor")}
    assert found["server"] == found["key"] == found["sqlite"] == found["data"] == "ok"
    assert found["targets"] == "warn"
    # Also where the settings of the command differ from those of the server.
    other = Cli(up.place, {**up.settings, "CONVEYOR_ALLOW_PRIVATE_TARGETS": "0"})
    [targets] = [check for check in other.json("doctor") if check["name"] == "targets"]
    assert (targets["verdict"], targets["found"]) == ("warn", "the server's workers allow private addresses")
    lonely = Cli(tmp_path, {"CONVEYOR_URL": "http://127.0.0.1:9"})
    assert {check["name"]: check["verdict"] for check in lonely.json("doctor")}["server"] == "warn"
    (tmp_path / "file").write_text("")
    failing = lonely("doctor", "--data", "file")
    assert failing.returncode == 1
    assert "fail" in failing.stdout


def test_doctor_warns_about_data_that_others_can_read(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    (place / "conveyor.db").touch()
    place.chmod(0o755)
    (place / "conveyor.db").chmod(0o644)
    found = {check["name"]: check for check in Cli(tmp_path, {}).json("doctor", "--data", "data")}
    assert found["data"]["verdict"] == "warn"
    assert "conveyor.db" in found["data"]["found"]
    assert found["data"]["advice"] == f"Run: chmod -R go= {place}"


def test_demo(cli: Cli) -> None:
    done = cli("demo", "--pages", "300")
    assert done.returncode == 0, done.stderr
    assert "by design" in done.stdout
    lines = manifest(cli.place / "demo-data" / "results.zip")
    assert len(lines) == 300
    assert {line["status"] for line in lines if "/missing/" in line["input"]} == {"failed"}
    assert {line["status"] for line in lines if "/flaky/" in line["input"]} == {"succeeded"}


def test_version(cli: Cli) -> None:
    assert cli.json("version")["version"] in cli("version").stdout


def test_a_server_of_this_machine_is_found_without_its_address(up: Cli, site: str) -> None:
    here = Cli(up.place, {name: value for name, value in up.settings.items() if name != "CONVEYOR_URL"})
    up.write("here.txt", f"{site}/quick/1")
    assert here("submit", "here.txt", "--wait").returncode == 0
    assert {check["name"]: check["verdict"] for check in here.json("doctor")}["server"] == "ok"


def test_the_local_key_goes_nowhere_else(up: Cli) -> None:
    away = Cli(up.place, {**up.settings, "CONVEYOR_URL": "http://stranger.example"})
    one_line(away("jobs"), "missing_key")
