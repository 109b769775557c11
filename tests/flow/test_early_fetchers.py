"""Fetchers that are started before a command knows their settings."""

import os
import signal

import pytest

from conveyor.process.early_fetchers import early_fetchers, start_fetcher
from conveyor.process.executors.fetch.frames import read_frame
from conveyor.process.executors.fetch.launch import launch_fetcher
from conveyor.settings import Settings

SECONDS = 60.0


async def test_a_fetcher_that_was_started_early_is_taken_and_works() -> None:
    with early_fetchers(1) as early:
        launched = await launch_fetcher(Settings.load({}), start=early.take)
        assert await read_frame(launched.reader)
    # It belongs to whoever took it.
    assert os.waitid(os.P_PID, launched.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    launched.writer.close()
    await launched.process.wait()


async def test_more_than_were_started_early_are_started_then() -> None:
    with early_fetchers(0) as early:
        launched = await launch_fetcher(Settings.load({}), start=early.take)
        assert await read_frame(launched.reader)
    launched.writer.close()
    await launched.process.wait()


def test_those_that_nobody_took_have_ended_afterwards() -> None:
    with early_fetchers(2) as early:
        processes = [started.process for started in early._waiting]
        assert [process.poll() for process in processes] == [None, None]
    assert [process.poll() for process in processes] == [-signal.SIGKILL, -signal.SIGKILL]


def test_one_that_gets_no_settings_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    ours, process = start_fetcher()
    # A terminal sends an interrupt to all processes of a command, whatever they have imported so far.
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    ours.close()
    assert process.wait(SECONDS) == 0
    assert capfd.readouterr().err == ""
