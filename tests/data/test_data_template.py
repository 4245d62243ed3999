"""Conversations as tokens: only what the assistant wrote is learnt."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatier.config.data_section import DataConfig
from megatier.config.schema import ModelConfig, RunConfig
from megatier.data.conversation import Conversation
from megatier.data.records import BadRecords
from megatier.data.template import tokenise_chats
from megatier.data.tokenizer import byte_tokenizer, load_tokenizer
from megatier.errors import DataError

MESSAGES = [
    {"role": "system", "content": "Be brief. ☃"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Só. "},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No. ☃"},
]
CHATML = """\
{% for message in messages %}
{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
MARKED = """\
{% for message in messages %}
{{ message.role + ": " }}
{%- if message.role == "assistant" %}
{% generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
{% else %}
{{- message.content }}
{%- endif %}
{% endfor %}
"""
LAST_TURN_THINKS = """\
{% for message in messages %}
{{ "<" + message.role + ">" }}
{%- if message.role == "assistant" and loop.last %}{{ "<think></think>" }}{% endif %}
{{- message.content + "</>" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<assistant>" }}{% endif %}
"""


REFUSED = BadRecords(skips=False)


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def read(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]] = MESSAGES) -> tuple[str, str]:
    """The whole conversation, and what of it is learnt."""
    ids, learnt = next(tokenise_chats([Conversation(messages, None, "a.jsonl, line 7")], tokenizer, REFUSED))
    assert ids.shape == learnt.shape
    return str(tokenizer.decode(ids)), str(tokenizer.decode(ids[learnt]))


def test_tokenise_chats_by_prefixes_learns_answers_and_their_ends() -> None:
    whole, learnt = read(with_template(CHATML))
    assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES)
    assert learnt == "Só. <|im_end|>\nNo. ☃<|im_end|>\n"


def test_tokenise_chats_by_marks_learns_what_they_enclose() -> None:
    whole, learnt = read(with_template(MARKED))
    assert whole.startswith("system: Be brief. ☃user: Why?assistant: Só.<|endoftext|>user: And?")
    assert learnt == "Só.<|endoftext|>No. ☃<|endoftext|>"


def test_tokenise_chats_of_the_byte_tokenizer_learns_answers() -> None:
    whole, learnt = read(byte_tokenizer())
    assert whole == "".join(f"{m['role']}:\n{m['content']}\n\n" for m in MESSAGES)
    assert learnt == "Só. \n\nNo. ☃\n\n"


def test_tokenise_chats_last_turn_that_is_written_in_another_way_learns_every_turn() -> None:
    """As Qwen3's template does."""
    whole, learnt = read(with_template(LAST_TURN_THINKS))
    assert whole.count("<think>") == 1
    assert learnt == "Só. </><think></think>No. ☃</>"


ALTERNATING = "{% if messages[2:] and messages[2].role == 'user' %}{{ raise_exception('alternate') }}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + CHATML,
        LAST_TURN_THINKS.replace('"<think></think>"', "messages | length").replace("loop.last", "true"),
        ALTERNATING + LAST_TURN_THINKS,
    ],
    ids=["the start depends on later turns", "a turn depends on later turns", "turns must alternate"],
)
def test_tokenise_chats_turn_whose_place_is_not_sure_is_refused(template: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl, line 7: the chat template writes turn 3 in another way when more"):
        read(with_template(template))


def test_tokenise_chats_token_across_the_border_of_a_turn_is_not_learnt() -> None:
    """And special tokens are one token each."""
    pieces = ["\u010a", "S", "o", ".", "\u010aS", "W", "u", "<|im_end|>"]
    bpe = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[("\u010a", "S")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken("<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role[0] + '\\n' + message.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a\\n' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "W"}, {"role": "assistant", "content": "So."}]
    ids, learnt = next(tokenise_chats([Conversation(messages, None, "here")], tokenizer, REFUSED))
    found = list(zip(tokenizer.convert_ids_to_tokens(ids.tolist()), learnt.tolist(), strict=True))
    assert found[-4:] == [("\u010aS", False), ("o", True), (".", True), ("<|im_end|>", True)]
    assert not any(learnt[:-3])


def test_tokenise_chats_gives_tools_to_the_template() -> None:
    tokenizer = with_template("{{ tools[0].function.name }}" + CHATML)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    ids, _ = next(tokenise_chats([Conversation(MESSAGES, tools, "here")], tokenizer, REFUSED))
    assert str(tokenizer.decode(ids)).startswith("f<|im_start|>system")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template. Set data.chat_template"),
        ("{{ raise_exception('roles must alternate') }}", "line 7: the chat template refuses .*: roles must alternate"),
        ("{{ messages[0].absent.more }}", "line 7: the chat template refuses"),
        ("{{ messages + 3 }}", "line 7: the chat template refuses"),
        (MARKED.replace("assistant", "nobody"), "line 7: no token of the assistant"),
        ("{% for", "line 7: the chat template refuses"),
    ],
)
def test_tokenise_chats_template_that_fails_says_why(template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(with_template(template))


def test_load_tokenizer_takes_a_chat_template_from_a_file(tmp_path: Path) -> None:
    def load(path: Path) -> Any:
        data = DataConfig(files=("x",), tokenizer="bytes", chat_template=str(path))
        return load_tokenizer(RunConfig(model=ModelConfig(config={"model_type": "llama"}), data=data))

    (tmp_path / "chat.jinja").write_text(CHATML)
    assert load(tmp_path / "chat.jinja").chat_template == CHATML
    with pytest.raises(DataError, match=r"data\.chat_template: cannot read .*none\.jinja"):
        load(tmp_path / "none.jinja")


@pytest.mark.filterwarnings("ignore:the chat template learns nothing behind an answer")
def test_tokenise_chats_a_refused_conversation_is_left_out_if_told_so() -> None:
    strict = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + MARKED
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "one"}]
    unanswered = [turns[0], {"role": "assistant", "content": ""}]
    conversations = [
        Conversation(messages, None, f"line {number}")
        for number, messages in enumerate([turns, MESSAGES, unanswered, turns], start=1)
    ]
    tokenizer = with_template(strict.replace(" + eos_token", ""))
    bad = BadRecords(skips=True)
    made = [str(tokenizer.decode(ids)) for ids, _ in tokenise_chats(conversations, tokenizer, bad)]
    assert made == ["user: ?assistant: one"] * 2
    assert bad.count == 2
    assert "line 2: the chat template refuses" in bad.said
    assert "line 3: no token of the assistant" in bad.said


def test_tokenise_chats_without_a_template_leaves_nothing_out() -> None:
    conversations = [Conversation(MESSAGES, None, "here")]
    with pytest.raises(DataError, match="has no chat template"):
        list(tokenise_chats(conversations, with_template(None), BadRecords(skips=True)))


@pytest.mark.parametrize(
    ("answer", "is_told"),
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>", True),
        ("{% generation %}{{ m.content }}\n{% endgeneration %}<|im_end|>", True),
        ("{% generation %}{{ m.content }}{% endgeneration %}", True),
        ("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}", False),
        ("{% generation %}{{ m.content }}\n\n{% endgeneration %}", False),
    ],
)
def test_tokenise_chats_of_a_template_whose_turns_end_unlearnt_warns(answer: str, is_told: bool) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}"
        "<|im_end|>{% endif %}{% endfor %}"
    )
    said = pytest.warns(UserWarning, match="does not learn to end a turn") if is_told else contextlib.nullcontext()
    with said:
        assert list(tokenise_chats([Conversation(MESSAGES, None, "here")], tokenizer, BadRecords(skips=False)))
