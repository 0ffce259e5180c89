"""Checks of a model's files: refuse at once what would fail after hours; notes on judges.

In: a model reference; a recipe's configuration. Out: :class:`ModelFiles`, from a local folder or
the Hub client's cache; or a refusal with the numbers and the field to change. Takes milliseconds
and no torch; a model that is not downloaded yet is not checked. Unreadable files are left to the
loader (:func:`refiner_core.training.model.loading.check_model`), whose messages are better.

A judge that reasons before it answers takes thousands of tokens where a score takes a few, so that
every judgement would end by length: its chat template decides, else its name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.external.checkpoints import safetensors_header
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError, UnsupportedError
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.placement import STAGES
from refiner_core.contract.protocols import all_under
from refiner_core.contract.services import asks_judge
from refiner_core.contract.types import WITHOUT_REASONING
from refiner_core.generation.completions import check_positions, recurrent_layers
from refiner_core.generation.load import BUILTIN_PREFIX, resolve_ref

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """A folder with a model or tokenizer.

    ``whole`` is False if files may still be missing (an unfinished download): then missing files
    are no error.
    """

    folder: Path
    whole: bool

    def has(self, *names: str) -> bool:
        """True if one of these files exists."""
        return any((self.folder / name).is_file() for name in names)

    def json(self, name: str) -> Mapping[str, Any]:
        """Content of a JSON file; empty if it is missing or unreadable."""
        try:
            found = json.loads((self.folder / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The text part of ``config.json``: all of it in plain language models."""
        config = self.json("config.json")
        part = config.get("text_config")
        return part if isinstance(part, dict) else config

    @property
    def missing_shards(self) -> list[str]:
        """Weight files named by the index that do not exist."""
        named = self.json(_INDEX).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) else set()
        return sorted(str(n) for n in files if not (self.folder / str(n)).is_file())

    @property
    def cut_short(self) -> str | None:
        """A weight file that is shorter than its own header says."""
        for path in sorted(self.folder.glob("*.safetensors")):
            with contextlib.suppress(OSError, ValueError):  # no header: left to the loader
                begin, header = safetensors_header(path)
                ends = (tensor["data_offsets"][1] for tensor in header.values())
                if path.stat().st_size < begin + max(ends, default=0):
                    return path.name
        return None

    @property
    def has_weights(self) -> bool:
        """True if there are weights in a format that transformers loads."""
        patterns = ("*.safetensors", "pytorch_model*.bin", _INDEX)
        return any(next(self.folder.glob(p), None) for p in patterns)

    @property
    def invites_reasoning(self) -> bool:
        """Whether its chat template has the switch of models that reason by default, or opens the
        reasoning for the model to continue."""
        path = self.folder / "chat_template.jinja"
        own = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        found = str(own or self.json("tokenizer_config.json").get("chat_template"))
        return _SWITCHES[0] in found or "<think>" in found.rpartition("add_generation_prompt")[2]

    def id_from(self, words: int) -> int | None:
        """The tokenizer's highest id, if it is ``words`` or more."""
        path = self.folder / "tokenizer.json"
        highest = _highest_id(path, path.stat().st_mtime_ns) if path.is_file() else None
        return highest if highest is not None and highest >= words else None


def model_files(ref: str, revision: str) -> ModelFiles | None:
    """The files of ``builtin:…``, a folder, or a Hub id whose snapshot is in the cache."""
    try:
        resolved = resolve_ref(ref)
    except RefinerError:
        return None  # reported when sources are resolved
    if ref.startswith(BUILTIN_PREFIX) or Path(resolved).is_dir():
        return ModelFiles(Path(resolved), whole=True)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(resolved, "config.json", revision=revision)
    except ValueError:
        return None  # no repository name; reported when sources are resolved
    if not isinstance(found, str):
        return None
    files = ModelFiles(Path(found).parent, whole=False)
    blobs = files.folder.parents[1] / "blobs"
    on_their_way = next(blobs.glob("*.incomplete"), None) is not None
    return replace(files, whole=not on_their_way and files.has_weights and not files.missing_shards)


@functools.lru_cache(maxsize=16)
def _highest_id(path: Path, changed_at: int) -> int | None:
    """Highest id; read once for many trials, unless the file changes."""
    try:
        found = json.loads(path.read_bytes())
        vocabulary = found["model"]["vocab"]
        added = [int(token["id"]) for token in found.get("added_tokens") or ()]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return max([*added, *map(int, ids)], default=None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


#: Stages that tokenise or run the recipe's base model.
_READERS = {"data", *STAGES, "evaluate"}
_TRAINERS = set(STAGES)
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "tiktoken.model"),
)
#: Tokenizer classes without an end-of-text token unless one is configured.
_WITHOUT_DEFAULTS = {"PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"}


def asked_of_model(config: RecipeConfig) -> tuple[object, ...]:
    """Everything that :func:`check_model_files` depends on: equal trials are checked once."""
    stages = frozenset(config.only or config.stages) & frozenset(config.stages)
    lengths = (config.data.max_prompt_token_length, config.grpo.response_length)
    return config.model, stages, lengths, config.grpo.max_token_length, config.environment.name


def check_model_files(config: RecipeConfig) -> None:
    """Refuse a recipe whose model or tokenizer cannot be used with it.

    Raises
    ------
    ConfigurationError
        Files are missing or truncated, or their sizes do not fit the recipe or each other.
    UnsupportedError
        The model's output head cannot be trained here.
    """
    stages = set(config.only or config.stages) & set(config.stages)
    if not stages & _READERS:
        return
    model = model_files(config.model.name_or_path, config.model.revision)
    other = config.model.tokenizer_name_or_path
    tokenizer = model if other is None else model_files(other, "main")
    if tokenizer is not None:
        _check_tokenizer(config, tokenizer)
        _check_template(config, tokenizer)
    if model is None or not model.has("config.json"):
        return
    _check_weights(config, model)
    if tokenizer is not None:
        _check_vocabulary(config, model, tokenizer)
    if any(KINDS[stage].on_prompts for stage in stages):
        _check_window(config, model)
    if stages & _TRAINERS:
        _check_head(config, model)


def layer_notes(config: RecipeConfig) -> list[str]:
    """A note if the model has recurrent layers, and its stages run them."""
    model = model_files(config.model.name_or_path, config.model.revision)
    kinds = recurrent_layers(model.text_config) if model else []
    if not kinds or not set(config.stages) & (_TRAINERS | {"evaluate"}):
        return []
    return [
        f"{config.model.name_or_path} has recurrent layers ({', '.join(kinds)}): training and "
        "sampling by transformers give each sample a row of its own. This is exact, but costs "
        "padding, and prompts are not shared."
    ]


# ---------------------------------------------------------------- tokenizer


def _check_tokenizer(config: RecipeConfig, files: ModelFiles) -> None:
    """A tokenizer exists, and has an end-of-text token."""
    field = _tokenizer_field(config)
    if files.whole and not files.has(*_TOKENIZERS):
        raise ConfigurationError(
            f"{files.folder} ({field}) has no tokenizer.",
            expected=f"one of {', '.join(_TOKENIZERS[:4])} beside config.json",
            fix="copy the tokenizer's files there, or set model.tokenizer_name_or_path",
        )
    settings = files.json("tokenizer_config.json")
    named = settings.get("eos_token") or files.json("special_tokens_map.json").get("eos_token")
    bare = settings.get("tokenizer_class") in _WITHOUT_DEFAULTS or "eos_token" in settings
    if files.whole and not named and bare:
        raise ConfigurationError(
            f"The tokenizer in {files.folder} ({field}) has no end-of-text token (`eos_token`): "
            "the model would never learn to stop.",
            expected="`eos_token` in tokenizer_config.json, such as <|im_end|>",
            fix="name it there, or set model.tokenizer_name_or_path to a chat model's",
        )


def _check_template(config: RecipeConfig, files: ModelFiles) -> None:
    """Conversations can be rendered."""
    if config.model.chat_template is not None:
        return
    if not files.whole or not files.has("tokenizer_config.json", "tokenizer.json"):
        return
    found = files.json("tokenizer_config.json").get("chat_template")
    if not found and not files.has("chat_template.jinja", "chat_template.json"):
        raise ConfigurationError(
            f"The tokenizer in {files.folder} ({_tokenizer_field(config)}) has no chat template: "
            "rows are conversations.",
            expected="`chat_template` in tokenizer_config.json, or chat_template.jinja",
            fix="set model.chat_template to a template's text (ChatML, say), or "
            "model.tokenizer_name_or_path to a chat model",
        )


def _tokenizer_field(config: RecipeConfig) -> str:
    own = config.model.tokenizer_name_or_path is None
    return "model.name_or_path" if own else "model.tokenizer_name_or_path"


# ---------------------------------------------------------------- weights


def _check_weights(config: RecipeConfig, model: ModelFiles) -> None:
    """All files exist, are complete, and have the configuration's shape."""
    missing, why = model.missing_shards if model.whole else [], ""
    if missing:
        why = f"lacks {len(missing)} of the weight files that its index names, {missing[0]} first"
    elif model.whole and not model.has_weights:
        why = "has a configuration, but no weights"
    elif (name := model.cut_short) is not None:
        size = (model.folder / name).stat().st_size
        why = f"has {name} that is cut short: it has {size:,} bytes, and its header names more"
    if why:
        raise ConfigurationError(
            f"{model.folder} (model.name_or_path) {why}.",
            expected="a complete checkpoint: *.safetensors beside config.json",
            fix="fetch or export it again, or correct model.name_or_path",
        )


def _check_vocabulary(config: RecipeConfig, model: ModelFiles, tokenizer: ModelFiles) -> None:
    """Every token id has an embedding; embeddings without an id are padding."""
    words = model.text_config.get("vocab_size")
    if not isinstance(words, int) or (highest := tokenizer.id_from(words)) is None:
        return
    raise ConfigurationError(
        f"The tokenizer ({_tokenizer_field(config)}, {tokenizer.folder}) has ids up to "
        f"{highest:,}, and the model (model.name_or_path, {model.folder}) embeddings of "
        f"{words:,} tokens, 0 to {words - 1:,}.",
        expected=f"a vocabulary of at most {words:,}: {highest + 1 - words:,} too many",
        fix="set model.tokenizer_name_or_path to the tokenizer that the model was trained with, "
        "or resize the model's embeddings and export it",
    )


# ---------------------------------------------------------------- layers


def _check_window(config: RecipeConfig, model: ModelFiles) -> None:
    """The longest prompt with the longest response fits into the positions."""
    text, grpo = model.text_config, config.grpo
    window, longest = text.get("max_position_embeddings"), config.data.max_prompt_token_length
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    stretched = isinstance(scaling, dict) and "factor" in json.dumps(scaling)
    if not isinstance(window, int) or stretched:  # then the number is not the real window
        return
    needs = {
        "data.max_prompt_token_length + grpo.response_length": longest + grpo.response_length,
        "grpo.max_token_length": grpo.max_token_length if config.environment.name else 0,
    }
    for fields, need in needs.items():
        if need > window:
            raise ConfigurationError(
                f"The window of {model.folder} (model.name_or_path) has {window:,} tokens, and "
                f"{fields} is {need:,}.",
                expected=f"{fields} <= max_position_embeddings of its config.json",
                fix=f"lower it to {window}, or train a model with a longer window",
            )


def _check_head(config: RecipeConfig, model: ModelFiles) -> None:
    """The output head alone gives the logits."""
    text = model.text_config
    cap = text.get("final_logit_softcapping")
    scale = text.get("logits_scaling", text.get("logit_scale"))
    if cap or (isinstance(scale, int | float) and scale != 1):
        name = "final_logit_softcapping" if cap else "a scale of logits"
        why = f"{name} ({cap or scale}): its logits are more than output head times hidden state, "
        why += "from which log-probabilities are taken in chunks"
        raise UnsupportedError(
            f"{model.folder} (model.name_or_path) has {why}.",
            expected="a plain output head",
            fix="set model.name_or_path to such a model (Qwen3, Llama, Mistral …)",
        )


# ---------------------------------------------------------------- notes


def position_notes(config: RecipeConfig) -> list[str]:
    """A note if samples may be longer than positions that are independent of the batch: such a
    training is refused when its rows are read (``check_positions``), which is after the queue."""
    stages = {*(config.only or config.stages)} & _TRAINERS
    model = model_files(config.model.name_or_path, config.model.revision) if stages else None
    if model is None:
        return []
    grpo = config.grpo
    prompt = config.data.max_prompt_token_length
    answered = min(prompt + grpo.response_length, grpo.max_token_length)
    longest = {"sft": config.sft.pack_length, "rft": config.rft.pack_length}
    longest["grpo"] = grpo.max_token_length if config.environment.name else answered
    try:
        check_positions(model.text_config, max(longest[stage] for stage in stages))
    except UnsupportedError as error:
        what = f"{config.model.name_or_path} is refused when training starts. {error.what}"
        return [f"{what}. To avoid it: {error.fix}."]
    return []


# ---------------------------------------------------------------- judges that reason


#: Limit of tokens that leaves enough for reasoning.
_ENOUGH_TOKENS = 4096
#: Families that reason unless they are asked not to.
_REASONS = re.compile(
    r"qwen3(?!.*(instruct|coder|base|embedding|reranker))|qwq|deepseek-r1|gpt-oss|magistral|"
    r"glm-(4\.[5-9]|[5-9])|minimax-m|seed-oss|smollm3|thinking|reasoning",
    re.IGNORECASE,
)
#: Arguments of chat templates that switch reasoning.
_SWITCHES = ("enable_thinking", "thinking")


def judge_notes(config: RecipeConfig) -> list[str]:
    """A note for each judge of a recipe and its protocols that reasons first and may not."""
    asked = {
        (under.judge.model, under.judge.extra_body): under.judge
        for under in (config, *all_under(config).values())
        if asks_judge(under)
    }
    return [
        f"{judge.model} (judge.model) reasons before it answers, and judge.max_tokens="
        f"{judge.max_tokens} ends its replies before the score: {WITHOUT_REASONING}."
        for judge in asked.values()
        if _is_cut(judge)
    ]


def _is_cut(judge: JudgeConfig) -> bool:
    if judge.kind != "openai" or judge.max_tokens >= _ENOUGH_TOKENS:
        return False
    body = json.loads(judge.extra_body or "{}")
    if "reasoning_effort" in body or "reasoning" in body:
        return False
    given = body.get("chat_template_kwargs") or {}
    if any(given.get(name) is False for name in _SWITCHES) or "reasoning_effort" in given:
        return False
    files = model_files(judge.model, judge.revision or "main")
    return reasons_by_name(judge.model) or (files is not None and files.invites_reasoning)


def reasons_by_name(model: str) -> bool:
    """Tell whether a model is of a family that reasons unless it is asked not to."""
    return bool(_REASONS.search(model))
