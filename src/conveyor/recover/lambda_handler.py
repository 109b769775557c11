"""The monitor as a Lambda function, for a rule that calls it once a minute. Settings come from the environment, and the
engines must be such as more than one process can reach; CONVEYOR_DATA must be a place that can be written, /tmp.

    Handler: conveyor.recover.lambda_handler.handler
"""

import asyncio
from typing import Any

import msgspec

from conveyor.recover.monitor import monitor_of
from conveyor.settings import Settings
from conveyor.system import open_system
from conveyor.telemetry.logs import configure_log


def handler(event: object, context: object) -> dict[str, Any]:
    """One pass; what it did, in counts. The event says only that it is time."""
    settings = Settings.load()
    configure_log(settings.log_level, form=settings.log_format)
    return asyncio.run(_pass(settings))


async def _pass(settings: Settings) -> dict[str, Any]:
    async with open_system(settings) as system:
        return msgspec.structs.asdict(await monitor_of(system).run_once())
