"""`make bench`: each speed beside its rival, measured in one run, in ABAB order, as medians.

Prints one JSON line per pair: ``name``, ``ours``, ``rival``, ``ratio`` (above 1: ours is better),
``unit``, ``rounds``, ``machine``. The same work is asserted on both sides. Machines are noisy: read
ratios, not seconds.
"""

import importlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infra.store.provenance import host
from refiner_core.contract.config import ModelConfig
from refiner_core.contract.types import GenerationRequest, SamplingParams
from refiner_core.generation.load import load_model, load_tokenizer
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.models.random_model import save_random_model
from tests.support.command import ROOT, finished

ROUNDS = 5
#: The shape of the embedded model: about 1M parameters.
TINY_SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "intermediate_size": 256,
}
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 180, 48


#: Pairs with a module of their own, which takes the remaining arguments and returns an exit status.
BENCHES = (
    "attacks",
    "checkpoint_stall",
    "failures",
    "gpu",
    "grpo_step",
    "judgements",
    "many_runs",
    "many_samples",
    "memory",
    "monitor",
    "sweeps",
    "trainer",
)


def main() -> int:
    """`python -m tests.bench NAME …` runs one bench; without a name, generation of groups."""
    if not sys.argv[1:]:
        torch.set_num_threads(1)
        print(json.dumps(generation_of_groups()), flush=True)
        return 0
    name, *arguments = sys.argv[1:]
    if name not in BENCHES:
        print(f"There is no bench {name!r}: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"tests.bench.{name}").main(arguments)
    return status


def endless_generator(batch_size: int) -> TransformersGenerator:
    """A generator over a random model of the tiny shape; no token ends a text."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder), **TINY_SHAPE, seed=0)
        config = ModelConfig(name_or_path=folder)
        model, tokenizer = load_model(folder, config), load_tokenizer(folder, config)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    return TransformersGenerator(model, tokenizer, batch_size=batch_size)


def generation_of_groups() -> dict[str, Any]:
    """Sampling 8 prompts x 8 samples of fixed length, against `generate` with a static cache."""
    ours_generator = endless_generator(PROMPTS * SAMPLES)
    model, tokenizer = ours_generator.model, ours_generator.tokenizer
    torch.manual_seed(0)
    prompts = torch.randint(0, len(tokenizer), (PROMPTS, PROMPT_TOKENS))
    requests = [
        GenerationRequest(tuple(prompt.tolist()), seed=97 * p + s)
        for p, prompt in enumerate(prompts)
        for s in range(SAMPLES)
    ]
    params = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS)

    def ours() -> int:
        return sum(len(c.token_ids) for c in ours_generator.generate(requests, params))

    def rival() -> int:
        with torch.no_grad():
            out = model.generate(
                prompts.repeat_interleave(SAMPLES, 0),
                attention_mask=torch.ones(PROMPTS * SAMPLES, PROMPT_TOKENS, dtype=torch.long),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=NEW_TOKENS,
                cache_implementation="static",
                disable_compile=True,
                pad_token_id=0,
            )
        return int(out.shape[0] * (out.shape[1] - PROMPT_TOKENS))

    expected = PROMPTS * SAMPLES * NEW_TOKENS
    assert ours() == rival() == expected
    return compare("generation of groups", ours, rival, expected, "tokens per CPU-second")


def compare(
    name: str, ours: Callable[[], Any], rival: Callable[[], Any], work: int, unit: str
) -> dict[str, Any]:
    """ABAB rounds; rates are ``work`` by process time, and the ratio is of medians."""
    rates: dict[str, list[float]] = {"ours": [], "rival": []}
    for _ in range(ROUNDS):
        for side, call in (("ours", ours), ("rival", rival)):
            begun = time.process_time()
            call()
            rates[side].append(work / (time.process_time() - begun))
    mine, other = (statistics.median(rates[side]) for side in ("ours", "rival"))
    return {
        "name": name,
        "ours": round(mine, 1),
        "rival": round(other, 1),
        "ratio": round(mine / other, 2),
        "unit": unit,
        "rounds": ROUNDS,
        "machine": machine(),
    }


def in_a_process(*words: str) -> Any:
    """The JSON line that a bench prints in a process of its own."""
    bench = [sys.executable, "-m", "tests.bench", *words]
    done = finished(bench, ROOT, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=3600)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def peak_mib() -> float:
    """The most memory that this process has had so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def machine() -> str:
    """The kind of machine, for the output lines."""
    found = host()
    return f"{found['cpu']}, {found['cores']} cores"


if __name__ == "__main__":
    sys.exit(main())
