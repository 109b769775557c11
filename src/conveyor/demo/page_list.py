"""The demo's list: pages of the site in fixed proportions, mixed, the same in every run."""

from collections.abc import Iterator

# Out of 100 pages. Missing and broken ones fail by design.
SHARES = {"quick": 83, "slow": 8, "flaky": 4, "redirect": 3, "missing": 1, "broken": 1}
# Coprime to 100: a stride that visits every hundredth once and spreads each kind over the list.
_STRIDE = 37

_KINDS = [kind for kind, share in SHARES.items() for _ in range(share)]
assert len(_KINDS) == 100


def pages(site: str, count: int) -> Iterator[str]:
    """URLs of `count` pages of the site that answers at `site`."""
    for number in range(count):
        yield f"{site}/{_KINDS[number * _STRIDE % 100]}/{number}"
