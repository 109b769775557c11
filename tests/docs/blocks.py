"""The pages, and the code that stands in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md"), *EXAMPLES.rglob("*.md")])

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r'title="([^"]*)"')


class Block(NamedTuple):
    """A piece of code in a page."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        language, _, rest = found["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        line = text.count("\n", 0, found.start()) + 2
        indent = len(found["indent"])
        code = "".join(f"{each[indent:]}\n" for each in found["code"].splitlines())
        yield Block(page, line, language, title[1] if title else "", code)


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def commands(code: str) -> Iterator[str]:
    """The commands of a piece of shell, lines that go on joined, comments and blank lines left out."""
    joined = re.sub(r"\\\n\s*", " ", code)
    for line in joined.splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            yield text
