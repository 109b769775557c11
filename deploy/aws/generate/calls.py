"""The calls of AWS that each role makes, by what they are made on. The policies are made from this table.

A test runs every flow behind a proxy that denies what is not here, and fails for an action that no flow needs. What
only a crash or an outage brings about is here too: each role has what the intents that it calls need. The actions are
those of IAM: a transaction is the sum of its parts, a batch of sends is `sqs:SendMessage`, HeadObject is
`s3:GetObject`.
"""

from enum import StrEnum


class On(StrEnum):
    """What a call is made on; the value is the Sid of its statement."""

    RECORDS = "Records"
    INDEXES = "RecordsIndexes"
    TASKS = "Tasks"
    QUEUES = "Queues"
    # ListQueues has no resource: IAM takes `*` for it, and nothing else.
    QUEUE_NAMES = "QueueNames"
    BUCKET = "Bucket"
    OBJECTS = "Objects"
    # Calls with a task token name no state machine: the service authorization reference of IAM has no type of resource
    # for them, and the token, which only its execution gave away, is what opens one waiting task.
    TASK_TOKENS = "TaskTokens"
    # What the operator lists in CONVEYOR_EVENT_TARGETS and CONVEYOR_SOURCE_BUCKETS.
    STATE_MACHINES = "StateMachines"
    EVENT_BUSES = "EventBuses"
    SOURCES = "SourceBuckets"


ROLES = ("api", "ingest", "work", "sweep", "schedule", "monitor", "intake", "operator")

Calls = dict[On, tuple[str, ...]]

# Every role reads and changes records, in transactions.
_RECORDS = ("BatchGetItem", "ConditionCheckItem", "DeleteItem", "PutItem", "Query", "UpdateItem")
_READ_TASKS = ("BatchGetItem", "Query")
_WRITE_TASKS = ("PartiQLInsert", "PutItem")
# Outcomes and cancelled tasks; and counters, also those that a recount repairs, and announcements.
_END_TASKS = ("DeleteItem", "PartiQLUpdate", "PutItem", "UpdateItem")

# Sending makes a queue that is missing, with tags, unless too many runs have one.
_SEND = ("CreateQueue", "GetQueueAttributes", "GetQueueUrl", "SendMessage", "TagQueue")
_RECEIVE = ("ChangeMessageVisibility", "DeleteMessage", "ReceiveMessage")
# Dead letters that the redrive policy moved are read where they are listed.
_READ_DEAD_LETTERS = ("ChangeMessageVisibility", "DeleteMessage", "ReceiveMessage")
_DROP = ("DeleteQueue",)

# Without ListBucket, S3 denies what is missing.
_LIST = ("ListBucket",)
_READ = ("GetObject",)
# A larger object is written in parts, which are dropped when the writer fails.
_WRITE = ("AbortMultipartUpload", "PutObject")
_DELETE = ("DeleteObject",)

# Of `migrate` and `doctor`.
_TABLES = (
    "CreateTable",
    "DescribeTable",
    "DescribeTimeToLive",
    "UpdateContinuousBackups",
    "UpdateTable",
    "UpdateTimeToLive",
)
_BUCKETS = ("CreateBucket", "GetLifecycleConfiguration", "PutLifecycleConfiguration")


def _of(service: str, *groups: tuple[str, ...]) -> tuple[str, ...]:
    """The actions of some groups, each once, in order."""
    return tuple(sorted({f"{service}:{action}" for group in groups for action in group}))


def _tables(*task_groups: tuple[str, ...], records: tuple[str, ...] = ()) -> Calls:
    return {
        On.RECORDS: _of("dynamodb", _RECORDS, records),
        On.INDEXES: _of("dynamodb", ("Query",)),
        On.TASKS: _of("dynamodb", _READ_TASKS, *task_groups),
    }


def _queues(*groups: tuple[str, ...]) -> Calls:
    return {On.QUEUES: _of("sqs", _SEND, *groups), On.QUEUE_NAMES: _of("sqs", ("ListQueues",))}


def _blobs(*groups: tuple[str, ...], bucket: tuple[str, ...] = ()) -> Calls:
    return {On.BUCKET: _of("s3", _LIST, bucket), On.OBJECTS: _of("s3", *groups)}


CALLS: dict[str, Calls] = {
    # Accepts, lists, redrives, recounts; signs requests for clients, which S3 checks by this role.
    "api": {
        **_tables(_WRITE_TASKS, ("UpdateItem",)),
        **_queues(_READ_DEAD_LETTERS),
        **_blobs(_READ, _WRITE, _DELETE, ("ListMultipartUploadParts",)),
    },
    "ingest": {
        **_tables(_WRITE_TASKS, _END_TASKS),
        **_queues(_RECEIVE, _DROP),
        **_blobs(_READ, _WRITE),
        On.SOURCES: _of("s3", _READ, ("GetObjectVersion",)),
    },
    # Events of tasks are written in batches.
    "work": {
        **_tables(_END_TASKS, ("BatchWriteItem",)),
        **_queues(_RECEIVE),
        **_blobs(_READ, _WRITE, _DELETE),
    },
    # Repairs, purges, exports and delivers.
    "sweep": {
        **_tables(_END_TASKS, ("BatchWriteItem",), records=("BatchWriteItem",)),
        **_queues(_READ_DEAD_LETTERS, _DROP),
        **_blobs(_READ, _WRITE, _DELETE),
        On.STATE_MACHINES: _of("states", ("StartExecution",)),
        On.EVENT_BUSES: _of("events", ("PutEvents",)),
    },
    "schedule": {**_tables(_WRITE_TASKS), **_queues(), **_blobs(_READ, _WRITE, _DELETE)},
    # Requeues what is stuck or overdue.
    "monitor": {
        **_tables(),
        **_queues(_RECEIVE, _DROP),
        On.TASK_TOKENS: _of("states", ("SendTaskFailure", "SendTaskHeartbeat", "SendTaskSuccess")),
    },
    "intake": {
        **_tables(_WRITE_TASKS),
        **_queues(_RECEIVE),
        **_blobs(_READ, _WRITE, _DELETE),
        On.TASK_TOKENS: _of("states", ("SendTaskFailure", "SendTaskHeartbeat")),
    },
    # `migrate`, `doctor`, `keys`, `verify` and `move-tasks`.
    "operator": {
        **_tables(
            _WRITE_TASKS,
            _END_TASKS,
            ("BatchWriteItem", *_TABLES),
            records=("BatchWriteItem", *_TABLES),
        ),
        **_queues(_RECEIVE, _DROP, ("SetQueueAttributes",)),
        **_blobs(_READ, _WRITE, _DELETE, bucket=_BUCKETS),
        On.TASK_TOKENS: _of("states", ("SendTaskHeartbeat",)),
    },
}
