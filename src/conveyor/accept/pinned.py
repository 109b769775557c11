"""Options that are decided once, when a job is accepted, and stored with it: a later version, or another setting, does
not change what the job does."""

import msgspec

from conveyor.accept.spec import JobSpec
from conveyor.model import PACED_KINDS, Options, Pace
from conveyor.settings import Settings


def pinned_options(spec: JobSpec, settings: Settings) -> Options:
    """The options of a job as they are stored."""
    options = spec.options()
    if options.pace is None:
        options = msgspec.structs.replace(options, pace=_default_pace(spec, settings))
    return options


def _default_pace(spec: JobSpec, settings: Settings) -> Pace | None:
    """Whoever names a limit knows the pace, and a gateway has its own."""
    if spec.kind not in PACED_KINDS:
        return None
    is_known = spec.rate_per_host is not None or spec.concurrency_per_host is not None
    has_gateway = spec.gateway is not None or settings.gateway is not None
    return Pace.FIXED if is_known or has_gateway else Pace.AUTO
