"""Records on Postgres: five parts over one database."""

from conveyor.clock import Clock
from conveyor.engines.postgres.access import PostgresAccess
from conveyor.engines.postgres.database import PostgresDatabase
from conveyor.engines.postgres.documents import PostgresDocuments
from conveyor.engines.postgres.ingests import PostgresIngests
from conveyor.engines.postgres.jobs import PostgresJobs
from conveyor.engines.postgres.outbox import PostgresOutbox


class PostgresRecords(PostgresJobs, PostgresOutbox, PostgresIngests, PostgresAccess, PostgresDocuments):
    """All of Records; the parts share nothing but the database and the clock."""

    def __init__(self, database: PostgresDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
