"""The configuration of a run: frozen dataclasses, every field marked and documented.

One section per stage (`data`, `sft`, `grpo`, `publish`, `evaluate`) plus what several stages share
(`model`, `reward`, `judge`) and what only steers the run (`tracking`, `dispatch`, `disk`,
`notify`). Field names of training are those of the reference trainer (open-instruct's GRPO), so
that a seed card's flags read the same here. Values at class level are the defaults of a full-size
run; recipes set the rest.

Text comes in through :mod:`refiner_core.contract.loading`, which turns YAML and overrides into
these classes and refuses what does not fit. Cross-field checks live in
:mod:`refiner_core.contract.checks.recipe`.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic.dataclasses import dataclass

from refiner_core.contract.marks import STRICT, added, execution, identity, section
from refiner_core.contract.steering_config import DiskConfig as DiskConfig
from refiner_core.contract.steering_config import DispatchConfig as DispatchConfig
from refiner_core.contract.steering_config import NotifyConfig as NotifyConfig
from refiner_core.contract.steering_config import Resources as Resources
from refiner_core.contract.steering_config import RetryConfig as RetryConfig
from refiner_core.contract.steering_config import TrackingConfig as TrackingConfig
from refiner_core.contract.training_config import CurriculumConfig as CurriculumConfig
from refiner_core.contract.training_config import EnvironmentConfig as EnvironmentConfig
from refiner_core.contract.training_config import GrpoConfig as GrpoConfig
from refiner_core.contract.training_config import HealthConfig as HealthConfig
from refiner_core.contract.training_config import RolloutServerConfig as RolloutServerConfig
from refiner_core.contract.training_config import SampleConfig as SampleConfig
from refiner_core.contract.training_config import SftConfig as SftConfig
from refiner_core.contract.training_config import ShapingConfig as ShapingConfig
from refiner_core.contract.training_config import UserConfig as UserConfig

#: Doubled braces, the shell's own ``${…}``, or a placeholder.
PLACEHOLDER = re.compile(r"\{\{|\}\}|\$\{[^}]*\}|\{(?P<name>[A-Za-z_]+)\}")


@dataclass(frozen=True, config=STRICT)
class CommandConfig:
    """A training script of somebody else's, run under the same care (stage `command`).

    ``run``, ``resume_arguments`` and the values of ``env`` may use these placeholders, which come
    quoted for the shell (in ``env`` as they are). ``{{`` and ``}}`` stand for single braces.

    ``{output}``
        folder for what it makes; the same one in all attempts.
    ``{seed}``, ``{workdir}``
        run seed; folder it starts in.
    ``{data}``
        output folder of the `data` stage.
    ``{model}``
        folder of the model that it starts from: the recipe's newest one, else the base model.
    ``{resume}``
        ``resume_arguments``; nothing as long as there is no complete checkpoint.
    ``{checkpoint}``
        the newest complete checkpoint (in ``resume_arguments`` only).
    """

    run: str = identity("", doc="the shell command that trains")
    version: str = identity("", doc="a name for the script's state, when its text is not in `run`")
    adopted: str = identity(
        "", doc="digest of the weights that `refiner adopt` has taken over, in the place of `run`"
    )
    env: tuple[str, ...] = identity((), doc="settings for it, `NAME=VALUE` each; no secrets")
    workdir: str | None = execution(None, doc="folder it starts in; none is where `refiner` ran")
    resume_arguments: str = execution(
        "", doc="what `{resume}` becomes from the second start on, e.g. `--resume {checkpoint}`"
    )
    checkpoints: str = execution(
        "checkpoint-*", doc="pattern of its checkpoint folders or files, below `{output}`"
    )
    step_pattern: str = execution(
        r"(\d+)(?!.*\d)", doc="regular expression whose group is the step in a checkpoint's name"
    )
    complete: str = execution(
        "weights",
        doc="when a checkpoint counts: `weights` (every shard can be read, and it has what its "
        "siblings have), `file:NAME` (that file is there), or `quiet:SECONDS` (unchanged for so "
        "long)",
    )
    keep: int = execution(2, ge=1, doc="complete checkpoints kept when room is short, at least 1")
    heartbeat: Literal["output", "files"] = execution(
        "output", doc="sign of life: something printed, or something written below `{output}`"
    )
    progress_pattern: str = execution(
        r"[Ss]tep[ :=]+(?P<step>\d+)(?:\s*/\s*(?P<total>\d+))?",
        doc="regular expression on printed lines: groups `step`, `total`, and any metric by name",
    )
    exports: str = identity(
        "auto", doc="folder of the final weights below `{output}`; `auto` is the newest checkpoint"
    )
    companions: str = identity(
        "",
        doc="folder with the config and tokenizer that exports lack; `{model}` is the model that "
        "it starts from",
    )
    stop_signal: Literal["TERM", "INT", "USR1", "USR2"] = execution(
        "TERM", doc="signal that asks it to save and end"
    )
    needs_network: bool = execution(False, doc="whether it must run where the internet is")
    resources: Resources = section(Resources, doc="resources of its job")


def uses(command: CommandConfig, placeholder: str) -> bool:
    """Say whether a command's texts name ``{placeholder}``."""
    texts = (command.run, command.resume_arguments, command.companions, *command.env)
    return any(placeholder in placeholders(text) for text in texts)


def placeholders(text: str) -> list[str]:
    """The names in single braces, in order: ``{{x}}`` and the shell's ``${x}`` are none."""
    return [m.group("name") for m in PLACEHOLDER.finditer(text) if m.group("name")]


#: Judges that are word overlap, the default first: see :mod:`refiner_core.judges.lexical`.
LEXICAL_MODELS = ("lexical-1", "lexical-loose-1")


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
        "instance", doc="which rubrics a rollout is judged by"
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


@dataclass(frozen=True, config=STRICT)
class ServeConfig:
    """A judge's server that refiner starts, shares and ends by itself.

    Nothing here changes what a judgement is, so that stages do not run again because their judge is
    served elsewhere; servers are shared by those who would start the same one.
    """

    engine: Literal["none", "vllm", "transformers", "command"] = execution(
        "none",
        doc="what serves `judge.model`: vLLM, `transformers serve`, or `judge.serve_command`; "
        "`none`, or an address in `judge.base_url`, uses that server",
    )
    where: Literal["job", "beside"] = execution(
        "job",
        doc="`job`: a job of its own, shared by all that judge alike; `beside`: within the job "
        "that judges, on its resources",
    )
    python: str | None = execution(
        None,
        doc="interpreter of the environment that has the engine; none is the first `vllm` (or "
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
        1800.0, gt=0, doc="how long it may take from its start until it answers, seconds"
    )
    idle_timeout_s: float = execution(
        600.0, ge=0, doc="it ends when nobody has held a lease for this long, seconds"
    )


@dataclass(frozen=True, config=STRICT)
class JudgeConfig:
    """Who scores rubrics and citations."""

    kind: Literal["lexical", "openai"] = identity(
        "lexical",
        doc="`lexical`: deterministic word overlap; `openai`: any OpenAI-compatible server",
    )
    model: str = identity(
        LEXICAL_MODELS[0],
        doc="name of the judge model; of the lexical one `lexical-1`, or `lexical-loose-1`, which "
        "is content with less",
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
        doc="ask the server to write JSON of a schema; `auto`: where the server takes it",
        legacy_value="none",
    )
    temperature: float | None = identity(
        0.0, ge=0, doc="sampling temperature of the judge; null is not sent"
    )
    max_tokens: int = identity(
        512, ge=1, doc="longest judgement; one that ends by length is a failure"
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
        "max_tokens", doc="what the server calls the limit; newer OpenAI models take the second"
    )
    concurrency: int = execution(256, ge=1, doc="requests in flight")
    timeout_s: float = execution(
        120.0, gt=0, doc="deadline of one judgement, seconds; pauses of an outage do not count"
    )
    batch_timeout_s: float = execution(
        3600.0,
        gt=0,
        doc="deadline of what is asked together (in training, a rollout's judgements), seconds; "
        "pauses do not count",
    )
    max_retries: int = execution(5, ge=0, doc="tries after a retryable failure")
    outage_patience_s: float = execution(
        900.0,
        ge=0,
        doc="how long a step waits for servers that are all gone, seconds; then the attempt ends "
        "as `judge outage` and is taken up again later",
    )
    cache_gb: float = execution(
        1.0, ge=0, doc="largest size of the workspace's store of judgements, GiB; 0 keeps none"
    )
    serve_command: str | None = execution(
        None,
        doc="command that serves the judge, with {model}, {revision}, {host} and {port}; its key "
        "is in the environment as REFINER_SERVER_KEY",
    )
    serve: ServeConfig = section(ServeConfig, doc="a server that refiner starts")
    resources: Resources = section(Resources, doc="resources of the judge's server")


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The model that the first training stage starts from."""

    name_or_path: str = identity(
        "builtin:tiny",
        doc="Hub id, local folder, or shipped: `builtin:tiny`, for agents `builtin:tiny-tools`",
    )
    revision: str = identity("main", doc="Hub revision (commit, tag or branch) of the model")
    tokenizer_name_or_path: str | None = identity(
        None, doc="tokenizer, where it is not the model's own"
    )
    chat_template: str | None = identity(
        None, doc="Jinja chat template text that replaces the tokenizer's own"
    )
    dtype: Literal["float32", "bfloat16"] = identity("float32", doc="weights and compute type")
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2"] = identity(
        "sdpa", doc="attention kernel; part of the identity because sums are taken in another order"
    )
    gradient_checkpointing: bool = execution(False, doc="recompute activations to save memory")
    cpu_threads: int = identity(
        1,
        ge=1,
        doc="threads of one CPU process; sums are taken in another order with another number",
    )


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """From raw rows to tokenised training, validation and held-out sets."""

    sft_path: str | None = identity(
        "builtin:synthetic",
        doc="demonstrations: JSONL, Parquet, `datasets` folder, Hub id, or `builtin:synthetic`",
    )
    sft_split: str = identity("train", doc="split of a `datasets` folder or Hub data set")
    sft_revision: str | None = identity(None, doc="pinned Hub revision; required for a Hub id")
    rl_path: str | None = identity(
        "builtin:synthetic", doc="prompts with rubrics; forms as of `data.sft_path`"
    )
    rl_split: str = identity("train", doc="split of a `datasets` folder or Hub data set")
    rl_revision: str | None = identity(None, doc="pinned Hub revision; required for a Hub id")
    held_out_fraction: float = identity(
        0.1, doc="share of questions kept from training, for evaluation (0 < x < 1)"
    )
    validation_fraction: float = identity(
        0.05,
        ge=0,
        le=1,
        doc="share of demonstrations kept for the SFT validation loss (0 <= x < 1)",
    )
    max_prompt_token_length: int = identity(
        6144, ge=1, doc="longer prompts are dropped and counted, never cut (tokens)"
    )
    refiner_mode: str | None = identity(
        None, doc="keep only rows of this mode, e.g. `answer_only`; none keeps all"
    )
    max_sft_rows: int | None = identity(None, ge=1, doc="use at most this many demonstrations")
    max_rl_rows: int | None = identity(None, ge=1, doc="use at most this many prompts")
    synthetic_sft_rows: int = identity(
        3000, ge=1, doc="rows that `builtin:synthetic` makes for SFT"
    )
    synthetic_rl_rows: int = identity(1000, ge=1, doc="rows that `builtin:synthetic` makes for RL")
    split_seed: int = identity(
        0, doc="seed of the split; not the run seed, so that all seeds of an arm share prompts"
    )
    synthetic_seed: int = identity(0, doc="seed of the generated facts (not of the split)")
    all_held_out: bool = added(
        False,
        doc="keep every prompt from training: rows that are there to evaluate on (see "
        "`evaluate.protocols`)",
    )
    resources: Resources = section(Resources, doc="resources of the data job")


@dataclass(frozen=True, config=STRICT)
class PublishConfig:
    """Which checkpoints go where, and with what card.

    `which`, `steps` and `evaluate` say which publications there are, not what one of them is, so
    they invalidate nothing that is published already.
    """

    target: Literal["folder", "hub"] = identity("folder", doc="a folder in Hub layout, or the Hub")
    path: str | None = identity(None, doc="folder target; none is WORKSPACE/published")
    repo_id: str = identity(
        "refiner/{recipe}-seed{seed}-{fingerprint}",
        doc="repository, OWNER/NAME on the Hub; may use {recipe}, {seed}, {step} and {fingerprint} "
        "(of the weights)",
    )
    which: Literal["final", "every-save", "best", "listed"] = added(
        "final",
        doc="checkpoints that are published: the last, every saved one, the best by an evaluation, "
        "or `steps`; all but the last while training goes on",
    )
    steps: tuple[int, ...] = added((), doc="with which=listed: the steps")
    evaluate: bool = added(True, doc="evaluate each published step for its card")
    best_metric: str = added("reward", doc="with which=best: the metric that decides")
    best_decoding: Literal["greedy", "sampled"] = added(
        "greedy", doc="with which=best: the decoding that it is taken from"
    )
    per_step: Literal["tag", "branch", "repository"] = added(
        "tag",
        doc="how steps share a repository: `tag` (main moves on, each step keeps a tag), `branch` "
        "(each step has one), `repository` (each has its own: {step} in repo_id)",
    )
    replace: bool = execution(
        False, doc="put this run's weights in the place of another run's in the same repository"
    )
    malformed: bool = execution(
        False, doc="publish a trained model none of whose answers was well formed, too"
    )
    private: bool = identity(True, doc="Hub only: create the repository private")
    license: str = identity("apache-2.0", doc="licence in the card's front matter")
    files: tuple[str, ...] = added(
        (),
        doc="patterns of the exported files that go along (README.md always does); none: all that "
        "a model needs",
    )
    card_template: str | None = added(
        None,
        doc="a Jinja file to make the card from, which goes along in refiner.json; none is the "
        "shipped one",
    )
    request_timeout_s: float = execution(60.0, doc="Hub only: deadline of one small request")
    patience_s: float = execution(
        300.0, doc="Hub only: how long one attempt bears rate limits and outages before it pauses"
    )
    price_per_gpu_hour: float | None = execution(
        None, doc="what a GPU costs an hour, for the card's cost; none: GPU-hours alone"
    )
    currency: str = execution("USD", doc="currency of `price_per_gpu_hour`")
    resources: Resources = section(Resources, doc="resources of the publish job")


@dataclass(frozen=True, config=STRICT)
class EvaluateConfig:
    """The protocol of an evaluation, and which models it is applied to."""

    models: tuple[Literal["base", "sft", "rft", "grpo", "command"], ...] = identity(
        ("base", "sft", "rft", "grpo", "command"),
        doc="models evaluated, where the recipe makes them",
    )
    decoding: tuple[Literal["greedy", "sampled"], ...] = identity(
        ("greedy", "sampled"), doc="decodings evaluated, each a protocol of its own"
    )
    max_prompts: int | None = identity(
        None,
        ge=1,
        doc="use at most this many held-out prompts: the first, of tasks the first of each domain "
        "by its share",
    )
    num_samples: int = identity(4, ge=1, doc="samples per prompt of the sampled decoding")
    temperature: float = identity(1.0, ge=0, doc="temperature of the sampled decoding")
    top_p: float = identity(
        1.0, gt=0, le=1, doc="nucleus sampling of the sampled decoding; 1 is off"
    )
    top_k: int = added(
        0, ge=0, doc="the sampled decoding draws from the likeliest tokens only; 0 is off"
    )
    user: UserConfig = section(
        UserConfig, doc="the user in evaluation: another one than in training, where it has a model"
    )
    bootstrap_samples: int = identity(2000, ge=1, doc="resamples behind each interval of a mean")
    seed: int = identity(1234, doc="sampling seed; the same for every run, so that arms pair up")
    batch_size: int = identity(
        256,
        ge=1,
        doc="samples decoded together; sums are taken in another order with another number",
    )
    occasion: str = added(
        "",
        doc="evaluate afresh for this occasion: with another name nothing is taken from an earlier "
        "evaluation, nor from the store of judgements",
    )
    protocols: tuple[str, ...] = added(
        (),
        doc="protocol files (shipped names, or YAML files): each model is evaluated under each of "
        "them too; a configuration holds what they say, as JSON",
    )
    fresh_reference: bool = execution(
        True,
        doc="ask a served judge about the random copier's answers anew in every evaluation, "
        "whatever the store knows: the control against a judge that drifts; one answer a prompt",
    )
    resources: Resources = section(Resources, doc="resources of the evaluation job")


@dataclass(frozen=True, config=STRICT)
class RecipeConfig:
    """A whole recipe."""

    recipe: str = execution("unnamed", doc="name of the recipe")
    description: str = execution("", doc="one paragraph for people")
    workspace: str = execution("runs", doc="folder that holds records, outputs, checkpoints, logs")
    log_level: Literal["debug", "info", "warning", "error"] = execution("info", doc="of stage logs")
    data_root: str | None = execution(
        None, doc="folder for the large files, where they lie on another disk than `workspace`"
    )
    stages: tuple[Literal["data", "sft", "rft", "grpo", "command", "publish", "evaluate"], ...] = (
        execution(
            ("data", "sft", "grpo", "publish", "evaluate"),
            doc="stages of the recipe (execution: what a stage *is* follows from its inputs); "
            "`rft` is two: `sample`, and SFT on what was kept",
        )
    )
    only: tuple[str, ...] = execution(
        (), doc="names of the stages that this call is about; the others must be there already"
    )
    seed: int = identity(42, doc="run seed: split, order, sampling")
    model: ModelConfig = section(ModelConfig, doc="the model that training starts from")
    data: DataConfig = section(DataConfig, doc="rows to tokens")
    sft: SftConfig = section(SftConfig, doc="supervised fine-tuning")
    sample: SampleConfig = section(SampleConfig, doc="attempts to fine-tune on, and what is kept")
    rft: SftConfig = section(SftConfig, doc="supervised fine-tuning on the attempts that were kept")
    grpo: GrpoConfig = section(GrpoConfig, doc="GRPO")
    command: CommandConfig = section(CommandConfig, doc="another trainer")
    reward: RewardConfig = section(RewardConfig, doc="the reward")
    judge: JudgeConfig = section(JudgeConfig, doc="the judge")
    environment: EnvironmentConfig = section(
        EnvironmentConfig, doc="what an agent with tools works in"
    )
    publish: PublishConfig = section(PublishConfig, doc="publishing")
    evaluate: EvaluateConfig = section(EvaluateConfig, doc="evaluation")
    tracking: TrackingConfig = section(TrackingConfig, doc="experiment tracking")
    dispatch: DispatchConfig = section(DispatchConfig, doc="jobs")
    disk: DiskConfig = section(DiskConfig, doc="room on the disk")
    notify: NotifyConfig = section(NotifyConfig, doc="who hears of it")
