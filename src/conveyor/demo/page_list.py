"""The list of the demo: pages of the site in fixed proportions and a fixed, mixed order."""

from collections.abc import Iterator

# Number of pages in 100. Missing and broken pages fail by design.
SHARES = {"quick": 83, "slow": 8, "flaky": 4, "redirect": 3, "missing": 1, "broken": 1}
# Coprime to 100, so that the stride visits each kind in proportion and spreads it over the list.
_STRIDE = 37

_KINDS = [kind for kind, share in SHARES.items() for _ in range(share)]
assert len(_KINDS) == 100


def pages(site: str, count: int) -> Iterator[str]:
    """Yield the URLs of `count` pages of the site at `site`."""
    for number in range(count):
        yield f"{site}/{_KINDS[number * _STRIDE % 100]}/{number}"
