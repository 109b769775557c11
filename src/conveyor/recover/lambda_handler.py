"""The monitor as a Lambda function, for a rule that calls it once a minute. Settings come from the environment. The
engines must be shared ones, and CONVEYOR_DATA a writable directory such as /tmp.

    Handler: conveyor.recover.lambda_handler.handler
"""

import asyncio
from typing import Any

import msgspec

from conveyor.recover.monitor import monitor_of
from conveyor.settings import Settings
from conveyor.system import check_shared_engines, open_system
from conveyor.telemetry.logs import configure_log


def handler(event: object, context: object) -> dict[str, Any]:
    """Run one pass; returns its counts. The content of the event is ignored."""
    settings = Settings.load()
    check_shared_engines(settings)
    configure_log(settings.log_level, form=settings.log_format)
    return asyncio.run(_pass(settings))


async def _pass(settings: Settings) -> dict[str, Any]:
    async with open_system(settings) as system:
        return msgspec.structs.asdict(await monitor_of(system).run_once())
