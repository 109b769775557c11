"""The lag of a fetcher's event loop."""

import asyncio
import time

from conveyor.process.executors.fetch.loop_lag import LoopLag


async def test_a_loop_that_is_busy_lags() -> None:
    lag = LoopLag()
    lag.start()
    lag.start()
    for _ in range(20):
        time.sleep(0.05)  # noqa: ASYNC251  (this is what makes it late)
        await asyncio.sleep(0)
    assert lag.seconds > 0.005
    lag.stop()
    assert lag.seconds > 0.005, "outcomes of the last orders are not sent yet"
    lag.start()
    lag.stop()
    # Later than its next look, whose timer is due before.
    await asyncio.sleep(0.05)
    assert lag.seconds == 0.0
    assert lag._timer is None, "it looks no more"
    lag.start()
    lag.stop()
    assert lag._timer is not None, "until there are orders again"
