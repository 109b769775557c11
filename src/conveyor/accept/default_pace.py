"""The pace of a job that names none. `auto`, where nothing else says how many requests its hosts get: no rate, no limit
per host, and no gateway, which is what the requests go to then.

Jobs are stored with it. Those of earlier versions are stored without a pace, which means `fixed`; so their duplicates
say that.
"""

import msgspec

from conveyor.model import PACED_KINDS, JobKind, Options, Pace
from conveyor.settings import Settings


def with_default_pace(options: Options, kind: JobKind, settings: Settings) -> Options:
    """The options of a new job, or of one whose pace is to be the default again."""
    is_limited = options.rate_per_host is not None or options.concurrency_per_host is not None
    has_gateway = options.gateway is not None or settings.gateway is not None
    if options.pace is not None or kind not in PACED_KINDS or is_limited or has_gateway:
        return options
    return msgspec.structs.replace(options, pace=Pace.AUTO)


def with_stored_pace(options: Options, kind: JobKind) -> Options:
    """The options of a stored job, for a new one with the same pace."""
    if options.pace is not None or kind not in PACED_KINDS:
        return options
    return msgspec.structs.replace(options, pace=Pace.FIXED)
