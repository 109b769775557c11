"""Engines that fail, or do not answer, when a test says so."""

import asyncio
import dataclasses
from collections import Counter
from typing import Any

from conveyor.engines.records import Records
from conveyor.errors import EngineFailed
from conveyor.system import System


class Switch:
    """Engines behind it answer, fail, or do not answer, as it says. It counts their calls."""

    def __init__(self) -> None:
        self.mode = "on"
        # Until then calls hang.
        self.answers = asyncio.Event()
        # Calls that fail once.
        self.fails: set[str] = set()
        self.calls: Counter[str] = Counter()

    def over(self, name: str, engine: Any) -> Any:
        return _Switched(self, name, engine)

    def system(self, system: System, *seams: str) -> System:
        parts = {
            part.name: self.over(f"records.{part.name}", getattr(system.records, part.name))
            if "records" in seams
            else getattr(system.records, part.name)
            for part in dataclasses.fields(Records)
        }
        others = {seam: self.over(seam, getattr(system, seam)) for seam in seams if seam != "records"}
        return dataclasses.replace(system, records=Records(**parts), **others)


class _Switched:
    def __init__(self, switch: Switch, name: str, engine: Any) -> None:
        self._switch, self._name, self._engine = switch, name, engine

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._engine, method)
        if not callable(call):
            return call

        async def switched(*args: Any, **kwargs: Any) -> Any:
            name = f"{self._name}.{method}"
            self._switch.calls[name] += 1
            if self._switch.mode == "fail" or name in self._switch.fails:
                self._switch.fails.discard(name)
                raise EngineFailed(f"{self._name} is away")
            if self._switch.mode == "hang":
                await self._switch.answers.wait()
            return await call(*args, **kwargs)

        return switched
