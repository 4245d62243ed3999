"""Makes documents of records: a text under one key, or a conversation in one of the usual shapes.

messages: [{"role": "user", "content": ...}, ...]; ShareGPT: [{"from": "human", "value": ...}, ...]; Alpaca:
instruction, input, output; TRL's prompt and completion. All of them become messages, which chat templates take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megatier.config.data_section import Chat
from megatier.data.image_parts import IMAGE_KEYS, ImageSource, holds_image, parts_of, place_images, text_of
from megatier.errors import DataError
from megatier.foreign import quoted, reason_of, unique_keys

ASSISTANT = "assistant"
"""The role whose turns are learnt."""

OTHER_ROLES = {"system", "developer", "user", "tool", "function"}
"""Names of those who speak besides the assistant, and so none of the assistant's own."""

SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system", "observation": "tool"}
"""The roles of ShareGPT, and what chat templates call them."""

MEDIA_KEYS = (*IMAGE_KEYS, "videos", "video", "audios", "audio")
"""Keys of images, videos and audio in the usual shapes of records."""

CHAT_KEYS: dict[Chat, str] = {
    "messages": "messages",
    "sharegpt": "conversations",
    "alpaca": "instruction",
    "prompt_completion": "completion",
}
"""The key by which each value of `data.chat` is recognised."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, of which the assistant's are learnt."""

    messages: list[dict[str, Any]]
    """Each has a role and, unless it calls tools, a content."""
    tools: list[Any] | None
    """The tools that the assistant could call, as the chat template takes them."""
    place: str
    """The place that it comes from, for errors."""
    images: tuple[ImageSource, ...] = ()
    """Its images, in the order in which its messages name them."""
    folder: Path = Path()
    """The folder to which paths of images are relative."""

    @property
    def num_bytes(self) -> int:
        """Bytes of UTF-8 in its contents."""
        return sum(len(text_of(message.get("content")).encode("utf-8", "replace")) for message in self.messages)


def in_folder(document: str | Conversation, folder: Path) -> str | Conversation:
    """Return a document that knows the folder to which paths of its images are relative."""
    if isinstance(document, Conversation) and document.images:
        return replace(document, folder=folder)
    return document


TEMPLATE_SETTINGS = "chat_template_kwargs"
"""The key under which TRL's records have variables of the chat template."""


class Shape(Protocol):
    """The keys under which a record holds its document."""

    def read(self, record: dict[str, Any], place: str) -> str | Conversation:
        """Return the document of a record.

        Raises:
            DataError: something is missing or of another kind. The message names the place.
        """


@dataclass(frozen=True, slots=True)
class Text:
    """A text under one key."""

    key: str
    """The key."""

    def read(self, record: dict[str, Any], place: str) -> str:
        """Return the text of a record; see `Shape`."""
        text = record.get(self.key)
        if not isinstance(text, str):
            remedy = f"Its keys are {quoted(list(record))}. " if record else ""

            # A record of conversations is the usual reason why there is no text, so the remedy names its shape.
            chat = next((chat for chat, key in CHAT_KEYS.items() if key in record), None)
            if chat:
                remedy += f"Set data.chat to {chat}."
            else:
                remedy += "Set data.text_field to the key of the text."
            raise DataError(f"{place}: no text under {self.key!r}. {remedy}")
        return _whole_characters(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """A list of turns under one key."""

    turns: str = "messages"
    """Key of the list in the record."""
    role: str = "role"
    """Key of a turn's role."""
    content: str = "content"
    """Key of what a turn says."""
    roles: tuple[tuple[str, str], ...] = ()
    """The roles in the record, and what the template calls them; empty: any role, by its own name."""
    system: str | None = None
    """Key of a system prompt that is not among the turns."""
    tools: str | None = "tools"
    """Key of the tools that the assistant may call. None: the records have none."""
    images: tuple[str, ...] | None = None
    """Keys under which a record may have its images; None: images are refused."""
    media: tuple[str, ...] = MEDIA_KEYS
    """Keys under which a record must not have anything that is not read."""

    def read(self, record: dict[str, Any], place: str) -> Conversation:
        """Return the conversation of a record; see `Shape`."""
        _check_template_settings(record, place)
        messages = self.messages(record, place)
        # Before the turns, where chat templates look for it.
        system = _system(_value(record, self.system), place)
        tools = _value(record, self.tools)
        conversation = _conversation(system + messages, tools, place)
        return _with_images(conversation, record, self.images, self.media)

    def messages(self, record: dict[str, Any], place: str) -> list[dict[str, Any]]:
        """Return the turns of a record as messages.

        Raises:
            DataError: there are none, or one is of another kind.
        """
        turns = record.get(self.turns)
        if not isinstance(turns, list):
            raise DataError(
                f"{place}: no list of turns under {self.turns!r}. Choose another data.chat, or correct the record."
            )
        return [self._message(turn, place) for turn in turns]

    def _message(self, turn: object, place: str) -> dict[str, Any]:
        """Return a turn as a message, with everything else that the record says of it."""
        if not isinstance(turn, dict):
            raise DataError(f"{place}: a turn is {quoted(turn)}, not an object.")
        role = turn.get(self.role)
        content = turn.get(self.content)

        # Without roles of its own the format is that of chat templates, which know whatever roles they like.
        known = dict(self.roles)
        if not isinstance(role, str) or (known and role not in known):
            names = f"one of {', '.join(known)}" if known else "text"
            raise DataError(f"{place}: a turn's {self.role} is {quoted(role)}; it must be {names}.")
        role = known.get(role, role)

        # A table gives every row all of its columns, so what a turn does not have is None there. A template must not
        # see it.
        read_keys = (self.role, self.content)
        rest = {key: value for key, value in turn.items() if value is not None and key not in read_keys}

        # A turn that calls tools need not say anything.
        if content is None and rest.get("tool_calls"):
            rest.pop("content", None)
            return {"role": role, **rest}
        if content is None:
            raise DataError(
                f"{place}: the turn of {role} has no {self.content!r}, which only a turn with tool_calls may leave "
                "out. Leave the record out, or write an empty text."
            )
        if self.images is not None:
            return {"role": role, "content": parts_of(content, place), **rest}
        said = _text(_join_parts(content, place), self.content, place)
        return {"role": role, "content": said, **rest}


SHAREGPT = Turns(
    turns="conversations", role="from", content="value", roles=tuple(SHAREGPT_ROLES.items()), system="system"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alpaca:
    """An instruction, perhaps with an input, and the answer; perhaps with earlier rounds."""

    prompt: str = "instruction"
    """Key of the instruction."""
    query: str | None = "input"
    """Key of the input, which follows the instruction."""
    response: str = "output"
    """Key of the answer."""
    system: str | None = "system"
    """Key of a system prompt."""
    history: str | None = "history"
    """Key of the earlier rounds, a list of pairs of prompt and answer."""
    images: tuple[str, ...] | None = None
    """Keys under which a record may have its images; None: images are refused."""
    media: tuple[str, ...] = MEDIA_KEYS
    """Keys under which a record must not have anything that is not read."""

    def read(self, record: dict[str, Any], place: str) -> Conversation:
        """Return the conversation of a record; see `Shape`."""
        prompt = _text(record.get(self.prompt), self.prompt, place)
        query = _value(record, self.query)
        if query:
            # Joined by a line's end, as LLaMA-Factory joins them.
            prompt = f"{prompt}\n{_text(query, str(self.query), place)}"
        rounds = list(self._earlier_rounds(record, place))
        response = _text(record.get(self.response), self.response, place)
        rounds.append((prompt, response))

        messages = _system(_value(record, self.system), place)
        for question, answer in rounds:
            messages.append({"role": "user", "content": question})
            messages.append({"role": ASSISTANT, "content": answer})
        conversation = _conversation(messages, None, place)
        return _with_images(conversation, record, self.images, self.media)

    def _earlier_rounds(self, record: dict[str, Any], place: str) -> Iterator[tuple[str, str]]:
        """Yield the earlier rounds, as prompt and answer."""
        name = str(self.history)
        # Tables have an empty value in each row without a history.
        rounds = _value(record, self.history) or []

        # What is no list is shown as a round that is none, by the error below.
        if not isinstance(rounds, list):
            rounds = [rounds]
        for pair in rounds:
            if not isinstance(pair, list) or len(pair) != 2:
                raise DataError(f"{place}: {self.history!r} is no list of pairs of prompt and answer.")
            prompt, answer = pair
            yield _text(prompt, name, place), _text(answer, name, place)


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt and the completion to learn, as TRL has them: two texts, or two lists of messages."""

    images: tuple[str, ...] | None = None
    """Keys under which a record may have its images; None: images are refused."""
    media: tuple[str, ...] = MEDIA_KEYS
    """Keys under which a record must not have anything that is not read."""

    def read(self, record: dict[str, Any], place: str) -> Conversation:
        """Return the conversation of a record; see `Shape`."""
        _check_template_settings(record, place)
        prompt = self._messages(record, "prompt", "user", place)
        completion = self._messages(record, "completion", ASSISTANT, place)

        # All turns of the assistant are learnt, and TRL learns those of the completion alone.
        if any(message["role"] == ASSISTANT for message in prompt):
            raise DataError(
                f"{place}: the prompt has a turn of the assistant, which would be learnt too. Write the whole as "
                "messages, with data.chat messages, if it shall be."
            )
        whole = _conversation(prompt + completion, record.get("tools"), place)
        return _with_images(whole, record, self.images, self.media)

    def _messages(self, record: dict[str, Any], key: str, role: str, place: str) -> list[dict[str, Any]]:
        """Return what lies under a key as messages; a text is one of this role."""
        content = record.get(key)

        if isinstance(content, list):
            return Turns(turns=key, images=self.images).messages(record, place)
        return [{"role": role, "content": _text(content, key, place)}]


def _check_template_settings(record: dict[str, Any], place: str) -> None:
    """Refuse a record that sets variables of the chat template, as TRL takes them: all are rendered alike here."""
    if record.get(TEMPLATE_SETTINGS):
        raise DataError(
            f"{place}: {TEMPLATE_SETTINGS} of a single record is not supported. Write its values into the template "
            "(data.chat_template), or leave the key out."
        )


def _conversation(messages: list[dict[str, Any]], tools: Any, place: str) -> Conversation:  # noqa: ANN401
    """Return a conversation in which the assistant speaks.

    Raises:
        DataError: it does not, or the tools are none.
    """
    # In the order in which they speak, for the message.
    roles = dict.fromkeys(message["role"] for message in messages)
    if ASSISTANT not in roles:
        remedy = "Leave the record out."
        if roles.keys() - OTHER_ROLES:
            remedy = (
                f"It is named {ASSISTANT!r} here; for another name set assistant_tag in a dataset_info.json and give "
                "data.files PATH/dataset_info.json#NAME, or rename it."
            )
        remark = f"; its roles are {', '.join(roles)}" if roles else ""
        raise DataError(f"{place}: no turn of the assistant, so nothing to learn{remark}. {remedy}")

    # Tables cannot hold tools of any shape, so many datasets hold them as JSON in a text.
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: the tools are no valid JSON: {reason_of(error)}.") from error

    if tools and not isinstance(tools, list):
        raise DataError(f"{place}: the tools are {quoted(tools)}, not a list.")
    return Conversation(messages, tools or None, place)


def _with_images(
    conversation: Conversation, record: dict[str, Any], keys: Sequence[str] | None, media: Sequence[str]
) -> Conversation:
    """Return a conversation with its images, whose messages are lists of parts, as processors' templates take them.

    Args:
        conversation: the conversation.
        record: its record.
        keys: where the record may have its images; None: they are not read, and the conversation stays as it is.
        media: where the record must not have anything else.

    Raises:
        DataError: the record has what is not read, or images and their places in the messages do not fit.
    """
    # A table has all of its columns in each record, so a key that is there may hold nothing.
    present = [key for key in (*media, *(keys or ())) if record.get(key)]
    for key in present:
        if key not in (keys or ()):
            remedy = "Set data.images to true" if key in IMAGE_KEYS else "Leave the record out"
            raise DataError(
                f"{conversation.place}: the record has something under {key!r} that would not be read. {remedy}, or "
                "remove the key."
            )
    if keys is None:
        return conversation
    given = record[present[0]] if present else None
    messages, images = place_images(conversation.messages, given, conversation.place)
    return replace(conversation, messages=messages, images=images)


def _join_parts(content: object, place: str) -> object:
    """Return the texts of a list of parts, such as `[{"type": "text", "text": "..."}]`, as one; else the content.

    Raises:
        DataError: a part is no text, such as an image.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else None
        if not isinstance(text, str):
            remedy = "Set data.images to true to read images." if holds_image(part) else ""
            raise DataError(
                f"{place}: a part of a turn is {quoted(part)}; parts of the type text alone are read. {remedy}".rstrip()
            )
        texts.append(text)
    return "".join(texts)


def _system(prompt: object, place: str) -> list[dict[str, Any]]:
    """Return a system prompt as a message, or nothing if there is none."""
    return [{"role": "system", "content": _text(prompt, "system", place)}] if prompt else []


def _text(value: object, key: str, place: str) -> str:
    """Return a value that must be text."""
    if not isinstance(value, str):
        raise DataError(f"{place}: no text under {key!r}, but {quoted(value)}.")
    return _whole_characters(value)


def _whole_characters(text: str) -> str:
    """Return a text without half surrogate pairs, which JSON can spell and UTF-8 has no bytes for."""
    # By UTF-16, where two halves that belong together become the character that they spell.
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _value(record: dict[str, Any], key: str | None) -> Any:  # noqa: ANN401
    """Return the value of a key that a shape need not have."""
    return record.get(key) if key is not None else None
