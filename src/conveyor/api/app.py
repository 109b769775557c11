"""The application. Gets a System, hands back the ASGI app; whatever handlers need is handed to them from here."""

from functools import partial
from typing import Any

from litestar import Litestar, Router
from litestar.di import Provide

from conveyor.accept.submit import Submit
from conveyor.api import events, health, jobs, problems, results
from conveyor.api.auth import key_guard, tenant_of
from conveyor.api.edge import Exchange
from conveyor.api.page import OPENAPI, page
from conveyor.api.parts import refuse_unknown_parameters
from conveyor.clock import Clock
from conveyor.keys import KeyCache
from conveyor.system import System


class Api(Litestar):
    """Litestar with the edge around it: routing errors pass no middleware, but they pass here."""

    clock: Clock

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        await Exchange(self.clock, scope, send).run(super().__call__, receive)


def create_app(system: System) -> Litestar:
    """The API over one system."""
    app = Api(
        route_handlers=[health.healthz, health.readyz, _v1(system), page(partial(_described, system))],
        dependencies=_parts(system),
        exception_handlers=problems.HANDLERS,
        before_request=refuse_unknown_parameters,
        openapi_config=None,
        logging_config=None,
        debug=False,
        # Bodies are counted where they are read, by the cap of the settings.
        request_max_body_size=None,
    )
    app.clock = system.clock
    return app


def _parts(system: System) -> dict[str, Provide]:
    submit = Submit(
        settings=system.settings,
        clock=system.clock,
        records=system.records,
        tasks=system.tasks,
        queue=system.queue,
        whole=system.whole,
    )
    return {
        "system": Provide(lambda: system, sync_to_thread=False),
        "submit": Provide(lambda: submit, sync_to_thread=False),
    }


def _v1(system: System) -> Router:
    """Everything that belongs to a tenant. The guard stands here, so that no route can be without it."""
    return Router(
        path="/v1",
        guards=[key_guard(KeyCache(system.records, system.clock), system.clock)],
        dependencies={"tenant": Provide(tenant_of, sync_to_thread=False)},
        route_handlers=[
            jobs.submit_job,
            jobs.list_jobs,
            jobs.show_job,
            results.list_results,
            results.show_task,
            results.get_body,
            results.export_job,
            events.list_events,
        ],
        security=[{"key": []}],
    )


def _described(system: System) -> Litestar:
    """The same routes once more, for the page alone: the app that serves would get routes of Litestar's own with it."""
    return Litestar(
        route_handlers=[health.healthz, health.readyz, _v1(system)],
        dependencies=_parts(system),
        openapi_config=OPENAPI,
        logging_config=None,
    )
