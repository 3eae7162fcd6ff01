"""A conversation with a model: the messages are kept, and so are the caches between its turns.

Each turn's prompt is made from all messages, and what the caches hold of it is taken up. The ids
of a turn are those of a single run on the same prompt with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlxgen.config import GenerationConfig
from mlxgen.errors import ContextError
from mlxgen.generation import GenerationStream, stream_generate
from mlxgen.memory import Memory
from mlxgen.models.loading import LoadedModel
from mlxgen.speculative.loop import Round
from mlxgen.text.prompt import Message, encode_messages, encode_text, has_template


class Conversation:
    """Ask, iterate over the reply, then add both to what is kept.

        stream = conversation.ask("Tell me about tea.")
        for piece in stream: ...
        conversation.add("Tell me about tea.", stream.result.text)

    Messages go through the chat template. Without one, or with use_template false, the prompt is
    every message and reply as it is, each followed by one newline. config: of each reply;
    `max_tokens` counts the tokens of one. memory: the caches to use, from a file for example.
    Raises `InputError` for a system text or template arguments with nowhere to go.
    """

    def __init__(
        self,
        target: LoadedModel,
        config: GenerationConfig,
        *,
        draft: LoadedModel | None = None,
        memory: Memory | None = None,
        system: str | None = None,
        use_template: bool = True,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._target = target
        self._config = config
        self._draft = draft
        self._memory = Memory(target, draft, config.cache) if memory is None else memory
        self._template_args = template_args
        self._uses_template = has_template(target.tokenizer, use_template, system, template_args)
        self._opening = () if system is None else (Message("system", system),)
        self.messages: tuple[Message, ...] = self._opening

    @property
    def context_tokens(self) -> int:
        """The window that a prompt and its reply have to fit into."""
        return self._target.checkpoint.context_tokens

    def prompt_ids(self, text: str) -> list[int]:
        """The prompt of the next turn, if this is the message."""
        messages = [*self.messages, Message("user", text)]
        tokenizer = self._target.tokenizer
        if self._uses_template:
            return encode_messages(tokenizer, messages, self._template_args)
        return encode_text(tokenizer, "".join(f"{message.content}\n" for message in messages))

    def ask(
        self, text: str, *, on_round: Callable[[Round], None] | None = None
    ) -> GenerationStream:
        """Start the reply to a message. It ends where the context window does, at the latest.

        Nothing is kept of it but the caches, until `add`. Raises `ContextError` when the window has
        no room for a reply, `InputError` when the template refuses.
        """
        prompt_ids = self.prompt_ids(text)
        room = self.context_tokens - len(prompt_ids)
        if room < 1:
            raise ContextError(
                f"the conversation would have {len(prompt_ids)} tokens, which leaves no room for "
                f"a reply in the model's context window of {self.context_tokens}"
            )
        config = replace(self._config, max_tokens=min(self._config.max_tokens, room))
        return stream_generate(
            self._target,
            prompt_ids,
            config,
            draft=self._draft,
            memory=self._memory,
            on_round=on_round,
        )

    def add(self, text: str, reply: str) -> None:
        """Keep a message and what was replied to it."""
        self.messages = (*self.messages, Message("user", text), Message("assistant", reply))

    def clear(self) -> None:
        """Begin anew, with the system text alone."""
        self.messages = self._opening
