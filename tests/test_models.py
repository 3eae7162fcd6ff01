"""What model directories say of themselves, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from mlxgen.errors import ModelError, OptionError, PairError
from mlxgen.models import source
from mlxgen.models.checkpoint import FALLBACK_CONTEXT_TOKENS, Checkpoint, read_checkpoint
from mlxgen.models.drafter_kind import (
    CLASSIC_LINE,
    check_kind_option,
    refuse_special,
    resolve_kind,
    special_kind,
)
from mlxgen.models.source import resolve_adapter, resolve_model
from mlxgen.models.vocabulary import compare_vocabularies

ORDINARY = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def checkpoint(config: dict[str, Any], role: str = "draft") -> Checkpoint:
    return Checkpoint(Path("/models/some"), role, config)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ORDINARY, None),
        ({}, None),
        ({**ORDINARY, "dflash_config": {"block_size": 16}}, "dflash"),
        ({**ORDINARY, "dflash_config": None}, None),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"model_type": "gemma4_assistant"}, "mtp"),
        ({"model_type": "gemma4_unified_assistant"}, "mtp"),
        ({"model_type": "qwen3_5_mtp"}, "mtp"),
        ({"model_type": ["qwen3_5_mtp"], "architectures": "DFlashDraftModel"}, None),
        ({"model_type": {}, "architectures": [None, 3]}, None),
    ],
)
def test_special_drafters_are_told_by_their_structure(
    config: dict[str, Any], kind: str | None
) -> None:
    assert special_kind(config) == kind


@given(
    st.dictionaries(st.sampled_from(["model_type", "architectures", "dflash_config"]), JSON_VALUES)
)
def test_drafter_kind_survives_any_json(config: dict[str, Any]) -> None:
    assert special_kind(config) in (None, "dflash", "mtp")


def test_ordinary_model_gets_the_fallback_label_and_block_size() -> None:
    assert resolve_kind(checkpoint(ORDINARY), None).line == (
        "Resolved drafter kind: dflash (block_size = 16, default)"
    )
    assert resolve_kind(checkpoint(ORDINARY), 16).line == (
        "Resolved drafter kind: dflash (block_size = 16, explicit)"
    )
    assert CLASSIC_LINE == (
        "Drafter kind was auto-detected only; running the classic SpeculativeGenerator path (pass "
        "--draft-kind explicitly to select a kind-specific round loop)."
    )


@pytest.mark.parametrize("option", ["-m", "--draft-model"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"dflash_config": {}}, "a DFlash drafter"),
        ({"model_type": "qwen3_5_mtp"}, "an MTP drafter"),
    ],
)
def test_special_drafter_is_refused_with_what_it_is_and_what_to_pass(
    option: str, config: dict[str, Any], name: str
) -> None:
    with pytest.raises(PairError) as refusal:
        refuse_special(checkpoint(config), option)
    message = str(refusal.value)
    assert message.startswith(f"{option} /models/some is {name}, not a standalone model")
    assert "pass a small full model" in message and "\n" not in message


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dflash", "the dflash round loop does not exist yet"),
        ("mtp", "the mtp round loop does not exist yet"),
        ("internal-mtp", "not user-selectable"),
        ("bogus", "accepted values: dflash, mtp"),
        ("", "accepted values: dflash, mtp"),
    ],
)
def test_every_explicit_kind_is_refused_for_its_own_reason(kind: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check_kind_option(kind)


def test_no_explicit_kind_is_fine() -> None:
    check_kind_option(None)


vocabularies = st.lists(st.text("abcd", min_size=1, max_size=4), unique=True, min_size=1)


def numbered(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


@given(vocabularies)
def test_a_vocabulary_fits_itself(tokens: list[str]) -> None:
    assert compare_vocabularies(numbered(tokens), numbered(tokens)) == []


@given(vocabularies, st.data())
def test_vocabularies_that_differ_in_an_id_are_refused_naming_the_first(
    tokens: list[str], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:position], "changed", *tokens[position + 1 :]]
    with pytest.raises(PairError) as refusal:
        compare_vocabularies(numbered(tokens), numbered(changed))
    message = str(refusal.value)
    assert f"token {position} is {tokens[position]!r} in the target" in message
    assert "'changed' in the draft" in message


@given(vocabularies, st.data())
def test_two_swapped_tokens_are_refused_though_the_sets_are_equal(
    tokens: list[str], data: st.DataObject
) -> None:
    size = len(tokens)
    if size < 2:
        return
    first = data.draw(st.integers(0, size - 2))
    second = data.draw(st.integers(first + 1, size - 1))
    swapped = list(tokens)
    swapped[first], swapped[second] = tokens[second], tokens[first]
    with pytest.raises(PairError, match=f"token {first} "):
        compare_vocabularies(numbered(tokens), numbered(swapped))


@given(vocabularies, st.lists(st.just("<extra>"), min_size=1, max_size=1), st.booleans())
def test_a_longer_vocabulary_is_noted_not_refused(
    tokens: list[str], more: list[str], target_is_longer: bool
) -> None:
    longer, shorter = numbered([*tokens, *more]), numbered(tokens)
    pair = (longer, shorter) if target_is_longer else (shorter, longer)
    (note,) = compare_vocabularies(*pair)
    which = "target" if target_is_longer else "draft"
    assert note.startswith(f"the {which}'s tokenizer has 1 more token")


def test_a_hole_in_one_vocabulary_is_a_difference() -> None:
    with pytest.raises(PairError, match="token 1 is 'b' in the target and missing in the draft"):
        compare_vocabularies({"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 2})
    assert compare_vocabularies({"a": 0, "c": 2}, {"a": 0, "c": 2}) == []


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub calls that were made, none of which goes out."""
    calls: list[str] = []

    def snapshot(repository: str, *_: object) -> Path:
        calls.append(repository)
        return Path("/hub") / repository

    monkeypatch.setattr(source, "_snapshot", snapshot)
    return calls


@pytest.mark.parametrize(
    "name", ["plain", "with space", "owner/name", "trailing/", "~/model", "./model", "a.b"]
)
def test_existing_directory_is_local_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: list[str], name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path(name).expanduser().mkdir(parents=True)
    assert resolve_model(name, None, "-m").is_dir()
    assert no_hub == []


@pytest.mark.parametrize(
    "name",
    ["./x", "../x/y", "~/x", "/x/y", "x/y/z", "x/y/", "x", "with space/x", "x/-y", "~nobody/x"],
)
def test_missing_path_is_no_hub_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: list[str], name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(name, None, "-m")
    assert no_hub == []


def test_owner_and_name_is_a_hub_id(no_hub: list[str]) -> None:
    assert resolve_model("some-owner/Some.Model_1", None, "-m") == Path(
        "/hub/some-owner/Some.Model_1"
    )
    assert no_hub == ["some-owner/Some.Model_1"]


@pytest.mark.parametrize("name", ["", "  "])
def test_empty_reference_is_refused_and_not_the_current_directory(name: str) -> None:
    with pytest.raises(OptionError, match="-m needs a directory or a hub id"):
        resolve_model(name, None, "-m")


def test_unusable_references_are_refused_in_one_short_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="is a file; pass the model's directory"):
        resolve_model(str(tmp_path / "file"), None, "-m")
    with pytest.raises(OptionError, match="--revision is for hub ids"):
        resolve_model(str(tmp_path), "main", "-m")
    with pytest.raises(ModelError) as refusal:
        resolve_model("a prompt by mistake " * 1000, None, "-m")
    assert len(str(refusal.value)) < 300


def test_offline_hub_id_that_is_not_cached_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set") as refusal:
        resolve_model("no-such-owner/no-such-model", "abc", "--draft-model")
    assert str(refusal.value).startswith(
        "--draft-model no-such-owner/no-such-model at revision abc"
    )


@pytest.mark.parametrize("name", ["missing", "~nobody/x", "x" * 5000])
def test_adapter_without_its_config_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"--adapter .*adapter_config\.json"):
        resolve_adapter(name)


def test_adapter_directory_may_start_with_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    assert resolve_adapter("~") == tmp_path


def write(directory: Path, **files: object) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "Expecting value"),
        ("{'a': 1}", "Expecting property name"),
        ("[1, 2]", "a JSON object is needed, not list"),
        ("null", "a JSON object is needed, not NoneType"),
        ("[" * 100_000, "recursion"),
        ('{"a": ' + "1" * 5000 + "}", "Exceeds the limit"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_broken_config_is_told_in_one_line_naming_the_file(
    tmp_path: Path, content: str, reason: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        read_checkpoint(write(tmp_path, config=content), "target")
    message = str(refusal.value)
    assert message.startswith(f"cannot read {tmp_path / 'config.json'}: ")
    assert reason in message and "\n" not in message and len(message) < 400


def test_config_that_is_not_utf8_or_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the draft model .* has no config\.json"):
        read_checkpoint(tmp_path, "draft")
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match="utf-8"):
        read_checkpoint(tmp_path, "draft")


def test_eos_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": [1, 2], "text_config": {"eos_token_id": 3}},
        generation_config={"eos_token_id": 4},
    )
    assert read_checkpoint(tmp_path, "target").eos_ids == {1, 2, 3, 4}


@pytest.mark.parametrize("value", [None, True, -1, "2", 1.5, [None, "x", True, -3], {"a": 1}, []])
def test_values_that_are_no_ids_are_no_eos_ids(tmp_path: Path, value: object) -> None:
    write(tmp_path, config={"eos_token_id": value, "text_config": value})
    assert read_checkpoint(tmp_path, "target").eos_ids == set()


@pytest.mark.parametrize("value", [None, True, -1, 0, "2", 1.5, [], {}])
def test_unusable_sizes_fall_back(value: object) -> None:
    broken = checkpoint({"vocab_size": value, "max_position_embeddings": value})
    assert broken.vocabulary_rows is None
    assert broken.context_tokens == FALLBACK_CONTEXT_TOKENS


def test_sizes_may_stand_in_the_text_config() -> None:
    nested = checkpoint({"text_config": {"vocab_size": 7, "max_position_embeddings": 99}})
    assert (nested.vocabulary_rows, nested.context_tokens) == (7, 99)
    assert checkpoint({"vocab_size": 5, "text_config": {"vocab_size": 7}}).vocabulary_rows == 5


@pytest.mark.parametrize(
    ("declared", "usable"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature", "top_p", "top_k"}),
        ({"temperature": 1, "top_p": 1, "top_k": 0}, {"temperature", "top_p", "top_k"}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature"}),
        ({"do_sample": False, "temperature": 0.6}, set()),
        ({"temperature": -1, "top_p": 1.5, "top_k": -3}, set()),
        ({"temperature": "0.6", "top_p": None, "top_k": True}, set()),
        ({"temperature": float("nan"), "top_p": float("inf"), "top_k": float("inf")}, set()),
        ({"temperature": 10**400, "top_k": 10**400}, set()),
        ({"min_p": 0.1, "repetition_penalty": 2}, set()),
        ({}, set()),
    ],
)
def test_only_usable_sampling_values_of_three_names_are_taken(
    tmp_path: Path, declared: dict[str, Any], usable: set[str]
) -> None:
    write(tmp_path, config={}, generation_config=declared)
    defaults = read_checkpoint(tmp_path, "target").sampling_defaults()
    assert defaults == {name: declared[name] for name in usable}
    assert isinstance(defaults.get("top_k", 0), int)


def test_missing_generation_config_recommends_nothing(tmp_path: Path) -> None:
    assert read_checkpoint(write(tmp_path, config={}), "target").sampling_defaults() == {}


def test_broken_generation_config_is_told(tmp_path: Path) -> None:
    write(tmp_path, config={}, generation_config="{")
    with pytest.raises(ModelError, match=r"cannot read .*generation_config\.json"):
        read_checkpoint(tmp_path, "target").sampling_defaults()


@given(
    st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "do_sample"]), JSON_VALUES)
)
def test_sampling_defaults_survive_any_json(
    tmp_path_factory: pytest.TempPathFactory, declared: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("any", numbered=True)
    write(directory, config={}, generation_config=declared)
    read_checkpoint(directory, "target").sampling_defaults()
