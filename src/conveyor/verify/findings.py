"""What a verification found: how much was checked, findings by kind with a few examples, and what could not be
checked. Its size does not grow with the installation."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from conveyor.clock import Clock
from conveyor.errors import ConveyorError
from conveyor.model import JobId

MAX_EXAMPLES = 10
_MAX_NOTES = 20


# A store fails, or a row or document cannot be decoded.
UNREADABLE = (ConveyorError, msgspec.MsgspecError, ValueError)


def error_text(error: BaseException) -> str:
    """Why something could not be read."""
    return error.message if isinstance(error, ConveyorError) else f"It cannot be decoded: {error}"


class FindingKind(StrEnum):
    """What is wrong."""

    COUNTS = "counts"
    TOTAL = "total"
    BODY_MISSING = "body_missing"
    BODY_DAMAGED = "body_damaged"
    LIST = "list"
    EXPORT = "export"
    MESSAGE = "message"
    DEAD_LETTER = "dead_letter"
    ORPHAN = "orphan"


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong, and where."""

    kind: FindingKind
    detail: str
    job_id: JobId | None = None
    # The number of a run, the index of a task, the key of an object.
    run: int | None = None
    index: int | None = None
    key: str | None = None
    size: int = 0
    repaired: bool = False


class FindingsOfKind(msgspec.Struct):
    """All findings of one kind: their number, the bytes of their objects, and the first of them."""

    count: int = 0
    repaired: int = 0
    bytes: int = 0
    examples: list[Finding] = msgspec.field(default_factory=list)


class Checked(msgspec.Struct):
    """How much was checked so far; of the tasks also how many there are."""

    jobs: int = 0
    runs: int = 0
    tasks: int = 0
    tasks_total: int = 0
    bodies: int = 0
    bytes: int = 0
    lists: int = 0
    exports: int = 0
    dead_letters: int = 0
    objects: int = 0


class Findings:
    """Collects findings. `show` is called after each step."""

    def __init__(self, show: Callable[["Findings"], None] = lambda findings: None) -> None:
        self._show = show
        self.checked = Checked()
        self.by_kind: dict[FindingKind, FindingsOfKind] = {}
        # What could not be checked because something failed; and what no engine can tell.
        self.failures: list[str] = []
        self.notes: list[str] = []

    @property
    def left(self) -> int:
        """Findings that were not repaired."""
        return sum(each.count - each.repaired for each in self.by_kind.values())

    def add(self, finding: Finding) -> None:
        of_kind = self.by_kind.setdefault(finding.kind, FindingsOfKind())
        of_kind.count += 1
        of_kind.repaired += finding.repaired
        of_kind.bytes += finding.size
        if len(of_kind.examples) < MAX_EXAMPLES:
            of_kind.examples.append(finding)

    def mark(self) -> dict[FindingKind, FindingsOfKind]:
        """What was found so far, for `restore`."""
        return {kind: msgspec.structs.replace(of, examples=list(of.examples)) for kind, of in self.by_kind.items()}

    def restore(self, mark: dict[FindingKind, FindingsOfKind]) -> None:
        """Drop what was found since."""
        self.by_kind = mark

    def fail(self, what: str) -> None:
        """Note that a part could not be checked."""
        if len(self.failures) < _MAX_NOTES:
            self.failures.append(what)

    def step(self) -> None:
        self._show(self)


class Pacing:
    """Bounds the share of the time in which a verification works, for the sake of a live server."""

    def __init__(self, clock: Clock, share: float) -> None:
        self._clock = clock
        self._share = share
        self._since = clock.monotonic()

    async def rest(self) -> None:
        """Pause in proportion to the time since the last pause."""
        worked = self._clock.monotonic() - self._since
        if self._share < 1:
            await self._clock.sleep(worked * (1 / self._share - 1))
        self._since = self._clock.monotonic()
