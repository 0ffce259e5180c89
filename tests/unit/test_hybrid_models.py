"""Models with recurrent layers train, sample and evaluate as each sample alone would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.types import GenerationRequest, SamplingParams
from refiner_core.data.prepared import write_prompts
from refiner_core.evaluation.run import evaluate_model
from refiner_core.generation.load import load_model
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.training.batches import OWN_ROW, collate, pack_samples, share_among
from refiner_core.training.model.loading import load_for_training
from refiner_core.training.model.logprobs import token_scores
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import (
    EOS,
    VOCABULARY,
    NoJudge,
    TrainRun,
    prompts,
    save_data,
    tiny_tokenizer,
)
from tests.support.turn_script import Script
from tests.unit.test_packing import alone_logprobs, random_samples
from tests.unit.test_turn_generation import agrees, continuous

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_LINEAR,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {**_MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_n_groups": 1, "mamba_d_ssm": 64, "head_dim": 16},
}


def saved(folder: Path, kind: str) -> str:
    """A folder with a random model of a few thousand parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": EOS}
    config = AutoConfig.for_model(
        *(kind,),
        **sizes,
        **heads,
        **tokens,
        bos_token_id=None,
        initializer_range=0.2,
        **KINDS[kind],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_the_loss_and_the_samples_of_each_sample_alone(tmp_path, kind):
    loaded = load_for_training(saved(tmp_path, kind), ModelConfig(), torch.device("cpu"))
    assert (loaded.balance, loaded.share_prompts) == (OWN_ROW, False)
    samples = random_samples([(5, [3, 1, 6]), (2, [4]), (17, [2, 22]), (1, [1, 6])])
    expected = alone_logprobs(loaded.model, samples)
    flat = torch.full_like(expected, torch.nan)
    for share in share_among(samples, 2, pack_length=40, share_prompts=False, balance=OWN_ROW):
        for pack in pack_samples(share, 40, balance=OWN_ROW):
            batch = collate([pack], balance=OWN_ROW)
            assert batch.input_ids_BL.numel() <= 40
            scores = token_scores(loaded.model, batch).logprob_T
            scores.sum().backward()
            flat[batch.flat_T] = scores.detach()
    torch.testing.assert_close(flat, expected, atol=1e-5, rtol=0)

    generator = TransformersGenerator(loaded.model, loaded.tokenizer, batch_size=3)
    prompts = [sample.prompt_ids for sample in samples]
    done = generator.generate(
        [GenerationRequest(ids, 7 + i) for i, ids in enumerate(prompts)],
        SamplingParams(temperature=0.0, max_new_tokens=12),
    )
    for ids, found in zip(prompts, done, strict=True):
        context = list(ids)
        for token, logprob in zip(found.token_ids, found.logprobs, strict=True):
            with torch.no_grad():
                logits = loaded.model(torch.tensor([context]), use_cache=False).logits[0, -1]
            assert int(logits.argmax()) == token
            assert float(logits.log_softmax(-1)[token]) == pytest.approx(logprob, abs=1e-4)
            context.append(token)


def test_turns_of_a_hybrid_are_what_single_calls_sample(tmp_path):
    model = load_model(saved(tmp_path, "lfm2"), ModelConfig())
    script = Script(4, 3)
    continuous(model, 2).turns(script)
    agrees(model, script, 4)


@pytest.mark.slow
def test_a_hybrid_trains_and_is_evaluated(tmp_path):
    """SFT, GRPO with its embedded sampler, and an evaluation, each as for any model."""
    saved(tmp_path / "model", "qwen3_next")
    save_data(tmp_path / "data")
    write_prompts(tmp_path / "data" / "rl_test.parquet", prompts(3))
    tuned = TrainRun(tmp_path, tmp_path / "sft", "sft", sft={"optimizer": "adamw"})
    assert tuned.stopped_after(2)["train_loss"]["final"] < 3.9
    straight = TrainRun(tmp_path, tmp_path / "straight", "sft", sft={"optimizer": "adamw"})
    straight()
    assert tuned.outcome() == straight.outcome()

    grpo = TrainRun(tmp_path, tmp_path / "grpo")
    grpo(num_training_steps=2)
    assert max(grpo.column("val/sampler_logprob_gap")) < 1e-4
    assert grpo.column("shared_prompts") == [0.0, 0.0]

    found = evaluate_model(
        replace(grpo.config, grpo=replace(grpo.config.grpo, response_length=8)),
        data_dir=tmp_path / "data",
        data_digest="d",
        model_ref=str(tmp_path / "grpo" / "out" / "model"),
        model_name="grpo",
        output_dir=tmp_path / "evaluate",
        io=FolderStageIO(tmp_path / "io"),
        judge=NoJudge(),
    )
    assert found["model"]
