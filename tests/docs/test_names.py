"""Names in the source: a class name occurs once, and so does a file name."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.docs.blocks import ROOT

SOURCE = ROOT / "src/conveyor"
FILES = sorted(SOURCE.rglob("*.py"))


def _more_than_once(names: dict[str, list[Path]]) -> dict[str, list[str]]:
    return {name: [str(path.relative_to(SOURCE)) for path in paths] for name, paths in names.items() if len(paths) > 1}


def _engine(path: Path) -> str | None:
    """The engine whose folder the file is in, as `sqlite` for engines/sqlite/tasks.py."""
    match path.relative_to(SOURCE).parts:
        case ("engines", engine, _):
            return engine
        case _:
            return None


def test_every_class_name_occurs_once() -> None:
    classes: dict[str, list[Path]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path)
    assert _more_than_once(classes) == {}


def test_every_file_name_occurs_once() -> None:
    """Engines implement the same seams, so their folders may share names with each other and with engines/ itself."""
    names: dict[str, list[Path]] = defaultdict(list)
    for path in FILES:
        is_seam = path.parent == SOURCE / "engines"
        if path.name != "__init__.py" and not (_engine(path) or is_seam):
            names[path.name].append(path)
    assert _more_than_once(names) == {}


def test_an_engine_shares_file_names_only_with_engines() -> None:
    elsewhere = {path.name for path in FILES if SOURCE / "engines" not in path.parents} - {"__init__.py"}
    shared = {str(path.relative_to(SOURCE)) for path in (SOURCE / "engines").rglob("*.py") if path.name in elsewhere}
    assert shared == set()
