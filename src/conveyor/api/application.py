"""The ASGI application of one System: the edge, the dashboard's files and the routes."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.schedules import Schedules
from conveyor.accept.submit import Submit
from conveyor.api.dependencies import SCOPE_KEY, Dependencies
from conveyor.api.direct_submit import DirectSubmit
from conveyor.api.edge import EdgeExchange
from conveyor.api.problems import problem_of
from conveyor.api.request_budget import RequestBudget
from conveyor.api.router import application
from conveyor.auth.failed_keys import FailedKeys
from conveyor.auth.keys import KeyCache
from conveyor.auth.sessions import Sessions
from conveyor.coordination.fail_open import FailOpen
from conveyor.dashboard.static_files import Files
from conveyor.errors import Unavailable
from conveyor.export.exports import Exports
from conveyor.jobs.admission import Admission
from conveyor.lists.uploads import Uploads
from conveyor.notify.deliveries import Deliveries
from conveyor.notify.webhooks import Webhooks
from conveyor.read.job_stream import Streams
from conveyor.system import System

_STOPPED = msgspec.json.encode(problem_of(Unavailable()))


class Api:
    """One system behind the routes. Litestar's middleware does not see routing errors; this class does."""

    def __init__(self, system: System, stop: asyncio.Event) -> None:
        self._clock = system.clock
        self._budget = RequestBudget(system.settings)
        self._dashboard = Files(system.blobs)
        self._dependencies = _dependencies(system, stop)
        self._submits = DirectSubmit(self._dependencies)
        self._routes = application()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await EdgeExchange(self._clock, self._budget, scope, send).run(self._answer, receive, _STOPPED)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if await self._dashboard.answer(scope, send):
            return
        scope[SCOPE_KEY] = self._dependencies
        if not await self._submits.answer(scope, receive, send):
            await self._routes(scope, receive, send)


def create_app(system: System, stop: asyncio.Event | None = None) -> Api:
    """The API of one system. Endless streams stop when `stop` is set."""
    return Api(system, stop or asyncio.Event())


def _dependencies(system: System, stop: asyncio.Event) -> Dependencies:
    return Dependencies(
        # What routes show answers without the coordinator; what they decide, the services below decide with it.
        system=replace(system, coordinator=FailOpen(system.coordinator, system.clock)),
        keys=KeyCache(system.records.access, system.clock),
        failed_keys=FailedKeys(system.clock, system.settings.failed_keys_per_minute),
        sessions=Sessions(system.records, system.clock, system.settings),
        submit=Submit(system),
        adding=AddTasks(system),
        uploads=Uploads(system, Admission(system).admit_upload),
        webhooks=Webhooks(system),
        deliveries=Deliveries(system),
        schedules=Schedules(system),
        exports=Exports(system),
        streams=Streams(system.settings.max_streams, stop),
    )
