"""The whole system on Postgres behind PgBouncer in transaction mode, with no word of it in the settings."""

import pytest

from tests.stacks.test_flows import (
    test_a_small_job_is_there_at_once_and_ends,
    test_a_staged_list_is_ingested_run_and_listed,
)

__all__ = ["test_a_small_job_is_there_at_once_and_ends", "test_a_staged_list_is_ingested_run_and_listed"]


@pytest.fixture
def stack() -> str:
    return "pgbouncer"
