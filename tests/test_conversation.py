"""A conversation: every turn is a single run on the whole prompt, minus what is in the caches."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

import mlxgen
from mlxgen.config import GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.conversation import Conversation
from mlxgen.decoding.tokens import FinishReason
from mlxgen.errors import ContextError, InputError
from mlxgen.generation import Generation, generate
from mlxgen.memory import Memory
from mlxgen.models.loading import LoadedModel
from mlxgen.text.prompt import Message
from tests.fixtures.model_directories import Vocabulary
from tests.fixtures.runs import ModelStore

SYMBOLS = "abcdefghijklmnopqrstuvwxyz :/\n'ABC"
TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}:{{ m.content }}/{% endfor %}"
    "{% if mood is defined %}{{ mood }}/{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WINDOW = 120


def vocabulary(template: str | None = TEMPLATE) -> Vocabulary:
    return Vocabulary(SYMBOLS, ("<s>", "</s>"), bos="<s>", eos="</s>", chat_template=template)


def load(models: ModelStore, template: str | None = TEMPLATE, **options: Any) -> LoadedModel:
    directory = models.llama_directory(
        1,
        vocabulary=vocabulary(template),
        head_scale=6.0,
        config={"max_position_embeddings": WINDOW},
        **options,
    )
    return mlxgen.load(str(directory))


@pytest.fixture(scope="module")
def target(models: ModelStore) -> LoadedModel:
    return load(models)


@pytest.fixture(scope="module")
def draft(models: ModelStore) -> LoadedModel:
    return load(models, disturbance=0.1)


def config(temperature: float = 0.0, **options: Any) -> GenerationConfig:
    return GenerationConfig(
        sampling=SamplingConfig(temperature=temperature), **{"max_tokens": 9, "seed": 4, **options}
    )


def say(conversation: Conversation, text: str) -> Generation:
    """One turn."""
    stream = conversation.ask(text)
    for _ in stream:
        pass
    conversation.add(text, stream.result.text)
    return stream.result


def spelled(ids: tuple[int, ...]) -> str:
    """The prompt as a text, special tokens spelled out."""
    return "".join(vocabulary().tokens[i] for i in ids)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("system", [None, "be kind"])
def test_every_turn_is_a_cold_run_on_the_whole_prompt(
    target: LoadedModel,
    draft: LoadedModel,
    temperature: float,
    has_draft: bool,
    system: str | None,
) -> None:
    settings = config(temperature)
    helper = draft if has_draft else None
    conversation = Conversation(target, settings, draft=helper, system=system)
    before: Generation | None = None
    for text in ("hi", "abc", "x y"):
        run = say(conversation, text)
        cold = generate(target, run.prompt_ids, settings)
        assert (run.text, run.token_ids) == (cold.text, cold.token_ids)
        if before is not None:
            assert run.reused_tokens == len(before.prompt_ids) + len(before.tokens) - 1
        before = run


def test_messages_go_through_the_template_in_order(target: LoadedModel) -> None:
    conversation = Conversation(target, config(), system="be kind", template_args={"mood": "glad"})
    first = say(conversation, "hi")
    second = say(conversation, "abc")
    assert spelled(first.prompt_ids) == "<s>system:be kind/user:hi/glad/assistant:"
    assert spelled(second.prompt_ids) == (
        f"<s>system:be kind/user:hi/assistant:{first.text}/user:abc/glad/assistant:"
    )
    assert conversation.messages == (
        Message("system", "be kind"),
        Message("user", "hi"),
        Message("assistant", first.text),
        Message("user", "abc"),
        Message("assistant", second.text),
    )


@pytest.mark.parametrize("has_template", [False, True])
def test_without_a_template_every_message_is_followed_by_a_newline(
    models: ModelStore, has_template: bool
) -> None:
    target = load(models, TEMPLATE if has_template else None)
    conversation = Conversation(target, config(), use_template=not has_template)
    first = say(conversation, "hi")
    second = say(conversation, "abc")
    assert spelled(first.prompt_ids) == "<s>hi\n"
    assert spelled(second.prompt_ids) == f"<s>hi\n{first.text}\nabc\n"
    assert second.reused_tokens == len(first.prompt_ids) + len(first.tokens) - 1


@pytest.mark.parametrize("options", [{"system": "be kind"}, {"template_args": {"mood": "glad"}}])
def test_what_needs_a_template_is_refused_at_once(
    target: LoadedModel, models: ModelStore, options: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="this model has none"):
        Conversation(load(models, None), config(), **options)
    with pytest.raises(InputError, match="--no-chat-template is set"):
        Conversation(target, config(), use_template=False, **options)


def test_a_reply_that_was_stopped_stays_in_the_conversation(
    target: LoadedModel, draft: LoadedModel
) -> None:
    settings = config(0.9, max_tokens=40)
    conversation = Conversation(target, settings, draft=draft)
    stream = conversation.ask("hi")
    said = ""
    with closing(iter(stream)) as pieces:
        for piece in pieces:
            said += piece.text
            if len(said) == 5:
                break
    conversation.add("hi", stream.result.text)
    assert stream.result.finish_reason is FinishReason.INTERRUPTED
    assert stream.result.text == said
    following = say(conversation, "abc")
    assert f"assistant:{said}/user:abc" in spelled(following.prompt_ids)
    assert following.reused_tokens == len(stream.result.prompt_ids) + 5 - 1
    assert following.token_ids == generate(target, following.prompt_ids, settings).token_ids


def test_what_is_not_added_is_forgotten(target: LoadedModel) -> None:
    conversation = Conversation(target, config())
    for _ in conversation.ask("never mind"):
        pass
    assert spelled(say(conversation, "hi").prompt_ids) == "<s>user:hi/assistant:"


def test_clearing_keeps_the_system_text_alone(target: LoadedModel) -> None:
    conversation = Conversation(target, config(0.9), system="be kind")
    first = say(conversation, "hi")
    say(conversation, "abc")
    conversation.clear()
    again = say(conversation, "hi")
    assert (again.prompt_ids, again.token_ids) == (first.prompt_ids, first.token_ids)
    assert again.reused_tokens == len(first.prompt_ids) - 1, "the caches know it still"


def test_a_reply_ends_with_the_context_window_and_then_there_is_no_room(
    target: LoadedModel,
) -> None:
    conversation = Conversation(target, config(max_tokens=1000, ignore_eos=True))
    assert conversation.context_tokens == WINDOW
    run = say(conversation, "hi")
    assert len(run.prompt_ids) + len(run.tokens) == WINDOW
    assert run.finish_reason is FinishReason.LENGTH
    with pytest.raises(ContextError, match=f"window of {WINDOW}"):
        conversation.ask("more")
    conversation.clear()
    assert say(conversation, "hi").token_ids == run.token_ids


def test_stop_strings_and_limits_count_for_each_reply(target: LoadedModel) -> None:
    free = say(Conversation(target, config()), "hi").text
    conversation = Conversation(target, config(stop=(free[2:4],)))
    first = say(conversation, "hi")
    assert (first.text, first.stop_string) == (free[:2], free[2:4])
    second = say(conversation, "abc")
    assert f"assistant:{free[:2]}/user:abc" in spelled(second.prompt_ids)
    assert len(second.tokens) <= 9


def test_a_refusing_template_leaves_the_conversation_as_it_was(models: ModelStore) -> None:
    template = (
        "{% for m in messages %}{% if 'x' in m.content %}{{ raise_exception('no x') }}{% endif %}"
        "{{ m.content }}/{% endfor %}"
    )
    target = load(models, template)
    conversation = Conversation(target, config())
    say(conversation, "hi")
    messages = conversation.messages
    with pytest.raises(InputError, match="no x"):
        conversation.ask("x")
    assert conversation.messages == messages


def test_speculation_is_the_same_on_every_turn(target: LoadedModel, draft: LoadedModel) -> None:
    speculation = SpeculationConfig(num_draft_tokens=4)
    conversation = Conversation(target, config(speculation=speculation), draft=draft)
    for text in ("hi", "abc", "abc"):
        statistics = say(conversation, text).statistics
        assert statistics is not None and statistics.rounds > 0
        assert statistics.accepted <= 8


def test_a_memory_from_elsewhere_is_taken_up(target: LoadedModel) -> None:
    memory = Memory(target)
    say(Conversation(target, config(), memory=memory), "hi")
    run = say(Conversation(target, config(), memory=memory), "hi")
    assert run.reused_tokens == len(run.prompt_ids) - 1
