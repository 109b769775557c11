"""The functions of CloudFormation as values, and a template as YAML with their short forms."""

import re
from typing import Any, NamedTuple

import yaml

NO_VALUE = "AWS::NoValue"

# A name after a tag, which needs no quotes.
_QUOTED = re.compile(r"(!(?:Ref|GetAtt|Condition)) '([\w.:]+)'")


class Intrinsic(NamedTuple):
    """A function, by the tag of its short form, and its argument."""

    tag: str
    argument: Any


def ref(name: str) -> Intrinsic:
    return Intrinsic("!Ref", name)


def sub(text: str) -> Intrinsic:
    return Intrinsic("!Sub", text)


def att(name: str) -> Intrinsic:
    return Intrinsic("!GetAtt", name)


def either(condition: str, then: Any, otherwise: Any = None) -> Intrinsic:
    """A value by a condition; without another one the property is left out."""
    return Intrinsic("!If", [condition, then, ref(NO_VALUE) if otherwise is None else otherwise])


def equals(parameter: str, value: str) -> Intrinsic:
    return Intrinsic("!Equals", [ref(parameter), value])


def is_not(condition: Any) -> Intrinsic:
    return Intrinsic("!Not", [condition])


def holds(name: str) -> Intrinsic:
    return Intrinsic("!Condition", name)


def every(*conditions: Any) -> Intrinsic:
    return Intrinsic("!And", list(conditions))


def any_of(*conditions: Any) -> Intrinsic:
    return Intrinsic("!Or", list(conditions))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """CloudFormation has none."""
        return True


def _intrinsic(dumper: _Dumper, value: Intrinsic) -> yaml.Node:
    if isinstance(value.argument, str):
        return dumper.represent_scalar(value.tag, value.argument)
    node = dumper.represent_sequence(value.tag, value.argument)
    # Short when it is only words.
    node.flow_style = all(isinstance(each, yaml.ScalarNode) for each in node.value)
    return node


_Dumper.add_representer(Intrinsic, _intrinsic)


def text_of(template: dict[str, Any]) -> str:
    """The template as YAML, in the order that it was made in."""
    text: str = yaml.dump(template, Dumper=_Dumper, sort_keys=False, width=118, default_flow_style=None)
    return _QUOTED.sub(r"\1 \2", text)
