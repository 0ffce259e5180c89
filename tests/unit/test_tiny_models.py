"""The embedded models of `tiny` and `tiny-tools`: tokenizers, chat templates, weights, folders."""

import json
import random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.data.synthetic import generate_rows
from refiner_core.environments.conversation import Conversation, prompt_ids
from refiner_core.environments.desk import DeskEnvironment
from refiner_core.environments.turns import call_text
from refiner_core.generation.load import load_model, resolve_ref
from refiner_core.models import builtin_model_dir
from refiner_core.models.random_model import make_random_model
from tests.support.real_rows import REAL_ROWS

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<answer></answer>"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
CALL_TEXT = '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    """Those of the shipped folders, by name."""
    names = ("tiny", "tiny-tools")
    return {name: AutoTokenizer.from_pretrained(builtin_model_dir(name)) for name in names}


@pytest.fixture(scope="module")
def tokenizer(tokenizers) -> Any:
    return tokenizers["tiny"]


@pytest.fixture(scope="module")
def of_tools(tokenizers) -> Any:
    return tokenizers["tiny-tools"]


@pytest.fixture(scope="module")
def desk() -> DeskEnvironment:
    return DeskEnvironment(EnvironmentConfig(name="desk"), UserConfig())


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def round_trip(tokenizer, text: str) -> str:
    return tokenizer.decode(
        ids_of(tokenizer, text), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def odd_texts() -> list[str]:
    """Some by hand, real research text, random Unicode."""
    texts = [
        "",
        " ",
        "  a  b \n\n\n\tc \r\n",
        "don't , stop . now !",
        "e\u0301 \u00e9 ﬁ … 数学 🧪",
        "<|im_start|>user\ntool\nsystem\nassistant\n<|im_end|><|endoftext|>",
        "<snippet id=1f0c9a2b-3>x</snippet><snippet id=S_a2B3,S_c4D5> y </snippet>",
        "Nabsufs NABSUF nabsuf NabSuf Nab-suf k3F7a1",
        '<tool_call>\n{"name": "respond", "arguments": {"content": "é … 数学 🧪"}}\n</tool_call>',
        '{"a": {"b": ["c", "d"], "e": {}}, "f": [{"g": 1.5e3}, {"h": null}]}',
        '<tool_call>{"name":"x","arguments":{}}</tool_call></tool_call>"}}\n',
        "S_ _S S_a2B3 S_x9 hand_over hand_overs get_bookingget_booking",
    ]
    for path in sorted(REAL_ROWS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            texts += [turn["content"] for turn in json.loads(line)["conversations"]]
    rng = random.Random(0)
    ranges = [(32, 127), (0, 32), (128, 0x300), (0x300, 0xD800), (0x10000, 0x110000)]
    for _ in range(1000):
        places = range(rng.randrange(60))
        texts.append("".join(chr(rng.randrange(*rng.choice(ranges))) for _ in places))
    return texts


@pytest.mark.parametrize("name", ["tiny", "tiny-tools"])
def test_text_comes_back_exactly(tokenizers, name: str):
    for text in odd_texts():
        assert round_trip(tokenizers[name], text) == text


def test_generated_rows_are_short_and_need_no_byte(tokenizer):
    bytes_used = set()
    rows = [row for row in generate_rows("sft", 430, 1) if row["metadata"]["flaw"] is None]
    assert len(rows) > 250
    for row in rows:
        for turn in row["conversations"]:
            tokens = tokenizer.tokenize(turn["content"])
            bytes_used |= {token for token in tokens if len(token) == 1}
        prompt = tokenizer.apply_chat_template(
            row["conversations"][:1], add_generation_prompt=True, enable_thinking=False
        )["input_ids"]
        assert len(prompt) <= 200
        assert len(ids_of(tokenizer, row["conversations"][1]["content"])) < 48
    assert bytes_used <= set(".?:>Ċ,") | {"I"}


def test_the_tokenizer_of_tools_keeps_the_ids_of_the_base(tokenizer, of_tools):
    old, new = tokenizer.get_vocab(), of_tools.get_vocab()
    assert all(new[token] == index for token, index in old.items())
    text = " Fetmel festival<snippet id=S_a5B5>"
    assert ids_of(of_tools, text)[:3] == ids_of(tokenizer, text)[:3]


def test_words_of_the_desk_need_no_bytes(of_tools, desk):
    """A word that the vocabulary lacks makes episodes longer, and is hard to copy."""
    allowed = set("0123456789 .,?:\n{}[]\"'()_-ĠĊ")
    texts = [desk.policy(domain) for domain in desk.domains()]
    tasks = desk.tasks("train")
    for number, task in enumerate(tasks[:: len(tasks) // 45]):
        episode = desk.episode(task)
        texts += [message.content for message in episode.reset(number)]
        for call in desk.expert(task, number, flawed=number % 3 == 0):
            step = episode.step(call)
            texts += [call_text(call), *(message.content for message in step.messages)]
            if step.done:
                break
    for text in texts:
        spelled = {token for token in of_tools.tokenize(text) if len(token) == 1}
        assert {s for s in spelled if s.isalpha() and s not in "ai"} <= allowed, text


def test_chat_turns_are_rendered_with_and_without_thinking(tokenizer):
    def rendered(turns: Any, *, thinking: bool, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=prompt, enable_thinking=thinking
        )

    asked = "<|im_start|>user\nHello<|im_end|>\n"
    opened = f"{asked}<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert rendered(TALK[:1], thinking=False) == asked
    assert rendered(TALK[:1], thinking=False, prompt=True) == opened
    assert rendered(TALK, thinking=False) == opened + "<answer></answer><|im_end|>\n"
    assert rendered(TALK[:1], thinking=True, prompt=True) == asked + "<|im_start|>assistant\n"


def test_tools_calls_and_results_are_rendered(tokenizer, of_tools):
    turns = [
        {"role": "system", "content": "Be brief."},
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOLS[0]) in text
    assert CALL_TEXT in text
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n")
    assert of_tools.apply_chat_template(turns[1:4], tokenize=False) == (
        f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>tool\none<|im_end|>\n"
    )


def test_turns_of_the_desk_are_appended_without_thoughts(of_tools, desk):
    domain = desk.domains()[0]
    policy = prompt_ids(of_tools, desk.policy(domain), desk.tools(domain))
    conversation = Conversation(of_tools, policy)
    head = of_tools.decode(conversation.ids)
    assert "\nget_booking(booking)\nreserve(room, day)\n" in head
    assert "type" not in head
    conversation.observe(desk.episode(desk.tasks("test")[0]).reset(0))
    text = of_tools.decode(conversation.ids)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "<think>" not in text


def test_a_random_model_is_made_by_its_seed_and_leaves_the_callers_random_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (make_random_model(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    first, second, third = (m.get_input_embeddings().weight for m in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert one.lm_head.weight is first


@pytest.mark.parametrize("name", ["tiny", "tiny-tools"])
def test_the_packaged_base_is_small_stock_and_complete(tokenizers, name: str):
    folder, tokenizer = builtin_model_dir(name), tokenizers[name]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert {"tokenizer_config.json", "generation_config.json"} <= names
    assert (folder / "model.safetensors").stat().st_size < 4.5e6
    assert resolve_ref(f"builtin:{name}") == str(folder)
    base = load_model(f"builtin:{name}", ModelConfig())
    assert type(base).__name__ == "Qwen3ForCausalLM"
    assert base.dtype == torch.float32
    assert base.config.tie_word_embeddings
    assert base.config.vocab_size == len(tokenizer)
    assert base.generation_config.eos_token_id == tokenizer.eos_token_id
    roles = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side)
    assert roles == ("<|im_end|>", "<|endoftext|>", "left")
