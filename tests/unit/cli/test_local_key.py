"""local.key: what a power cut left in it keeps no server from starting, and a whole one survives the next."""

import os
from pathlib import Path

import pytest

from conveyor.auth.keys import authenticate
from conveyor.auth.signing import signing_key
from conveyor.cli import doctor_checks
from conveyor.cli.connection import connect, read_line
from conveyor.cli.local_key import ensure_local_key
from conveyor.cli.run_directory import RunMark, read_mark, write_mark
from conveyor.errors import InvalidSetting, MissingKey
from conveyor.settings import Settings
from conveyor.system import open_system

# Empty, a hole of zeros, bytes of another file, and half a line.
DAMAGED = [b"", b"\n", bytes(92), b"\xff\xfe\x80 not text", b"cv_01"]
IDS = ["empty", "blank", "zeros", "garbage", "torn"]


@pytest.mark.parametrize("content", DAMAGED, ids=IDS)
async def test_a_damaged_local_key_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "local.key"
    path.write_bytes(content)
    async with open_system(Settings(data=tmp_path)) as system:
        text = await ensure_local_key(system)
        assert (await authenticate(system.records.access, system.clock, text)).admin
        assert read_line(path) == text == await ensure_local_key(system)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_the_keys_and_the_mark_of_a_run_are_on_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        sync(fd)
        steps.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name}")

    def replaced(self: Path, target: Path) -> Path:
        steps.append(f"name {target.name}")
        return replace(self, target)

    async with open_system(Settings(data=tmp_path)) as system:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", synced)
            patch.setattr(Path, "replace", replaced)
            await ensure_local_key(system)
            (tmp_path / "signing.key").unlink()
            signing_key(system.settings)
            write_mark(tmp_path, RunMark(["ä.txt"], None, "out.zip"))
    for name in ("local.key", "signing.key", "run.json"):
        at = steps.index(f"sync {name}.new")
        assert steps[at : at + 3] == [f"sync {name}.new", f"name {name}", f"sync {tmp_path.name}"]
    assert read_mark(tmp_path) == RunMark(["ä.txt"], None, "out.zip")


@pytest.mark.parametrize("content", DAMAGED[:-1], ids=IDS[:-1])
def test_doctor_and_commands_name_a_damaged_local_key(tmp_path: Path, content: bytes) -> None:
    settings = Settings(data=tmp_path, url="http://127.0.0.1:9")
    (tmp_path / "local.key").write_bytes(content)
    check = doctor_checks._key(settings)
    assert (check.verdict, check.advice) == ("fail", "Restart `conveyor up`, which replaces it.")
    assert "local.key is damaged" in check.found
    with pytest.raises(MissingKey, match=r"local\.key is damaged\. Restart `conveyor up`"):
        connect(settings)


def test_doctor_says_what_to_do_about_a_damaged_signing_key(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, url="http://127.0.0.1:9")
    (tmp_path / "signing.key").write_bytes(b"")
    with pytest.raises(InvalidSetting, match="Delete it"):
        signing_key(settings)
    check = doctor_checks._owner(settings)
    assert check.verdict == "fail"
    assert "Delete it" in (check.advice or "")
