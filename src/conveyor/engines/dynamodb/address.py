"""Where the tables are, and what `migrate` gives them:
`dynamodb://REGION/TABLE_PREFIX?endpoint=http://...&pitr=true&warm_tasks=12000,40000&warm_records=12000,8000`."""

import re
from urllib.parse import parse_qsl, urlsplit

import msgspec

from conveyor.engines.aws_session import default_region
from conveyor.errors import InvalidSetting

SCHEME = "dynamodb"
FORM = "dynamodb://REGION/TABLE_PREFIX, for example dynamodb://eu-central-1/conveyor; without REGION, set AWS_REGION"

_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
# Leaves room for the longest suffix within DynamoDB's 255 characters.
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_UNITS = re.compile(r"([1-9][0-9]{0,8}),([1-9][0-9]{0,8})", re.ASCII)
_YES_NO = {"true": True, "1": True, "false": False, "0": False}


class WarmThroughput(msgspec.Struct, frozen=True):
    """Units a second that a table and its indexes take at once, without having grown to it."""

    reads: int
    writes: int


class DynamoAddress(msgspec.Struct, frozen=True):
    """The location of the two tables of one installation."""

    region: str
    prefix: str
    # None: the region's default endpoint.
    endpoint: str | None = None
    # Whether `migrate` turns point-in-time recovery on.
    pitr: bool = False
    # The least that `migrate` gives to the table of records with its indexes, and to that of tasks.
    warm_records: WarmThroughput | None = None
    warm_tasks: WarmThroughput | None = None

    @property
    def records(self) -> str:
        return f"{self.prefix}-records"

    @property
    def tasks(self) -> str:
        return f"{self.prefix}-tasks"


def parse_address(url: str) -> DynamoAddress:
    """Parse the URL. Raises InvalidSetting with the expected form."""
    parts = urlsplit(url)
    if parts.scheme != SCHEME:
        raise InvalidSetting(f"The URL of DynamoDB tables is {FORM}.")
    region, prefix = parts.netloc or default_region() or "", parts.path.removeprefix("/")
    if not _REGION.fullmatch(region):
        raise InvalidSetting(f"{region!r} is not an AWS region. Use {FORM}.")
    if not _PREFIX.fullmatch(prefix):
        raise InvalidSetting(f"{prefix!r} is not a valid table prefix: 1 to 200 of A-Z a-z 0-9 _ . -. Use {FORM}.")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    endpoint = options.pop("endpoint", None)
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise InvalidSetting("`endpoint` in the URL of DynamoDB tables is an http or https URL.")
    pitr = options.pop("pitr", "false")
    if pitr not in _YES_NO:
        raise InvalidSetting("`pitr` in the URL of DynamoDB tables is true or false.")
    warm_records, warm_tasks = (_warm(name, options.pop(name, None)) for name in ("warm_records", "warm_tasks"))
    if options:
        raise InvalidSetting(
            f"The URL of DynamoDB tables has no {', '.join(sorted(options))}: "
            "only endpoint, pitr, warm_records and warm_tasks."
        )
    return DynamoAddress(region, prefix, endpoint, _YES_NO[pitr], warm_records, warm_tasks)


def _warm(name: str, text: str | None) -> WarmThroughput | None:
    if text is None:
        return None
    match = _UNITS.fullmatch(text)
    if match is None:
        raise InvalidSetting(
            f"`{name}` in the URL of DynamoDB tables is READS,WRITES: units a second, for example 12000,40000."
        )
    return WarmThroughput(int(match[1]), int(match[2]))
