"""The interactive chat of `mlxgen generate` on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from mlxgen.cli.interrupts import Terminated, forget
from mlxgen.cli.reply import print_run
from mlxgen.cli.streams import Streams, printable
from mlxgen.config import GenerationConfig
from mlxgen.conversation import Conversation
from mlxgen.decoding.tokens import FinishReason
from mlxgen.errors import ContextError, ExitCode, InputError
from mlxgen.generation import Generation

PROMPT = "> "
EXIT, CLEAR = "/exit", "/clear"
_HINT = f"Ctrl-D or {EXIT} leaves, {CLEAR} forgets the conversation."


class Chat:
    """Reads messages and prints replies until the input ends.

    Ctrl-C stops a reply, and what was said until then stays in the conversation; at the prompt it
    gives a hint. SIGTERM ends the chat. config: as the conversation's.
    """

    def __init__(
        self,
        conversation: Conversation,
        streams: Streams,
        config: GenerationConfig,
        *,
        shows_profile: bool,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._conversation = conversation
        self._streams = streams
        self._config = config
        self._shows_profile = shows_profile
        self._decode = decode

    def run(self) -> ExitCode:
        """Chat; `DONE` after Ctrl-D or /exit, `INTERRUPTED` after SIGTERM."""
        _prepare_line_editing()
        self._streams.note(f"Chat: Ctrl-C stops a reply. {_HINT}")
        while True:
            try:
                line = _read_line()
                if line is None or line.strip() == EXIT:
                    return ExitCode.DONE
                if line.strip() == CLEAR:
                    self._conversation.clear()
                    self._streams.note("The conversation is forgotten.")
                elif line.strip():
                    self._turn(line)
            except Terminated:
                return ExitCode.INTERRUPTED
            except KeyboardInterrupt:
                forget()
                # The terminal shows ^C where the cursor was.
                print(file=sys.stderr)
                self._streams.note(_HINT)
            except InputError as error:
                cure = f"; {CLEAR} forgets it" if isinstance(error, ContextError) else ""
                self._streams.warn(printable(" ".join(str(error).split()) + cure))

    def _turn(self, text: str) -> None:
        stream = self._conversation.ask(text)
        is_complete = False
        try:
            printed = print_run(
                stream,
                self._streams,
                self._config,
                shows_profile=self._shows_profile,
                decode=self._decode,
            )
            is_complete = printed.interruption is None
        finally:
            result = stream.result
            if is_complete or result.text:
                self._conversation.add(text, result.text)
        if not is_complete and not result.text:
            self._streams.note("Nothing was said yet, so the message is not kept.")
        self._note_full_window(result)
        if printed.interruption is Terminated:
            raise Terminated

    def _note_full_window(self, result: Generation) -> None:
        window = self._conversation.context_tokens
        used = len(result.prompt_ids) + len(result.tokens)
        if result.finish_reason is FinishReason.LENGTH and used >= window:
            self._streams.note(
                f"The reply ends here because the model's context window of {window} tokens is "
                f"full; {CLEAR} forgets the conversation."
            )


def _prepare_line_editing() -> None:
    """Give `input` its line editing and history, where the platform has them."""
    with contextlib.suppress(ImportError):
        import readline

        # A pasted text of several lines is one message.
        readline.parse_and_bind("set enable-bracketed-paste on")


def _read_line() -> str | None:
    """A message, or None at the end of the input. Raises `InputError` when it is not UTF-8."""
    try:
        if sys.stdout.isatty():
            line = input(PROMPT)
            line.encode()
            return line
        # Standard output is the text's alone.
        print(PROMPT, end="", file=sys.stderr, flush=True)
        data = sys.stdin.buffer.readline()
        if data:
            return data.decode().rstrip("\r\n")
    except EOFError:
        pass
    except UnicodeError as error:
        raise InputError("the message is not UTF-8 text") from error
    # What the shell prints next begins on a line of its own.
    print(file=sys.stderr)
    return None
