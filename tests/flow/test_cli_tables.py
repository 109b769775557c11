"""A user's own csv becomes a table: what `conveyor run` reads, and what `-o` writes, by its name."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from backports import zstd

from tests.flow.test_cli import Cli, manifest, one_line
from tests.support.demo_site import demo_site


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with demo_site() as url:
        yield url


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})


def shop(cli: Cli, site: str) -> str:
    """A list as people have it: semicolons, names of their own, a bad line."""
    rows = [f"sku-{number};{site}/quick/{number};{number}.50" for number in (1, 2, 3)]
    return cli.write("shop.csv", "ID;Link;Price", *rows, "sku-4;;9")


def test_a_csv_becomes_a_table_by_the_name_of_the_output(cli: Cli, site: str) -> None:
    given = (shop(cli, site), "--url-column", "link")
    done = cli("run", *given, "-o", "out.parquet")
    assert done.returncode == 0, done.stderr
    assert "1 invalid line" in done.stdout
    table = pq.read_table(cli.place / "out.parquet").to_pylist()
    assert [(row["id"], row["Price"], row["url"], row["http_status"]) for row in table] == [
        (f"sku-{number}", f"{number}.50", f"{site}/quick/{number}", 200) for number in (1, 2, 3)
    ]
    assert {header["name"] for header in table[0]["headers"]} >= {"content-type"}
    assert cli("run", *given, "-o", "out.csv.zst").returncode == 0
    text = zstd.decompress((cli.place / "out.csv.zst").read_bytes()).decode()
    assert [row["Price"] for row in csv.DictReader(text.splitlines())] == ["1.50", "2.50", "3.50"]
    assert cli("run", *given, "-o", "out.jsonl", "--bodies", "text").returncode == 0
    lines = [json.loads(line) for line in (cli.place / "out.jsonl").read_text().splitlines()]
    assert (lines[0]["id"], lines[0]["data"]) == ("sku-1", {"Price": "1.50"})
    assert "<" in lines[0]["body"]
    assert cli("run", *given, "-o", "out.zip", "--names", "{data.Price}/{id}{ext}").returncode == 0
    assert manifest(cli.place / "out.zip")[1]["file"] == "bodies/2.50/sku-2.html"


def test_what_cannot_be_written_is_refused_before_anything_runs(cli: Cli, site: str) -> None:
    given = cli.write("urls.txt", f"{site}/quick/1")
    (cli.place / "out.csv").write_text("mine")
    assert "--overwrite" in one_line(cli("run", given, "-o", "out.csv"), "bad_input")
    assert (cli.place / "out.csv").read_text() == "mine"
    for arguments in (
        ("-o", "out.xlsx"),
        ("-o", "new.csv", "--bodies", "text"),
        ("-o", "new.csv", "--names", "{id}"),
        ("-o", "new.zip", "--names", "../{id}"),
        ("-o", "new.zip", "--gateway", "https://user:canary@api.example.com/fetch"),
        ("-o", "new.zip", "--handler", "nobody"),
        ("-o", "new.zip", "--option", "no_such_option=1"),
        ("-o", "new.zip", "--option", "max_redirects"),
    ):
        refused = cli("run", given, *arguments)
        assert refused.returncode == 2, (arguments, refused.stderr)
        assert len(refused.stderr.splitlines()) == 1
        assert "canary" not in refused.stderr
    assert not list(cli.place.glob("new*"))
    assert cli("run", given, "-o", "out.csv", "--overwrite").returncode == 0
    assert (cli.place / "out.csv").read_text().startswith("index,")


def test_lists_by_a_pattern_behind_a_url_and_with_any_option(cli: Cli, site: str) -> None:
    cli.write("a-1.csv", "url,n", f"{site}/quick/1,1", "one,two,three")
    cli.write("a-2.csv", "url,n", f"{site}/quick/2,2")
    cli.write("more.json", '{"max_redirects": 1, "backoff": {"base": 0.5}}')
    flags = ("--options", "more.json", "--option", "backoff.cap=2", "--option", "max_redirects=3")
    done = cli("run", "a-*.csv", "-o", "out.csv", *flags)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((cli.place / "out.csv").read_text().splitlines()))
    assert [row["n"] for row in rows] == ["1", "2"]
    invalid = json.loads((cli.place / "out.csv.invalid.jsonl").read_text())
    assert invalid["reason"].startswith("a-1.csv:3: The row has 3 fields")
    assert invalid["text"] == "one,two,three"
    assert "No file matches" in one_line(cli("run", "b-*.csv", "-o", "b.csv"), "list_unreadable")
    # The page is no list of URLs; that it is read and each of its lines looked at is what counts.
    behind = cli("run", f"{site}/quick/1", "-o", "web.csv")
    assert behind.returncode == 2
    assert "line 1" in behind.stderr
