"""How much is kept in memory: every table that is reached from some objects, by the class and the name it has there.

    sizes_of(system, *roles)    {"Worker._lanes": 0, "SqliteCoordinator._tallies": 12, ...}

Tables of the same name in several objects are added up.
"""

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from typing import Any

import msgspec

_TABLES = (dict, list, set, deque)
_HOME = "conveyor"


def sizes_of(*roots: object) -> Counter[str]:
    """The sizes of all tables that are reached from these, and of those of Conveyor's modules."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(type(root).__name__, root) for root in roots]
    waiting += _of_modules(sizes)
    while waiting:
        name, thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _TABLES):
            sizes[name] += len(thing)
            waiting += [(f"{name}[]", each) for each in _inside(thing)]
        elif _is_ours(thing):
            waiting += [(f"{type(thing).__name__}.{field}", value) for field, value in _fields(thing)]
    return sizes


def growth(before: Counter[str], after: Counter[str]) -> dict[str, str]:
    """Which tables have another size than they had."""
    names = sorted(before.keys() | after.keys())
    return {name: f"{before[name]} → {after[name]}" for name in names if before[name] != after[name]}


def _of_modules(sizes: Counter[str]) -> Iterator[tuple[str, object]]:
    """The tables, caches and objects that modules keep."""
    for name, module in list(sys.modules.items()):
        if name != _HOME and not name.startswith(f"{_HOME}."):
            continue
        for field, value in list(vars(module).items()):
            if isinstance(value, _lru_cache_wrapper):
                # One that has a bound holds what this process did before, in other tests, up to that.
                if value.cache_info().maxsize is None:
                    sizes[f"{name}.{field}"] = value.cache_info().currsize
            elif isinstance(value, _TABLES) or (_is_ours(value) and type(value).__module__ == name):
                yield f"{name}.{field}", value


def _inside(table: Any) -> list[Any]:
    values = [*table.keys(), *table.values()] if isinstance(table, dict) else list(table)
    return [value for value in values if isinstance(value, (*_TABLES, tuple)) or _is_ours(value)]


def _is_ours(thing: object) -> bool:
    """Objects of Conveyor, and bound methods and closures by which they are kept."""
    return not isinstance(thing, type) and type(thing).__module__.partition(".")[0] == _HOME


def _fields(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, msgspec.Struct):
        for field in thing.__struct_fields__:
            yield field, getattr(thing, field)
        return
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if hasattr(thing, slot):
                yield slot, getattr(thing, slot)


def live_objects() -> Counter[str]:
    """How many objects of each class of Conveyor there are, reached or not."""
    gc.collect()
    return Counter(type(thing).__qualname__ for thing in gc.get_objects() if _is_ours(thing))
