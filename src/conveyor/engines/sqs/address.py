"""Where the queues are: from CONVEYOR_QUEUE to region, prefix and endpoint, from a queue's name to one for SQS.

`sqs://REGION/PREFIX?endpoint=…&wait=20&settle=60`. All queues of one installation begin with the prefix.
"""

import math
import re
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from conveyor.engines.queue import QueueName
from conveyor.errors import InvalidSetting

LONGEST_WAIT = 20

_FORM = "sqs://REGION/PREFIX"
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,29}")
_PLAIN = re.compile(r"[A-Za-z0-9_]+")
_LONGEST_NAME = 80
_DIGEST = 12


class SqsAddress(NamedTuple):
    """What the URL says."""

    region: str
    prefix: str
    endpoint: str | None = None
    # Seconds that a poll of an empty queue stays open; 0 asks anew each time.
    wait: int = LONGEST_WAIT
    # Seconds for which a queue must have counted as empty before it is called so: SQS counts late.
    settle: float = 60.0

    @property
    def dead(self) -> str:
        """Where SQS itself moves what nobody could handle. No queue's own name has a dash and no digest."""
        return f"{self.prefix}-dead-letters"

    @property
    def shared(self) -> str:
        """The queue of those runs that have none of their own."""
        return f"{self.prefix}-shared-runs"

    @property
    def runs(self) -> str:
        """What the names of runs' own queues begin with."""
        return f"{self.prefix}-run-"

    def name_of(self, queue: QueueName) -> str:
        """The name in SQS: its letters, digits, `_` and `-` only, at most 80, and another for each queue."""
        return f"{self.prefix}-{plain(queue, _LONGEST_NAME - len(self.prefix) - 1)}"


def plain(queue: QueueName, most: int = _LONGEST_NAME) -> str:
    """The queue's name if it is plain, else what is left of it and a digest."""
    if _PLAIN.fullmatch(queue) and len(queue) <= most:
        return queue
    kept = re.sub(r"[^A-Za-z0-9_]", "-", queue)[: most - _DIGEST - 1]
    return f"{kept}-{sha256(queue.encode()).hexdigest()[:_DIGEST]}"


def parse(url: str) -> SqsAddress:
    """Raises InvalidSetting, which says what to write."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if parts.scheme != "sqs" or not _REGION.fullmatch(parts.netloc):
        raise InvalidSetting(f"CONVEYOR_QUEUE must be {_FORM}")
    if not _PREFIX.fullmatch(prefix):
        raise InvalidSetting(f"CONVEYOR_QUEUE: PREFIX in {_FORM} must be 1 to 30 characters of A-Z a-z 0-9 _ -")
    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - {"endpoint", "wait", "settle"}
    if unknown:
        raise InvalidSetting(f"CONVEYOR_QUEUE: `{min(unknown)}` is no option; there are endpoint, wait, settle")
    return SqsAddress(
        region=parts.netloc,
        prefix=prefix,
        endpoint=_endpoint(options.get("endpoint")),
        wait=int(_number("wait", options.get("wait", str(LONGEST_WAIT)), LONGEST_WAIT)),
        settle=_number("settle", options.get("settle", "60"), 3600),
    )


def _endpoint(text: str | None) -> str | None:
    if text is not None:
        parts = urlsplit(text)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username:
            raise InvalidSetting("CONVEYOR_QUEUE: `endpoint` must be an http or https address")
    return text


def _number(name: str, text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise InvalidSetting(f"CONVEYOR_QUEUE: `{name}` must be a number of seconds from 0 to {most:g}")
    return number
