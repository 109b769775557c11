"""Shrinking: gives the pages that deletes left free back to the filesystem, in steps, while nothing is written."""

import apsw
import structlog

log = structlog.get_logger()

# How long nothing was written before the first step, and between two steps, in seconds.
IDLE_SECONDS = 1.0
PAUSE_SECONDS = 0.05
# Pages of one step: at most a few milliseconds for which a write has to wait.
STEP_PAGES = 256
# Free pages that stay, 16 MiB: new rows use them.
KEPT_PAGES = 4096
# A database of an earlier version that is larger is not rewritten when it is opened.
_QUICKLY_REWRITTEN = 64 * 1024 * 1024

_INCREMENTAL = 2


def is_shrinkable(db: apsw.Connection) -> bool:
    """Whether the file can give pages back. It can from its creation on, or since it was rewritten."""
    return bool(db.pragma("auto_vacuum") == _INCREMENTAL)


def make_shrinkable(db: apsw.Connection) -> bool:
    """Rewrite a database of an earlier version. False if it needs none."""
    if is_shrinkable(db):
        return False
    db.pragma("auto_vacuum", _INCREMENTAL)
    db.execute("VACUUM")
    return True


def make_shrinkable_if_small(db: apsw.Connection) -> None:
    if is_shrinkable(db):
        return
    if db.pragma("page_count") * db.pragma("page_size") <= _QUICKLY_REWRITTEN:
        make_shrinkable(db)
    else:
        log.info("the database does not shrink after deletes; stop all processes and run conveyor migrate once")


def shrink(db: apsw.Connection) -> bool:
    """Give one step of pages back. Returns whether there are more."""
    free = db.pragma("freelist_count") - KEPT_PAGES
    if free <= 0:
        return False
    db.execute(f"PRAGMA incremental_vacuum({min(free, STEP_PAGES)})").fetchall()
    if free > STEP_PAGES:
        return True
    # The file itself becomes shorter when the log is copied into it.
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    return False
