"""Fixed bugs of the engines and of retention."""

import pytest

from conveyor.engines.sqlite import database
from tests.faults.planted import Planted
from tests.unit.test_database import test_a_late_writer_of_a_deleted_run_changes_no_later_one


def reuse_run_numbers(patch: pytest.MonkeyPatch) -> None:
    """The table as it was made at first, whose highest number is given away again once its row is deleted."""
    first, _, *later = database.MIGRATIONS
    patch.setattr(database, "MIGRATIONS", (first, "SELECT 1", *later))


PLANTED = [
    Planted(
        "the number of a deleted run is reused",
        reuse_run_numbers,
        test_a_late_writer_of_a_deleted_run_changes_no_later_one,
    ),
]
