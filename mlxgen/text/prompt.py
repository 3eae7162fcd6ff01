"""From what the user wrote to the token ids that the model sees.

Text that spells a special token becomes that token, in raw prompts and in templates alike: that is
how chat formats are written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.errors import InputError


@dataclass(frozen=True)
class Message:
    """One contribution to a conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


def encode_prompt(
    tokenizer: Any,
    text: str,
    *,
    system: str | None = None,
    use_template: bool = True,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt, through the chat template where the tokenizer has one.

    Without a template, or with use_template false, the text is encoded as it is, with the special
    tokens that the tokenizer adds by itself. Raises `InputError` for an empty prompt, a template
    that refuses, and for a system text or template arguments with nowhere to go.
    """
    if not text:
        raise InputError("the prompt is empty: pass -p TEXT, -f FILE, or pipe it in")
    if has_template(tokenizer, use_template, system, template_args):
        messages = [Message("user", text)]
        if system is not None:
            messages.insert(0, Message("system", system))
        return encode_messages(tokenizer, messages, template_args)
    return encode_text(tokenizer, text)


def has_template(
    tokenizer: Any,
    use_template: bool,
    system: str | None,
    template_args: Mapping[str, Any] | None,
) -> bool:
    """Whether messages go through the chat template.

    Raises `InputError` when they do not and a system text or template arguments are there, which
    would have nowhere to go.
    """
    if use_template and tokenizer.has_chat_template:
        return True
    unused = [
        option
        for option, value in (("--system", system), ("--chat-template-args", template_args))
        if value is not None
    ]
    if unused:
        why = "--no-chat-template is set" if not use_template else "this model has none"
        raise InputError(f"{unused[0]} needs a chat template, and {why}")
    return False


def encode_messages(
    tokenizer: Any, messages: Sequence[Message], template_args: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation that the assistant is to continue, through the chat template.

    Raises `InputError` for a template that refuses.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **(template_args or {}),
        )
    except Exception as error:  # a template is a program: it may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the model's chat template rejected the request: {reason}; --no-chat-template passes "
            f"the prompt as it is"
        ) from error
    # The template writes its own special tokens.
    return _not_empty(tokenizer.encode(rendered, add_special_tokens=False))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it is, with the special tokens that the tokenizer adds by itself."""
    starts_itself = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return _not_empty(tokenizer.encode(text, add_special_tokens=not starts_itself))


def _not_empty(ids: Sequence[int]) -> list[int]:
    if not ids:
        raise InputError("the prompt holds nothing that this model's tokenizer can represent")
    return [int(i) for i in ids]
