"""A section of a config: what all sections have in common. Pure.

The string under a field is all that is written about it: messages, the help and `help()` of a section show it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of_class

from megatier.config.names import suggest_names
from megatier.config.values import ByteCount, byte_count, number, parse_list, parse_yaml, require
from megatier.errors import ConfigError
from megatier.foreign import printable, quoted
from megatier.optimizers import in_words

NULLS = ("null", "Null", "NULL", "~")
"""How YAML writes that there is no value."""


class TypeWords(NamedTuple):
    """The words for the values of a type."""

    short: str
    """In the help."""
    words: str
    """In messages."""


TYPES: dict[Any, TypeWords] = {
    bool: TypeWords("true | false", "true or false"),
    int: TypeWords("N", "a whole number below 2**63"),
    float: TypeWords("X", "a finite number"),
    str: TypeWords("TEXT", "text"),
    ByteCount: TypeWords("SIZE", "a size such as 96GiB"),
    tuple: TypeWords("LIST", "a list of text ([] for none)"),
    dict: TypeWords("KEYS", "keys with values"),
}


class Section:
    """A part of a config. A name that it does not have is refused, and so is a value of another kind than its field."""

    __slots__ = ("given",)

    NAME: ClassVar[str] = ""
    """Its name in a config; empty: of the whole."""
    given: frozenset[str]
    """Names of the fields that its maker gave, also of those that are at their default. A copy with other values, as
    `dataclasses.replace` makes it, was given all."""

    def __new__(cls, *args: object, **given: object) -> Self:
        """Refuse names that no field has.

        Raises:
            ConfigError: names the first one, and what may have been meant.
        """
        # Here, since the `__init__` that a dataclass has would raise a TypeError of Python's.
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]  # every section is a dataclass
        for name in given:
            if name in known:
                continue
            near = suggest_names(name, known)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}."
            raise ConfigError(f"unknown setting {cls.dotted(printable(name))}; {hint}")

        section = super().__new__(cls)
        object.__setattr__(section, "given", frozenset(given))
        return section

    @classmethod
    def dotted(cls, key: str) -> str:
        """Return the name of a setting in a whole config."""
        return f"{cls.NAME}.{key}" if cls.NAME else key

    def read(self) -> None:
        """Refuse values of another kind than their fields, and keep the others as Python's own.

        Numbers of other libraries become Python's, since a config is written as YAML and JSON; sizes and lists may be
        given as text.

        Raises:
            ConfigError: names setting and value, what may stand there, and what the setting means.
        """
        section: Any = type(self)
        for key, hint in hints(section).items():
            value = getattr(self, key)
            types = types_of(hint)
            if value is None and NoneType in types:
                continue
            kept = _kept(value, types)
            if kept is None:
                # As the file has it: None is Python's word.
                given = "null" if value is None else quoted(value)
                allowed = in_message(hint)
                doc = field_docs(section)[key]
                raise ConfigError(f"{self.dotted(key)} is {given}; it must be {allowed}. {doc}")

            # A section is frozen, so its fields are set past its own `__setattr__`.
            object.__setattr__(self, key, kept)

    def need(self, key: str, holds: bool, bound: str) -> None:
        """Refuse the value of a field unless it holds.

        Raises:
            ConfigError: names setting, value and bound.
        """
        value = getattr(self, key)
        # As somebody wrote it: YAML has lists.
        if isinstance(value, tuple):
            value = list(value)
        require(holds, self.dotted(key), value, bound)

    def need_least(self, **least: int) -> None:
        """Refuse numbers that are below their least ones, which are given by the names of the fields.

        Raises:
            ConfigError: names setting, value and bound.
        """
        for key, bound in least.items():
            self.need(key, getattr(self, key) >= bound, f"at least {bound}")


def _kept(value: Any, types: list[Any]) -> Any:  # noqa: ANN401  a setting is of any type
    """Return a value as a setting of these types keeps it; None: it takes no such value."""
    choices: list[Any] = []
    for each in types:
        if get_origin(each) is Literal:
            choices += get_args(each)
    if isinstance(value, str) and choices:
        return value if value in choices else None

    # What is no number may be a value of another type of the setting.
    with suppress(ConfigError):
        if ByteCount in types:
            return byte_count("", value)
        if int in types or float in types:
            return number("", value, whole=int in types)

    if tuple in types:
        entries = [value] if isinstance(value, str) else value
        is_list = isinstance(entries, list | tuple)
        is_text = is_list and all(isinstance(word, str) for word in entries)
        return parse_list(value, "") if is_text else None
    plain = tuple(each for each in types if each in (bool, str, dict))
    return value if isinstance(value, plain) else None


@functools.cache
def hints(section: type[Any]) -> dict[str, Any]:
    """Return the types of the fields of a section, by name."""
    # Evaluating annotations takes long, and they are asked for with each value.
    types = hints_of_class(section, include_extras=True)
    return {item.name: types[item.name] for item in fields(section)}


def types_of(hint: Any) -> list[Any]:  # noqa: ANN401  type hints have no common type
    """Return the types that a setting takes: those of a union each, without what tuples and dicts hold."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = []
    for member in members:
        # Of these two what they hold is the type: the choices, and that a number is one of bytes.
        is_whole = get_origin(member) in (Literal, Annotated)
        types.append(member if is_whole else get_origin(member) or member)
    return types


def in_help(hint: Any) -> str:  # noqa: ANN401
    """Return a word for the values that a setting takes."""
    names: list[str] = []
    for each in types_of(hint):
        if each in TYPES:
            names.append(TYPES[each].short)
        elif each is not NoneType:
            names += get_args(each)
    return " | ".join(names)


def in_message(hint: Any) -> str:  # noqa: ANN401
    """Return in words what a setting takes."""
    types = types_of(hint)
    names: list[str] = []
    for each in types:
        if each in TYPES:
            names.append(TYPES[each].words)
        elif each is not NoneType:
            names += get_args(each)
    said = in_words(tuple(names)) if len(names) > 1 else names[0]
    return f"{said}, or null" if NoneType in types else said


def from_text(text: str, hint: Any) -> Any:  # noqa: ANN401
    """Return the value of a text that a file or the command line gives to a setting of this type.

    What is no value of the type comes back as it is or as YAML sees it, for the section to refuse.
    """
    types = types_of(hint)
    # A name may be the word null.
    if types == [str]:
        return text
    if text in NULLS:
        return None

    # A list may be written as YAML, too. Text without brackets is none: a pattern such as *.norm would be an alias.
    is_yaml = not {str, ByteCount} & set(types)
    if tuple in types:
        is_yaml = text.lstrip().startswith("[")
    with suppress(ConfigError):
        value = parse_yaml(text) if is_yaml else text
        return text if value is None else value
    return text


@functools.cache
def field_docs(section: type[Any]) -> dict[str, str]:
    """Return the string under each field of a section, as one line. It says null and false, as YAML does."""
    # Python keeps no strings under fields, so they are read from the source.
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, doc in itertools.pairwise(tree.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if not isinstance(doc, ast.Expr) or not isinstance(doc.value, ast.Constant):
            continue
        text = doc.value.value
        if isinstance(text, str):
            line = " ".join(text.split())
            docs[statement.target.id] = line.replace("None:", "null:").replace("False:", "false:")
    return docs


class SettingHelp(NamedTuple):
    """What the help says of a setting, in words."""

    name: str
    """In a whole config, such as train.steps."""
    takes: str
    """The values that it may have."""
    default: str
    doc: str


def settings_of(section: Any) -> Iterator[SettingHelp]:  # noqa: ANN401  every section is a dataclass
    """Yield the help of each setting of a section, in the order of its fields."""
    docs = field_docs(section)
    for key, hint in hints(section).items():
        default = section.__dataclass_fields__[key].default
        said = "null" if default is None else str(default).lower()
        # A list is written with commas on the command line.
        if isinstance(default, tuple):
            said = ",".join(default).lower() or "none"
        yield SettingHelp(section.dotted(key), in_help(hint), said, docs[key])


class Explained:
    """The docstring of a section, with the strings under its fields. It is made when somebody asks for it."""

    def __init__(self, first: str | None) -> None:
        """Begin with the docstring in the source."""
        self.first = first

    def __get__(self, instance: object, section: Any) -> str:  # noqa: ANN401
        """Return the docstring with a paragraph for each field, in the order of the fields."""
        # Made here and not when the class is: every import would parse the source.
        paragraphs = [f"{self.first}\n\nAttributes:"]
        for key, doc in field_docs(section).items():
            paragraph = textwrap.fill(f"{key}: {doc}", 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
            paragraphs.append(paragraph)
        return "\n".join(paragraphs)


Made = TypeVar("Made", bound=type[Section])


def explained(section: Made) -> Made:
    """Let the docstring of a section explain its fields. This decorates the finished dataclass."""
    type.__setattr__(section, "__doc__", Explained(section.__doc__))
    return section
