"""Bugs in what is shown of secrets, and in where requests go."""

from typing import Any

import msgspec
import pytest
from pyreqwest.http import Url

from conveyor.coordination.own_counts import CountsAway
from conveyor.egress.heads import ResponseHead
from conveyor.egress.redirects import OutgoingRequest
from conveyor.jobs import secrets
from conveyor.jobs.admission import Admission
from conveyor.process.executors.fetch import fetch_executor
from tests.faults.planted import Planted
from tests.flow import test_body_budget_limits, test_coordinator_away, test_fetch
from tests.security import test_shown_secrets


def show_inputs_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(secrets, "_shown_task", lambda value: value)


def follow_redirects_on_the_gateway(patch: pytest.MonkeyPatch) -> None:
    def from_the_gateway(request: OutgoingRequest, head: ResponseHead, location: str | None = None) -> OutgoingRequest:
        on_it = msgspec.structs.replace(request, url=Url("http://127.0.0.1/gateway"))
        return follow_redirect(on_it, head, location)

    follow_redirect = fetch_executor.follow_redirect
    patch.setattr(fetch_executor, "follow_redirect", from_the_gateway)


def read_any_body(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetch_executor, "largest_body", lambda budget, fetchers: 1 << 30)


def admit_by_the_coordinator_alone(patch: pytest.MonkeyPatch) -> None:
    async def admit(self: Admission, admit_by: Any) -> None:
        await self._check_workers(self._shared)
        await admit_by(self._shared)

    patch.setattr(Admission, "_admit", admit)


PLANTED = [
    Planted(
        "nothing is accepted without the coordinator",
        admit_by_the_coordinator_alone,
        test_coordinator_away.limits_hold_without_it,
        faults=(CountsAway,),
    ),
    Planted(
        "a body larger than the budget is read",
        read_any_body,
        test_body_budget_limits.a_worker_reads_no_larger_body,
    ),
    Planted(
        "a redirect through a gateway is relative to the gateway",
        follow_redirects_on_the_gateway,
        test_fetch.a_redirect_through_a_gateway_is_relative_to_the_page,
    ),
    Planted(
        "headers of a task's input are shown",
        show_inputs_as_they_are,
        test_shown_secrets.test_what_of_an_input_is_hidden,
    ),
]
