"""The application. Gets a System, hands back the ASGI app; whatever handlers need is handed to them from here."""

import asyncio
from functools import partial
from typing import Any

from litestar import Litestar, Router
from litestar.di import Provide
from litestar.types import ControllerRouterHandler, Guard

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.admission import Admission
from conveyor.accept.schedules import Schedules
from conveyor.accept.submit import Submit
from conveyor.api import (
    callbacks,
    dead_letters,
    events,
    exports,
    fleet,
    health,
    invalid,
    jobs,
    keys,
    moves,
    open_jobs,
    problems,
    results,
    schedules,
    sessions,
    statistics,
    stream,
    uploads,
    webhooks,
)
from conveyor.api.auth import admin_guard, key_guard, tenant_of
from conveyor.api.edge import Exchange
from conveyor.api.intake import Intake
from conveyor.api.metrics import metrics_route
from conveyor.api.page import OPENAPI, page
from conveyor.api.parts import refuse_unknown_parameters
from conveyor.clock import Clock
from conveyor.dashboard.files import Files
from conveyor.dashboard.sessions import Sessions
from conveyor.keys import KeyCache
from conveyor.serve.deliveries import Deliveries
from conveyor.serve.exports import Exports
from conveyor.serve.stream import Streams
from conveyor.serve.webhooks import Webhooks
from conveyor.stage.uploads import Uploads
from conveyor.system import System


class Api(Litestar):
    """Litestar with the edge around it: routing errors pass no middleware, but they pass here."""

    clock: Clock
    intake: Intake
    files: Files

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        await Exchange(self.clock, self.intake, scope, send).run(self._answer, receive)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if not await self.files.answer(scope, send):
            await super().__call__(scope, receive, send)


def create_app(system: System, stop: asyncio.Event | None = None) -> Litestar:
    """The API over one system. Streams, which would go on for ever, end when `stop` is set."""
    stop = stop or asyncio.Event()
    visitors = Sessions(system.records, system.clock, system.settings)
    app = Api(
        route_handlers=[*_routes(system, visitors), page(partial(_described, system, visitors))],
        dependencies=_parts(system, visitors, stop),
        exception_handlers=problems.HANDLERS,
        before_request=refuse_unknown_parameters,
        openapi_config=None,
        logging_config=None,
        debug=False,
        # Bodies are counted where they are read, by the cap of the settings.
        request_max_body_size=None,
    )
    app.clock = system.clock
    app.intake = Intake(system.settings)
    app.files = Files(system.blobs)
    return app


def _parts(system: System, visitors: Sessions, stop: asyncio.Event) -> dict[str, Provide]:
    submit, adding, staging = Submit(system), AddTasks(system), Uploads(system, Admission(system).admit_upload)
    webhooks_part, deliveries, schedules_part = Webhooks(system), Deliveries(system), Schedules(system)
    exports_part = Exports(system)
    streams = Streams(system.settings.max_streams, stop)
    return {
        "system": Provide(lambda: system, sync_to_thread=False),
        "submit": Provide(lambda: submit, sync_to_thread=False),
        "adding": Provide(lambda: adding, sync_to_thread=False),
        "uploads": Provide(lambda: staging, sync_to_thread=False),
        "webhooks": Provide(lambda: webhooks_part, sync_to_thread=False),
        "deliveries": Provide(lambda: deliveries, sync_to_thread=False),
        "schedules": Provide(lambda: schedules_part, sync_to_thread=False),
        "exports": Provide(lambda: exports_part, sync_to_thread=False),
        "streams": Provide(lambda: streams, sync_to_thread=False),
        "sessions": Provide(lambda: visitors, sync_to_thread=False),
    }


def _routes(system: System, visitors: Sessions) -> list[ControllerRouterHandler]:
    source = KeyCache(system.records, system.clock)
    guard = key_guard(source, visitors, system.clock)
    scraped = metrics_route(system.settings, source, system.clock)
    return [health.healthz, health.readyz, scraped, _of_tenants(guard), _of_administrators(guard), _of_links()]


def _of_tenants(guard: Guard) -> Router:
    """Everything that belongs to a tenant. The guard stands here, so that no route can be without it."""
    return Router(
        path="/v1",
        guards=[guard],
        dependencies={"tenant": Provide(tenant_of, sync_to_thread=False)},
        route_handlers=[
            uploads.create_upload,
            uploads.show_upload,
            jobs.submit_job,
            jobs.list_jobs,
            jobs.show_job,
            jobs.change_job,
            open_jobs.add_tasks,
            open_jobs.close_job,
            moves.rerun_job,
            moves.cancel_job,
            moves.pause_job,
            moves.resume_job,
            moves.delete_job,
            results.list_results,
            results.show_task,
            results.get_body,
            results.export_job,
            statistics.show_statistics,
            statistics.search_tasks,
            exports.create_export,
            exports.list_exports,
            exports.show_export,
            exports.delete_export,
            exports.get_manifest,
            exports.get_part,
            invalid.list_invalid,
            events.list_events,
            stream.follow_job,
            stream.follow_jobs,
            webhooks.create_webhook,
            webhooks.list_webhooks,
            webhooks.show_secret,
            webhooks.show_webhook,
            webhooks.change_webhook,
            webhooks.remove_webhook,
            webhooks.rotate_secret,
            webhooks.list_deliveries,
            webhooks.list_job_deliveries,
            callbacks.list_callbacks,
            webhooks.show_delivery,
            webhooks.redeliver,
            schedules.create_schedule,
            schedules.list_schedules,
            schedules.show_schedule,
            schedules.change_schedule,
            schedules.remove_schedule,
            dead_letters.list_letters,
            dead_letters.redrive_letters,
            fleet.list_breakers,
            fleet.list_lanes,
            fleet.show_workers,
            sessions.show_session,
            sessions.sign_out,
            sessions.create_link,
        ],
        security=[{"key": []}],
    )


def _of_administrators(guard: Guard) -> Router:
    """What concerns every tenant. No handler gets one: an administrator acts for all."""
    return Router(
        path="/v1/keys",
        guards=[guard, admin_guard],
        route_handlers=[keys.create_key, keys.list_keys, keys.revoke_key],
        security=[{"key": []}],
    )


def _of_links() -> Router:
    """What a signed link is the right for, or a link that signs in, without a key."""
    return Router(path="/v1", route_handlers=[uploads.fill_upload, sessions.sign_in])


def _described(system: System, visitors: Sessions) -> Litestar:
    """The same routes once more, for the page alone: the app that serves would get routes of Litestar's own with it."""
    return Litestar(
        route_handlers=_routes(system, visitors),
        dependencies=_parts(system, visitors, asyncio.Event()),
        openapi_config=OPENAPI,
        logging_config=None,
    )
