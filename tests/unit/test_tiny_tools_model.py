"""The packaged base of the recipe `tiny-tools`: tokenizer, new rows, documents, folder."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.conversation import Conversation, prompt_ids
from refiner_core.environments.desk import DeskEnvironment
from refiner_core.environments.turns import call_text
from refiner_core.generation.load import load_model, load_tokenizer, resolve_ref
from refiner_core.models import builtin_model_dir, tiny_tokenizer

FOLDER = builtin_model_dir("tiny-tools")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def desk():
    return DeskEnvironment(EnvironmentConfig(name="desk"), UserConfig())


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def back(tokenizer, text: str) -> str:
    return tokenizer.decode(
        ids_of(tokenizer, text), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def demonstrations(desk, count: int):
    """Solved and flawed episodes with every text that is said in them."""
    tasks = desk.tasks("train")
    for number, task in enumerate(tasks[:: max(1, len(tasks) // count)]):
        episode = desk.episode(task)
        said = [message.content for message in episode.reset(number)]
        calls = desk.expert(task, number, flawed=number % 3 == 0)
        for call in calls:
            step = episode.step(call)
            said += [call_text(call), *(message.content for message in step.messages)]
            if step.done:
                break
        yield task, said


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n\n\tcancel  cancelled canceling\r\n",
        '<tool_call>\n{"name": "respond", "arguments": {"content": "é … 数学 🧪"}}\n</tool_call>',
        '{"a": {"b": ["c", "d"], "e": {}}, "f": [{"g": 1.5e3}, {"h": null}]}',
        '<tool_call>{"name":"x","arguments":{}}</tool_call></tool_call>"}}\n',
        "<|im_start|>user\ntool\nsystem\nassistant\n<|im_end|>",
        "S_ _S S_a2B3 S_x9 hand_over hand_overs get_bookingget_booking",
    ],
)
def test_text_with_json_and_calls_comes_back_exactly(tokenizer, text: str):
    assert back(tokenizer, text) == text


def test_what_the_base_model_knew_keeps_its_ids(tokenizer):
    old, new = tiny_tokenizer().get_vocab(), tokenizer.get_vocab()
    assert all(new[token] == index for token, index in old.items())
    text = " Fetmel festival<snippet id=S_a5B5>"
    assert ids_of(tokenizer, text)[:3] == ids_of(tiny_tokenizer(), text)[:3]


def test_what_is_said_at_the_desk_needs_no_bytes(tokenizer, desk):
    """A word that the vocabulary lacks makes episodes longer, and is hard to copy."""
    allowed = set("0123456789 .,?:\n{}[]\"'()_-Ġ")
    texts = [desk.policy(domain) for domain in desk.domains()]
    texts += [text for _, said in demonstrations(desk, 45) for text in said]
    for text in texts:
        spelled = [token for token in tokenizer.tokenize(text) if len(token) == 1]
        one_letter = {token for token in spelled if not token.isalpha() or token in "ai"}
        assert set(spelled) - one_letter <= allowed | {"Ċ"}, text


def test_turns_are_appended_without_thoughts_and_tools_are_listed_by_name(tokenizer, desk):
    domain = desk.domains()[0]
    tools = desk.tools(domain)
    conversation = Conversation(tokenizer, prompt_ids(tokenizer, desk.policy(domain), tools))
    head = tokenizer.decode(conversation.ids)
    assert "\nget_booking(booking)\nreserve(room, day)\n" in head
    assert "type" not in head
    conversation.observe(desk.episode(desk.tasks("test")[0]).reset(0))
    assert tokenizer.decode(conversation.ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "<think>" not in tokenizer.decode(conversation.ids)


def test_calls_and_results_of_a_conversation_are_rendered(tokenizer):
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "one"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    body = json.dumps({"name": "look_up", "arguments": {"key": "a"}})
    assert text == (
        "<|im_start|>user\nHello<|im_end|>\n"
        f"<|im_start|>assistant\n<tool_call>\n{body}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\none<|im_end|>\n"
    )


def test_the_packaged_base_is_small_stock_and_complete(base, tokenizer):
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert (FOLDER / "model.safetensors").stat().st_size < 4.5e6
    assert type(base).__name__ == "Qwen3ForCausalLM"
    assert base.config.vocab_size == len(tokenizer)
    assert base.generation_config.eos_token_id == tokenizer.eos_token_id


def test_it_is_found_by_its_name_and_a_wrong_name_lists_what_there_is():
    config = ModelConfig(name_or_path="builtin:tiny-tools")
    assert resolve_ref("builtin:tiny-tools") == str(FOLDER)
    model = load_model(config.name_or_path, config)
    assert model.config.vocab_size == len(load_tokenizer(config.name_or_path, config))
    with pytest.raises(ConfigurationError, match=r"builtin:tiny-tools"):
        resolve_ref("builtin:tiny_tools")
