"""Every way in which a tenant has Conveyor make a request: the columns of the table in tests/security. A path gets
URLs, has the real code request each of them, and returns what came of it: the code of a refusal, or `reached`.

egress_register.py says which modules they go through.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from conveyor.accept.schedules import ListSource
from conveyor.accept.sources import Sources
from conveyor.clock import Clock
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.records import Document
from conveyor.errors import ConveyorError
from conveyor.jobs.event_names import NOTIFY, WEBHOOK, WebhookNotify, notify_id
from conveyor.lists.url_lists import UrlLists
from conveyor.model import (
    ExportApi,
    Gateway,
    InputJson,
    JobId,
    JobKind,
    Outcome,
    PooledGateway,
    RemoteSource,
    RobotsMode,
    TaskRef,
)
from conveyor.notify.deliverer import Deliverer
from conveyor.notify.deliveries import DELIVERY, Deliveries, delivery_document, delivery_of
from conveyor.notify.webhooks import Endpoint, Secret
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.download.export_api_executor import ExportDownloadExecutor
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.addresses import as_input
from tests.support.make_jobs import ACME, make_job, make_notice
from tests.support.target_site import AUTHORITY, Seen, Site, answer, page

REACHED = "reached"
FAR = "http://far.example/"

_AT_ONCE = 50

Attempt = Callable[[str], Awaitable[str]]


@dataclass(frozen=True)
class EgressWorld:
    """What a path has: a system, a guard of its own, and a site at an address that passes for public."""

    system: System
    clock: Clock
    site: Site
    new_guard: Callable[[], TargetGuard]

    def outbound(self) -> Outbound:
        return Outbound(self.new_guard())

    def redirect(self, url: str, status: int = 302) -> str:
        return self.site.url(f"/redirect?status={status}&to={quote(url, safe='')}")


@dataclass(frozen=True)
class EgressPath:
    """A way to make a request. `open` gives the attempt for one URL."""

    name: str
    open: Callable[[EgressWorld], AbstractAsyncContextManager[Attempt]]
    # Whether the request goes to what a redirect names, or to what a gateway was asked for.
    follows: bool = True
    # Codes beside the refusals: a gateway resolves names by itself.
    allowed: frozenset[str] = frozenset()
    # Codes beside these for vectors that name a public host, or a path of the site itself.
    allowed_elsewhere: frozenset[str] = frozenset()
    at_once: int = _AT_ONCE

    async def each(self, world: EgressWorld, urls: Sequence[str]) -> list[str]:
        gate = asyncio.Semaphore(self.at_once)
        async with self.open(world) as attempt:

            async def one(url: str) -> str:
                async with gate:
                    return await attempt(url)

            return await asyncio.gather(*(one(url) for url in urls))


@page("export-api")
async def export_api(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Whatever is asked, the export is ready, and its file is where the query says."""
    body = json.dumps({"id": "1", "state": "ready", "url": seen.query("file")}).encode()
    answer(writer, body, content_type="application/json")


def _led_to(url: str) -> dict[str, Any]:
    """Options of a job that robots.txt of the site leads there, by its user agent."""
    return {"robots": RobotsMode.OBEY, "headers": {"User-Agent": quote(url, safe="")}}


def _code(outcome: Outcome) -> str:
    return outcome.error.code if outcome.error else REACHED


async def _try(job_kind: JobKind, executor: Any, clock: Clock, task_input: str, **options: Any) -> str:
    """One attempt; of a job with a pool, through its last gateway."""
    job = make_job(clock, kind=job_kind, timeout=5.0, chunk_size=1, **options)
    refs = [TaskRef(0, InputJson(task_input))]
    pool = job.options.gateway.pool if job.options.gateway is not None else ()
    outcomes = await (executor.attempt_through(len(pool) - 1, job, refs) if pool else executor.attempt(job, refs))
    return _code(outcomes[0])


def _settings_of(world: EgressWorld, **settings: Any) -> Settings:
    """Those of an operator who trusts an authority of their own, and lets jobs verify nothing."""
    bundle = world.system.settings.data / "authorities.pem"
    bundle.write_bytes(AUTHORITY)
    return msgspec.structs.replace(world.system.settings, ca_bundle=bundle, allow_insecure=True, **settings)


def _fetching(wrap: Callable[[EgressWorld, str], tuple[str, dict[str, Any]]], gateway: bool = False) -> Any:
    """A fetch of a URL, with options, that are made of the vector. With `gateway`, the operator has one: the site."""

    @asynccontextmanager
    async def opened(world: EgressWorld) -> AsyncIterator[Attempt]:
        settings = _settings_of(world, gateway=world.site.url("/gateway?url={url}") if gateway else None)
        executor = FetchExecutor(settings, world.clock, world.new_guard())

        async def attempt(url: str) -> str:
            target, options = wrap(world, url)
            return await _try(JobKind.FETCH, executor, world.clock, as_input(target), **options)

        yield attempt
        await executor.close()

    return opened


def _downloading(wrap: Callable[[EgressWorld, str], tuple[str, dict[str, Any]]], gateway: bool = False) -> Any:
    @asynccontextmanager
    async def opened(world: EgressWorld) -> AsyncIterator[Attempt]:
        system = world.system
        settings = _settings_of(world, gateway=world.site.url("/gateway?url={url}") if gateway else None)
        executor = DownloadExecutor(settings, world.clock, world.new_guard(), system.records, system.blobs)

        async def attempt(url: str) -> str:
            target, options = wrap(world, url)
            return await _try(JobKind.DOWNLOAD, executor, world.clock, as_input(target), **options)

        yield attempt
        await executor.close()

    return opened


def _nothing(world: EgressWorld, url: str) -> dict[str, Any]:
    return {}


def _exporting(
    change: Callable[[EgressWorld, str], dict[str, Any]] = _nothing,
    wrap: Callable[[EgressWorld, str], dict[str, Any]] = _nothing,
) -> Any:
    """An export whose API is at the site, but for what is changed; and the options of its job."""

    @asynccontextmanager
    async def opened(world: EgressWorld) -> AsyncIterator[Attempt]:
        system = world.system
        # A failed call of the API is not retried.
        settings = _settings_of(world, export_retries=0)
        executor = ExportDownloadExecutor(settings, world.clock, world.new_guard(), system.records, system.blobs)
        api = world.site.url("/export-api")
        good = {"create": {"url": api}, "id": "$.id", "status": {"url": api}, "state": "$.state", "ready": ["ready"]}

        async def attempt(url: str) -> str:
            export = msgspec.convert({**good, "download": {"url": api}, **change(world, url)}, ExportApi)
            options = wrap(world, url)
            return await _try(JobKind.EXPORT_DOWNLOAD, executor, world.clock, '"1"', export=export, **options)

        yield attempt
        await executor.close()

    return opened


def _delivering(receiver: str, redirect: bool = False, again: bool = False) -> Any:
    """A webhook that was stored before today's checks: of the tenant's endpoint, or of a job's `notify`."""

    @asynccontextmanager
    async def opened(world: EgressWorld) -> AsyncIterator[Attempt]:
        system, documents = world.system, world.system.records.documents
        settings = msgspec.structs.replace(system.settings, webhook_retries="")
        deliverer = Deliverer(settings, system.records, world.clock, system.signing_key, world.outbound())

        async def attempt(url: str) -> str:
            if redirect:
                url = world.redirect(url, 307)
            now, job = world.clock.now(), make_job(world.clock)
            if receiver == WEBHOOK:
                row_id = world.clock.new_id("webhook")
                row = Document(WEBHOOK, ACME, row_id, msgspec.json.encode(Endpoint(url, now, [Secret(1)])))
            else:
                row_id = notify_id(job.job_id, 0)
                row = Document(NOTIFY, ACME, row_id, msgspec.json.encode(WebhookNotify(url=url)), job_id=job.job_id)
            delivery = delivery_document(make_notice(world.clock, job, "run.completed"), row_id, row_id, now, 1000.0)
            await documents.create_documents([row, delivery])
            code = await sent(delivery.id)
            if again:
                await Deliveries(system).redeliver(ACME, delivery.id)
                code = await sent(delivery.id)
            return code

        async def sent(delivery_id: str) -> str:
            await deliverer.tick()
            await asyncio.gather(*deliverer._running)
            stored = await documents.document(DELIVERY, ACME, delivery_id)
            assert stored is not None
            last = delivery_of(stored).log[-1]
            return last.error if last.status is None and last.error else REACHED

        yield attempt
        await deliverer.close()

    return opened


def _list(read: Callable[[UrlLists, RemoteSource], Awaitable[object]], redirect: bool = False) -> Any:
    """A list that the ingest reads where it is."""

    @asynccontextmanager
    async def opened(world: EgressWorld) -> AsyncIterator[Attempt]:
        lists = UrlLists(world.outbound(), 5.0)

        async def attempt(url: str) -> str:
            remote = RemoteSource(world.redirect(url) if redirect else url, etag='"1"')
            return await _refused(read(lists, remote))

        yield attempt
        await lists.close()

    return opened


def _staging(redirect: bool) -> Any:
    """The list of a schedule, copied when it fires."""

    @asynccontextmanager
    async def opened(world: EgressWorld) -> AsyncIterator[Attempt]:
        outbound = world.outbound()
        sources = Sources(world.system, outbound)

        async def attempt(url: str) -> str:
            source = ListSource(url=world.redirect(url) if redirect else url)
            return await _refused(sources.stage(ACME, JobId(world.clock.new_id("job")), source))

        yield attempt
        await outbound.close()

    return opened


@asynccontextmanager
async def _posting(world: EgressWorld) -> AsyncIterator[Attempt]:
    outbound = world.outbound()

    async def attempt(url: str) -> str:
        try:
            await outbound.post(url, [], b"{}", 5.0)
        except OutboundFailed as failed:
            return failed.code
        return REACHED

    yield attempt
    await outbound.close()


async def _refused(request: Awaitable[object]) -> str:
    try:
        await request
    except (OutboundFailed, ConveyorError) as failed:
        return failed.code
    return REACHED


async def _whole(lists: UrlLists, remote: RemoteSource) -> None:
    async for _ in lists.whole(remote, 1000, None):
        pass


async def _range(lists: UrlLists, remote: RemoteSource) -> None:
    async for _ in lists.stream(remote, 6, 0, 6):
        pass


async def _pin(lists: UrlLists, remote: RemoteSource) -> None:
    await lists.pin(remote)


def _through(url: str) -> dict[str, dict[str, Any]]:
    """Options of a job that names a gateway there, by what it is; the pools have a good one first."""
    good, template = PooledGateway(proxy="http://proxy.example:8080"), f"{url}?url={{url}}"
    socks = url.replace("http", "socks5h", 1)
    gateways = {
        "proxy": Gateway(proxy=url),
        "SOCKS proxy": Gateway(proxy=socks),
        "template": Gateway(url=template),
        "pool": Gateway(pool=[PooledGateway(proxy=url)]),
        "SOCKS proxy in a pool": Gateway(pool=[good, PooledGateway(proxy=socks)]),
        "template in a pool": Gateway(pool=[good, PooledGateway(url=template)]),
    }
    return {name: {"gateway": gateway} for name, gateway in gateways.items()}


def _gateways_of_jobs(prefix: str, opened: Callable[[str], Any]) -> tuple[EgressPath, ...]:
    """A path for each way to name a gateway. `opened` makes the path of one, by its name."""
    return tuple(
        EgressPath(
            f"{prefix}, {name} of the job",
            opened(name),
            allowed=_BY_GATEWAY | ({"bad_input"} if "SOCKS" in name else frozenset()),
        )
        for name in _through(FAR)
    )


# Each mode of TLS has clients of its own.
_OTHER_TLS = {"http2": True, "insecure": True}
_BY_GATEWAY = frozenset({"gateway_failed"})
_BY_ROBOTS = frozenset({"robots_unavailable"})
# A robots.txt that is not there allows the page.
_NO_ROBOTS = frozenset({REACHED})
# What was asked of a gateway of the operator, or of a site that plays one.
_ASKED = frozenset({REACHED, "connect_failed"})

PATHS: tuple[EgressPath, ...] = (
    EgressPath("fetch", _fetching(lambda world, url: (url, {}))),
    *(
        EgressPath(
            f"fetch, redirect by {status}",
            _fetching(lambda world, url, status=status: (world.redirect(url, status), {})),  # type: ignore[misc]  # the default binds it
        )
        for status in (301, 302, 303, 307, 308)
    ),
    EgressPath("fetch, two redirects", _fetching(lambda world, url: (world.redirect(world.redirect(url)), {}))),
    EgressPath("fetch, another mode of TLS", _fetching(lambda world, url: (url, _OTHER_TLS))),
    EgressPath(
        "fetch, redirect in another mode of TLS", _fetching(lambda world, url: (world.redirect(url), _OTHER_TLS))
    ),
    *_gateways_of_jobs("fetch", lambda name: _fetching(lambda world, url: (FAR, _through(url)[name]))),
    EgressPath(
        "fetch, proxy in another mode of TLS",
        _fetching(lambda world, url: (FAR, {**_through(url)["proxy"], **_OTHER_TLS})),
        allowed=_BY_GATEWAY,
    ),
    EgressPath(
        "fetch through a template of the job",
        _fetching(lambda world, url: (url, {"gateway": Gateway(url=world.site.url("/gateway?url={url}"))})),
        follows=False,
        allowed=_ASKED,
    ),
    EgressPath(
        "fetch, redirect by a gateway of the job",
        _fetching(
            lambda world, url: (
                f"{FAR}?to={quote(url, safe='')}",
                {"gateway": Gateway(url=world.site.url("/gateway?url={url}"))},
            )
        ),
        follows=False,
        allowed=_ASKED,
    ),
    EgressPath(
        "fetch through the gateway of the operator",
        _fetching(lambda world, url: (url, {}), gateway=True),
        follows=False,
        allowed=_ASKED,
    ),
    EgressPath(
        "fetch, robots.txt", _fetching(lambda world, url: (url, {"robots": RobotsMode.OBEY})), allowed=_BY_ROBOTS
    ),
    EgressPath(
        "fetch, robots.txt that redirects",
        _fetching(lambda world, url: (world.site.url("/ok"), _led_to(url))),
        allowed=_BY_ROBOTS,
        allowed_elsewhere=_NO_ROBOTS,
    ),
    EgressPath(
        "fetch, robots.txt by a proxy of the job",
        _fetching(lambda world, url: (FAR, {**_through(url)["proxy"], "robots": RobotsMode.OBEY})),
        allowed=_BY_ROBOTS | _BY_GATEWAY,
    ),
    EgressPath(
        "fetch, robots.txt by a template of the job",
        _fetching(lambda world, url: (FAR, {**_through(url)["template"], "robots": RobotsMode.OBEY})),
        allowed=_BY_ROBOTS | _BY_GATEWAY,
    ),
    EgressPath(
        "download, robots.txt", _downloading(lambda world, url: (url, {"robots": RobotsMode.OBEY})), allowed=_BY_ROBOTS
    ),
    EgressPath(
        "download, robots.txt that redirects",
        _downloading(lambda world, url: (world.site.url("/ok"), _led_to(url))),
        allowed=_BY_ROBOTS,
        allowed_elsewhere=_NO_ROBOTS,
    ),
    EgressPath("download", _downloading(lambda world, url: (url, {}))),
    EgressPath("download, redirect", _downloading(lambda world, url: (world.redirect(url), {}))),
    EgressPath("download, two redirects", _downloading(lambda world, url: (world.redirect(world.redirect(url)), {}))),
    EgressPath("download, another mode of TLS", _downloading(lambda world, url: (url, _OTHER_TLS))),
    *_gateways_of_jobs("download", lambda name: _downloading(lambda world, url: (FAR, _through(url)[name]))),
    EgressPath(
        "download through the gateway of the operator",
        _downloading(lambda world, url: (url, {}), gateway=True),
        follows=False,
        allowed=_ASKED,
    ),
    EgressPath("export API, create", _exporting(lambda world, url: {"create": {"url": url}})),
    EgressPath("export API, status", _exporting(lambda world, url: {"status": {"url": url}})),
    EgressPath("export API, file", _exporting(lambda world, url: {"download": {"url": url}})),
    EgressPath(
        "export API, file that it names",
        _exporting(
            lambda world, url: {
                "status": {"url": f"{world.site.url('/export-api')}?file={quote(url, safe='')}"},
                "download": "$.url",
            }
        ),
    ),
    EgressPath("export API, redirect", _exporting(lambda world, url: {"create": {"url": world.redirect(url)}})),
    EgressPath(
        "export API, another mode of TLS",
        _exporting(lambda world, url: {"create": {"url": url}}, lambda world, url: _OTHER_TLS),
    ),
    *_gateways_of_jobs("export API", lambda name: _exporting(wrap=lambda world, url: _through(url)[name])),
    EgressPath("webhook", _posting),
    EgressPath("webhook, endpoint", _delivering(WEBHOOK), at_once=1),
    EgressPath("webhook, endpoint, redelivered", _delivering(WEBHOOK, again=True), at_once=1),
    EgressPath("webhook, named by a job", _delivering(NOTIFY), at_once=1),
    EgressPath(
        "webhook, redirect", _delivering(WEBHOOK, redirect=True), follows=False, allowed=frozenset({REACHED}), at_once=1
    ),
    EgressPath("list of a job, version", _list(_pin)),
    EgressPath("list of a job, whole", _list(_whole)),
    EgressPath("list of a job, range", _list(_range)),
    EgressPath("list of a job, redirect", _list(_whole, redirect=True)),
    EgressPath("list of a schedule", _staging(redirect=False)),
    EgressPath("list of a schedule, redirect", _staging(redirect=True)),
)
