"""Small value types and protocols between packages. Torch-free.

Science (``refiner_core``) is written against these protocols; ``infra`` and tests implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from refiner_core.contract.errors import NoSpaceError

# ---------------------------------------------------------------- judging


@dataclass(frozen=True)
class JudgeRequest:
    """One question to a judge.

    ``text`` is judged against ``reference``, by ``kind``:

    ================== ========================== ===============================
    kind               text                       reference
    ================== ========================== ===============================
    rubric             answer, tags as sampled    the rubric's description
    citation_recall    claim                      text of the evidence cited
    citation_needed    uncited plain text         answer, tags as sampled
    citation_precision claim                      text of one cited snippet
    ================== ========================== ===============================
    """

    kind: Literal["rubric", "citation_recall", "citation_needed", "citation_precision"]
    question: str
    text: str
    reference: str = ""


@dataclass(frozen=True)
class Judgement:
    """A judge's verdict. ``score`` is in [0, 1] and is None exactly when ``status`` is failed."""

    status: Literal["scored", "failed"]
    score: float | None
    detail: str = ""


#: In the detail of a failed judgement: there was a reply, but it is not a judgement.
UNPARSABLE, CUT_SHORT = "unparsable judgement", "the judgement ended by"
#: In the detail of a reply without a score that has reasoning, whole or cut.
REASONING = "reasoning in the place of a score"
#: The setting that most models with a switch for reasoning understand, and all ways out.
THINKING_OFF = """judge.extra_body='{"chat_template_kwargs": {"enable_thinking": false}}'"""
WITHOUT_REASONING = (
    f"set {THINKING_OFF} (or the field of this model that switches reasoning off), or "
    "judge.max_tokens=8192 with a reasoning parser in judge.serve.args"
)


class Judge(Protocol):
    """Scores requests; never raises for a single bad answer, it returns a failed judgement."""

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order.

        Raises
        ------
        JudgeOutage
            No server could be asked for longer than the configuration allows.
        Interrupted
            A stop was requested during a wait.
        """


@runtime_checkable
class StreamingJudge(Judge, Protocol):
    """A judge that works while its caller does something else, and remembers answers."""

    def submit(self, requests: Sequence[JudgeRequest]) -> Callable[[], list[Judgement]]:
        """Start judging and return at once: a function that waits for the judgements, one per
        request, in order; errors as in :meth:`Judge.judge`."""

    def usage(self) -> JudgeUsage:
        """Usage since it was created."""

    def fresh(self, mark: str) -> StreamingJudge:
        """The same judge, which remembers only questions asked under ``mark``.

        Its answers are stored under the mark alone, and used under no other. It counts with this
        judge and ends with it.
        """


@dataclass(frozen=True)
class JudgeUsage:
    """Counts of a judge's work; the difference of two is that of the time between.

    ``asked`` judgements were requested: ``stored`` of them came from the store, ``shared`` were the
    same question as another one in flight, ``failed`` have no score; the rest was scored by calls.
    ``answers`` counts HTTP answers by status, ``lost`` tries without a whole answer by reason
    (``refused``: never sent; ``connection``, ``truncated``, ``too_long``, ``timeout``,
    ``given_up``), ``unusable`` answers of status 200 without a usable judgement by reason;
    ``retries`` the tries after a first one; ``reasoned`` answers with reasoning before the score;
    ``served`` the servers' names of themselves, by usable replies. Tokens are those that servers
    reported. Requests in flight when an error ended the work are counted in ``asked`` alone.
    """

    asked: int = 0
    stored: int = 0
    shared: int = 0
    failed: int = 0
    calls: int = 0
    retries: int = 0
    answers: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    unusable: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0  # sum over answered calls
    paused_s: float = 0.0  # all servers were unavailable
    reasoned: int = 0
    served: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Endpoint:
    """Address of a judge. ``key`` is a secret: it is shown nowhere."""

    url: str
    key: str = field(default="", repr=False)


class StoredJudgement(NamedTuple):
    """A stored judgement, always a scored one. Tokens are those of its call, so that a report can
    give its cost."""

    score: float
    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgementStore(Protocol):
    """Stores judgements by a digest (16 bytes) of everything that determines the answer."""

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Stored judgements, in order."""

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Store one; cheap, never raises for a full disk. Thread-safe."""

    def flush(self) -> None:
        """Sync all judgements to the disk."""


@dataclass(frozen=True)
class RewardResult:
    """The reward of one rollout and every part of it.

    ``status``: ``scored``; ``malformed`` (the policy's fault: judge and citation parts are 0 by
    rule); ``unscored`` (the judge failed: ``total`` is None and the rollout leaves the batch).
    ``components`` holds each part under its own name; ``judgements`` is JSON-ready detail.
    """

    status: Literal["scored", "malformed", "unscored"]
    total: float | None
    components: Mapping[str, float]
    judgements: Sequence[Mapping[str, Any]] = ()


# ---------------------------------------------------------------- generation


@dataclass(frozen=True)
class SamplingParams:
    """``temperature`` 0 is greedy. ``stop_strings`` stay in the text."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One sample of one prompt; its randomness depends only on ``seed``."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """Sampled tokens (the stop token included) with the sampler's own log-probabilities.

    For an episode with tools, ``token_ids`` is everything after the prompt, in order: the model's
    own tokens and those of tools, user and template. ``own`` has one value per token, True if the
    model sampled it (None: everywhere); other log-probabilities are NaN. ``episode`` is the
    JSON form of its :class:`refiner_core.environments.protocol.EpisodeRecord`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    own: tuple[bool, ...] | None = None
    episode: Mapping[str, Any] | None = None


OnCompletion = Callable[[int, Completion], None]


class Generator(Protocol):
    """Samples completions for prompts."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """One completion per request, in order, independent of how they are batched.

        ``on_completion(index, completion)`` is called once per request as soon as that sample is
        finished, in any order, in the thread of the call; its exceptions end the call.
        """


@dataclass(frozen=True)
class TurnRequest:
    """The next turn of a conversation.

    ``context_ids`` is the whole conversation so far. It begins with the context of the
    conversation's previous turn; the tokens sampled then follow unchanged, or (if the turn was
    repaired) not at all. So a generator may keep one cache per ``conversation``.
    """

    conversation: int
    context_ids: tuple[int, ...]
    seed: int
    params: SamplingParams


class Turns(NamedTuple):
    """Output of a :class:`TurnScheduler`: turns to begin, conversations that have ended since, and
    whether there may be further turns at all."""

    begin: tuple[TurnRequest, ...]
    ended: tuple[int, ...]
    more: bool


class TurnScheduler(Protocol):
    """Source of turns and receiver of completions. Only the generator's thread calls it."""

    def take(self, room: int, *, wait: bool) -> Turns:
        """Turns that begin now: of known conversations, any number, and of at most ``room`` new
        ones.

        With ``wait`` (nothing is being decoded) it returns at least one turn, or one ended
        conversation, which frees its place, unless there are no more. Without it, it is quick; an
        ordered desk may wait for tools all the same. A generator ends when nothing is being decoded
        and there are no more turns, so the desk may be called again after it has reported that.
        """

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        """Receive a sampled turn. Exceptions end the call. Quick: tools belong into threads."""


@runtime_checkable
class TurnGenerator(Protocol):
    """Samples the turns of many conversations, each as early as possible."""

    def turns(self, desk: TurnScheduler) -> None:
        """Work until the desk has no more turns. The same answers of the desk to the same calls
        give the same bits: turns join by steps of decoding, not by seconds."""


class RolloutServers(Protocol):
    """Servers that sample rollouts, for a trainer that sends them weights; ``infra`` starts and
    ends them.

    Not thread-safe, except for :meth:`close`.
    """

    def start(self, weights: Path) -> list[Endpoint]:
        """Start all of them on a model folder, wait until they answer, and return their addresses.

        Raises
        ------
        RefinerError
            A server cannot be started; none is left running.
        """

    def replace(self, index: int, weights: Path, why: str) -> Endpoint:
        """End one at once, start another in its place, and return its address.

        Raises
        ------
        KilledError
            Servers had to be replaced more often than the recipe allows.
        """

    def weights_of(self, index: int, weights: Path) -> str:
        """Path of a model folder as one of them reads it: on its own node."""

    def close(self) -> None:
        """End all of them, with their children."""


# ---------------------------------------------------------------- a stage at work


@dataclass(frozen=True)
class Progress:
    """Progress of a stage, for its heartbeat and its progress bar."""

    done: int
    total: int
    phase: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path


class StageIO(Protocol):
    """Interface of a running stage to its workspace. The implementation handles paths and fencing.

    Metrics and rollouts belong to steps: when a stage resumes from the checkpoint of step *k*,
    those of later steps are removed, and those up to *k* are kept.
    """

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's numbers (under the reference's names). Steps only grow."""

    def save_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store a step's rollouts with their reward components (one Parquet file per step)."""

    def latest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint of this stage, from any attempt, its contents verified."""

    def pass_over(self, checkpoint: SavedCheckpoint, why: str) -> None:
        """Mark the newest checkpoint as unreadable: from now on the one before it is the newest.
        Before anything is logged."""

    def new_checkpoint(self, step: int) -> AbstractContextManager[Path]:
        """A folder to write into; complete and visible only after the block ended without error.

        It may be called from another thread than the rest, one checkpoint at a time; so may
        :meth:`room_again`.

        Raises
        ------
        NoSpaceError
            It did not fit; nothing half-written stays visible.
        """

    def room_again(self, error: NoSpaceError) -> bool:
        """Wait a while for space after a write that did not fit. True: try it again."""

    def keep_checkpoints(self, steps: Sequence[int]) -> list[SavedCheckpoint]:
        """Keep the checkpoints of these steps, existing or to come, beside the newest ones, and
        release those of an earlier call. Returns the complete ones, in order."""

    def progress(self, progress: Progress) -> None:
        """Report the stage's progress. Cheap; call it every step and within long ones."""

    def should_stop(self) -> bool:
        """Whether to save at the next step boundary and raise ``Interrupted``."""


# ---------------------------------------------------------------- prepared rows

#: Mode of rows whose answers are the answer block and nothing else.
ANSWER_ONLY = "answer_only"


def whole_text(text: str) -> str:
    """Text that can be encoded: unpaired surrogates, which foreign JSON may contain, become
    U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True)
class PromptRow:
    """One prepared prompt, for rollouts or evaluation.

    ``prompt_text`` is the user's message in the row (evidence is parsed from it); ``prompt_ids`` is
    the rendered chat up to the assistant's turn. ``truth`` is known to a generator of rows and
    hidden from rewards; None for real rows.
    """

    sample_id: str
    question: str
    prompt_text: str
    prompt_ids: tuple[int, ...]
    rubrics: str
    refiner_mode: str = ANSWER_ONLY
    truth: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class DemonstrationRow:
    """One prepared demonstration: token ids and a loss mask."""

    sample_id: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


ViewState = Literal[
    "waiting",  # for inputs, for a free local slot, or for the end of a pause between two attempts
    "paused",  # for disk space; it continues by itself
    "queued",  # submitted; the scheduler has not started it yet, or has suspended it
    "running",  # started by this call
    "reattached",  # found running, started by an earlier call or another process
    "skipped",  # was done before this call
    "done",  # finished during this call
    "failed",
    "interrupted",  # stopped on request or resumable; the same command continues
    "blocked",  # an input failed
]
TERMINAL: frozenset[ViewState] = frozenset({"skipped", "done", "failed", "interrupted", "blocked"})


@dataclass(frozen=True)
class StageView:
    """Current state of a stage, for display."""

    name: str
    kind: str
    fingerprint: str
    state: ViewState
    attempt: int = 0
    job_id: str | None = None
    progress: Progress | None = None
    seconds: float = 0.0  # worked, summed over this call's attempts
    message: str = ""
    log: str = ""  # path of the newest attempt's log
    exit_code: int = 0  # of a failed or interrupted stage (errors.EXIT_CODES)
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Whether the state is final for this call."""
        return self.state in TERMINAL
