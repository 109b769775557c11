"""No URL of a tenant leads to this machine or its neighbours: every vector (egress_vectors.py) on every path that makes
a request (egress_paths.py), with canaries that count who comes. The control shows for each path that it would reach
them.

`make test` takes a sample of each kind of vector, another one for each path; CONVEYOR_SSRF=all takes the whole table.
`python -m pytest tests/security/test_egress_table.py -rP` prints the counts.
"""

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.egress_paths import PATHS, REACHED, EgressPath, EgressWorld
from tests.support.egress_register import MODULES
from tests.support.egress_scan import connecting_modules
from tests.support.egress_vectors import PUBLIC, Names, Ports, public, sample, vectors
from tests.support.target_site import Canary, Site

WHOLE = os.environ.get("CONVEYOR_SSRF") == "all"
STEP = 1 if WHOLE else 25

# What a refusal is called: by the guard, by the parser of a list, and by the job's options.
REFUSALS = frozenset({"target_refused", "bad_url", "bad_redirect", "bad_input", "list_unreadable", "source_refused"})
# Some vectors name a public host to whoever reads them rightly, where nothing listens; in a redirect, some are paths of
# the site itself.
PUBLIC_KINDS = frozenset({"rebinding", "userinfo", "syntax"})
UNREACHED = frozenset(
    {"connect_failed", "tls_failed", "gateway_failed", "source_unavailable", "timeout", "export_api_failed"}
    | {"http_404", "list_missing"}
)


@pytest.fixture
async def canaries() -> AsyncIterator[tuple[Canary, Canary]]:
    async with Canary("127.0.0.1") as four, Canary("::1") as six:
        yield four, six


@asynccontextmanager
async def world_of(place: Path, new_guard: Callable[[], TargetGuard]) -> AsyncIterator[EgressWorld]:
    clock = SystemClock()
    async with open_system(Settings.load({}, data=place), clock) as system, Site(PUBLIC) as site:
        yield EgressWorld(system, clock, site, new_guard)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
async def test_no_vector_reaches_a_canary(path: EgressPath, canaries: tuple[Canary, Canary], tmp_path: Path) -> None:
    ports: Ports = canaries[0].port, canaries[1].port
    rows = sample(vectors(ports), STEP, PATHS.index(path))

    def new_guard() -> TargetGuard:
        return TargetGuard(allow_private=False, clock=SystemClock(), resolver=Names(), policy=public)

    async with world_of(tmp_path / "data", new_guard) as world:
        codes = await path.each(world, [row.url for row in rows])
    reached = [canary.connections for canary in canaries]
    print(f"{path.name}: {len(rows)} vectors, {sum(reached)} connections; {dict(Counter(codes))}")
    assert reached == [0, 0]
    for row, code in zip(rows, codes, strict=True):
        unreached = UNREACHED | path.allowed_elsewhere if row.kind in PUBLIC_KINDS else frozenset[str]()
        assert code in REFUSALS | path.allowed | unreached, (row, code)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
async def test_the_path_would_reach_it(path: EgressPath, canaries: tuple[Canary, Canary], tmp_path: Path) -> None:
    """The control: with private targets allowed, the same code connects."""
    four, _ = canaries

    def new_guard() -> TargetGuard:
        return TargetGuard(allow_private=True, clock=SystemClock())

    async with world_of(tmp_path / "data", new_guard) as world:
        (code,) = await path.each(world, [f"http://127.0.0.1:{four.port}/"])
        if path.follows:
            assert four.connections > 0, code
        else:
            # The site is asked, and what it answers is not followed here.
            assert world.site.connections > 0, code
            assert code == REACHED


def test_the_table_is_large_enough() -> None:
    rows = vectors((1, 2))
    kinds = Counter(row.kind for row in rows)
    print(f"{len(rows)} vectors x {len(PATHS)} paths = {len(rows) * len(PATHS)}; {dict(kinds)}")
    assert len(rows) == len(set(rows)) >= 550
    assert len(kinds) >= 13
    assert len(PATHS) == len({path.name for path in PATHS}) >= 30
    assert {row.kind for row in sample(rows, 25, 7)} == set(kinds)


def test_every_module_that_connects_is_in_the_register() -> None:
    """A new one needs a path in the table, or a reason why no tenant's URL goes through it."""
    found = connecting_modules()
    unknown = {module for module in found if not any(_is_below(module, known) for known in MODULES)}
    assert not unknown, "add them to MODULES in tests/support/egress_register.py"
    gone = {known for known in MODULES if not any(_is_below(module, known) for module in found)}
    assert not gone


def test_every_module_of_the_register_has_paths() -> None:
    names = [path.name for path in PATHS]
    used = set()
    for module, paths in MODULES.items():
        if isinstance(paths, tuple):
            for start in paths:
                own = {name for name in names if name.startswith(start)}
                assert own, (module, start)
                used |= own
    assert used == set(names)


def _is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
