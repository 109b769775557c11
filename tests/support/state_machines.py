"""State machines that wait for jobs: the one of deploy/stepfunctions on an emulator, and a proxy before it that writes
down what is told, and fails as it is asked to."""

import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientSession, web
from botocore.config import Config

from conveyor.embedded import Embedded
from conveyor.engines.aws_session import aws_session
from conveyor.engines.records import Document
from conveyor.jobs.callbacks import CALLBACK, Callback, callback_of
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, JobId, TaskEnd
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.callback_monitor import Callbacks
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.intake import Intake
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.servers.aws import CREDENTIALS, REGION
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME
from tests.support.working import until

DEFINITION = Path(__file__).parents[2] / "deploy" / "stepfunctions" / "state-machine.asl.json"
ROLE = "arn:aws:iam::000000000000:role/conveyor"
ENDS = ("SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED")
QUEUES = {"IntakeQueueUrl": "intake", "ReprocessQueueUrl": "reprocess", "DeadLetterQueueUrl": "dead"}

Change = Callable[[dict[str, Any]], None]


class Call(NamedTuple):
    """A call of Step Functions that came through: what was said, with which token, and how it was answered."""

    operation: str
    token: str
    status: int
    said: dict[str, Any]
    at: float


class Between:
    """A proxy before the emulator. `faults` has, for an operation, what befalls the next calls of it: `throttle` and
    `refuse` (not carried out), `error` (answered 500, carried out), `reset` (carried out, the answer is lost), or the
    code of an error. With `settled`, an answer is acknowledged once the emulator knows its token no more, as AWS does
    it at once."""

    def __init__(self, emulator: str, now: Callable[[], float] = lambda: 0.0, *, settled: bool = False) -> None:
        self._emulator = emulator
        self._now = now
        self._settled = settled
        self.calls: list[Call] = []
        self.faults: dict[str, list[str]] = {}
        self.endpoint = ""
        self._session: ClientSession

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Between"]:
        app = web.Application(client_max_size=4 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        host, port = site._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
        self.endpoint = f"http://{host}:{port}"
        async with ClientSession() as self._session:
            try:
                yield self
            finally:
                await runner.cleanup()

    def taken(self, operation: str) -> list[Call]:
        """The calls that the state machine heard."""
        return [call for call in self.calls if call.operation == operation and call.status == 200]

    def answers(self) -> Counter[str]:
        """How many answers each token was given."""
        return Counter(call.token for call in self.taken("SendTaskSuccess") + self.taken("SendTaskFailure"))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        operation = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        body = await request.read()
        waiting = self.faults.get(operation, [])
        fault = waiting.pop(0) if waiting else ""
        if fault == "throttle":
            return _error("ThrottlingException", 400)
        if fault and fault not in ("error", "reset"):
            return _error(fault, 400)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with self._session.request(
            request.method, self._emulator + request.path_qs, data=body, headers=headers
        ) as answer:
            data, status = await answer.read(), answer.status
        if operation.startswith("SendTask"):
            said = json.loads(body)
            if self._settled and status == 200 and operation != "SendTaskHeartbeat":
                await self._until_known_no_more(headers, said["taskToken"])
            self.calls.append(Call(operation, said.pop("taskToken"), status, said, self._now()))
        if fault == "error":
            return _error("InternalServerError", 500)
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        kept = {name: answer.headers[name] for name in ("Content-Type", "x-amzn-RequestId") if name in answer.headers}
        return web.Response(body=data, status=status, headers=kept)

    async def _until_known_no_more(self, headers: dict[str, str], token: str) -> None:
        asked = {name: value for name, value in headers.items() if name.lower() != "content-length"}
        asked["X-Amz-Target"] = "AWSStepFunctions.SendTaskHeartbeat"

        async def status() -> int:
            body = json.dumps({"taskToken": token}).encode()
            async with self._session.post(self._emulator, data=body, headers=asked) as answer:
                return answer.status

        await until(status, lambda status: status != 200)


def _error(code: str, status: int) -> web.Response:
    body = json.dumps({"__type": code, "message": "as it was told"}).encode()
    return web.Response(body=body, status=status, content_type="application/x-amz-json-1.0")


class Roles:
    """What keeps a state machine waiting, a pass at a time."""

    def __init__(self, system: System) -> None:
        assert system.step_functions is not None
        self.system = system
        self.intake = Intake(system)
        self.callbacks = Callbacks(system, system.step_functions)
        answers = StepAnswers(system)
        self.notifier = OutboxDispatcher(system.settings, system.records, system.tasks, system.clock, answers)

    async def take_in(self, number: int = 1) -> None:
        """Until so many jobs came in."""
        seen = 0
        while seen < number:
            taken = await self.intake.run_once()
            seen += taken.jobs + taken.attached

    async def finish_one(self, job: Job, index: int) -> None:
        await self.system.tasks.finish(job.key, [TaskEnd(index, TaskStatus.SUCCEEDED, 1, None, None, "{}", 0.0)])

    async def ingest(self, job_id: JobId) -> None:
        """What ingesters do for a job that replaces another, while time passes."""
        (ingester, *_) = Embedded(self.system, {}).ingesters()
        clock = self.system.clock
        assert isinstance(clock, JumpingClock)
        while not (await self.job(job_id)).run.last_batch:
            await ingester.tick()
            clock.advance(1.0)

    async def finish(self, job_id: JobId) -> None:
        """What a worker does for a job, in one step."""
        job = await self.job(job_id)
        ends = [TaskEnd(index, TaskStatus.SUCCEEDED, 1, None, None, "{}", 0.0) for index in range(job.run.total)]
        finished = await self.system.tasks.finish(job.key, ends)
        await Lifecycle(self.system.records, self.system.tasks, self.system.clock).settle(job, finished.counts)

    async def answer(self) -> None:
        await self.notifier.run_once()
        await self.callbacks.run_once()

    async def job(self, job_id: JobId) -> Job:
        job = await self.system.records.jobs.job(ACME, job_id)
        assert job is not None
        return job

    async def all(self) -> list[Callback]:
        return [callback_of(row) for row in await self.rows()]

    async def rows(self) -> list[Document]:
        return (await self.system.records.documents.documents(CALLBACK, ACME, None, 1000)).items

    async def only(self) -> Callback:
        (found,) = await self.all()
        return found


class Machine:
    """The state machine, its queues, and its executions."""

    def __init__(self, endpoint: str, name: str, sqs: Any, steps: Any) -> None:
        self.endpoint = endpoint
        self.name = name
        self.sqs = sqs
        self.steps = steps
        self.urls: dict[str, str] = {}
        self.arn = ""
        self._started = 0

    def inbox(self, queue: str, wait: int = 0) -> str:
        """The queue as CONVEYOR_INTAKE names it."""
        return f"sqs://{REGION}/{self.name}-{queue}?endpoint={self.endpoint}&wait={wait}"

    def settings(self, between: Between | None = None) -> dict[str, Any]:
        """What an operator would set."""
        endpoint = self.endpoint if between is None else between.endpoint
        return {
            "step_functions": f"stepfunctions://{REGION}?endpoint={endpoint}",
            "intake": f"{self.inbox('reprocess')} {self.inbox('intake')}",
            "intake_tenant": "acme",
        }

    async def make(self, change: Change | None = None, *, queues: bool = True) -> None:
        """Create the queues and the machine; `change` gets its definition."""
        base = f"{self.endpoint}/000000000000/{self.name}-"
        for queue in QUEUES.values():
            if queues:
                await self.make_queue(queue)
            else:
                self.urls[queue] = f"{base}{queue}"
        text = DEFINITION.read_text()
        for variable, queue in QUEUES.items():
            text = text.replace(f"${{{variable}}}", self.urls[queue])
        definition = json.loads(text)
        if change is not None:
            change(definition)
        made = await self.steps.create_state_machine(
            name=self.name, definition=json.dumps(definition), roleArn=ROLE, type="STANDARD"
        )
        self.arn = made["stateMachineArn"]

    async def make_queue(self, queue: str) -> None:
        self.urls[queue] = (await self.sqs.create_queue(QueueName=f"{self.name}-{queue}"))["QueueUrl"]

    async def start(self, job: dict[str, Any]) -> str:
        self._started += 1
        started = await self.steps.start_execution(
            stateMachineArn=self.arn, name=f"{self.name}-{self._started}", input=json.dumps({"job": job})
        )
        arn: str = started["executionArn"]
        return arn

    async def look(self, execution: str) -> dict[str, Any]:
        seen: dict[str, Any] = await self.steps.describe_execution(executionArn=execution)
        return seen

    async def ended(self, execution: str) -> dict[str, Any]:
        """The execution, once it has ended."""

        async def look() -> dict[str, Any]:
            return await self.look(execution)

        return await until(look, lambda seen: seen["status"] in ENDS)

    async def output(self, execution: str) -> Any:
        """What it came to, if it came to a good end."""
        seen = await self.ended(execution)
        assert seen["status"] == "SUCCEEDED", seen
        return json.loads(seen["output"])

    async def waiting(self, queue: str) -> int:
        """Messages of a queue that nobody holds."""
        asked = await self.sqs.get_queue_attributes(
            QueueUrl=self.urls[queue], AttributeNames=["ApproximateNumberOfMessages"]
        )
        return int(asked["Attributes"]["ApproximateNumberOfMessages"])

    async def held(self, queue: str) -> int:
        """All messages of a queue."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        asked = await self.sqs.get_queue_attributes(QueueUrl=self.urls[queue], AttributeNames=names)
        return sum(int(asked["Attributes"][name]) for name in names)

    async def until_sent(self, queue: str, number: int = 1) -> None:
        """Until so many messages stand in a queue."""

        async def look() -> int:
            return await self.waiting(queue)

        await until(look, lambda count: count >= number)

    async def letters(self, name: str) -> list[dict[str, Any]]:
        """What is in a queue, by its whole name, with attributes."""
        url = (await self.sqs.get_queue_url(QueueName=name))["QueueUrl"]
        got = await self.sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"])
        found: list[dict[str, Any]] = got.get("Messages", [])
        return found


@asynccontextmanager
async def machine(endpoint: str, name: str) -> AsyncIterator[Machine]:
    """A machine that is not made yet, of this name."""
    os.environ.update(CREDENTIALS)
    config = Config(max_pool_connections=50, retries={"total_max_attempts": 1})
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                aws_session().create_client(service, region_name=REGION, endpoint_url=endpoint, config=config)
            )
            for service in ("sqs", "stepfunctions")
        ]
        yield Machine(endpoint, name, *clients)
