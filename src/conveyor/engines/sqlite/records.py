"""Records on SQLite: five parts over one database."""

from conveyor.clock import Clock
from conveyor.engines.sqlite.access import SqliteAccess
from conveyor.engines.sqlite.database import SqliteDatabase
from conveyor.engines.sqlite.documents import SqliteDocuments
from conveyor.engines.sqlite.ingests import SqliteIngests
from conveyor.engines.sqlite.jobs import SqliteJobs
from conveyor.engines.sqlite.outbox import SqliteOutbox


class SqliteRecords(SqliteJobs, SqliteOutbox, SqliteIngests, SqliteAccess, SqliteDocuments):
    """All of Records; the parts share nothing but the database and the clock."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
