"""Fixed bugs of the Postgres engine."""

import pytest

from conveyor.engines.postgres import connections, queue, tasks, wakes
from conveyor.engines.postgres.database import PostgresSession
from conveyor.engines.postgres.queries import made_for
from conveyor.engines.postgres.tables import SQL, drop_own
from conveyor.engines.postgres.url import PostgresPlace
from conveyor.engines.queue import QueueName
from conveyor.errors import EngineFailed, TasksInUse
from tests.faults.planted import Planted
from tests.faults.test_postgres_purge import (
    test_a_purge_waits_for_no_reader_and_no_reader_for_a_purge,
    test_long_readers_of_many_runs_stop_no_other_purge,
)
from tests.unit.engines.test_postgres import (
    test_a_message_that_is_due_later_wakes_nobody,
    test_a_send_succeeds_though_nobody_can_be_woken,
    test_wakes_that_come_up_together_are_one_transaction,
)
from tests.unit.engines.test_postgres_pooler import test_many_take_turns_on_few_sessions_in_transaction_mode


def wait_for_the_readers_of_a_table(patch: pytest.MonkeyPatch) -> None:
    async def drop(db: PostgresSession, number: int) -> None:
        await db.run("SET LOCAL lock_timeout = '500ms'")
        await db.run(made_for(SQL["drop_own_tables"], f"_{number}").text)
        await db.change(made_for(SQL["mark_own"], ""), {"run_no": number, "own": False})

    patch.setattr(tasks, "drop_own", drop)


def blame_the_engine_for_readers(patch: pytest.MonkeyPatch) -> None:
    """As if it did not answer: after a few such errors in a row the pass ends."""

    async def drop(db: PostgresSession, number: int) -> None:
        try:
            await drop_own(db, number)
        except TasksInUse as error:
            raise EngineFailed("Postgres failed: the tasks are in use") from error

    patch.setattr(tasks, "drop_own", drop)


def take_a_pooler_for_the_server(patch: pytest.MonkeyPatch) -> None:
    """Each connection has its settings and its statements, as if its session were its own."""

    async def is_pooled(place: PostgresPlace) -> bool:
        return False

    patch.setattr(connections, "is_pooled", is_pooled)


def leave_settings_in_sessions(patch: pytest.MonkeyPatch) -> None:
    settings = connections._settings
    patch.setattr(connections, "_settings", lambda place, command: settings(place, "SET"))


def wake_for_every_message(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "WAKE_WITHIN", float("inf"))


def notify_one_queue_at_a_time(patch: pytest.MonkeyPatch) -> None:
    async def wake(self: wakes.Waker, name: QueueName) -> None:
        await self._database.rows(wakes._NOTIFY, {"channel": self._channel, "queues": [name]})

    patch.setattr(wakes.Waker, "wake", wake)


_BROKEN = (AssertionError, EngineFailed)

PLANTED = [
    Planted(
        "a purge keeps readers waiting",
        wait_for_the_readers_of_a_table,
        test_a_purge_waits_for_no_reader_and_no_reader_for_a_purge,
        _BROKEN,
    ),
    Planted(
        "a backup stops all purges",
        blame_the_engine_for_readers,
        test_long_readers_of_many_runs_stop_no_other_purge,
        _BROKEN,
    ),
    Planted(
        "a pooler is taken for the server",
        take_a_pooler_for_the_server,
        test_many_take_turns_on_few_sessions_in_transaction_mode,
        _BROKEN,
    ),
    Planted(
        "settings stay in shared sessions",
        leave_settings_in_sessions,
        test_many_take_turns_on_few_sessions_in_transaction_mode,
    ),
    Planted(
        "a retry in minutes wakes receivers",
        wake_for_every_message,
        test_a_message_that_is_due_later_wakes_nobody,
    ),
    Planted(
        "a transaction for each wake-up",
        notify_one_queue_at_a_time,
        test_wakes_that_come_up_together_are_one_transaction,
    ),
    Planted(
        "a stored send fails for its wake-up",
        notify_one_queue_at_a_time,
        test_a_send_succeeds_though_nobody_can_be_woken,
        _BROKEN,
    ),
]
