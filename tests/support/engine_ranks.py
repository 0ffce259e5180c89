"""Two ranks under torchrun that train the tiny model with every engine, and write the results.

``torchrun --nproc_per_node 2 engine_ranks.py FOLDER``: rank 0 trains each case alone first, then
both do together; rank 0 writes ``FOLDER/found.json``. One start for all cases: importing torch and
DeepSpeed takes longer than most of them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import StageFailed
from refiner_core.generation.load import load_model
from refiner_core.generation.saving import save_model
from refiner_core.training.batches import Sample, collate, pack_samples, share_packs
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.ranks import Ranks, TorchRanks
from refiner_core.training.rollouts.rollout import TrainSample
from refiner_core.training.sft import train_sft
from refiner_core.training.updates import GrpoUpdate
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import (
    VOCABULARY,
    demonstrations,
    recipe,
    save_data,
    save_tiny_model,
)

STEPS, SAVED = 4, 2
#: Bytes of a file of exported weights.
SHARD = 20_000
#: Engine (a stage of ZeRO, or plain torch) and type of the cases of SFT.
PAIRS = ((None, "float32"), (2, "bfloat16"), (3, "bfloat16"))
#: An odd hidden size: vectors do not divide by two ranks.
TIED = {"hidden_size": 33}
UNTIED = {"hidden_size": 33, "tie_word_embeddings": False, "seed": 3}


def config_of(
    stage: int | None, dtype: str, *, recompute: bool = False, offload: bool = False
) -> RecipeConfig:
    """SFT of four steps, GRPO of any number."""
    return recipe(
        model={"dtype": dtype, "gradient_checkpointing": recompute},
        sft={
            "deepspeed_stage": stage,
            "optimizer": "adamw",
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "max_train_steps": STEPS,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 5,
            "save_freq": SAVED,
            "async_save": False,
            "offload_optimizer": offload,
            "offload_param": offload and stage == 3,
        },
        grpo={"deepspeed_stage": stage, "num_mini_batches": 2, "entropy_coefficient": 0.01},
    )


class Cases:
    """All cases of one world."""

    def __init__(self, root: Path, ranks: Ranks) -> None:
        self.root, self.ranks = root, ranks
        self.found: dict[str, Any] = {}

    def first(self) -> bool:
        return self.ranks.rank == 0

    # ------------------------------------------------------------ SFT as a stage

    def sft(self, name: str, ranks: Ranks, config: RecipeConfig, **source: str) -> dict[str, Any]:
        """Train as the stage does; with ``resume`` from the saved step of another case."""
        folder = self.root / "sft" / name
        io = None
        if ranks.rank == 0:
            io = FolderStageIO(folder)
            if "resume" in source:
                saved = self.root / "sft" / source["resume"] / "checkpoints" / str(SAVED)
                shutil.copytree(saved, folder / "checkpoints" / str(SAVED))
        report = train_sft(
            config,
            data_dir=self.root / "data",
            model_ref=str(self.root / source.get("model", "tied")),
            output_dir=folder,
            io=io,
            ranks=ranks,
        )
        if io is None:
            return {}
        rows = io.metrics()
        last = max(io.checkpoint_steps())
        progress = json.loads((folder / "checkpoints" / str(last) / "progress.json").read_text())
        return {
            "losses": [row["loss/train_avg"] for row in rows],
            "norms": [row["grad_norm"] for row in rows],
            "validation": report["validation_loss"],
            "restored_from": progress.get("restored_from"),
            "written_by": progress["written_by"],
        }

    def all_sft(self, stage: int | None, dtype: str) -> None:
        """Alone (plain), together, and together again from the middle; then across."""
        name, config = f"{stage}-{dtype}", config_of(stage, dtype)
        alone = f"alone-{dtype}"
        if alone not in self.found:
            self.found[alone] = self.sft_alone(alone, dtype)
        self.found[name] = self.sft(name, self.ranks, config)
        self.found[f"{name}-resumed"] = self.sft(f"{name}-resumed", self.ranks, config, resume=name)
        self.found[f"{name}-from-alone"] = self.sft(
            f"{name}-from-alone", self.ranks, config, resume=alone
        )
        self.found[f"{name}-to-alone"] = self.sft_alone(f"{name}-to-alone", dtype, resume=name)

    def sft_alone(self, name: str, dtype: str, **source: str) -> Any:
        """Rank 0 trains by itself."""
        return self.sft(name, Ranks(), config_of(None, dtype), **source) if self.first() else None

    # ------------------------------------------------------------ single steps

    def open(self, config: RecipeConfig, ranks: Ranks | None = None, model: str = "tied") -> Engine:
        return open_engine(config, "sft", str(self.root / model), ranks or self.ranks)

    def step(self, engine: Engine, number: int, spoil: str = "") -> tuple[float, float]:
        """One update over packs that hang on ``number``; ``spoil`` says what goes wrong."""
        rows = demonstrations(14, seed=number)
        samples = [Sample((), row.input_ids, row.loss_mask) for row in rows]
        packs = pack_samples(samples, 48)
        tokens = sum(len(pack.target_T) for pack in packs)
        world, rank = engine.ranks.world, engine.ranks.rank
        loss = 0.0
        for place, pack in enumerate(share_packs(packs, world)[rank]):
            batch = collate([pack], balance=engine.balance)
            part = -engine.score(batch, entropy="metric").logprob_T.sum() / tokens
            broken = spoil == "nan" and place == 0 and rank == world - 1
            engine.backward(part * (math.nan if broken else 1.0))
            loss += float(part.detach())
        if spoil == "scored between":
            with torch.no_grad():
                engine.score(collate(packs[:1], balance=engine.balance))
        if spoil == "dropped":
            engine.gradient_norm()
            engine.drop()
            return loss, math.nan
        asked = engine.gradient_norm() if spoil == "asked" else None
        norm = engine.step(0.5)
        assert asked is None or asked == norm
        return engine.ranks.add([loss])[0], norm

    def state(self, engine: Engine) -> dict[str, torch.Tensor]:
        snapshot: Any = engine.snapshot({})
        return {**(snapshot.tensors or {}), **snapshot.states}

    def faults(self, stage: int | None, dtype: str, *, offload: bool = False) -> None:
        """A NaN and a dropped step change nothing, and leave nothing behind."""
        config = config_of(stage, dtype, offload=offload)
        straight, disturbed = self.open(config), self.open(config)
        expected = [self.step(straight, n) for n in range(3)]
        got = [self.step(disturbed, 0)]
        before = {name: t.clone() for name, t in self.state(disturbed).items()}
        nan_norm = self.step(disturbed, 7, "nan")[1]
        self.step(disturbed, 8, "dropped")
        after = self.state(disturbed)
        got += [self.step(disturbed, 1, "scored between"), self.step(disturbed, 2, "asked")]
        same = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        self.found[f"{stage}-{dtype}-faults{'-offload' * offload}"] = {
            "expected": expected,
            "got": got,
            "nan_norm": str(nan_norm),
            "unchanged": self.ranks.add([not same])[0] == 0,
            "masters": sorted(
                {t.dtype for n, t in after.items() if n.startswith("master")}, key=str
            )
            == ([torch.float32] if dtype == "bfloat16" else []),
        }

    def recomputing(self, stage: int | None) -> None:
        """Activation checkpointing, and reading the whole model in between."""
        plain = self.open(config_of(stage, "float32"))
        recompute = self.open(config_of(stage, "float32", recompute=True))
        expected, got, read = [], [], []
        for number in range(3):
            expected.append(self.step(plain, number))
            got.append(self.step(recompute, number))
            read = self.read(recompute)
        reference = self.read(plain)
        self.found[f"{stage}-recomputing"] = {
            "expected": expected,
            "got": got,
            "logits": float(np.abs(np.subtract(read[0], reference[0])).max()),
            "generated": read[1] == reference[1],
        }

    def read(self, engine: Engine) -> list[Any]:
        """Logits of the whole model and what it generates."""
        ids = torch.arange(3, 12)[None]
        with engine.whole() as model, torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits.flatten().tolist()
            return [logits, model.generate(ids, max_new_tokens=4, do_sample=False).tolist()]

    def grpo(self, stage: int | None, ranks: Ranks | None = None) -> None:
        """Two steps of two updates each on fixed rollouts, with a KL reference."""
        ranks = ranks or self.ranks
        config = config_of(stage, "float32")
        engine = open_engine(config, "grpo", str(self.root / "tied"), ranks)
        update = GrpoUpdate(
            engine, engine.reference(str(self.root / "tied")), config.grpo, config.seed
        )
        metrics = [update.run(rollouts(step), step=step, factor=1.0) for step in range(1, 3)]
        name = f"{stage}-grpo" if ranks.world > 1 else "alone-grpo"
        self.found[name] = [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in metrics
        ]

    def loads(self) -> None:
        """How often each rank reads the whole model under ZeRO-3: to train it, and as reference."""
        read = list[int]()
        where = "refiner_core.training.model.loading.load_bare_model"
        with mock.patch(where, lambda *a: read.append(1) or load_model(*a)):
            self.open(config_of(3, "float32")).reference(str(self.root / "tied"))
        self.found["loads"] = self.ranks.gather(len(read))

    def exports(self, stage: int | None) -> None:
        """An untied model, exported in shards by rank 0 and handed over to both ranks."""
        engine = self.open(config_of(stage, "float32"), model="untied")
        self.step(engine, 0)
        folder = self.root / "exports" / str(stage)
        ids = list(range(3, 12))
        with largest_gathered() as gathered:
            engine.export(folder, shard_bytes=SHARD)
            copy = self.root / "handed-over" / f"{stage}-{self.ranks.rank}"
            logits = engine.hand_over(
                lambda _: ids,
                lambda model, weights: save_model(model, engine.tokenizer, copy, weights),
            )
        each = self.ranks.gather(max(gathered, default=0))
        after = self.step(engine, 1)
        if not self.first():
            return
        reference = self.open(config_of(None, "float32"), Ranks(), model="untied")
        self.step(reference, 0)
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        with reference.whole() as model, torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0]
            largest = max(tensor.nbytes for tensor in model.parameters())
        with torch.no_grad():
            exported = loaded(torch.tensor([ids])).logits[0]
        self.found[f"{stage}-export"] = {
            "difference": float((exported - wanted).abs().max()),
            "handed over": float((logits - exported).abs().max()),
            "missing": sorted(info["missing_keys"]),
            "tied": loaded.lm_head.weight is loaded.model.embed_tokens.weight,
            "gathered": each,
            "largest": largest,
            "after": after,
            "expected after": self.step(reference, 1),
        }

    def unequal_weights(self) -> None:
        """A rank whose weights went astray is found before its checkpoint is written."""
        engine = self.open(config_of(None, "float32"))
        if self.ranks.rank == 1:
            with engine.whole() as model, torch.no_grad():
                next(model.parameters()).view(-1)[5] += 1e-6
        said = ""
        try:
            engine.snapshot({})
        except StageFailed as error:
            said = str(error)
        everywhere = self.ranks.add([bool(said)])[0] == self.ranks.world
        self.found["unequal"] = {"said": said, "everywhere": everywhere}


@contextmanager
def largest_gathered() -> Iterator[list[int]]:
    """Bytes of the whole parameters that this rank holds at once, at each gathering of ZeRO-3 that
    the block asks for."""
    import deepspeed

    seen, at_once, real = list[int](), 0, deepspeed.zero.GatheredParameters

    @contextmanager
    def counted(parameters: list[Any], **options: Any) -> Iterator[None]:
        nonlocal at_once
        size = sum(p.ds_numel * p.element_size() for p in parameters)
        at_once += size
        seen.append(at_once)
        with real(parameters, **options):
            yield
        at_once -= size

    with mock.patch.object(deepspeed.zero, "GatheredParameters", counted):
        yield seen


def rollouts(step: int) -> list[TrainSample]:
    """Four groups of three samples with made-up advantages and sampler log-probabilities."""
    rng = np.random.default_rng(step)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCABULARY, n).tolist())

    samples = []
    for group in range(4):
        prompt = tokens(5 + group)
        for _ in range(3):
            response = tokens(int(rng.integers(1, 7)))
            logprobs = tuple((-3.5 + rng.normal(size=len(response))).tolist())
            samples.append(TrainSample(prompt, response, logprobs, float(rng.normal())))
    return samples


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    with TorchRanks(cuda=False) as ranks:
        cases = Cases(root, ranks)
        if cases.first():
            save_tiny_model(root / "tied", **TIED)
            save_tiny_model(root / "untied", **UNTIED)
            save_data(root / "data")
            cases.grpo(None, Ranks())
        ranks.all_or_none(None)
        for stage, dtype in PAIRS:
            cases.all_sft(stage, dtype)
            cases.faults(stage, dtype)
            if stage and dtype == "bfloat16":
                cases.faults(stage, dtype, offload=True)
        for stage in (None, 2, 3):
            cases.grpo(stage)
            cases.recomputing(stage)
            cases.exports(stage)
        cases.loads()
        cases.unequal_weights()
        if cases.first():
            (root / "found.json").write_text(json.dumps(cases.found))


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
