"""The embedded model: exact tokenizer, random models of any size, and the packaged base."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from refiner_core import words  # noqa: E402
from refiner_core.data.synthetic import generate_rows  # noqa: E402
from refiner_core.data.truth import score_truth  # noqa: E402
from refiner_core.models import tiny_model_dir, tiny_tokenizer  # noqa: E402
from refiner_core.models.random_model import make_random_model, save_random_model  # noqa: E402
from tests.support.real_rows import REAL_ROWS  # noqa: E402

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "<answer></answer>"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def base():
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir())


def _round_trip(tokenizer, text: str) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _random_text(rng: random.Random) -> str:
    ranges = [(32, 127), (0, 32), (128, 0x300), (0x300, 0xD800), (0x10000, 0x110000)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(60)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a  b \n\n\n\tc \r\n",
        "don't , stop . now !",
        "e\u0301 \u00e9 ﬁ … 数学 🧪",
        "<|im_start|>user\n<|im_end|><|endoftext|>",
        "<snippet id=1f0c9a2b-3>x</snippet><snippet id=S_a2B3,S_c4D5> y </snippet>",
        "Nabsufs NABSUF nabsuf NabSuf Nab-suf k3F7a1",
    ],
)
def test_text_comes_back_exactly(tokenizer, text: str):
    assert _round_trip(tokenizer, text) == text


def test_random_unicode_comes_back_exactly(tokenizer):
    rng = random.Random(0)
    for text in (_random_text(rng) for _ in range(1000)):
        assert _round_trip(tokenizer, text) == text


def test_real_research_text_comes_back_exactly(tokenizer):
    for path in sorted(REAL_ROWS.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            for turn in json.loads(line)["conversations"]:
                assert _round_trip(tokenizer, turn["content"]) == turn["content"]


def test_names_values_and_ids_are_two_tokens_and_tags_are_one(tokenizer):
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    rng = random.Random(0)
    for _ in range(300):
        assert count(" " + words.draw_name(rng)) == 2
        assert count(" " + words.draw_value(rng)) == 2
        assert count(f"<snippet id={words.draw_id(rng)}>") == 4
    assert all(count(f" {word}") == 1 for word in words.ATTRIBUTES)
    assert all(count(tag) == 1 for tag in ("<answer>", "</answer>", "</snippet>", "<|im_end|>"))


def test_no_generated_row_needs_a_byte(tokenizer):
    bytes_used = set()
    for row in generate_rows("sft", 300, 1, flaw_share=0.0):
        for turn in row["conversations"]:
            for token in tokenizer.tokenize(turn["content"]):
                if len(token) == 1:
                    bytes_used.add(token)
    assert bytes_used <= set(".?:>Ċ,") | {"I"}


def test_rows_are_short(tokenizer):
    for row in generate_rows("sft", 300, 2, flaw_share=0.0):
        prompt = tokenizer.apply_chat_template(
            row["conversations"][:1], add_generation_prompt=True, enable_thinking=False
        )["input_ids"]
        assert len(prompt) <= 200
        answer = tokenizer.encode(row["conversations"][1]["content"], add_special_tokens=False)
        assert len(answer) < 48


def test_the_prompt_without_thinking_is_a_prefix_of_the_conversation(tokenizer):
    whole = tokenizer.apply_chat_template(TALK, tokenize=False, enable_thinking=False)
    prompt = tokenizer.apply_chat_template(
        TALK[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    opened = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompt == f"<|im_start|>user\nHello<|im_end|>\n{opened}"
    assert whole == prompt + "<answer></answer><|im_end|>\n"


def test_the_generation_prompt_comes_only_when_asked_for(tokenizer):
    without = tokenizer.apply_chat_template(TALK[:1], tokenize=False, enable_thinking=False)
    assert without == "<|im_start|>user\nHello<|im_end|>\n"
    thinking = tokenizer.apply_chat_template(
        TALK[:1], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert thinking == without + "<|im_start|>assistant\n"


def test_tools_calls_and_results_are_rendered(tokenizer):
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=TOOLS, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOLS[0]) in text
    assert '<tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>' in text
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n")


def test_special_tokens_have_the_roles_of_qwen3(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.padding_side == "left"


def test_a_random_model_is_made_by_its_seed_and_leaves_the_callers_random_state():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (make_random_model(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    first, second, third = (m.get_input_embeddings().weight for m in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert one.lm_head.weight is first


def test_a_random_model_of_any_size_is_read_back_from_its_folder(tmp_path: Path):
    folder = save_random_model(tmp_path / "model", hidden_size=48, head_dim=32, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.hidden_size == 48
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert _round_trip(tokenizer, " Nabsuf … <answer>") == " Nabsuf … <answer>"
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert out.shape[1] <= 5


def test_the_packaged_base_is_small_stock_and_complete(base):
    folder = tiny_model_dir()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert {"tokenizer_config.json", "generation_config.json"} <= names
    assert (folder / "model.safetensors").stat().st_size < 4.2e6
    assert type(base).__name__ == "Qwen3ForCausalLM"
    assert base.dtype == torch.float32
    assert base.config.max_position_embeddings == 32768
    assert base.config.tie_word_embeddings
    assert base.generation_config.eos_token_id == tiny_tokenizer().eos_token_id


def test_the_packaged_base_does_not_know_the_task(base, tokenizer):
    rows = generate_rows("rl", 12, 5)
    scores = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row["conversations"],
            add_generation_prompt=True,
            enable_thinking=False,
            return_tensors="pt",
        )["input_ids"]
        out = base.generate(prompt, max_new_tokens=40, do_sample=False)
        text = tokenizer.decode(out[0, prompt.shape[1] :])
        scores.append(score_truth(text.removesuffix(tokenizer.eos_token), row["truth"])["oracle"])
    assert sum(scores) / len(scores) < 0.2
