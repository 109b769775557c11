"""kill -9 in the middle of a download from a server that cuts: one intact file, little fetched twice, flat memory.

At 40 MB here; `python -m tests.faults.downloads 500` is the same at full size.
"""

from pathlib import Path

import pytest

from tests.faults.downloads import measure

MB = 1_000_000


@pytest.mark.timeout(300)
async def test_a_download_cut_twenty_times_while_its_worker_is_killed_five_times(tmp_path: Path) -> None:
    cost = await measure(40 * MB, cuts=20, kills=5, rate=12 * MB, place=tmp_path)
    assert cost.intact
    assert (cost.cuts, cost.kills, cost.attempts) == (20, 5, 1)
    assert cost.fetched <= 1.1 * cost.size
    assert cost.peak_bytes < 150 * MB
