"""`conveyor verify` on shared engines, while all roles are running."""

import asyncio
import dataclasses

import pytest

from conveyor.cli.guard import run_guarded
from conveyor.system import SEAMS, System
from conveyor.verify.findings import FindingKind
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.installations import stored, use, verified
from tests.support.target_site import Site

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("stack", ["postgres", "aws"])
async def test_nothing_is_wrong_in_an_installation_in_use(
    api: Api,
    site: Site,
    system: System,
    stack: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = await use(api, site)
    for seam in SEAMS:
        if (url := getattr(system.settings, seam)) is not None:
            monkeypatch.setenv(f"CONVEYOR_{seam.upper()}", url)
    # In a thread of its own: this one has a loop.
    command = ["verify", "--data", str(system.settings.data), "--share", "1", "--json"]
    assert await asyncio.to_thread(run_guarded, command) == 0
    report = capsys.readouterr().out
    assert '"clean": true' in report
    assert ("Messages: this queue engine cannot tell" in report) is (stack == "aws")
    later = JumpingClock()
    later.advance(2 * 86_400.0)
    for clock in (system.clock, later):
        findings = await verified(dataclasses.replace(system, clock=clock))
        assert findings.by_kind == {}
        checked = findings.checked
        assert (checked.jobs, checked.runs, checked.exports, checked.lists) == (6, 7, 1, 4)
        assert checked.tasks == 524
        assert checked.bodies > 500
    job = await stored(system, used.fetched)
    lost = f"results/acme/{job.job_id}/{job.run.run_id}/{system.clock.new_id('body')}"
    await system.blobs.put(lost, b"123")
    findings = await verified(dataclasses.replace(system, clock=later), repair=True)
    assert [each.key for each in findings.by_kind[FindingKind.ORPHAN].examples] == [lost]
    assert await system.blobs.size(lost) is None
