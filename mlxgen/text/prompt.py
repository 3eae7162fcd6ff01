"""From what the user wrote to the token ids that the model sees.

Text that spells a special token becomes that token, in raw prompts and in templates alike: that is
how chat formats are written by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxgen.errors import InputError


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
    if use_template and tokenizer.has_chat_template:
        ids = _encode_chat(tokenizer, text, system, template_args or {})
    else:
        unused = [
            option
            for option, value in (("--system", system), ("--chat-template-args", template_args))
            if value is not None
        ]
        if unused:
            why = "--no-chat-template is set" if not use_template else "this model has none"
            raise InputError(f"{unused[0]} needs a chat template, and {why}")
        ids = _encode_raw(tokenizer, text)
    if not ids:
        raise InputError("the prompt holds nothing that this model's tokenizer can represent")
    return ids


def _encode_chat(
    tokenizer: Any, text: str, system: str | None, template_args: Mapping[str, Any]
) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template_args
        )
    except Exception as error:  # a template is a program: it may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the model's chat template rejected the request: {reason}; --no-chat-template passes "
            f"the prompt as it is"
        ) from error
    # The template writes its own special tokens.
    return [int(i) for i in tokenizer.encode(rendered, add_special_tokens=False)]


def _encode_raw(tokenizer: Any, text: str) -> list[int]:
    starts_itself = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=not starts_itself)]
