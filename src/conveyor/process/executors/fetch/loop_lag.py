"""LoopLag: how late the event loop of a fetcher runs what is due, while it runs orders.

A loop that is busy with responses reads the next one late. What an attempt then takes longer is this process's own
doing, and says nothing about the host (coordination/pace.py).
"""

import asyncio
import time

_PERIOD = 0.02
_SMOOTHING = 0.1


class LoopLag:
    """`seconds` is the lag of the last tenths of a second, averaged."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_idle = True
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Orders run: look from now on."""
        self._is_idle = False
        if self._timer is None:
            self._look_later()

    def stop(self) -> None:
        """No order runs: look once more. Until then the lag stands for what ran, and for what begins."""
        self._is_idle = True

    def _look_later(self) -> None:
        due = time.monotonic() + _PERIOD
        self._timer = asyncio.get_running_loop().call_later(_PERIOD, self._look, due)

    def _look(self, due: float) -> None:
        if self._is_idle:
            self._timer, self.seconds = None, 0.0
            return
        late = max(0.0, time.monotonic() - due)
        self.seconds += _SMOOTHING * (late - self.seconds)
        self._look_later()
