"""Digests of a plan's external inputs: data, model weights, rubrics, prompts.

Runs on a login node at plan time: reads files, without network or torch. Local content is
hashed; content of a Hub is identified by its pinned revision.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from refiner_core.contract.checks.environment import BUILTIN_ROWS
from refiner_core.contract.config import DataConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, no_such
from refiner_core.contract.files import readable
from refiner_core.contract.kinds.serving import JUDGE_WEIGHTS
from refiner_core.contract.planned import HUB_DIGEST
from refiner_core.contract.protocols import all_under, refused_under, under
from refiner_core.contract.sections.environment import check_settings
from refiner_core.contract.services import engine_of, serves
from refiner_core.data.sources import Which, resolve_source, source_digest
from refiner_core.generation.load import resolve_ref

_KINDS_OF_TAU2 = ("action", "communicate", "environment", "db", "nl")


def check_names(config: RecipeConfig) -> None:
    """Refuse unknown names.

    Raises
    ------
    ConfigurationError
        Names the field and the known names.
    """
    if config.environment.name:
        _check_shaping(config)
    if config.publish.which == "best" and "publish" in config.stages:
        _check_best(config)


def _check_shaping(config: RecipeConfig) -> None:
    """Check the partial credit of a shipped environment; an own environment lists its names when
    its tasks are prepared."""
    known = _known_names(config.environment.name)
    if known is None:
        return
    domains, kinds = known
    check_settings(config.environment.shaping, domains, kinds)


def _known_names(name: str) -> tuple[Collection[str], Collection[str]] | None:
    """Domains, and kinds of checks, of an environment."""
    from refiner_core.environments.registry import DESK, TAU2

    if name == DESK:
        from refiner_core.environments.desk.environment import KINDS
        from refiner_core.environments.desk.tasks import DOMAINS

        return tuple(DOMAINS), KINDS
    if name == TAU2:
        from refiner_core.environments.tau2.package import DOMAINS as OF_TAU2

        return OF_TAU2, _KINDS_OF_TAU2
    return None


def _check_best(config: RecipeConfig) -> None:
    from refiner_core.evaluation.metrics import has_metric, metrics_of

    publish, decodings = config.publish, config.evaluate.decoding
    what, fix = "No evaluation of this recipe gives", "correct it, or add its evaluation"
    if not has_metric(config, publish.best_metric):
        known = metrics_of(config)
        raise no_such(f"{what} publish.best_metric", publish.best_metric, known, fix)
    if publish.best_decoding not in decodings:
        raise no_such(f"{what} publish.best_decoding", publish.best_decoding, decodings, fix)


#: Files up to this size are hashed completely; larger ones by size, head and tail.
_WHOLE_BYTES = 64 * 2**20
_EDGE_BYTES = 2**20


def resolve_sources(config: RecipeConfig) -> dict[str, str]:
    """Digest by source name (see :func:`refiner_core.contract.plan.make_plan`); protocol files have
    their names after the digest.

    Raises
    ------
    DataError, ConfigurationError
        A source is missing, or a name is unknown; the message names the field.
    """
    check_names(config)
    sources = _of_training(config) | _of_measuring(config)
    for name, measured in all_under(config).items():
        with refused_under(name):
            own = protocol_sources(measured)
        sources |= {under(source, name): digest for source, digest in own.items()}
    return sources


def protocol_sources(measured: RecipeConfig) -> dict[str, str]:
    """Digests of the inputs that a configuration under a protocol adds; errors as for
    :func:`resolve_sources`."""
    sources = _of_measuring(measured)
    if measured.data.all_held_out:
        sources["data.rl"] = _only_once(_rows_digest, _rows(measured.data), "rl")
    return sources


def _of_training(config: RecipeConfig) -> dict[str, str]:
    sources = {"model": _only_once(model_digest, config.model.name_or_path, config.model.revision)}
    tokenizer = config.model.tokenizer_name_or_path
    if tokenizer is not None and not Path(resolve_ref(tokenizer)).is_dir():
        sources["tokenizer"] = f"{HUB_DIGEST}{tokenizer}@main"  # a local one is the recipe's own
    agent = bool(config.environment.name)
    if agent:
        from refiner_core.environments.registry import environment_digest

        sources["environment"] = _only_once(environment_digest, config)
    own_rows = agent and config.data.sft_path == BUILTIN_ROWS  # rows of the environment's expert
    if config.data.sft_path is not None and not own_rows:
        digest = source_digest if agent else _rows_digest
        sources["data.sft"] = _only_once(digest, _rows(config.data), "sft")
    if config.data.rl_path is not None and not agent:
        sources["data.rl"] = _only_once(_rows_digest, _rows(config.data), "rl")
    if config.publish.card_template is not None:
        sources["card_template"] = _only_once(_template_digest, config.publish.card_template)
    return sources


def _rows_digest(data: DataConfig, which: Which) -> str:
    """Digest of rows; those of a local file are checked, as the data stage does."""
    digest, source = source_digest(data, which), resolve_source(data, which, pinned=False)
    if source.kind in ("jsonl", "parquet"):
        from refiner_core.data.rows import check_first_rows

        check_first_rows(source)
    return digest


def _rows(data: DataConfig) -> DataConfig:
    """The settings that select the rows, without their later use."""
    return DataConfig(**{name: getattr(data, name) for name in _NAMES_ROWS})


_NAMES_ROWS = (
    *("sft_path", "sft_split", "sft_revision", "rl_path", "rl_split", "rl_revision"),
    *("synthetic_sft_rows", "synthetic_rl_rows", "synthetic_seed"),
)


def _of_measuring(config: RecipeConfig) -> dict[str, str]:
    """Digests of rubrics and judge."""
    sources, reward = dict[str, str](), config.reward
    if config.environment.name and config.environment.nl_assertions != "judge":
        return sources  # nothing is judged
    if "static" in reward.rubric_source and not reward.instance_rubrics_only:
        from refiner_core.rubrics import rubric_set_digest

        sources["rubrics"] = _only_once(rubric_set_digest, reward.static_rubrics)
    if config.judge.kind == "openai":
        from refiner_core.judges import judge_prompts_digest

        sources["judge_prompt"] = _only_once(
            judge_prompts_digest, config.judge.prompt, config.judge.form
        )
    if serves(config.judge) and engine_of(config.judge) != "command":
        judge = config.judge
        if not Path(resolve_ref(judge.model)).is_dir():
            sources[JUDGE_WEIGHTS] = f"{HUB_DIGEST}{judge.model}@{judge.revision or 'main'}"
    return sources


@contextlib.contextmanager
def read_each_once() -> Iterator[None]:
    """Context in which a file named by several configurations is read and hashed once: all trials
    of a sweep are planned with the same rows and weights, however long planning takes."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


_known: ContextVar[dict[Any, str] | None] = ContextVar("known", default=None)


def _only_once(digest: Callable[..., str], *names: Any) -> str:
    """``digest(*names)``, cached within :func:`read_each_once`."""
    known = _known.get()
    if known is None:
        return digest(*names)
    if (digest, names) not in known:
        known[digest, names] = digest(*names)
    return known[digest, names]


def _template_digest(name: str) -> str:
    """Digest of a template, which must parse: an error must not appear after days of training."""
    from refiner_core.cards.build import check_template

    path = Path(name)
    expected = "a Jinja file in UTF-8, such as `refiner card template` prints"
    with readable(f"publish.card_template {path}", expected):
        data = path.expanduser().read_bytes()
        text = data.decode()
    check_template(text)
    return hashlib.sha256(data).hexdigest()


def model_digest(name_or_path: str, revision: str) -> str:
    """Digest of a model: its files' content, or ``hub:NAME@REVISION``."""
    resolved = resolve_ref(name_or_path)
    path = Path(resolved)
    if not path.is_dir():
        return f"{HUB_DIGEST}{name_or_path}@{revision}"
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            f"The model folder {path} has no config.json.",
            expected="a folder that transformers can load (config.json, *.safetensors)",
            fix="set model.name_or_path to such a folder, a Hub id, or builtin:tiny",
        )
    return folder_digest(path)


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of a model folder's files, in name order."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        if path.suffix == ".md" or path.name.startswith("."):
            continue
        total.update(f"{path.name}:{path.stat().st_size}:".encode())
        total.update(_content_digest(path))
    return total.hexdigest()


def _content_digest(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        edges = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(-_EDGE_BYTES, 2)
        edges.update(file.read())
        return edges.digest()
