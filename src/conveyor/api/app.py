"""The application. Gets a System, hands back the ASGI app; whatever handlers need is handed to them from here."""

from functools import partial
from typing import Any

from litestar import Litestar, Router
from litestar.di import Provide
from litestar.types import ControllerRouterHandler, Guard

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.submit import Submit
from conveyor.api import (
    dead_letters,
    events,
    health,
    invalid,
    jobs,
    keys,
    moves,
    open_jobs,
    problems,
    results,
    uploads,
)
from conveyor.api.auth import admin_guard, key_guard, tenant_of
from conveyor.api.edge import Exchange
from conveyor.api.page import OPENAPI, page
from conveyor.api.parts import refuse_unknown_parameters
from conveyor.clock import Clock
from conveyor.keys import KeyCache
from conveyor.stage.uploads import Uploads
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
        route_handlers=[*_routes(system), page(partial(_described, system))],
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
    submit, adding, staging = Submit(system), AddTasks(system), Uploads(system)
    return {
        "system": Provide(lambda: system, sync_to_thread=False),
        "submit": Provide(lambda: submit, sync_to_thread=False),
        "adding": Provide(lambda: adding, sync_to_thread=False),
        "uploads": Provide(lambda: staging, sync_to_thread=False),
    }


def _routes(system: System) -> list[ControllerRouterHandler]:
    guard = key_guard(KeyCache(system.records, system.clock), system.clock)
    return [health.healthz, health.readyz, _of_tenants(guard), _of_administrators(guard), _of_links()]


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
            open_jobs.add_tasks,
            open_jobs.close_job,
            moves.rerun_job,
            moves.delete_job,
            results.list_results,
            results.show_task,
            results.get_body,
            results.export_job,
            invalid.list_invalid,
            events.list_events,
            dead_letters.list_letters,
            dead_letters.redrive_letters,
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
    """What a signed link is the right for, without a key."""
    return Router(path="/v1", route_handlers=[uploads.fill_upload])


def _described(system: System) -> Litestar:
    """The same routes once more, for the page alone: the app that serves would get routes of Litestar's own with it."""
    return Litestar(
        route_handlers=_routes(system),
        dependencies=_parts(system),
        openapi_config=OPENAPI,
        logging_config=None,
    )
