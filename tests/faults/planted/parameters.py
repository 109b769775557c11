"""Bugs in what the server takes from a query, and in what it says of its methods."""

from typing import Any

import pytest

from conveyor.api import dependencies, result_routes, router, statistics_routes
from conveyor.read.runs import LATEST
from tests.faults.planted import Planted
from tests.security import test_openapi as openapi


def _null_is_absent(patch: pytest.MonkeyPatch) -> None:
    """A filter that is `null` returns everything."""
    read = result_routes._http_status
    patch.setattr(result_routes, "_http_status", lambda text: None if text == "null" else read(text))


def _empty_is_latest(patch: pytest.MonkeyPatch) -> None:
    """A run without a name is the latest."""
    chosen_run = statistics_routes.chosen_run
    patch.setattr(statistics_routes, "chosen_run", lambda records, job, run: chosen_run(records, job, run or LATEST))


class _OneOfEach(dict[str, Any]):
    """Parameters that are looked at once each."""

    def multi_items(self) -> Any:
        return self.items()


def _one_of_several_counts(patch: pytest.MonkeyPatch) -> None:
    check = dependencies.refuse_unknown_parameters

    async def check_names(request: Any) -> None:
        class Once:
            route_handler = request.route_handler
            query_params = _OneOfEach(request.query_params.dict())

        await check(Once())  # type: ignore[arg-type]  # all that it reads of a request

    patch.setattr(router, "refuse_unknown_parameters", check_names)


def _methods_of_one_handler(patch: pytest.MonkeyPatch) -> None:
    one = {path: methods.split(", ")[0] + ", OPTIONS" for path, methods in router._methods().items()}
    patch.setattr(router, "_methods", lambda: one)


PLANTED = [
    Planted("a filter that is null returns everything", _null_is_absent, openapi.a_filter_is_a_number_or_absent),
    Planted("an empty run is the latest", _empty_is_latest, openapi.a_run_has_a_name),
    Planted("one of several values counts", _one_of_several_counts, openapi.a_parameter_is_sent_once),
    Planted("Allow names one handler's methods", _methods_of_one_handler, openapi.every_method_is_allowed),
]
