"""The version: the same everywhere, and in step with the changelog."""

import re

import pytest

import conveyor
from tests.docs.blocks import ROOT
from tests.release.changelog import check_changelog
from tests.release.packages import project

_RELEASED = "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n- b\n\n## [0.1.0] - 2026-11-17\n\n- a\n"
_UNRELEASED = "## [Unreleased]\n\n- b\n\n## [0.1.0] - 2026-11-17\n\n- a\n"


def test_the_package_has_the_version_of_the_project() -> None:
    assert conveyor.__version__ == project()["version"]


def test_the_changelog_fits_the_version() -> None:
    check_changelog((ROOT / "CHANGELOG.md").read_text(), project()["version"])


@pytest.mark.parametrize(
    ("text", "version"), [(_RELEASED, "0.2.0"), (_UNRELEASED, "0.2.0.dev0"), (_UNRELEASED, "0.1.1.dev0")]
)
def test_a_changelog_that_fits(text: str, version: str) -> None:
    check_changelog(text, version)


@pytest.mark.parametrize(
    ("text", "version", "said"),
    [
        (_UNRELEASED, "0.2.0", "lacks 0.2.0"),
        (_UNRELEASED, "0.1.0.dev0", "not newer than 0.1.0"),
        (_RELEASED, "0.3.0.dev0", "no Unreleased"),
        (_RELEASED.replace("0.2.0", "0.0.9"), "0.0.9", "newest first"),
        (_RELEASED.replace(" - 2026-12-01", ""), "0.2.0", "no date"),
    ],
)
def test_a_changelog_that_does_not_fit(text: str, version: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_changelog(text, version)


def test_no_page_names_the_wheel_of_one_version() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if re.search(r"conveyor_jobs-\d", page.read_text())] == []
