"""The tutorial, command by command, as a reader with some environment types it, with a smaller million."""

import gzip
import json
import zipfile
from pathlib import Path

from tests.docs.blocks import DOCS
from tests.docs.terminal import terminal

PAGES = 300
MILLION = 3000


def run_tutorial(place: Path, environment: Path, demo: str) -> None:
    """Run it in an empty directory, with `demo` in the place of `make demo`; raises if a command fails or if a file is
    not what the page says."""
    replaced = {
        "make demo": demo,
        ". .venv/bin/activate": f". {environment}/bin/activate",
        "N=1000000": f"N={MILLION}",
    }
    page = DOCS / "tutorial.md"
    assert all(said in page.read_text() for said in replaced)
    with terminal(place, replaced) as here:
        printed = here.run_page(page)
    assert f"Tasks      {PAGES}" in printed
    assert "http_404" in printed
    assert f"million completed {MILLION} of {MILLION}" in printed
    with zipfile.ZipFile(place / "results.zip") as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 102
    assert len((place / "both.csv").read_text().splitlines()) == 102
    lines = gzip.decompress((place / "million.jsonl.gz").read_bytes()).splitlines()
    assert len(lines) == MILLION
    assert json.loads(lines[-1])["status"] == "succeeded"
