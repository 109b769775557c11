"""The keys of a run in the table of tasks.

Tasks and their events are in the partition of their shard, `Job#<job>#TS<n>`. A job with one shard has a single
partition, `Job#<job>`, like every job before shards existed. Items that a run has once are in `Job#<job>`, whatever the
number of shards. Sort keys start with tenant and run: a run is a range of keys, and no key reaches another tenant.
"""

from conveyor.engines.dynamodb.events import DIGITS
from conveyor.engines.dynamodb.table import Key
from conveyor.model import RunKey, TaskId, shard_of, task_id


def shards(run: RunKey) -> range:
    return range(max(1, run.shard_count))


def home(run: RunKey) -> str:
    return f"Job#{run.job_id}"


def partition(run: RunKey, shard: int) -> str:
    return home(run) if run.shard_count <= 1 else f"{home(run)}#TS{shard}"


def prefix(run: RunKey) -> str:
    """The prefix of all sort keys of a run."""
    return f"{run.tenant}#{run.run_id}#"


def task_prefix(run: RunKey) -> str:
    return f"{prefix(run)}task#"


def task_key(run: RunKey, task: TaskId) -> Key:
    return Key(partition(run, shard_of(task, run.shard_count)), task_prefix(run) + task)


def key_at(run: RunKey, index: int) -> Key:
    return task_key(run, task_id(run.run_id, index))


def task_in(sort_key: str) -> TaskId:
    return TaskId(sort_key.rpartition("#")[2])


def event_prefix(run: RunKey) -> str:
    return f"{prefix(run)}event#"


def event_key(run: RunKey, index: int, seq: int) -> Key:
    return Key(key_at(run, index).pk, f"{event_prefix(run)}{seq:0{DIGITS}d}")


def count_prefix(run: RunKey) -> str:
    """The prefix of counts and announcements."""
    return f"{prefix(run)}count#"


def count_key(run: RunKey, slot: int) -> Key:
    return Key(home(run), f"{count_prefix(run)}{slot}")


def announcement_prefix(run: RunKey) -> str:
    return f"{count_prefix(run)}next#"


def announcement_key(run: RunKey, writer: str, lane: int) -> Key:
    return Key(home(run), f"{announcement_prefix(run)}{writer}.{lane}")


def first_key(run: RunKey) -> Key:
    """The item that the first put of a run creates: it numbers the run's events."""
    return Key(home(run), f"{prefix(run)}run")
