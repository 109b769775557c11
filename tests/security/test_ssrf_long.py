"""The ways of long tasks to make us connect: downloads, their redirects, and every URL of an export, those that the API
itself names too. The canaries of test_ssrf must stay alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.model import ExportApi, InputJson, JobKind, Outcome, TaskRef
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.download.export_api_executor import ExportDownloadExecutor
from conveyor.system import System
from tests.security.test_ssrf import PUBLIC, REFUSALS, Ports, codes, names, public, vectors
from tests.support.addresses import as_input
from tests.support.make_jobs import make_job
from tests.support.target_site import Canary, Seen, Site, answer, page


@page("export-api")
async def export_api(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Whatever is asked, the export is ready, and its file is where the query says."""
    body = json.dumps({"id": "1", "state": "ready", "url": seen.query("file")}).encode()
    answer(writer, body, content_type="application/json")


@pytest.fixture
async def canaries() -> AsyncIterator[tuple[Canary, Canary]]:
    async with Canary("127.0.0.1") as four, Canary("::1") as six:
        yield four, six
        assert [four.connections, six.connections] == [0, 0]


@pytest.fixture
def ports(canaries: tuple[Canary, Canary]) -> Ports:
    return canaries[0].port, canaries[1].port


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site(PUBLIC) as made:
        yield made


def guard() -> TargetGuard:
    return TargetGuard(allow_private=False, clock=SystemClock(), resolver=names, policy=public)


async def run(executor: Any, kind: JobKind, inputs: Sequence[str], **options: Any) -> list[Outcome]:
    job = make_job(SystemClock(), kind=kind, timeout=5.0, chunk_size=1, **options)
    refs = [TaskRef(index, InputJson(text)) for index, text in enumerate(inputs)]
    outcomes: list[Outcome] = []
    for start in range(0, len(refs), 50):
        outcomes += await executor.attempt(job, refs[start : start + 50])
    return outcomes


async def test_downloads(system: System, ports: Ports, site: Site) -> None:
    executor = DownloadExecutor(system.settings, system.clock, guard(), system.records, system.blobs)
    outcomes = await run(executor, JobKind.DOWNLOAD, [as_input(url) for url in vectors(ports)])
    assert codes(outcomes) <= REFUSALS
    urls = [site.url(f"/redirect?to={quote(url)}", "hop.example") for url in vectors(ports)]
    assert codes(await run(executor, JobKind.DOWNLOAD, [as_input(url) for url in urls])) <= REFUSALS
    assert site.visits["/redirect"] >= len(urls)
    await executor.close()


async def test_exports(system: System, ports: Ports, site: Site) -> None:
    executor = ExportDownloadExecutor(system.settings, system.clock, guard(), system.records, system.blobs)
    urls = vectors(ports)[::5]
    api = site.url("/export-api", "api.example")
    good = {"create": {"url": api}, "id": "$.id", "status": {"url": api}, "state": "$.state", "ready": ["ready"]}
    linked = {**good, "status": {"url": f"{api}?file={{input}}"}, "download": "$.url"}
    outcomes = await run(
        executor,
        JobKind.EXPORT_DOWNLOAD,
        [json.dumps(url) for url in vectors(ports)],
        export=msgspec.convert(linked, ExportApi),
    )
    assert codes(outcomes) <= REFUSALS
    for url in urls:
        for change in ({"create": {"url": url}}, {"status": {"url": url}}, {"download": {"url": url}}):
            export = msgspec.convert({**good, "download": {"url": api}, **change}, ExportApi)
            outcomes = await run(executor, JobKind.EXPORT_DOWNLOAD, ["1"], export=export)
            assert codes(outcomes) <= REFUSALS, change
    await executor.close()
