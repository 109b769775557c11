"""`conveyor deploy aws`: show what a stack would make and cost, and the commands that make it. It makes nothing."""

from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson
from conveyor.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from conveyor.deploy.aws_costs import CostLine
    from conveyor.deploy.aws_stack import StackPlan

app = typer.Typer(help="Show how to put Conveyor elsewhere.", no_args_is_help=True, rich_markup_mode=None)

Stack = Annotated[str, typer.Option("--stack", metavar="NAME", help="Name of the stack.")]
Size = Annotated[str, typer.Option("--size", help="small, medium or large.")]
Region = Annotated[str | None, typer.Option("--region", metavar="REGION", help="Region. [that of the AWS libraries]")]
Image = Annotated[str | None, typer.Option("--image", metavar="URI", help="Image of Conveyor in a registry.")]
Given = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the template. Can be repeated."),
]


@app.callback()
def deploy() -> None:
    """Show how to put Conveyor elsewhere."""


@app.command("aws")
def aws(
    stack: Stack,
    size: Size = "small",
    region: Region = None,
    image: Image = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Show what a stack on AWS makes and costs, and the commands that make it.

    Checks the parameters against the template. It calls nothing and makes nothing: you run the commands.
    """
    from conveyor.deploy.aws_costs import idle_month, million_tasks
    from conveyor.deploy.aws_stack import made_resources, plan_stack, steps, warnings

    values = _values(given or [])
    if image is not None:
        values["Image"] = image
    plan = plan_stack(stack, size, region or _region(), values)
    idle, million = idle_month(plan.parameters), million_tasks(plan.parameters)
    if as_json:
        print_json(
            {
                "parameters": plan.parameters,
                "resources": made_resources(plan.parameters),
                "idle_month": {line.what: round(line.dollars, 2) for line in idle},
                "million_tasks": {line.what: round(line.dollars, 2) for line in million},
                "warnings": warnings(plan),
                "commands": [step.text for step in steps(plan)],
            }
        )
        return
    _print_plan(plan, idle, million)


def _values(given: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"--set takes NAME=VALUE, not {text!r}.")
        values[name] = value
    return values


def _region() -> str | None:
    try:
        from conveyor.system import aws_region
    except ImportError:
        return None
    return aws_region()


def _print_plan(plan: "StackPlan", idle: "Sequence[CostLine]", million: "Sequence[CostLine]") -> None:
    import shutil

    from conveyor.deploy.aws_stack import TEMPLATE, made_resources, steps, warnings

    print(f"# Stack {plan.stack} in {plan.region}, from {TEMPLATE}")
    print("#\n# With these parameters the template makes:")
    for kind, count in sorted(made_resources(plan.parameters).items()):
        print(f"#   {count:3} {kind}")
    _print_costs("Idle, a month, in us-east-1 on demand:", idle)
    _print_costs("A million tasks beyond that (fetches of half a second), to the end of their life:", million)
    print("#\n# Transfer, logs, point-in-time recovery and what you store longer than 14 days are extra.")
    problems = warnings(plan)
    if shutil.which("aws") is None:
        problems.append("The AWS CLI is not installed on this machine.")
    if problems:
        print("#\n# Look at this first:")
        for problem in problems:
            print(f"#   {problem}")
    for step in steps(plan):
        print(f"\n# {step.why[0].upper()}{step.why[1:]}:\n{step.text}")


def _print_costs(title: str, lines: "Sequence[CostLine]") -> None:
    print(f"#\n# {title}")
    for line in lines:
        print(f"#   ${line.dollars:8.2f}  {line.what}")
    print(f"#   ${sum(line.dollars for line in lines):8.2f}  together")
