"""Traces: a job's spans at a real collector, one trace for each, whichever process made them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from conveyor.api.server import serve
from conveyor.errors import InvalidSetting
from conveyor.model import JobId
from conveyor.settings import Settings
from conveyor.system import System, open_system
from conveyor.telemetry import traces
from tests.support.api import Api, client, new_key
from tests.support.receiver import Receiver
from tests.support.target_site import Listener, answer, read_request
from tests.support.working import Flaky, ended, until, working

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(Listener):
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Any] = []
        self.paths: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            seen = await read_request(reader)
            self.paths.add(seen.target)
            for resource in ExportTraceServiceRequest.FromString(seen.body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            answer(writer)

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as made:
        yield made


@pytest.fixture
def settings(settings: Settings, collector: Collector, request: pytest.FixtureRequest) -> Settings:
    ratio = getattr(request, "param", 1.0)
    return msgspec.structs.replace(settings, otlp_endpoint=f"http://127.0.0.1:{collector.port}", trace_ratio=ratio)


@asynccontextmanager
async def serving(system: System) -> AsyncIterator[Api]:
    """The API of a system that the test itself closes."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(system, "127.0.0.1", 0, stop, url.set_result))
    try:
        async with client() as http:
            yield Api(await url, system, await new_key(system, "acme"), http)
    finally:
        stop.set()
        await running


async def run_job(settings: Settings) -> str:
    """A job that is ingested, of which a task fails, with a webhook; everything is closed and flushed behind it."""
    async with (
        Receiver() as receiver,
        open_system(settings) as system,
        serving(system) as api,
        working(system, Flaky(lambda job, index: 404 if index == 7 else None)),
    ):
        spec = {
            "kind": "fetch",
            "tasks": [f"http://t.example/{n}?token=canary5ecret" for n in range(40)],
            "notify": [{"type": "webhook", "url": receiver.url(), "events": ["run.completed"]}],
        }
        made = await api.submit(spec, headers={"prefer": "respond-async", "traceparent": CALLER})
        assert made.status == 202, made.body
        job_id: str = made.json["id"]
        await ended(api, job_id)

        async def told() -> int:
            return len(receiver.told)

        await until(told)
    return job_id


async def test_a_job_is_one_trace_from_accept_to_webhook(settings: Settings, collector: Collector) -> None:
    job_id = await run_job(settings)
    assert collector.paths == {"/v1/traces"}
    spans = collector.spans
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert {span.trace_id for span in spans} == {traces.trace_id(JobId(job_id)).to_bytes(16)}

    [root] = [span for span in spans if not span.parent_span_id]
    assert root.name == "accept"
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in root.links] == [tuple(CALLER.split("-")[1:3])]
    [run] = collector.named("run")
    assert run.parent_span_id == root.span_id
    above = {"ingest split": "run", "ingest range": "run", "batch": "run", "task": "batch", "webhook": "accept"}
    for name, parent in above.items():
        assert collector.named(name), name
        assert {by_id[span.parent_span_id].name for span in collector.named(name)} == {parent}, name
    assert sum(_of(span, "conveyor.attempts") for span in collector.named("batch")) == 40
    assert [_of(span, "error.type") for span in collector.named("task") if span.status.code == 2] == ["http_404"]
    for span in spans:
        assert _of(span, "conveyor.job_id") == job_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    assert b"canary5ecret" not in b"".join(span.SerializeToString() for span in spans)


@pytest.mark.parametrize("settings", [0.0], indirect=True)
async def test_what_is_not_sampled_is_not_sent(settings: Settings, collector: Collector) -> None:
    await run_job(settings)
    assert not collector.spans


def test_a_part_of_all_jobs_is_sampled_and_the_same_everywhere() -> None:
    jobs = [JobId(f"job_{number:026d}") for number in range(2000)]

    class Nowhere:
        def emit(self, span: traces.Span) -> int:
            return 1

    assert not any(map(traces.is_traced, jobs))
    with traces.tracing_to(Nowhere(), 0.1):
        once = [job for job in jobs if traces.is_traced(job)]
    with traces.tracing_to(Nowhere(), 0.2):
        more = {job for job in jobs if traces.is_traced(job)}
    assert 120 < len(once) < 280
    assert more > set(once)
    assert len({traces.trace_id(job) for job in jobs}) == len(jobs)


async def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = """
import asyncio, sys, tempfile
from conveyor.settings import Settings
from conveyor.system import open_system
async def main():
    async with open_system(Settings.load({}, data=tempfile.mkdtemp())):
        pass
asyncio.run(main())
print([name for name in sys.modules if name.startswith(("opentelemetry", "prometheus_client"))])
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert said.strip() == b"[]"


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(InvalidSetting):
        Settings.load({}, otlp_endpoint="collector:4318")


def _of(span: Any, name: str) -> Any:
    values = {pair.key: pair.value for pair in span.attributes}
    return getattr(values[name], values[name].WhichOneof("value")) if name in values else None
