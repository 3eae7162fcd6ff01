"""From what the user wrote to the token ids that the model sees.

Text that spells a special token becomes that token, in raw prompts and in templates alike: that is
how chat formats are written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxgen.backend.bounded import CallError, LimitError, call_bounded
from mlxgen.errors import InputError

TEMPLATE_SECONDS = 5.0
_TEMPLATE_MEMORY_BYTES = 1 << 30
_TEMPLATE_OWN_BYTES = 1 << 20
_TEMPLATE_GROWTH = 16


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

    A template comes with the model and is a program: it runs in transformers' sandbox, in a copy
    of this process, within limits of time, memory and length. Raises `InputError` for a template
    that refuses or goes beyond them.
    """
    said = [{"role": message.role, "content": message.content} for message in messages]
    arguments = dict(template_args or {})

    def render() -> str:
        rendered = tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True, **arguments
        )
        if not isinstance(rendered, str):
            raise TypeError(f"it gives {type(rendered).__name__} and not a text")
        return rendered

    try:
        rendered = call_bounded(
            render,
            seconds=TEMPLATE_SECONDS,
            memory_bytes=_TEMPLATE_MEMORY_BYTES,
            answer_bytes=_TEMPLATE_OWN_BYTES + _TEMPLATE_GROWTH * len(repr((said, arguments))),
        )
        rendered.encode()
    except UnicodeEncodeError as error:
        raise _template_error("rejected the request: it writes no valid text") from error
    except LimitError as error:
        raise _template_error(f"asks for too much: {error}") from error
    except CallError as error:
        reason = str(error).splitlines()[0]
        raise _template_error(f"rejected the request: {reason}") from error
    # The template writes its own special tokens.
    return _encoded(tokenizer, rendered, adds_special_tokens=False)


def _template_error(what: str) -> InputError:
    return InputError(
        f"the model's chat template {what}; --no-chat-template passes the prompt as it is"
    )


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it is, with the special tokens that the tokenizer adds by itself."""
    starts_itself = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return _encoded(tokenizer, text, adds_special_tokens=not starts_itself)


def _encoded(tokenizer: Any, text: str, *, adds_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Half of a surrogate pair, from an argument that was not UTF-8 or from a template.
        raise InputError("the prompt is not UTF-8 text") from error
    ids: Sequence[int]
    try:
        # Not verbose: how long a prompt may be is said elsewhere, in the model's own terms.
        ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens, verbose=False)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a tokenizer runs its file's patterns, and Rust may panic
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"the model's tokenizer fails on this prompt: {reason}; its tokenizer.json may be "
            f"damaged: fetch the model again"
        ) from error
    if not ids:
        raise InputError("the prompt holds nothing that this model's tokenizer can represent")
    return [int(i) for i in ids]
