"""The site is built from the pages, strictly, asks nobody for anything, and has from the code what the code says."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs import reference
from tests.docs.blocks import DOCS, ROOT
from tests.docs.tables import PARTS, made_anew, parts_of

# What a browser fetches by itself; a link in the text is not among it.
_FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*?\s(?:src|href|data)=[\"']?(?:https?:)?//[^>]*>"
)
_CSS = re.compile(r"url\([\"']?(?:https?:)?//")


def build(place: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    """As `make docs` does it."""
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    built = build(tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "site"
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    for path in site.rglob("*.html"):
        assert not _FETCHED.search(path.read_text()), (path, _FETCHED.search(path.read_text()))
    for path in site.rglob("*.css"):
        assert not _CSS.search(path.read_text()), path


@pytest.mark.parametrize("link", ["other.md", "index.md#nowhere"])
def test_a_broken_link_would_not_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# One\n\n[gone]({link})\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "One"\n')
    built = build(tmp_path)
    assert built.returncode != 0
    assert "does not exist" in built.stdout + built.stderr


def test_every_page_is_in_the_navigation() -> None:
    def files(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [found for each in (node.values() if isinstance(node, dict) else node) for found in files(each)]

    listed = files(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_what_is_made_from_the_code_is_what_the_code_says() -> None:
    found: list[str] = []
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        found += parts_of(text)
        assert made_anew(text) == text, f"{path}: generate it again: python -m tests.docs.tables"
    assert sorted(found) == sorted(PARTS)


def test_every_error_code_of_a_task_is_described() -> None:
    folders = (ROOT / "src/conveyor/process", ROOT / "src/conveyor/egress")
    source = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for code in re.findall(r"(?:TaskError|Failure)\(\s*\"([a-z_]+)\"", source):
        assert code in reference.TASK_ERRORS, code
    for code in reference.TASK_ERRORS:
        assert f'"{code}"' in source or code in {"bad_url", "target_refused", "extract_failed"}, code


def test_every_event_of_a_task_is_one() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/conveyor").rglob("*.py"))
    for event in set(re.findall(r"\"(task\.[a-z_]+)\"", source)):
        assert event in reference.TASK_EVENTS, event
