"""The fixtures that tests share: a clock to move, settings in a directory of their own, the system, a running API."""

import gc
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.api import Api, serving
from tests.support.clocks import JumpingClock
from tests.support.logs import be_plain

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a shell. What the tests start would be deaf to Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

be_plain()

# There is no garbage yet: looking for some takes seconds of collecting ten thousand tests.
gc.disable()

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("any speed", deadline=None)
hypothesis.settings.load_profile("any speed")

# Each of their tests takes seconds.
_LONG = ("stacks", "dashboard", "test_kill.py", "test_powerloss.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, so that at the end every process has something to do."""
    items.sort(key=lambda item: not any(part in item.path.parts for part in _LONG))


def pytest_collection_finish() -> None:
    """What was imported and collected stays."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A command that runs in the process of the tests configures the log, which the next test would inherit."""
    configured = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.configure(**configured)
    root.handlers = handlers
    root.setLevel(level)


@pytest.fixture
async def clock() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({}, data=tmp_path / "data", allow_private_targets=True)


@pytest.fixture
async def system(settings: Settings, clock: JumpingClock) -> AsyncIterator[System]:
    async with open_system(settings, clock) as opened:
        yield opened


@pytest.fixture
async def server(system: System) -> AsyncIterator[Api]:
    """A running API on a free port, with a key of tenant `acme`."""
    async with serving(system) as api:
        yield api
