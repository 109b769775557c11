"""Records on DynamoDB: five parts over one table."""

from conveyor.clock import Clock
from conveyor.engines.dynamodb.access import DynamoAccess
from conveyor.engines.dynamodb.documents import DynamoDocuments
from conveyor.engines.dynamodb.ingests import DynamoIngests
from conveyor.engines.dynamodb.jobs import DynamoJobs
from conveyor.engines.dynamodb.outbox import DynamoOutbox
from conveyor.engines.dynamodb.table import Table


class DynamoRecords(DynamoJobs, DynamoIngests, DynamoAccess, DynamoDocuments, DynamoOutbox):
    """All of Records; the parts share nothing but the table and the clock."""

    def __init__(self, table: Table, clock: Clock) -> None:
        DynamoOutbox.__init__(self, table, clock)
