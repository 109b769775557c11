"""What other processes there are, by /proc."""

from pathlib import Path


def fetchers_of(process: int) -> list[int]:
    """The processes that fetch for this one, oldest first."""
    children = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return sorted(child for child in children if "conveyor.process.executors.fetch.child" in _command(child))


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""
