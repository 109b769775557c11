"""A load whose every job is known, on servers of two versions."""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from conveyor import Client
from tests.support.product_site import ProductSite
from tests.support.up_process import Up
from tests.upgrade.kinds import KINDS, Kind, Work
from tests.upgrade.versions import skips_newer_rows

_PAUSE_SECONDS = 0.05


class Load:
    """Uses some servers in turn, until it is stopped. What a server has accepted must be finished in the end:
    `accepted` has what both versions know, `newer` what only the later one does."""

    def __init__(self, site: ProductSite, tasks: int, old: Path, new: Path) -> None:
        self.accepted: list[Work] = []
        self.newer: list[Work] = []
        kinds = [kind(site, tasks) for kind in KINDS]
        self._old = [kind for kind in kinds if kind.is_known(old)]
        self._new = [kind for kind in kinds if kind in self._old or (skips_newer_rows(old) and kind.is_known(new))]
        self._turn = 0
        # Work that something follows, if its job has ended.
        self._followed: deque[Work] = deque()
        self._stopped = threading.Event()
        self._failures: list[BaseException] = []

    @property
    def total(self) -> int:
        return len(self.accepted) + len(self.newer)

    @property
    def kinds(self) -> dict[str, int]:
        """How many jobs of each kind were accepted; and the runs and exports of all."""
        everything = [*self.accepted, *self.newer]
        jobs = Counter(work.kind.name for work in everything)
        return {
            **jobs,
            "runs": sum(work.runs for work in everything),
            "exports": sum(work.exports for work in everything),
        }

    @contextmanager
    def on(self, *servers: Up, later: Up | None = None) -> Iterator[None]:
        """Use these servers during the block, and `later`."""
        self._stopped.clear()
        using = threading.Thread(target=self._use, args=(servers, later))
        using.start()
        try:
            yield
        finally:
            self._stopped.set()
            using.join()
            assert self._failures == [], self._failures

    def _use(self, servers: Sequence[Up], later: Up | None) -> None:
        places = [(each, self._old) for each in servers] + ([] if later is None else [(later, self._new)])
        try:
            with ExitStack() as stack:
                clients = [(stack.enter_context(Client(up.url, key=up.key)), kinds) for up, kinds in places]
                while not self._stopped.is_set():
                    turn, which = divmod(self._turn, len(clients))
                    client, kinds = clients[which]
                    self._submit(client, kinds[turn % len(kinds)])
                    self._follow(client, kinds)
                    self._turn += 1
                    self._stopped.wait(_PAUSE_SECONDS)
        except BaseException as error:
            self._failures.append(error)

    def _submit(self, client: Client, kind: Kind) -> None:
        work = kind.submit(client)
        (self.accepted if kind in self._old else self.newer).append(work)
        if kind.followed:
            self._followed.append(work)

    def _follow(self, client: Client, kinds: Sequence[Kind]) -> None:
        """Go on with what came first, if this server knows it and its job has ended; whoever has accepted it."""
        if self._followed and (work := self._followed[0]).kind in kinds and (job := client.job(work.job_id)).ended:
            self._followed.popleft()
            work.kind.follow(work, job)

    def check_by_earlier(self, up: Up) -> int:
        """Everything that the earlier version knows is finished, and listed without what it does not know."""
        return _check(up, self.accepted)

    def check_by_later(self, up: Up) -> int:
        """Everything is finished, and listed."""
        return _check(up, [*self.accepted, *self.newer])


def _check(up: Up, accepted: Sequence[Work]) -> int:
    with Client(up.url, key=up.key) as client:
        for work in accepted:
            work.kind.check(client, work)
        assert sorted(job.id for job in client.jobs()) == sorted(work.job_id for work in accepted)
    return len(accepted)


@contextmanager
def shop() -> Iterator[ProductSite]:
    """A site with a loop of its own."""
    site, loop = ProductSite(), asyncio.new_event_loop()
    loop.run_until_complete(site.__aenter__())
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    try:
        yield site
    finally:
        asyncio.run_coroutine_threadsafe(site.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        serving.join()
        loop.close()
