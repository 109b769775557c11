"""Bugs that the state machine found."""

import pytest

from conveyor.engines.queue import Queue
from conveyor.ingest import pipeline
from conveyor.model import Run
from tests.faults.planted import Planted
from tests.flow import test_ended_ingest


def queues_go_from_under_their_holders(patch: pytest.MonkeyPatch) -> None:
    """The ingest of an ended run dropped its queues while a worker held messages of it."""

    async def nobody(queue: Queue, run: Run, now: float) -> bool:
        return False

    patch.setattr(pipeline, "has_holders", nobody)


PLANTED = [
    Planted(
        "an ended ingest drops messages that are held",
        queues_go_from_under_their_holders,
        test_ended_ingest.test_its_queues_stay_while_a_worker_holds_messages_of_it,
    ),
]
