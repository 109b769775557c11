"""Breakdown of a run: what its attempts came to, by host, by error and host, and over time. Bounded, whatever the size
of the run, so that nobody scans tasks to answer why they fail.

Workers collect it in parts (process/breakdown_parts.py) and add their parts to one document of the run. A part has the
name of its worker and a number, and is added once. A worker that dies loses what it had not added yet: the counts of a
breakdown may be too low, and are never too high. Of a small run none is stored; its rows are read instead
(read/breakdown_views.py).
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from conveyor.coordination.durations import percentile, steps_of
from conveyor.engines.records import Document, DocumentRecords
from conveyor.faults import crashpoint
from conveyor.model import Job, RunKey, TaskError

BREAKDOWN = "breakdown"
# Up to this many tasks a run is small.
SMALL_RUN = 500
# The name of all hosts, or all error codes, that have no entry of their own.
OTHER = "*"

# Entries of a stored breakdown. A worker collects more before it adds them.
MAX_HOSTS = 100
MAX_GROUPS = 100
_COLLECTED = 10
_MAX_CODES = 50
# Messages of a group, and their length.
_MAX_SAMPLES = 3
_MAX_MESSAGE = 300
MAX_BUCKETS = 240
# Seconds of the window in which the current throughput of a host is counted.
WINDOW = 30
# Workers whose last part is known; the ones that added last.
_MAX_WRITERS = 200
_MAX_TRIES = 20


class HostTally(msgspec.Struct, array_like=True):
    """The attempts at one host. `succeeded` and `failed` are last attempts, `retried` are failed ones before them."""

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    # The number of the current window, and the attempts in it and in the one before.
    window: int = 0
    recent: int = 0
    before: int = 0
    # Attempts by latency: buckets of coordination/durations.py.
    steps: dict[int, int] = {}

    @property
    def attempts(self) -> int:
        return self.succeeded + self.failed + self.retried

    def add(self, other: "HostTally") -> None:
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.retried += other.retried
        self.first_at = min(self.first_at or other.first_at, other.first_at or self.first_at)
        self.last_at = max(self.last_at, other.last_at)
        self._add_window(other)
        for step, count in other.steps.items():
            self.steps[step] = self.steps.get(step, 0) + count

    def rate(self, now: float) -> float:
        """Attempts a second in the last full window and the current one."""
        window = int(now // WINDOW)
        if window > self.window + 1:
            return 0.0
        if window > self.window:
            return self.recent / (WINDOW + now % WINDOW)
        began = max(self.first_at, (self.window - 1) * WINDOW)
        return (self.recent + self.before) / max(now - began, 1.0)

    def percentile(self, share: float) -> float | None:
        return percentile(sorted(self.steps.items()), share) if self.steps else None

    def _add_window(self, other: "HostTally") -> None:
        if other.window > self.window:
            self.before = other.before + (self.recent if other.window == self.window + 1 else 0)
            self.window, self.recent = other.window, other.recent
        elif other.window == self.window:
            self.recent += other.recent
            self.before += other.before
        elif other.window == self.window - 1:
            self.before += other.recent


class ErrorSample(msgspec.Struct, frozen=True, array_like=True):
    """One failed attempt."""

    index: int
    attempt: int
    at: float
    message: str
    http_status: int | None = None


class ErrorGroup(msgspec.Struct, array_like=True):
    """Failed attempts with one error code at one host: last ones, and retried ones. The samples have different
    messages."""

    failed: int = 0
    retried: int = 0
    last_at: float = 0.0
    samples: list[ErrorSample] = []

    def add(self, other: "ErrorGroup") -> None:
        self.failed += other.failed
        self.retried += other.retried
        self.last_at = max(self.last_at, other.last_at)
        known = {sample.message for sample in self.samples}
        fresh = [sample for sample in other.samples if sample.message not in known]
        self.samples += fresh[: _MAX_SAMPLES - len(self.samples)]


class FailedAttempt(msgspec.Struct, frozen=True, gc=False):
    """A failed attempt, as it is added."""

    index: int
    attempt: int
    host: str
    error: TaskError
    http_status: int | None
    elapsed: float
    is_retried: bool


class Breakdown(msgspec.Struct, array_like=True):
    """Starts empty, and grows by `add_…` and `merge`."""

    hosts: dict[str, HostTally] = {}
    # All hosts without an entry.
    other: HostTally = msgspec.field(default_factory=HostTally)
    # By error code, then by host.
    groups: dict[str, dict[str, ErrorGroup]] = {}
    # Seconds of a bucket; and succeeded, failed and retried attempts by the number of the bucket since 1970.
    width: int = 1
    buckets: dict[int, list[int]] = {}
    # The number of the last part of each worker.
    writers: dict[str, int] = {}
    # When a part was last added.
    at: float = 0.0

    def add_successes(self, hosts: Sequence[str], seconds: Iterable[float], at: float) -> None:
        """Add last attempts that succeeded, by column, all of which ended at this time."""
        if not hosts:
            return
        for host, steps in _by_host(hosts, steps_of(seconds)):
            self._add_host(host, _tally(sum(steps.values()), 0, 0, at, steps))
        self._add_to_bucket(at, len(hosts), 0, 0)

    def add_failures(self, attempts: Sequence[FailedAttempt], at: float) -> None:
        """Add failed attempts, all of which ended at this time."""
        for attempt, step in zip(attempts, steps_of(attempt.elapsed for attempt in attempts), strict=True):
            failed, retried = int(not attempt.is_retried), int(attempt.is_retried)
            self._add_host(attempt.host, _tally(0, failed, retried, at, {step: 1}))
            message = attempt.error.message[:_MAX_MESSAGE]
            sample = ErrorSample(attempt.index, attempt.attempt, at, message, attempt.http_status)
            self._add_group(attempt.error.code, attempt.host, ErrorGroup(failed, retried, at, [sample]))
        retries = sum(attempt.is_retried for attempt in attempts)
        if attempts:
            self._add_to_bucket(at, 0, len(attempts) - retries, retries)

    def merge(self, part: "Breakdown") -> None:
        """Add another breakdown of the same run, and drop what is over the bounds of a stored one."""
        for host, tally in part.hosts.items():
            self._add_host(host, tally)
        self.other.add(part.other)
        for code, hosts in part.groups.items():
            for host, group in hosts.items():
                self._add_group(code, host, group)
        while self.width < part.width:
            self._widen()
        for number, counts in part.buckets.items():
            self._add_to_bucket(number * part.width, *counts)
        self.trim(MAX_HOSTS, MAX_GROUPS)

    def trim(self, max_hosts: int, max_groups: int) -> None:
        """Move the hosts and groups with the fewest attempts to `OTHER`; half of the hosts stay for their errors."""
        if len(self.hosts) > max_hosts:
            by_errors = sorted(self.hosts, key=lambda host: -_errors(self.hosts[host]))[: max_hosts // 2]
            first = {host for host in by_errors if _errors(self.hosts[host])}
            by_attempts = sorted(self.hosts, key=lambda host: (host not in first, -self.hosts[host].attempts))
            for host in by_attempts[max_hosts:]:
                self.other.add(self.hosts.pop(host))
        if sum(map(len, self.groups.values())) > max_groups:
            self._trim_groups(max_groups)

    def _trim_groups(self, max_groups: int) -> None:
        named = [
            (group.failed, group.retried, code, host)
            for code, hosts in self.groups.items()
            for host, group in hosts.items()
            if host != OTHER
        ]
        # The entries for all others count, too.
        for _, _, code, host in sorted(named, reverse=True)[max(max_groups - len(self.groups), 0) :]:
            group = self.groups[code].pop(host)
            self.groups[code].setdefault(OTHER, ErrorGroup()).add(group)
        codes = sorted(self.groups, key=lambda code: -sum(group.failed for group in self.groups[code].values()))
        for code in codes[_MAX_CODES:]:
            for group in self.groups.pop(code).values():
                self.groups.setdefault(OTHER, {}).setdefault(OTHER, ErrorGroup()).add(group)

    def _add_host(self, host: str, tally: HostTally) -> None:
        known = self.hosts.get(host)
        if known is None:
            known = self.hosts[host] = HostTally()
        known.add(tally)
        if len(self.hosts) > _COLLECTED * MAX_HOSTS:
            self.trim(MAX_HOSTS, MAX_GROUPS)

    def _add_group(self, code: str, host: str, group: ErrorGroup) -> None:
        hosts = self.groups.setdefault(code, {})
        known = hosts.get(host)
        if known is None:
            known = hosts[host] = ErrorGroup()
        known.add(group)
        if len(hosts) > _COLLECTED * MAX_GROUPS or len(self.groups) > _COLLECTED * _MAX_CODES:
            self.trim(MAX_HOSTS, MAX_GROUPS)

    def _add_to_bucket(self, at: float, *counts: int) -> None:
        number = int(at // self.width)
        is_new = number not in self.buckets
        bucket = self.buckets.setdefault(number, [0, 0, 0])
        for place, count in enumerate(counts):
            bucket[place] += count
        while is_new and max(self.buckets) - min(self.buckets) >= MAX_BUCKETS:
            self._widen()

    def _widen(self) -> None:
        """Make each two neighbouring buckets one."""
        before, self.buckets = self.buckets, {}
        self.width *= 2
        for number, counts in before.items():
            bucket = self.buckets.setdefault(number // 2, [0, 0, 0])
            for place, count in enumerate(counts):
                bucket[place] += count


_decoder = msgspec.msgpack.Decoder(Breakdown)


def is_small(job: Job) -> bool:
    """Whether nobody collects a breakdown of the job's latest run, because its rows will be read instead."""
    return job.run.last_batch and job.run.total <= SMALL_RUN


def encode_breakdown(breakdown: Breakdown) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(breakdown), 1)


def decode_breakdown(raw: bytes) -> Breakdown | None:
    """None for the form of another version."""
    try:
        return _decoder.decode(zlib.decompress(raw))
    except (msgspec.MsgspecError, zlib.error):
        return None


async def stored_breakdown(documents: DocumentRecords, run: RunKey) -> Breakdown:
    """The breakdown of a run; an empty one if there is none."""
    document = await documents.document(BREAKDOWN, run.tenant, run.run_id)
    return (None if document is None else decode_breakdown(document.body)) or Breakdown()


async def add_part(
    documents: DocumentRecords, run: RunKey, part: Breakdown, writer: str, number: int, at: float
) -> bool:
    """Add a part to the breakdown of a run, once. False if others added theirs all the time: try again later."""
    for _ in range(_MAX_TRIES):
        document = await documents.document(BREAKDOWN, run.tenant, run.run_id)
        stored = Breakdown() if document is None else decode_breakdown(document.body)
        if stored is None or stored.writers.get(writer, 0) >= number:
            # It was written by a later version, which has other parts; or the part is there.
            return True
        stored.merge(part)
        stored.writers.pop(writer, None)
        stored.writers = dict([*stored.writers.items(), (writer, number)][-_MAX_WRITERS:])
        stored.at = max(stored.at, at)
        body = encode_breakdown(stored)
        crashpoint("breakdown.write.before")
        if document is None:
            # Whether it was this one that was created shows when it is read.
            fresh = Document(BREAKDOWN, run.tenant, run.run_id, body, job_id=run.job_id)
            await documents.create_documents([fresh])
        elif await documents.replace_document(msgspec.structs.replace(document, body=body)) is not None:
            crashpoint("breakdown.write.after")
            return True
    return False


def _tally(succeeded: int, failed: int, retried: int, at: float, steps: dict[int, int]) -> HostTally:
    count = succeeded + failed + retried
    return HostTally(succeeded, failed, retried, at, at, int(at // WINDOW), count, 0, steps)


def _by_host(hosts: Sequence[str], steps: Sequence[int]) -> list[tuple[str, dict[int, int]]]:
    """How many attempts are in each bucket, of each host."""
    if hosts.count(hosts[0]) == len(hosts):
        return [(hosts[0], dict(Counter(steps)))]
    by_host: dict[str, dict[int, int]] = {}
    for (host, step), count in Counter(zip(hosts, steps, strict=True)).items():
        by_host.setdefault(host, {})[step] = count
    return list(by_host.items())


def _errors(tally: HostTally) -> int:
    return tally.failed + tally.retried
