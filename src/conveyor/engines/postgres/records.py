"""Records on Postgres: five parts over one database."""

from conveyor.clock import Clock
from conveyor.engines.postgres.access import PostgresAccess
from conveyor.engines.postgres.database import Database
from conveyor.engines.postgres.documents import PostgresRows
from conveyor.engines.postgres.ingests import PostgresIngests
from conveyor.engines.postgres.jobs import PostgresJobs
from conveyor.engines.postgres.outbox import PostgresNotices


class PostgresRecords(PostgresJobs, PostgresNotices, PostgresIngests, PostgresAccess, PostgresRows):
    """All of Records; the parts share nothing but the database and the clock."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
