"""Tokenises a conversation by the tokenizer's chat template, and marks what the assistant wrote.

The text is rendered once and tokenised once. The assistant's turns are ranges of its characters: those that the
template marks with {% generation %}, else what a turn adds after the prompt that asks for it. A token is learnt if all
of it lies in such a range.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatier.data.conversation import ASSISTANT, Conversation
from megatier.data.image_parts import text_of
from megatier.data.records import BadRecords
from megatier.data.unknown_tokens import NONE_UNKNOWN, UnknownTokens
from megatier.errors import DataError
from megatier.foreign import reading

CharacterRange = tuple[int, int]
"""The number of the first character, and that of the one after the last."""

BATCH_CHARACTERS = 1 << 17
"""Characters that are tokenised at once, or a few more: 200 bytes a token lie in RAM meanwhile."""

UNENDED_ANSWER = (
    "the chat template learns nothing behind an answer of the assistant, so the model does not learn to end a turn. "
    "Let {% endgeneration %} stand behind the token that ends it (data.chat_template)."
)
"""The warning about a template whose turns have no learnt end."""
TEMPLATE_REMEDY = (
    "Set data.chat_template to a Jinja file in which {% generation %} and {% endgeneration %} enclose these turns."
)
"""The remedy in errors about assistant's turns that cannot be told."""
UNLEARNT = f"no token of the assistant. Leave the record out if its answers are empty. {TEMPLATE_REMEDY}"
"""What is wrong with a conversation of which nothing is learnt."""


def tokenise_chats(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    bad: BadRecords,
    unknown: UnknownTokens = NONE_UNKNOWN,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield the token ids of each conversation that is not left out, and whether each token is learnt.

    No end token is added, because the template has its own. Several conversations are tokenised at once, for which fast
    tokenizers take all cores.

    Raises:
        DataError: there is no template. Or it refuses these messages, the assistant's turns cannot be told for sure, or
            a message spells a token that is unknown, and `bad` does not leave such a conversation out.
    """
    if not tokenizer.is_fast:
        name = tokenizer.name_or_path
        raise DataError(
            f"the tokenizer {name} does not say which characters a token has, as data.chat needs. Use a fast "
            "tokenizer, which has a tokenizer.json."
        )

    batch = list[_Rendered]()
    num_characters = 0
    for conversation in conversations:
        template = Template(conversation, tokenizer)
        try:
            batch.append(_Rendered(conversation.place, *template.rendered()))
        except DataError as error:
            bad.leave_out(error)
            continue

        num_characters += len(batch[-1].text)
        if num_characters >= BATCH_CHARACTERS:
            yield from _tokenise_rendered(batch, tokenizer, bad, unknown)
            batch = []
            num_characters = 0

    if batch:
        yield from _tokenise_rendered(batch, tokenizer, bad, unknown)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation as text."""

    place: str
    """The place that it comes from, for errors."""
    text: str
    """The text that the template makes of it."""
    ranges: list[CharacterRange]
    """The assistant's turns."""


def _tokenise_rendered(
    batch: Sequence[_Rendered], tokenizer: PreTrainedTokenizerBase, bad: BadRecords, unknown: UnknownTokens
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Tokenise several conversations at once.

    Raises:
        DataError: a conversation has no token of the assistant or an unknown one, and `bad` does not leave it out.
    """
    texts = [rendered.text for rendered in batch]

    # The template writes special tokens itself.
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    all_ids = encoded["input_ids"]
    all_spans = encoded["offset_mapping"]
    for rendered, ids, spans in zip(batch, all_ids, all_spans, strict=True):
        # A conversation without tokens has no spans, and still two columns.
        pairs = np.asarray(spans, np.int64).reshape(-1, 2)
        learnt = mask_ranges(pairs, rendered.ranges)
        if not learnt.any():
            bad.leave_out(DataError(f"{rendered.place}: {UNLEARNT}"))
            continue

        numbers = np.asarray(ids, np.int64)
        if (error := unknown.error_of(numbers, rendered.place)) is not None:
            bad.leave_out(error)
            continue
        yield numbers, learnt


def mask_ranges(spans: NDArray[np.int64], ranges: Sequence[CharacterRange]) -> NDArray[np.bool_]:
    """Return which tokens lie in one of some ranges of characters, with all that they stand for.

    A token that reaches over the border of a turn has characters that the assistant did not write.

    Args:
        spans: the first character of each token, and the one after its last, int64 [tokens, 2].
        ranges: the ranges.
    """
    # All tokens at once, since a conversation may have many thousands.
    begins, ends = spans.T
    is_inside = np.zeros(len(spans), np.bool_)
    for start, stop in ranges:
        is_inside |= (begins >= start) & (ends <= stop)
    return is_inside


class Template:
    """A tokenizer's chat template, for one conversation."""

    def __init__(self, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the template.

        Raises:
            DataError: the tokenizer has none.
        """
        self._conversation = conversation
        self._tokens: dict[str, Any] = tokenizer.special_tokens_map
        self._ends = tuple(tokenizer.all_special_tokens)
        try:
            self._source = tokenizer.get_chat_template(tools=conversation.tools)
        except ValueError as error:
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template. Set data.chat_template to a Jinja file."
            ) from error

    def rendered(self) -> tuple[str, list[CharacterRange]]:
        """Return the conversation as text, and the ranges of the assistant's turns.

        Raises:
            DataError: the template refuses the conversation, or does not let one tell these turns.
        """
        messages = self._conversation.messages

        # By the text of the template, since transformers takes a template without marks and marks nothing, with a
        # warning.
        is_marked = "endgeneration" in self._source
        text, ranges = self._render(messages, return_assistant_tokens_mask=is_marked)
        learnt_ranges = ranges if is_marked else list(self._turns(text))
        self._check_ends(text, learnt_ranges)
        return text, learnt_ranges

    def _check_ends(self, text: str, ranges: Sequence[CharacterRange]) -> None:
        """Warn if what is learnt ends with an answer itself, and not with what the template writes behind it."""
        turns = [message for message in self._conversation.messages if message["role"] == ASSISTANT]
        # A template may mark other ranges than whole turns, and then it is not known which answer ends where.
        if len(turns) != len(ranges):
            return
        for (start, stop), turn in zip(ranges, turns, strict=True):
            answer = text_of(turn.get("content"))
            if not answer.strip():
                continue
            # Many templates cut the blanks around an answer off.
            bare = answer.strip()
            learnt = text[start:stop]
            is_bare = learnt.endswith((answer, bare))

            # Blanks end a turn only where no token behind them does.
            has_end_behind = text[stop:].lstrip().startswith(self._ends)
            if is_bare or (has_end_behind and learnt.rstrip().endswith(bare)):
                # The text is always the same one, so that Python shows it once.
                warnings.warn(UNENDED_ANSWER, stacklevel=2)

    def _turns(self, text: str) -> Iterator[CharacterRange]:
        """Yield the range of each turn of the assistant.

        Raises:
            DataError: the template does not let one tell.
        """
        for index, message in enumerate(self._conversation.messages):
            if message["role"] == ASSISTANT:
                start = self._start(index)
                stop = self._stop(index, text)
                if stop is None or stop < len(start) or not text.startswith(start):
                    raise DataError(
                        f"{self._conversation.place}: the chat template writes turn {index + 1} in another way when "
                        f"more turns follow, so it is not sure where the turn begins or ends. {TEMPLATE_REMEDY}"
                    )
                yield len(start), stop

    def _start(self, index: int) -> str:
        """Return the text up to a turn, with the prompt that asks for it."""
        return self._render(self._conversation.messages[:index], add_generation_prompt=True)[0]

    def _stop(self, index: int, text: str) -> int | None:
        """Return the place where a turn ends; None if the template does not let one tell.

        It is where the text up to this turn ends, if the whole text begins with that. Some templates write the last
        turn in another way (Qwen3 gives it an empty thought). Then the next turn tells: the text that it adds if this
        turn is left out is the text that it must add after this turn.
        """
        messages = self._conversation.messages
        through, _ = self._render(messages[: index + 1])
        if text.startswith(through):
            return len(through)
        try:
            before, _ = self._render(messages[:index])
            without, _ = self._render(messages[:index] + messages[index + 1 : index + 2])
            through, _ = self._render(messages[: index + 2])
        except DataError:  # for example a template whose turns must alternate
            return None

        # A template may look at all turns at once, and then these texts do not say where this one ends.
        added = without.removeprefix(before)
        if not added or not without.startswith(before):
            return None
        if not through.endswith(added) or not text.startswith(through):
            return None
        return len(through) - len(added)

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> tuple[str, list[CharacterRange]]:  # noqa: ANN401
        """Return some messages as text, with the ranges that the template marks."""
        conversation = self._conversation
        with reading(f"{conversation.place}: the chat template refuses the conversation", DataError):
            # transformers annotates the result as text, which it is not.
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=conversation.tools,
                chat_template=self._source,
                **self._tokens,
                **options,
            )

        texts, ranges = rendered
        return texts[0], ranges[0] if ranges else []
