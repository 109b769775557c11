"""Options of jobs in conveyor.toml, under [job]: the lowest, below --options, --option and flags."""

import json
from typing import Any

from conveyor.config_files import JOB, job_options, place_of
from conveyor.errors import BadInput, ConveyorError
from conveyor.settings import own_files


def with_job_defaults(spec: dict[str, Any]) -> dict[str, Any]:
    """The options of a job, with those of the files that it does not set. Raises BadInput."""
    defaults = job_defaults()
    for name, value in spec.items():
        inner = defaults.get(name)
        defaults[name] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    return defaults


def job_defaults() -> dict[str, Any]:
    """The options in the files, checked as a server does it. Raises BadInput, which names file, line and key."""
    files = own_files()
    defaults = job_options(files)
    if not defaults:
        return {}
    from conveyor.accept.option_limits import check_limits
    from conveyor.accept.spec import decode_spec
    from conveyor.client.job_options import JobOptions

    for name in defaults:
        if name not in JobOptions.__annotations__:
            raise BadInput(f"{place_of(files, f'{JOB}.{name}')}: unknown option `{name}` of a job.")
    for name, value in defaults.items():
        try:
            check_limits(decode_spec(json.dumps({name: value}).encode()))
        except (ConveyorError, TypeError) as error:
            place = place_of(files, f"{JOB}.{name}")
            said = getattr(error, "message", f"`{name}` has a value that JSON does not have.")
            raise BadInput(f"{place}: {said}") from None
    return defaults
