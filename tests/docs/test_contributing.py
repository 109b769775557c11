"""CONTRIBUTING.md and ARCHITECTURE.md: the map has every package and module, and names only files that exist."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT

SOURCE = ROOT / "src/conveyor"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

# A name in backticks that is a path below src/conveyor: a file, or a package.
_FILE = re.compile(r"`([\w./-]+\.(?:py|js|sql))`")


def _modules() -> set[str]:
    """Every package and every root module of src/conveyor, as the map writes them."""
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    return packages | {path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py"}


def _rows() -> list[str]:
    """The first cells of the map's rows."""
    table = CONTRIBUTING.partition("### Packages and modules")[2].partition("\n#")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def test_the_map_has_one_row_for_each_package_and_root_module() -> None:
    rows = _rows()
    assert len(rows) == len(set(rows))
    assert set(rows) == _modules()


def test_the_layers_of_the_architecture_are_those_of_the_import_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text().partition("\nlayers = [")[2].partition("\n]")[0]
    layers = [
        {name for name in re.findall(r"\w+", row) if name != "__main__"}
        for row in re.findall(r'^    "(.*)",$', contract, re.MULTILINE)
    ]
    table = ARCHITECTURE.partition("\n## The layers")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ((?:`[\w.]+` ?)+)\|", table, re.MULTILINE)
    assert [set(re.findall(r"`(\w+)(?:\.py)?`", cell)) for cell in cells] == layers


@pytest.mark.parametrize("name", sorted(set(_FILE.findall(ARCHITECTURE))))
def test_every_file_of_the_architecture_exists(name: str) -> None:
    assert (SOURCE / name).is_file()


@pytest.mark.parametrize("name", sorted(set(_FILE.findall(CONTRIBUTING))))
def test_every_file_of_contributing_exists(name: str) -> None:
    assert (SOURCE / name).is_file() or (ROOT / name).is_file()


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / link).exists(), link


def test_every_target_of_make_is_described() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE)) - {"help"}
    described = set(re.findall(r"^\| `make ([a-z]+)` \|", CONTRIBUTING, re.MULTILINE))
    assert described == targets


def test_the_glossary_is_linked_and_has_each_word_once() -> None:
    glossary = DOCS / "explanation/glossary.md"
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "index.md", ROOT / "zensical.toml"):
        assert str(Path("explanation") / glossary.name) in page.read_text(), page
    rows = re.findall(r"^\| (\*\*.*?\*\*.*?) \|", glossary.read_text(), re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row)]
    assert len(words) == len(set(words)), sorted({word for word in words if words.count(word) > 1})
