"""Parses CONVEYOR_QUEUE, and maps queue names to SQS names.

`sqs://REGION/PREFIX?endpoint=…&wait=20&settle=60`. All SQS queues of one installation share the prefix.
"""

import math
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from conveyor.engines.aws_session import default_region
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
    """The parts of the URL."""

    region: str
    prefix: str
    endpoint: str | None = None
    # Seconds of a long poll of an empty queue; 0: short polls.
    wait: int = LONGEST_WAIT
    # Seconds for which SQS must report a queue as empty before it counts as empty: SQS counts with a delay.
    settle: float = 60.0

    @property
    def dead(self) -> str:
        """The target of the redrive policy. No other queue's name has a dash and no digest."""
        return f"{self.prefix}-dead-letters"

    @property
    def shared(self) -> str:
        """The queue of the runs without a queue of their own."""
        return f"{self.prefix}-shared-runs"

    @property
    def runs(self) -> str:
        """The prefix of the queues of runs."""
        return f"{self.prefix}-run-"

    def runs_of(self, names: Iterable[str]) -> set[str]:
        """The runs that these SQS queues belong to. A run queue and a recovery queue are one run: what follows its id
        begins with a dash, which no id has."""
        return {name.removeprefix(self.runs).partition("-")[0] for name in names if name.startswith(self.runs)}

    def name_of(self, queue: QueueName) -> str:
        """The unique name in SQS: at most 80 letters, digits, `_` and `-`."""
        return f"{self.prefix}-{plain(queue, _LONGEST_NAME - len(self.prefix) - 1)}"


def plain(queue: QueueName, longest: int = _LONGEST_NAME) -> str:
    """The queue's name if SQS accepts it, else its valid characters and a digest."""
    if _PLAIN.fullmatch(queue) and len(queue) <= longest:
        return queue
    kept = re.sub(r"[^A-Za-z0-9_]", "-", queue)[: longest - _DIGEST - 1]
    return f"{kept}-{sha256(queue.encode()).hexdigest()[:_DIGEST]}"


def parse(url: str) -> SqsAddress:
    """Parse the URL. Raises InvalidSetting with the expected form."""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    region = parts.netloc or default_region() or ""
    if parts.scheme != "sqs" or not _REGION.fullmatch(region):
        raise InvalidSetting(f"CONVEYOR_QUEUE must be {_FORM}; without REGION, set AWS_REGION")
    if not _PREFIX.fullmatch(prefix):
        raise InvalidSetting(f"CONVEYOR_QUEUE: PREFIX in {_FORM} must be 1 to 30 characters of A-Z a-z 0-9 _ -")
    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - {"endpoint", "wait", "settle"}
    if unknown:
        raise InvalidSetting(f"CONVEYOR_QUEUE: unknown option `{min(unknown)}`. Use endpoint, wait or settle.")
    return SqsAddress(
        region=region,
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


def _number(name: str, text: str, longest: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= longest:
        raise InvalidSetting(f"CONVEYOR_QUEUE: `{name}` must be a number of seconds from 0 to {longest:g}")
    return number
