"""What other processes there are, by /proc."""

from pathlib import Path


def children_of(process: int) -> list[int]:
    """The processes that this one has started, oldest first."""
    return sorted(
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    )


def fetchers_of(process: int) -> list[int]:
    """Those of them that fetch for it."""
    return [child for child in children_of(process) if "conveyor.process.executors.fetch.child" in _command(child)]


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""
