"""Sections `reward` and `judge`: the score of an answer, and its judge."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, added, execution, identity, section
from refiner_core.contract.sections.steering import Resources

#: Judges by word overlap, the default first: see :mod:`refiner_core.judges.lexical`.
LEXICAL_MODELS = ("lexical-1", "lexical-loose-1")


@dataclass(frozen=True, config=STRICT)
class PenaltiesConfig:
    """Prices of what a reward otherwise gives away; :mod:`refiner_core.rewards.course` has the
    measures.

    A price times its measure, both 0 to 1, is subtracted from the score before
    `verification_reward`; all of them together never take it below 0.
    """

    copied: float = added(0.0, ge=0, le=1, doc="price: share of claims' words that are copied")
    copied_sources: float = added(
        0.0, ge=0, le=1, doc="price: share of the sources' words that the answer copies"
    )
    uncited: float = added(0.0, ge=0, le=1, doc="price: share of claims without sound citation")
    outside: float = added(0.0, ge=0, le=1, doc="price: share of text outside of the answer block")
    long_spans: float = added(
        0.0, ge=0, le=1, doc="price: share of words beyond `long_span_words` of their tag"
    )
    long_span_words: int = added(40, ge=1, doc="free words in a tag")
    unsupported: float = added(
        0.0, ge=0, le=1, doc="price: share of cited claims without full support"
    )
    repeated: float = added(0.0, ge=0, le=1, doc="price: share of claims that repeat another")
    length: float = added(0.0, ge=0, le=1, doc="price: share of words beyond `length_words`")
    length_words: int = added(300, ge=1, doc="free words of an answer")
    abstention: float = added(0.0, ge=0, le=1, doc="price: an answer that cites nothing")


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """How judgements and citations become one number (`--refiner_reward_*` of the reference)."""

    verification_reward: float = identity(10.0, gt=0, doc="scale of the [0, 1] score")
    apply_paper_citation_reward: bool = identity(True, doc="include the citation term")
    paper_citation_weight: float = identity(0.2, ge=0, le=1, doc="w of the citation term, 0 to 1")
    combination: Literal["convex", "additive"] = identity(
        "convex", doc="(1-w)*judge + w*citation, or judge + w*citation"
    )
    gate_judge_score_with_format_bonus: bool = identity(
        False, doc="multiply the judge term by the format bonus"
    )
    non_stop_penalty: bool = identity(
        False, doc="replace the score of a completion that did not stop"
    )
    non_stop_penalty_value: float = identity(0.0, doc="the score that replaces it")
    rubric_source: Literal["instance", "static", "instance+static", "none"] = identity(
        "instance", doc="rubrics of a rollout"
    )
    static_rubrics: str = identity(
        "v3", doc="name of a shipped rubric set, or a YAML file, for the static part"
    )
    instance_rubrics_only: bool = added(
        False, doc="drop static rubrics from the reward and from logging"
    )
    rubric_aggregation: Literal["weighted_mean", "signed_mean", "positive_sum"] = identity(
        "weighted_mean",
        doc="sum|w|s'/sum|w| with flipped negatives; sum w s/sum|w|; sum w s/max(sum w+, 1)",
    )
    penalties: PenaltiesConfig = section(PenaltiesConfig, doc="prices of what pays unearned")


@dataclass(frozen=True, config=STRICT)
class ServeConfig:
    """A judge's server that refiner starts, shares and ends by itself.

    None of its fields changes a judgement, so stages do not run again because their judge is
    served elsewhere; runs that would start the same server share one.
    """

    engine: Literal["none", "vllm", "transformers", "command"] = execution(
        "none",
        doc="server of `judge.model`: vLLM, `transformers serve`, or `judge.serve_command`; "
        "`none`, or an address in `judge.base_url`, uses that server",
    )
    where: Literal["job", "beside"] = execution(
        "job",
        doc="`job`: a job of its own, shared by all stages with the same judge; `beside`: within "
        "the stage's own job, on `judge.resources.gpus` of its GPUs (0: on those that it uses)",
    )
    python: str | None = execution(
        None,
        doc="interpreter of the engine's environment; default: the first `vllm` (or "
        "`transformers`) command on PATH after `setup`",
    )
    setup: tuple[str, ...] = execution(
        (), doc="shell lines before it starts, e.g. `module load vllm/0.33`"
    )
    container: str | None = execution(
        None, doc="words before the command, e.g. `apptainer exec --nv vllm.sif`"
    )
    args: tuple[str, ...] = execution(
        (), doc="further arguments of the engine, e.g. `--tensor-parallel-size 2`"
    )
    start_timeout_s: float = execution(
        1800.0, gt=0, doc="limit from its start to its first answer, seconds"
    )
    idle_timeout_s: float = execution(
        600.0, ge=0, doc="it ends after this time without a lease, seconds"
    )


@dataclass(frozen=True, config=STRICT)
class JudgeConfig:
    """The judge of rubrics and citations."""

    kind: Literal["lexical", "openai"] = identity(
        "lexical",
        doc="`lexical`: deterministic word overlap; `openai`: any OpenAI-compatible server",
    )
    model: str = identity(
        LEXICAL_MODELS[0],
        doc="name of the judge model; of the lexical one `lexical-1`, or `lexical-loose-1`, which "
        "is less strict",
    )
    revision: str | None = identity(None, doc="revision of the judge model")
    prompt: str = identity(
        "v2", doc="version of the judge's prompts, or a folder with prompts of your own"
    )
    form: Literal["per_rubric", "batched"] = added(
        "per_rubric", doc="a call for each rubric, or one for all rubrics of an answer"
    )
    structured_output: Literal["auto", "json_schema", "none"] = identity(
        "auto",
        doc="request JSON of a schema from the server; `auto`: if the server supports it",
        legacy_value="none",
    )
    temperature: float | None = identity(
        0.0, ge=0, doc="sampling temperature of the judge; null sends none"
    )
    max_tokens: int = identity(
        512, ge=1, doc="longest judgement (tokens); one that ends by length is a failure"
    )
    extra_body: str = added(
        "",
        doc="further fields of each request, a mapping or JSON text, e.g. "
        '`{"chat_template_kwargs": {"enable_thinking": false}}`',
    )
    max_failed_share: float = identity(
        0.2,
        ge=0,
        le=1,
        doc="stop (resumable) when more than this share of a step's rollouts is unscored",
    )
    base_url: str | None = execution(None, doc="server address, e.g. http://127.0.0.1:8000/v1")
    base_urls: tuple[str, ...] = execution(
        (), doc="further servers of the same judge; calls are balanced over all of them"
    )
    api_key_env: str = execution(
        "REFINER_JUDGE_API_KEY", doc="environment variable that holds the key"
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = execution(
        "max_tokens", doc="the server's name of the limit; newer OpenAI models use the second"
    )
    concurrency: int = execution(256, ge=1, doc="requests in flight")
    timeout_s: float = execution(
        120.0, gt=0, doc="deadline of one judgement, seconds; pauses of an outage do not count"
    )
    batch_timeout_s: float = execution(
        3600.0,
        gt=0,
        doc="deadline of a group of requests (in training, a rollout's judgements), seconds; "
        "pauses do not count",
    )
    max_retries: int = execution(5, ge=0, doc="retries after a retryable failure")
    outage_patience_s: float = execution(
        900.0,
        ge=0,
        doc="how long a step waits while no server answers, seconds; then the attempt ends as "
        "`judge outage` and is resumed later",
    )
    cache_gb: float = execution(
        1.0, ge=0, doc="largest size of the workspace's store of judgements, GiB; 0 stores none"
    )
    serve_command: str | None = execution(
        None,
        doc="command that serves the judge, with {model}, {revision}, {host} and {port}; its key "
        "is in the environment as REFINER_SERVER_KEY",
    )
    serve: ServeConfig = section(ServeConfig, doc="a server that refiner starts")
    resources: Resources = section(Resources, doc="resources of the judge's server")
