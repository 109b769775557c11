"""All routes. They are built once for all systems; a request carries its dependencies in its scope: see
dependencies.py."""

from collections.abc import Callable
from functools import cache
from typing import Any

from litestar import Litestar, Response, Router
from litestar.di import Provide
from litestar.types import ControllerRouterHandler, Scope

from conveyor.api import body_routes as bodies
from conveyor.api import breakdown_routes as breakdowns
from conveyor.api import callback_routes as callbacks
from conveyor.api import comparison_routes as comparison
from conveyor.api import control_routes as control
from conveyor.api import dead_letter_routes as dead_letters
from conveyor.api import event_routes as events
from conveyor.api import export_routes as exports
from conveyor.api import fleet_routes as fleet
from conveyor.api import health_routes as health
from conveyor.api import invalid_line_routes as invalid
from conveyor.api import job_routes as jobs
from conveyor.api import key_routes as keys
from conveyor.api import metrics_route as metrics
from conveyor.api import open_job_routes as open_jobs
from conveyor.api import preview_routes as previews
from conveyor.api import problems
from conveyor.api import result_routes as results
from conveyor.api import schedule_routes as schedules
from conveyor.api import session_routes as sessions
from conveyor.api import statistics_routes as statistics
from conveyor.api import stream_routes as stream
from conveyor.api import upload_routes as uploads
from conveyor.api import webhook_routes as webhooks
from conveyor.api.auth import admin_guard, key_guard, tenant_of
from conveyor.api.dependencies import ApiRequest, Dependencies, dependencies_of, refuse_unknown_parameters
from conveyor.api.openapi_page import OPENAPI, openapi_route


@cache
def application() -> Litestar:
    """The Litestar application. Its caller puts the dependencies of a system into the scope."""
    app = Litestar(
        route_handlers=[*_routes(), openapi_route(_described)],
        dependencies=_providers(),
        exception_handlers=problems.HANDLERS,
        before_request=_before_handler,
        openapi_config=None,
        logging_config=None,
        debug=False,
        # request_bodies.py applies the limit of the settings.
        request_max_body_size=None,
    )
    _resolve_in_turn(app)
    return app


def _resolve_in_turn(app: Litestar) -> None:
    """Resolve dependencies one after the other: Litestar starts a task for each where a handler has several, and ours
    only read an attribute."""
    for route in app.routes:
        for _, model in getattr(route, "route_handler_map", {}).values():
            model.dependency_batches = [{each} for batch in model.dependency_batches for each in batch]


async def _before_handler(request: ApiRequest) -> Response[None] | None:
    """Check the query, and respond to OPTIONS: Litestar's own response names the methods of one handler of the path."""
    await refuse_unknown_parameters(request)
    if request.method != "OPTIONS":
        return None
    return Response(None, status_code=204, headers={"Allow": _methods()[request.scope["path_template"]]})


@cache
def _methods() -> dict[str, str]:
    """The methods of each path."""
    return {route.path_format: ", ".join(sorted(route.methods)) for route in application().routes}


def _described() -> Litestar:
    """The same routes again, for the OpenAPI page only: in the serving app, Litestar would add routes of its own."""
    return Litestar(route_handlers=_routes(), dependencies=_providers(), openapi_config=OPENAPI, logging_config=None)


def _providers() -> dict[str, Provide]:
    """Providers of the dependencies, by the parameter names of handlers."""
    return {name: Provide(_part(name), sync_to_thread=False) for name in Dependencies.__struct_fields__}


def _part(name: str) -> Callable[[Scope], Any]:
    def provide(scope: Scope) -> Any:
        return getattr(dependencies_of(scope), name)

    return provide


def _routes() -> list[ControllerRouterHandler]:
    return [health.healthz, health.readyz, metrics.show_metrics, _tenant_routes(), _admin_routes(), _link_routes()]


def _tenant_routes() -> Router:
    """The routes of tenants. The guard is set here, so that no route can be without it."""
    return Router(
        path="/v1",
        guards=[key_guard],
        dependencies={"tenant": Provide(tenant_of, sync_to_thread=False)},
        route_handlers=[
            uploads.create_upload,
            uploads.show_upload,
            uploads.sign_parts,
            uploads.complete_upload,
            previews.preview,
            jobs.submit_job,
            jobs.list_jobs,
            jobs.show_job,
            jobs.change_job,
            open_jobs.add_tasks,
            open_jobs.close_job,
            control.rerun_job,
            control.duplicate_job,
            control.cancel_job,
            control.pause_job,
            control.resume_job,
            control.delete_job,
            results.list_results,
            results.show_task,
            bodies.get_body,
            bodies.describe_body,
            bodies.get_extracted,
            results.export_job,
            statistics.show_statistics,
            breakdowns.list_errors,
            breakdowns.list_run_hosts,
            statistics.search_tasks,
            comparison.compare_runs,
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
            webhooks.test_webhook,
            webhooks.list_deliveries,
            webhooks.list_job_deliveries,
            callbacks.list_callbacks,
            webhooks.show_delivery,
            webhooks.redeliver,
            schedules.create_schedule,
            schedules.list_schedules,
            schedules.show_schedule,
            schedules.change_schedule,
            schedules.run_schedule,
            schedules.remove_schedule,
            dead_letters.list_letters,
            dead_letters.redrive_letters,
            fleet.list_breakers,
            fleet.reset_breakers,
            fleet.list_hosts,
            fleet.show_load,
            fleet.list_lanes,
            fleet.show_workers,
            sessions.show_session,
            sessions.sign_out,
            sessions.become_admin,
            sessions.leave_admin,
            sessions.create_link,
        ],
        security=[{"key": []}],
    )


def _admin_routes() -> Router:
    """The routes of administrators, who act for all tenants: handlers get no tenant."""
    return Router(
        path="/v1",
        guards=[key_guard, admin_guard],
        route_handlers=[keys.create_key, keys.list_keys, keys.revoke_key, keys.list_tenants],
        security=[{"key": []}],
    )


def _link_routes() -> Router:
    """The routes that need no key: a signed link or a sign-in link authorizes them."""
    return Router(
        path="/v1",
        route_handlers=[
            uploads.fill_upload,
            bodies.get_linked_body,
            bodies.describe_linked_body,
            bodies.get_linked_extracted,
            sessions.sign_in,
        ],
    )
