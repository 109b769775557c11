"""What the sweep over single faults found."""

import asyncio
from collections.abc import Sequence

import pytest

from conveyor import service
from conveyor.service import Service
from tests.faults.planted import Planted
from tests.unit import test_service


async def _stop_all_until_the_first_error(services: Sequence[Service], tasks: Sequence[asyncio.Task[None]]) -> None:
    for each in services:
        each.stop()
    await asyncio.gather(*tasks)


def _first_error_ends_the_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "stop_all", _stop_all_until_the_first_error)


PLANTED = [
    Planted(
        "one role that fails to close leaves the others without their engines",
        _first_error_ends_the_wait,
        test_service.test_an_error_at_closing_is_told_when_all_the_others_have_given_back_what_they_hold,
    ),
]
