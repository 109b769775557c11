"""Whether the changelog fits the version: what is not released yet has no date, a release has one."""

import re
from datetime import date

from packaging.version import Version

_SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def check_changelog(text: str, version: str) -> None:
    """Sections are of falling versions and dates. A version in development begins with Unreleased and is newer than the
    last release; a release has the first section after it."""
    [first, *rest] = _SECTION.findall(text)
    released = rest if first[0] == "Unreleased" else [first, *rest]
    assert all(day for _, day in released), "a release has no date"
    order = [(Version(name), date.fromisoformat(day)) for name, day in released]
    assert order == sorted(order, reverse=True), "the changelog is not newest first"
    if Version(version).is_devrelease:
        assert first == ("Unreleased", ""), f"{version} is in development, and the changelog has no Unreleased"
        assert all(Version(version) > each for each, _ in order), f"{version} is not newer than {released[0][0]}"
    else:
        assert order and order[0][0] == Version(version), f"the changelog lacks {version}"
