"""A conversation as tokens, by the tokenizer's chat template, and which of them the assistant wrote.

The text is rendered once and tokenised once. The assistant's turns are spans of its characters: those that the template
marks with {% generation %}, else what a turn adds behind the prompt that asks for it. A token is learnt if it lies in
such a span whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatier.data.conversation import ASSISTANT, Conversation
from megatier.errors import DataError
from megatier.foreign import reading

CharacterRange = tuple[int, int]
"""First character, and the one behind the last."""

BATCH_CHARACTERS = 1 << 17
"""Tokenised at once, or a little more: 200 bytes a token lie in RAM meanwhile."""

REMEDY = "Set data.chat_template to a Jinja file in which {% generation %} and {% endgeneration %} enclose these turns."


def tokenise_chats(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Token ids of each conversation, and whether each is learnt. No end token is added: the template has its own.

    Several are tokenised at once, for which fast tokenizers take all cores.

    Raises:
        DataError: there is no template, it refuses these messages, or the assistant's turns cannot be told for sure.
    """
    if not tokenizer.is_fast:
        name = tokenizer.name_or_path
        raise DataError(f"the tokenizer {name} does not say which characters a token has. Use a fast one for chat.")
    batch = list[_Rendered]()
    num_characters = 0
    for conversation in conversations:
        batch.append(_Rendered(conversation.place, *_Template(conversation, tokenizer).rendered()))
        num_characters += len(batch[-1].text)
        if num_characters >= BATCH_CHARACTERS:
            yield from _tokenised(batch, tokenizer)
            batch = []
            num_characters = 0

    if batch:
        yield from _tokenised(batch, tokenizer)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation as text."""

    place: str
    text: str
    spans: list[CharacterRange]
    """The assistant's."""


def _tokenised(
    batch: Sequence[_Rendered], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    texts = [rendered.text for rendered in batch]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for rendered, ids, characters in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        offsets = np.asarray(characters, np.int64).reshape(-1, 2)
        learnt = np.zeros(len(offsets), np.bool_)
        for start, stop in rendered.spans:
            learnt |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop)
        if not learnt.any():
            raise DataError(
                f"{rendered.place}: no token of the assistant. Leave the record out if its answers are empty. {REMEDY}"
            )

        yield np.asarray(ids, np.int64), learnt


class _Template:
    """The template, for one conversation."""

    def __init__(self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
        self._conversation = conversation
        self._tokens: dict[str, Any] = tokenizer.special_tokens_map
        try:
            self._source = tokenizer.get_chat_template(tools=conversation.tools)
        except ValueError as error:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template. Set data.chat_template to a Jinja file."
            ) from error

    def rendered(self) -> tuple[str, list[CharacterRange]]:
        """The text, and the assistant's spans."""
        messages = self._conversation.messages
        is_marked = "endgeneration" in self._source
        text, spans = self._render(messages, return_assistant_tokens_mask=is_marked)
        return text, spans if is_marked else list(self._turns(text))

    def _turns(self, text: str) -> Iterator[CharacterRange]:
        """Where each turn of the assistant begins and ends."""
        for index, message in enumerate(self._conversation.messages):
            if message["role"] == ASSISTANT:
                start = self._start(index)
                stop = self._stop(index, text)
                if stop is None or stop < len(start) or not text.startswith(start):
                    raise DataError(
                        f"{self._conversation.place}: the chat template writes turn {index + 1} in another way when "
                        f"more follows, so where it begins or ends is not sure. {REMEDY}"
                    )
                yield len(start), stop

    def _start(self, index: int) -> str:
        """The prompt that asks for a turn."""
        return self._render(self._conversation.messages[:index], add_generation_prompt=True)[0]

    def _stop(self, index: int, text: str) -> int | None:
        """Where a turn ends: where the text up to it does, else where the next turn begins; None if that differs.

        Some templates write the last turn in another way (Qwen3 gives it an empty thought). Then the next turn tells:
        what it adds where the turn in question is left out is what it must add behind it.
        """
        messages = self._conversation.messages
        through, _ = self._render(messages[: index + 1])
        if text.startswith(through):
            return len(through)
        try:
            before, _ = self._render(messages[:index])
            without, _ = self._render(messages[:index] + messages[index + 1 : index + 2])
            through, _ = self._render(messages[: index + 2])
        except DataError:  # turns that must alternate, for one
            return None

        added = without.removeprefix(before)
        is_sure = added and without.startswith(before) and through.endswith(added) and text.startswith(through)
        return len(through) - len(added) if is_sure else None

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> tuple[str, list[CharacterRange]]:  # noqa: ANN401
        conversation = self._conversation
        with reading(f"{conversation.place}: the chat template refuses the conversation", DataError):
            made: Any = render_jinja_template(  # annotated as text
                conversations=[list(messages)],
                tools=conversation.tools,
                chat_template=self._source,
                **self._tokens,
                **options,
            )

        texts, spans = made
        return texts[0], spans[0] if spans else []
