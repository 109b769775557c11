"""The examples, by the commands of their pages."""

import csv
import json
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pyarrow.parquet as pq
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import EXAMPLES
from tests.docs.terminal import terminal
from tests.servers.aws import CREDENTIALS, REGION
from tests.servers.moto import moto
from tests.support.up_process import ROOT, running

ROLE = "arn:aws:iam::000000000000:role/example"


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the example that the test is named after."""
    name = request.node.name.removeprefix("test_").partition("[")[0]
    copied = tmp_path / "examples" / name
    shutil.copytree(EXAMPLES / name, copied)
    return copied


@pytest.fixture
def site() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "conveyor.demo.site"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_every_example_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"} <= tested


def test_gateway(place: Path) -> None:
    with terminal(place) as here:
        printed = here.run_page(place / "README.md")
    assert "Succeeded  40" in printed
    rows = list(csv.DictReader((place / "titles.csv").read_text().splitlines()))
    assert [row["title"] for row in rows] == [f"Product {number}" for number in range(1, 41)]
    # It was busy for some, and Conveyor came again.
    assert {row["attempts"] for row in rows} == {"1", "2"}


def test_products(place: Path) -> None:
    with terminal(place, {"N=10000": "N=100"}) as here:
        printed = here.run_page(place / "README.md")
    assert "extract_failed" in printed
    rows = pq.read_table(place / "products.parquet").to_pylist()
    assert [(row["title"], row["price"]) for row in rows] == [
        (f"Product {number}", number % 1000 + 0.95) for number in range(1, 101)
    ]


def test_enrich_csv(place: Path) -> None:
    with terminal(place) as here:
        here.run_page(place / "README.md")
    rows = list(csv.DictReader((place / "enriched.csv").read_text().splitlines()))
    assert [row["domain"] for row in rows] == ["example.com", "example.org", "example.com", "", "example.net"]
    assert [row["secure"] for row in rows] == ["True", "False", "True", "", "True"]
    assert "not a website (attempt 2)" in rows[3]["error"]
    assert not any(row["error"] for row in rows if row["name"] != "Dogwood")


def test_monthly_exports(place: Path) -> None:
    with terminal(place) as here:
        spec = place / "export.json"
        spec.write_text(spec.read_text().replace(":8081/", f":{here.ports['8081']}/"))
        here.run_page(place / "README.md")
    with zipfile.ZipFile(place / "exports.zip") as archive:
        manifest = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert [line["status"] for line in manifest] == ["succeeded"] * 4
        for line in manifest:
            first = archive.read(line["file"]).splitlines()[1]
            assert first.startswith(line["input"]["month"].encode())


def test_state_machine(place: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against an emulator; a server on the embedded engines takes the job in."""
    endpoint = moto()
    job = json.loads((place / "job.json").read_text())
    job["tasks"] = [f"{site}/quick/{number}" for number, _ in enumerate(job["tasks"])]
    (place / "job.json").write_text(json.dumps(job))
    settings = {
        "CONVEYOR_STEP_FUNCTIONS": f"stepfunctions://{REGION}?endpoint={endpoint}",
        "CONVEYOR_INTAKE": " ".join(
            f"sqs://{REGION}/example-{queue}?endpoint={endpoint}&wait=1" for queue in ("reprocess", "intake")
        ),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": REGION,
        **CREDENTIALS,
    }
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with terminal(place, **settings) as here:
        # The queues have to be there before the server looks for them.
        runpy.run_path(str(place / "start.py"))["create"]("example", ROLE)
        here.start("conveyor up --allow-private-targets")
        printed = here.run(f"python start.py example {ROLE} job.json")
    status, _, summary = printed.partition("\n")
    assert status == "SUCCEEDED"
    assert json.loads(summary)["counts"]["succeeded"] == 2


def test_notebook(place: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(place / "watch.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    with running(tmp_path) as up:
        monkeypatch.setenv("CONVEYOR_DATA", str(up.data))
        monkeypatch.setenv("SITE", site)
        monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(place)}}).execute()
    shown = json.dumps(notebook.cells)
    assert "completed" in shown
    assert "http_404" in shown
    assert "text/html" in shown
    assert len((place / "from-a-notebook.csv").read_text().splitlines()) == 401
