"""Fixed bugs of the Coordinator on Redis."""

import asyncio

import pytest
from redis import exceptions

from conveyor import system
from conveyor.engines.redis import node_calls
from conveyor.engines.redis.address import RedisNode
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.redis_server import Server
from tests.faults.planted import Planted
from tests.unit.engines import test_redis_server as guards


def keep_all_in_one_slot(patch: pytest.MonkeyPatch) -> None:
    """The prefix alone is the hash tag."""
    patch.setattr(RedisCoordinator, "_key", lambda self, kind, name: f"{{{self._prefix}}}:{kind}:{name}")


def remember_answers_by_caller(patch: pytest.MonkeyPatch) -> None:
    """In a slot of their own, and not beside the key that they are about."""
    patch.setattr(RedisCoordinator, "_answers", lambda self, key: f"{{{self._prefix}}}:answers:{self._caller}")


def wait_with_all_calls_for_one(patch: pytest.MonkeyPatch) -> None:
    """A slot that is on its way is a problem of its node."""
    is_not_now = node_calls._is_not_now
    patch.setattr(
        node_calls,
        "_is_not_now",
        lambda error: isinstance(error, exceptions.TryAgainError) or is_not_now(error),
    )


def follow_slots_without_asking(patch: pytest.MonkeyPatch) -> None:
    """A slot that is on its way is taken for one that has arrived."""

    def redirect(self: Server, call: node_calls.RedisCall, error: exceptions.AskError, _: object) -> None:
        call.asking = None
        self._masters[call.slot] = RedisNode(error.host, error.port)
        self._place(call)

    patch.setattr(Server, "_redirect", redirect)


def cancel_once(patch: pytest.MonkeyPatch) -> None:
    async def end(task: "asyncio.Task[None]") -> None:
        task.cancel()
        await asyncio.wait([task])

    patch.setattr(node_calls, "end", end)


def show_the_options_of_a_url(patch: pytest.MonkeyPatch) -> None:
    def shown(url: str) -> str:
        head, at, tail = url.rpartition("@")
        return f"{head.partition('://')[0]}://…@{tail}" if at else url

    patch.setattr(system, "_shown", shown)


PLANTED = [
    Planted(
        "a cluster keeps all keys in one slot",
        keep_all_in_one_slot,
        guards.test_names_are_spread_and_the_keys_of_one_call_are_not,
    ),
    Planted(
        "answers are in another slot than what they are about",
        remember_answers_by_caller,
        guards.test_names_are_spread_and_the_keys_of_one_call_are_not,
    ),
    Planted(
        "a slot on its way holds up its node",
        wait_with_all_calls_for_one,
        guards.test_a_call_that_has_to_wait_holds_up_no_other,
    ),
    Planted(
        "a slot on its way is taken for moved",
        follow_slots_without_asking,
        guards.test_a_slot_that_moves_is_asked_for_once,
    ),
    Planted(
        "a swallowed cancellation hangs the close",
        cancel_once,
        guards.test_a_task_that_swallows_a_cancellation_ends,
    ),
    Planted(
        "the password of the Sentinels is shown",
        show_the_options_of_a_url,
        guards.test_no_secret_of_a_url_is_shown,
    ),
]
