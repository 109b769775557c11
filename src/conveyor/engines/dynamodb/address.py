"""Where the tables are: `dynamodb://REGION/TABLE_PREFIX?endpoint=http://...&pitr=true`."""

import re
from urllib.parse import parse_qsl, urlsplit

import msgspec

from conveyor.errors import InvalidSetting

SCHEME = "dynamodb"
FORM = "dynamodb://REGION/TABLE_PREFIX, for example dynamodb://eu-central-1/conveyor"

_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
# Leaves room for the longest suffix within DynamoDB's 255 characters.
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_YES_NO = {"true": True, "1": True, "false": False, "0": False}


class DynamoAddress(msgspec.Struct, frozen=True):
    """The location of the two tables of one installation."""

    region: str
    prefix: str
    # None: the region's default endpoint.
    endpoint: str | None = None
    # Whether `migrate` turns point-in-time recovery on.
    pitr: bool = False

    @property
    def records(self) -> str:
        return f"{self.prefix}-records"

    @property
    def tasks(self) -> str:
        return f"{self.prefix}-tasks"


def parse_address(url: str) -> DynamoAddress:
    """Parse the URL. Raises InvalidSetting with the expected form."""
    parts = urlsplit(url)
    region, prefix = parts.netloc, parts.path.removeprefix("/")
    if parts.scheme != SCHEME:
        raise InvalidSetting(f"The URL of DynamoDB tables is {FORM}.")
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
    if options:
        raise InvalidSetting(f"The URL of DynamoDB tables has no {', '.join(sorted(options))}: only endpoint and pitr.")
    return DynamoAddress(region, prefix, endpoint, _YES_NO[pitr])
