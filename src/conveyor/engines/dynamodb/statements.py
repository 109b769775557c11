"""The PartiQL statements that put, finish and read tasks."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from aiodynamo.errors import ValidationException
from aiodynamo.expressions import F

from conveyor.engines.dynamodb.lanes import drain
from conveyor.engines.dynamodb.layout import key_at, task_in
from conveyor.engines.dynamodb.table import MAX_IN_A_WRITE, Key, Table
from conveyor.engines.dynamodb.wire import INVALID_CODE, PASSING_CODES, Transient
from conveyor.errors import EngineFailed, EngineRefused
from conveyor.model import ResultDetail, RunKey, Task, TaskEnd, TaskSeed
from conveyor.states import TaskStatus

FORM = "1"
# The code of a statement that is invalid.
_REFUSED = "refused"
_LONGEST_TAG = 1000

_detail = msgspec.json.Decoder(ResultDetail)

Raw = dict[str, Any]
Statement = dict[str, Any]


class Insertion(NamedTuple):
    """A task to put: its partition, and the attributes and values of the statement."""

    pk: str
    names: tuple[str, ...]
    parameters: list[Raw]


class TaskFinish(NamedTuple):
    """A task to finish."""

    key: Key
    end: TaskEnd


def task_item(run: RunKey, seed: TaskSeed, ttl: int) -> Insertion:
    key = key_at(run, seed.index)
    parameters: list[Raw] = [
        {"S": key.pk},
        {"S": key.sk},
        {"N": FORM},
        {"N": str(seed.index)},
        {"S": seed.input},
        {"N": str(ttl)},
    ]
    names: tuple[str, ...] = ("pk", "sk", "v", "index", "input", "ttl")
    for name, text in (("tag", _tag(seed.input)), ("prior", seed.prior)):
        if text is not None:
            names = (*names, name)
            parameters.append({"S": text})
    return Insertion(key.pk, names, parameters)


def task_of(item: Raw) -> Task:
    """Read a task from its item. A task without `ended` is pending; without `v`, its form is 1."""
    if item.get("v", {"N": FORM})["N"] != FORM:
        raise EngineFailed("A task in DynamoDB was written by a newer Conveyor: upgrade this one.")
    name = task_in(item["sk"]["S"])
    index, task_input = int(item["index"]["N"]), msgspec.Raw(item["input"]["S"].encode())
    if "ended" not in item:
        return Task(name, index, task_input, TaskStatus.PENDING)
    ended = item["ended"]["M"]
    return Task(
        task_id=name,
        index=index,
        input=task_input,
        status=TaskStatus(int(ended["status"]["N"])),
        attempts=int(ended["attempts"]["N"]),
        http_status=int(ended["http_status"]["N"]) if "http_status" in ended else None,
        error_code=ended["error_code"]["S"] if "error_code" in ended else None,
        detail=_detail.decode(ended["detail"]["S"]),
        finished_at=float(ended["at"]["N"]),
    )


async def insert(table: Table, lanes: Sequence[list[Insertion]]) -> None:
    """Put tasks. A task that already exists stays as it is. Raises EngineFailed after the others, if DynamoDB refuses
    one for good."""
    batches = _Batches(table)

    def statement(names: tuple[str, ...]) -> str:
        return f'INSERT INTO "{table.name}" VALUE {{' + ",".join(f"'{name}':?" for name in names) + "}"

    async def send(batch: list[Insertion]) -> list[Insertion]:
        statements = [{"Statement": statement(each.names), "Parameters": each.parameters} for each in batch]
        codes = await batches.execute(statements)
        return [each for each, code in zip(batch, codes, strict=True) if not _settled(code, "DuplicateItem")]

    await drain(table.wire, lanes, MAX_IN_A_WRITE, send)
    batches.check()


class Ender:
    """Finishes tasks, each once, and recognizes its own earlier writes."""

    def __init__(self, table: Table) -> None:
        self._table = table
        where = '"pk"=? AND "sk"=? AND "ended" IS MISSING'
        self._statement = f'UPDATE "{table.name}" SET "ended"=? WHERE {where}'  # noqa: S608  (the name was checked)

    async def end(self, ends: list[TaskFinish], by: str, moved: list[TaskEnd]) -> None:
        """Add the tasks that the call named `by` moved to `moved`, even if it fails midway. Raises EngineFailed after
        the others, if DynamoDB refuses one for good."""
        batches = _Batches(self._table)
        # Tasks of unanswered attempts, and those of them that have finished.
        unsure: set[Key] = set()
        doubtful: list[TaskFinish] = []

        async def send(batch: list[TaskFinish]) -> list[TaskFinish]:
            statements = [
                {
                    "Statement": self._statement,
                    "Parameters": [_ended(each.end, by), {"S": each.key.pk}, {"S": each.key.sk}],
                }
                for each in batch
            ]
            try:
                codes = await batches.execute(statements)
            except Transient as failure:
                if failure.unsure:
                    unsure.update(each.key for each in batch)
                raise
            except asyncio.CancelledError:
                # Another lane failed while this call was on its way.
                doubtful.extend(batch)
                raise
            left: list[TaskFinish] = []
            for each, code in zip(batch, codes, strict=True):
                if code is None:
                    moved.append(each.end)
                elif not _settled(code, "ConditionalCheckFailed"):
                    if code == "InternalServerError":
                        unsure.add(each.key)
                    left.append(each)
                elif each.key in unsure:
                    doubtful.append(each)
            return left

        lanes: dict[str, list[TaskFinish]] = {}
        for each in ends:
            lanes.setdefault(each.key.pk, []).append(each)
        try:
            await drain(self._table.wire, list(lanes.values()), MAX_IN_A_WRITE, send)
        finally:
            moved += await self._own(doubtful, by)
        batches.check()

    async def _own(self, ends: list[TaskFinish], by: str) -> list[TaskEnd]:
        """Which of these an earlier attempt of the same call finished."""
        stored = await self._table.read_raw([each.key for each in ends], F("sk") & F("ended", "by"))
        own = {item["sk"]["S"] for item in stored if item.get("ended", {}).get("M", {}).get("by") == {"S": by}}
        return [each.end for each in ends if each.key.sk in own]


class _Batches:
    """Runs the statements of one call. One that DynamoDB refuses for good, because it is invalid, does not fail the
    others of its batch: their outcome is needed."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._refusal: EngineFailed | None = None

    def check(self) -> None:
        """Raise EngineFailed if a statement was refused for good."""
        if self._refusal is not None:
            raise self._refusal

    async def execute(self, statements: list[Statement]) -> list[str | None]:
        """Run statements. Returns the code of each one that was not executed."""
        try:
            answer = await self._table.wire.once("BatchExecuteStatement", {"Statements": statements})
        except EngineFailed as failure:
            if not isinstance(failure.__cause__, ValidationException):
                raise
            return await self._execute_halves(statements, failure)
        responses: list[Raw] = answer["Responses"]
        if len(responses) != len(statements):
            raise Transient(f"{len(responses)} answers to {len(statements)} statements", unsure=True)
        return [self._code(response) for response in responses]

    async def _execute_halves(self, statements: list[Statement], failure: EngineFailed) -> list[str | None]:
        """DynamoDB refused the whole batch, and executed none: find the statement that is invalid."""
        if len(statements) == 1:
            self._refusal = failure
            return [_REFUSED]
        half = len(statements) // 2
        return [*await self.execute(statements[:half]), *await self.execute(statements[half:])]

    def _code(self, response: Raw) -> str | None:
        error = response.get("Error")
        if error is None:
            return None
        code = str(error.get("Code"))
        if code in PASSING_CODES or code in ("DuplicateItem", "ConditionalCheckFailed"):
            return code
        failed = EngineRefused if code == INVALID_CODE else EngineFailed
        self._refusal = failed(f"DynamoDB refused a statement: {code}: {error.get('Message')}")
        return _REFUSED


def _settled(code: str | None, refusal: str) -> bool:
    """Whether a statement is done: executed, or refused for good."""
    return code in (None, refusal, _REFUSED)


def _ended(end: TaskEnd, by: str) -> Raw:
    ended: Raw = {
        "status": {"N": str(int(end.status))},
        "attempts": {"N": str(end.attempts)},
        "detail": {"S": end.detail},
        "at": {"N": repr(end.at)},
        "by": {"S": by},
    }
    if end.http_status is not None:
        ended["http_status"] = {"N": str(end.http_status)}
    if end.error_code is not None:
        ended["error_code"] = {"S": end.error_code}
    return {"M": ended}


def _tag(task_input: str) -> str | None:
    """The user's tag, if the input is an object with one. Inputs of handlers may have a value of any length there: an
    item that has it twice may be too large."""
    if not task_input.startswith("{") or '"tag"' not in task_input:
        return None
    try:
        tag = msgspec.json.decode(task_input).get("tag")
    except (msgspec.DecodeError, AttributeError):
        return None
    return tag if isinstance(tag, str) and len(tag) <= _LONGEST_TAG else None
