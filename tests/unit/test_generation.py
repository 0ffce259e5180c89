"""Generation: samples, their log-probabilities, their ends; loading of models."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import ConfigurationError, StageFailed, UnsupportedError
from refiner_core.contract.types import Completion, GenerationRequest, SamplingParams
from refiner_core.generation import transformers_backend
from refiner_core.generation.completions import completion_text
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.sampling import draw, plan_batches, processed_logprobs
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.models import tiny_model_dir
from refiner_core.models import tiny_tokenizer as shipped_tokenizer
from tests.support.tiny_training import furthest, tiny_model

VOCAB = 61
EOS = 2


#: Positions whose frequencies follow the longest sequence of a batch beyond 16 tokens.
LONG_ROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
    **{"short_factor": [1.0] * 16, "long_factor": [4.0] * 16},
}


class LetterTokenizer:
    """Token i is one letter; enough text for stop strings."""

    eos_token_id = EOS

    def batch_decode(self, ids: list[list[int]], **_: Any) -> list[str]:
        return ["".join(chr(ord("A") + i) for i in row) for row in ids]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_model(
        7, vocab_size=VOCAB, initializer_range=0.35, max_position_embeddings=256, eos_token_id=EOS
    )


@pytest.fixture
def generator(model: Any) -> TransformersGenerator:
    return TransformersGenerator(model, LetterTokenizer())


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(sum(lengths))
    return [tuple(int(x) for x in rng.integers(3, VOCAB, n)) for n in lengths]


def group(prompt: tuple[int, ...], samples: int, seed: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, seed=seed + s) for s in range(samples)]


def same_but_for_last_digits(left: list[Completion], right: list[Completion]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, max_new_tokens=80),
        SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=30),
        SamplingParams(temperature=1.3, top_k=10, max_new_tokens=30),
        SamplingParams(temperature=0.0, max_new_tokens=30),
    ],
    ids=["plain, past the first capacity", "top-p", "top-k", "greedy"],
)
def test_returned_logprobs_are_those_of_a_plain_forward_pass(
    generator: TransformersGenerator, model: Any, params: SamplingParams
) -> None:
    """GRPO's importance ratios start from these numbers: cache, padding and dropped rows hide in
    none of them."""
    requests = [r for p in prompts(5, 40, 1, 23) for r in group(p, 3, seed=100)]
    requests.append(GenerationRequest(prompts(17)[0], seed=1))
    completions = generator.generate(requests, params)
    assert {c.finish_reason for c in completions} == {"stop", "length"} or params.temperature == 0
    assert furthest(model, requests, completions, params) < 1e-5


def test_greedy_is_what_transformers_generate_gives(
    generator: TransformersGenerator, model: Any
) -> None:
    for prompt in prompts(4, 31, 90):
        (ours,) = generator.generate(
            [GenerationRequest(prompt, seed=0)], SamplingParams(temperature=0, max_new_tokens=25)
        )
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=25,
        )[0, len(prompt) :]
        assert ours.token_ids == tuple(theirs.tolist())


def test_a_sample_does_not_depend_on_its_neighbours(
    generator: TransformersGenerator, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a batch size, an execution field, would change what is trained on."""
    requests = [r for p in prompts(9, 30, 12) for r in group(p, 5, seed=len(p))]
    params = SamplingParams(max_new_tokens=40)
    together = generator.generate(requests, params)
    torch.manual_seed(2)
    assert generator.generate(requests, params) == together
    alone = [generator.generate([request], params)[0] for request in requests]
    same_but_for_last_digits(together, alone)
    backwards = generator.generate(requests[::-1], params)[::-1]
    same_but_for_last_digits(together, backwards)
    small = TransformersGenerator(model, LetterTokenizer(), batch_size=2)
    same_but_for_last_digits(together, small.generate(requests, params))
    monkeypatch.setattr(transformers_backend, "PREFILL_TOKENS", 50)
    same_but_for_last_digits(together, generator.generate(requests, params))


def test_eos_is_kept_and_ends_the_sample(generator: TransformersGenerator) -> None:
    completions = generator.generate(group(prompts(8)[0], 40), SamplingParams(max_new_tokens=60))
    for completion in completions:
        assert EOS not in completion.token_ids[:-1]
        assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 60
        assert len(completion.logprobs) == len(completion.token_ids)
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_stop_strings_stay_in_the_text_and_may_span_tokens(
    generator: TransformersGenerator,
) -> None:
    requests = group(prompts(8)[0], 30)
    free = generator.generate(requests, SamplingParams(max_new_tokens=40))
    text = LetterTokenizer().batch_decode([list(free[0].token_ids)])[0]
    stop = text[2:5]
    held = generator.generate(
        requests, SamplingParams(max_new_tokens=40, stop_strings=("never seen", stop))
    )
    assert held[0].finish_reason == "stop"
    for before, after in zip(free, held, strict=True):
        whole = LetterTokenizer().batch_decode([list(before.token_ids)])[0]
        cut = LetterTokenizer().batch_decode([list(after.token_ids)])[0]
        assert cut == (whole[: whole.index(stop) + len(stop)] if stop in whole else whole)


def test_samples_follow_the_model_s_distribution(
    generator: TransformersGenerator, model: Any
) -> None:
    prompt = prompts(6)[0]
    completions = generator.generate(
        group(prompt, 4000, seed=10**6), SamplingParams(max_new_tokens=1)
    )
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    seen = np.bincount([c.token_ids[0] for c in completions], minlength=VOCAB) / 4000
    assert np.abs(seen - expected).sum() < 0.1


@pytest.mark.parametrize(("batch_size", "batches"), [(3, 6), (256, 1)])
def test_each_sample_is_handed_out_when_its_last_token_is_drawn(
    model: Any, batch_size: int, batches: int
) -> None:
    """A judge begins with it while the others of its batch are decoded."""
    steps: list[int] = []  # tokens decoded, over all batches
    told: list[tuple[int, int, Completion]] = []
    generator = TransformersGenerator(
        model, LetterTokenizer(), batch_size=batch_size, on_step=lambda *_: steps.append(1)
    )
    requests = [r for p in prompts(9, 30, 12) for r in group(p, 4, seed=len(p))]
    params = SamplingParams(max_new_tokens=12)
    made = generator.generate(requests, params, lambda i, c: told.append((i, len(steps), c)))
    assert sorted(index for index, _, _ in told) == list(range(len(requests)))
    assert all(made[index] == completion for index, _, completion in told)
    assert {c.finish_reason for c in made} == {"stop", "length"}
    beginnings = [step + 1 - len(completion.token_ids) for _, step, completion in told]
    assert len(set(beginnings)) == batches
    assert beginnings == sorted(beginnings)


def test_an_error_of_the_callback_ends_the_call_and_leaves_the_model_as_it_was(
    generator: TransformersGenerator, model: Any
) -> None:
    def refuse(index: int, completion: Completion) -> None:
        raise ValueError("row 3 does not fit")

    model.train()
    try:
        with pytest.raises(ValueError, match="row 3"):
            generator.generate(group(prompts(5)[0], 2), SamplingParams(max_new_tokens=3), refuse)
        assert model.training
        assert torch.is_grad_enabled()
    finally:
        model.eval()


def test_too_long_a_request_is_refused_with_its_numbers(generator: TransformersGenerator) -> None:
    with pytest.raises(ConfigurationError, match=r"200 tokens and up to 100 new ones .* 300.* 256"):
        generator.generate(
            [GenerationRequest(prompts(200)[0], seed=0)], SamplingParams(max_new_tokens=100)
        )


def test_weights_that_are_not_a_number_stop_the_run(model: Any) -> None:
    generator = TransformersGenerator(model, LetterTokenizer())
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    try:
        with pytest.raises(StageFailed, match="not finite"):
            generator.generate(group(prompts(4)[0], 2), SamplingParams(max_new_tokens=2))
    finally:
        with torch.no_grad():
            model.model.norm.weight.copy_(kept)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sliding_window": 16}, "sliding_attention at 17 tokens"),
        ({"rope_parameters": LONG_ROPE}, "longrope"),
    ],
)
def test_positions_that_depend_on_the_batch_are_refused_only_where_it_matters(
    changes: dict[str, Any], error: str
) -> None:
    model = tiny_model(vocab_size=VOCAB, **changes)
    model.config.sliding_window = changes.get("sliding_window")
    generator = TransformersGenerator(model, LetterTokenizer())
    generator.generate(group(prompts(8)[0], 1), SamplingParams(max_new_tokens=8))
    with pytest.raises(UnsupportedError, match=error):
        generator.generate(group(prompts(8)[0], 1), SamplingParams(max_new_tokens=9))


def test_batches_are_cut_before_their_cache_outgrows_memory() -> None:
    """256 long prompts of a 4B model at once would need hundreds of gigabytes."""
    requests = [r for p in prompts(*range(100, 120)) for r in group(p, 2)]
    batches = plan_batches(requests, 256, max_new_tokens=50, max_entries=1000)
    assert len(batches) > 1
    for batch in batches:
        assert len(batch) * (max(len(r.prompt_ids) for r in batch) + 2 * 50) <= 1000
    alone = plan_batches(requests[:2], 256, max_new_tokens=50, max_entries=1)
    assert [len(batch) for batch in alone] == [1]


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 1], logits[0, 3] = 0.0, 0.0
    token, logprob = draw(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams())
    assert int(token) in (1, 3)
    assert float(logprob) == pytest.approx(np.log(0.5))


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = processed_logprobs(logits, SamplingParams(top_p=0.7)).exp()
    np.testing.assert_allclose(kept[0], [0.625, 0.375, 0, 0], atol=1e-6)
    only = processed_logprobs(logits, SamplingParams(top_p=1e-9)).exp()
    np.testing.assert_allclose(only[0], [1, 0, 0, 0], atol=1e-6)


def test_text_shows_special_tokens_but_for_the_last() -> None:
    tokenizer = shipped_tokenizer()
    ids = tuple(tokenizer.encode("<answer>a</answer><|im_start|>b<|im_end|>"))
    logprobs = (0.0,) * len(ids)
    stopped = completion_text(tokenizer, Completion(ids, logprobs, "stop"))
    assert stopped == "<answer>a</answer><|im_start|>b"
    cut = completion_text(tokenizer, Completion(ids[:-1], logprobs[:-1], "length"))
    assert cut == stopped


# ---------------------------------------------------------------- loading


def test_a_saved_model_is_loaded_with_the_configured_type(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), ModelConfig(dtype="bfloat16", attn_implementation="eager"))
    assert loaded.dtype == torch.bfloat16
    assert loaded.config._attn_implementation == "eager"
    assert not loaded.training


def test_a_checkpoint_that_lacks_weights_is_refused(model: Any, tmp_path: Path) -> None:
    """transformers fills them with random numbers and only warns."""
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigurationError, match="lacks 3 of the model's weights"):
        load_model(str(tmp_path), ModelConfig())


@pytest.mark.parametrize("ref", ["/no/such/folder", "./missing", "builtin:large", "a/b/c"])
def test_a_reference_to_nothing_says_what_is_possible(ref: str) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.name_or_path"):
        load_tokenizer(ref, ModelConfig())


def test_damaged_files_of_a_model_are_no_bug_of_ours(tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir(), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"model of .* cannot be loaded \(SafetensorError"):
        load_model(str(tmp_path), ModelConfig())
    with pytest.raises(ConfigurationError, match=r"tokenizer of .* cannot be loaded \(KeyError"):
        load_tokenizer(str(tmp_path), ModelConfig())


@pytest.mark.parametrize("load", [load_tokenizer, load_model])
def test_a_model_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Any
) -> None:
    """At a terminal the answer might be yes, and a run without one would hang."""
    auto = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer", None],
    }
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "unheard_of", "auto_map": auto}))
    (tmp_path / "code.py").write_text("raise RuntimeError('it ran')\n")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda words="": asked.append(words) or "n")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load(str(tmp_path), ModelConfig(name_or_path=str(tmp_path)))
    assert asked == []
