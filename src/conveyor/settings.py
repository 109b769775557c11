"""One frozen Settings, made once from the environment and passed down. Only this module reads the environment.

Each field is the variable CONVEYOR_<FIELD>; its comment is its description in `conveyor doctor` and in SPEC §9.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from conveyor.errors import InvalidSetting

PREFIX = "CONVEYOR_"

_SHORTEST_SECRET = 32


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set. The defaults are the embedded system on this machine, closed to all others."""

    # Directory of the embedded engines: database, blobs, the local key.
    data: Path = Path("conveyor-data")
    # Address that the API listens on.
    host: str = "127.0.0.1"
    # Port that the API listens on; 0 takes a free one.
    port: int = 8080
    # Server that the command line talks to.
    url: str = "http://127.0.0.1:8080"
    # Key that the command line sends; without it, the one that `conveyor up` left in the data directory.
    api_key: str | None = None
    # Module with the functions registered by @conveyor.task, as module or module:name.
    app: str | None = None
    # Worker loops in this process.
    workers: int = 1
    # Tasks that one worker loop runs at once.
    worker_concurrency: int = 256
    # Fetch from private, loopback and link-local addresses too.
    allow_private_targets: bool = False
    # Gateway for jobs that name none: an HTTP proxy URL, or a URL template with {url}.
    gateway: str | None = None
    # Largest request body, in bytes.
    max_request_bytes: int = 64 * 1024 * 1024
    # Most tasks in one request body.
    max_inline_tasks: int = 100_000
    # Most tasks of a job that is written in the request itself; one with more is ingested.
    sync_task_limit: int = 1000
    # Shards of a large or open job, on engines that want them.
    task_shard_count: int = 8
    # Shard on engines that do not want it too, to try the layout out.
    force_task_shards: bool = False
    # Largest staged list, in bytes, as it is stored and once decompressed.
    max_list_bytes: int = 8 * 1024 * 1024 * 1024
    # Bytes of a plain list that one ingest worker takes at a time.
    ingest_range_bytes: int = 4 * 1024 * 1024
    # Ingest loops in this process.
    ingesters: int = 2
    # Seconds until an upload that nobody made a job of expires.
    upload_seconds: float = 86_400.0
    # Seconds that an answer is kept for replay under its Idempotency-Key.
    idempotency_seconds: float = 86_400.0
    # Seconds after which an unanswered request under an Idempotency-Key may be taken over.
    idempotency_lease_seconds: float = 60.0
    # Secret that upload links are signed with, at least 32 characters; without it, one is kept in the data directory.
    signing_key: str | None = None
    # Seconds that a worker holds a message between heartbeats.
    lease_seconds: float = 30.0
    # Starts of a chunk without an outcome before its tasks are tried alone; then as many again for each.
    max_lost_starts: int = 3
    # Longest time a result waits for others before it is written, in seconds.
    flush_seconds: float = 0.05
    # Level of the log on standard error: debug, info, warning, error.
    log_level: str = "info"
    # For tests: die at a crash point, as name:n.
    crash_at: str | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> "Settings":
        """From CONVEYOR_* variables; an override that is None counts as not given."""
        source = os.environ if environ is None else environ
        raw: dict[str, Any] = {
            field: source[PREFIX + field.upper()]
            for field in cls.__struct_fields__
            if source.get(PREFIX + field.upper(), "") != ""
        }
        raw.update({name: value for name, value in overrides.items() if value is not None})
        try:
            settings = msgspec.convert(raw, cls, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise InvalidSetting(_explain(error)) from None
        _check(settings)
        return settings


def _decode(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


def _explain(error: msgspec.ValidationError) -> str:
    message, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    return f"{PREFIX}{field.upper()}: {message}" if field else message


_LEAST = {
    "workers": 1,
    "worker_concurrency": 1,
    "max_inline_tasks": 1,
    "max_request_bytes": 1024,
    "max_lost_starts": 1,
    "lease_seconds": 0.001,
    "flush_seconds": 0,
    "task_shard_count": 1,
    "max_list_bytes": 1,
    "ingest_range_bytes": 1,
    "ingesters": 1,
    "upload_seconds": 1,
    "idempotency_seconds": 1,
    "idempotency_lease_seconds": 0,
}
_LOG_LEVELS = ("debug", "info", "warning", "error")


def _check(settings: Settings) -> None:
    for field, least in _LEAST.items():
        # Written so that a NaN is refused too.
        if not least <= getattr(settings, field) < math.inf:
            raise InvalidSetting(f"{PREFIX}{field.upper()} must be at least {least}")
    if not 0 <= settings.port <= 65535:
        raise InvalidSetting(f"{PREFIX}PORT must be between 0 and 65535")
    if settings.log_level not in _LOG_LEVELS:
        raise InvalidSetting(f"{PREFIX}LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}")
    if settings.signing_key is not None and len(settings.signing_key) < _SHORTEST_SECRET:
        raise InvalidSetting(f"{PREFIX}SIGNING_KEY must have at least {_SHORTEST_SECRET} characters")
