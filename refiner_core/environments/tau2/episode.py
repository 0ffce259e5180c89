"""One conversation of tau2-bench, stepped turn by turn.

In: a task, tau2-bench's parts, the user's settings. Out: messages, and an outcome.

tau2's orchestrator carries messages between agent, user and tools; this module advances it until
the agent's next turn, and passes our agent's message. Everything runs in the caller's thread.

Attributes of tau2's tasks and simulations, and values derived from them.

In: values of the package. Out: plain values.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from refiner_core.contract.config import UserConfig
from refiner_core.contract.errors import Interrupted, RefinerError
from refiner_core.contract.types import Judge, JudgeRequest
from refiner_core.environments.protocol import (
    Check,
    Failure,
    InfrastructureError,
    Message,
    Outcome,
    Step,
    ToolCall,
)
from refiner_core.environments.tau2.package import Parts

#: Kinds of faults by parts of the names of errors, since its client may not be importable here;
#: any other error means that the user's answer was unusable.
_FAULTS = {
    "user_off_script": "Validation",
    "user_slow": "Timeout",
    "user_down": "API|OpenAI|OSError|Connect|Transport|Server|RateLimit",
}


def user_fault(error: BaseException, user: UserConfig) -> InfrastructureError:
    """The infrastructure error for ``error``, by the first known type in its chain of causes: the
    simulated user is down, slow or off-script."""
    one: BaseException | None = error
    while one is not None:
        names = " ".join(base.__name__ for base in type(one).__mro__)
        for kind, known in _FAULTS.items():
            if re.search(known, names):
                status = getattr(one, "status_code", None) or ""
                said = f"gave no answer ({type(one).__name__} {status}".rstrip()
                return off_script(f"{said}, after {user.max_retries} more tries)", user, kind)
        one = one.__cause__
    return off_script(f"gave no usable answer ({type(error).__name__})", user)


def off_script(what: str, user: UserConfig, kind: str = "user_off_script") -> InfrastructureError:
    """Error for a user that does not behave like one."""
    return InfrastructureError(
        f"The simulated user {user.model} {what}.",
        kind=kind,
        expected="words of the customer in the scenario, or calls of the user's tools",
        fix=f"check its base_url, model, key ({user.api_key_env}) and server, raise its timeout_s "
        "or max_tokens, or use a model that follows instructions and calls tools",
    )


SPEAK, FINISH = "respond", "done"
#: Errors of tools, including the user's, after which tau2-bench ends an episode; its own default.
MAX_ERRORS = 10
#: Tool calls of a user between two of its messages.
_MOST_USER_CALLS = 50
_SEEDS = 2**31
#: tau2's names of normal ends of an episode.
_STOPPED = ("agent_stop", "user_stop")


@dataclass(eq=False)
class Tau2Episode:
    """Implements :class:`~refiner_core.environments.protocol.Episode`.

    ``task`` is tau2-bench's object, ``tools`` are the agent's by name. ``judge`` is None if
    assertions in plain language are excluded.
    """

    parts: Parts
    domain: str
    task: Any
    tools: Mapping[str, Any]
    max_steps: int
    user: UserConfig
    user_args: Callable[[], dict[str, Any]]
    judge: Judge | None
    _orchestrator: Any = None
    _agent: Any = None
    _seed: int = 0

    # ---- Episode

    def reset(self, seed: int) -> tuple[Message, ...]:
        """Start: tau2-bench's agent greets, and the user states its request."""
        self._seed, self._calls = seed, 0
        self._tools: list[str] = []
        self._errors: list[str] = []
        self._begun, self._began_at = time.monotonic(), datetime.now(tz=UTC).isoformat()
        self._id = str(uuid.uuid4())
        self._start()
        self._turn_until_agent()
        if self._orchestrator.done:
            raise off_script("ended the conversation before it began", self.user)
        return (*earlier_messages(self.task), self._told())

    def step(self, call: ToolCall) -> Step:
        """One turn of the agent; calls that tau2-bench could not take are answered here."""
        if self._orchestrator is None:
            raise RuntimeError("call reset() first")
        if self._orchestrator.done:
            return Step((), done=True)
        self._calls += 1
        self._tools.append(call.name)
        refused = self._refused(call)
        if refused is not None:
            self._errors.append("wrong_argument")
            return Step((Message("tool", refused),), tool_error="wrong_argument")
        self._agent.given = self._message(call)
        self._turn_until_agent()
        last = self._orchestrator.message
        error = self._tool_error(call, last)
        if error:
            self._errors.append(error)
        if self._orchestrator.done:
            told = (self._told(),) if not isinstance(last, self.parts.AssistantMessage) else ()
            return Step(told, done=True, tool_error=error)
        return Step((self._told(),), tool_error=error)

    def outcome(self) -> Outcome:
        """tau2's own evaluation. An interrupted episode is worth 0, as in tau2; its checks are
        those that hold as it stands."""
        if self._orchestrator is None:
            raise RuntimeError("call reset() first")
        reason = self._reason()
        simulation = self._simulation()
        measured, reward_info = self._measure(simulation)
        if reason not in _STOPPED:
            measured = replace(measured, reward=0.0)
        failure = failure_of(measured, reason=reason, tools=self._tools, errors=self._errors)
        record = slim(simulation.model_dump(mode="json", exclude_none=True))
        record["termination_reason"] = reason or "max_steps"
        return Outcome(
            reward=measured.reward,
            checks=measured.checks,
            components=dict(measured.components),
            excluded=measured.excluded,
            failure=failure,
            info={"simulation": record, "reward_info": {**reward_info, "reward": measured.reward}},
        )

    def close(self) -> None:
        """Do nothing: there are no resources."""
        self._orchestrator = self._agent = None

    # ---- start

    def _start(self) -> None:
        parts = self.parts
        environment = parts.registry.get_env_constructor(self.domain)(solo_mode=False)
        self._agent = _agent_class(parts)(list(environment.get_tools()), environment.get_policy())
        user = parts.UserSimulator(
            tools=_user_tools(environment, self.task),
            instructions=self.task.user_scenario,
            llm=f"openai/{self.user.model}",
            llm_args=self.user_args(),
        )
        self._orchestrator = parts.Orchestrator(
            domain=self.domain,
            agent=self._agent,
            user=user,
            environment=environment,
            task=self.task,
            max_steps=self.max_steps,
            max_errors=MAX_ERRORS,
            seed=self._seed % _SEEDS,
            solo_mode=False,
        )
        try:
            self._orchestrator.initialize()
        except Exception as error:
            raise _crashed("a task could not be begun", error) from error

    # ---- stepping

    def _turn_until_agent(self) -> None:
        """Advance until the agent must speak, or the episode is over."""
        orchestrator, role = self._orchestrator, self.parts.Role
        user_calls = 0
        while not orchestrator.done:
            if orchestrator.to_role == role.AGENT and self._agent.given is None:
                return
            asks_user = orchestrator.to_role == role.USER
            try:
                orchestrator.step()
            except Exception as error:
                if asks_user:
                    raise user_fault(error, self.user) from None
                raise _crashed("a step failed", error) from error
            self._end_at_limits()
            user_calls += asks_user and orchestrator.to_role == role.ENV
            if user_calls > _MOST_USER_CALLS:
                raise off_script(f"called {user_calls} tools without a word in between", self.user)

    def _end_at_limits(self) -> None:
        """Apply the limits, as tau2's own loop does after every step."""
        orchestrator, reasons = self._orchestrator, self.parts.TerminationReason
        if orchestrator.to_role == self.parts.Role.ENV:
            return
        if orchestrator.step_count >= orchestrator.max_steps:
            orchestrator.done, orchestrator.termination_reason = True, reasons.MAX_STEPS
        if orchestrator.num_errors >= orchestrator.max_errors:
            self._blame_user()
            orchestrator.done, orchestrator.termination_reason = True, reasons.TOO_MANY_ERRORS

    def _blame_user(self) -> None:
        """Blame the user if most of the failed tool calls, which tau2 counts for both sides, were
        the user's."""
        answers = (m for m in self._orchestrator.trajectory if getattr(m, "error", False))
        by_user = sum(answer.requestor == "user" for answer in answers)
        if 2 * by_user > self._orchestrator.num_errors:
            raise off_script(f"made {by_user} calls of tools that failed", self.user)

    def _message(self, call: ToolCall) -> Any:
        parts, said = self.parts, None
        if call.name == SPEAK:
            said = str(call.arguments["content"])
        elif call.name == FINISH:
            said = parts.GymAgent.STOP_TOKEN
        if said is not None:
            return parts.AssistantMessage(role="assistant", content=said, cost=0.0)
        made = parts.ToolCall(
            id=f"call_{self._calls}",
            name=call.name,
            arguments=dict(call.arguments),
            requestor="assistant",
        )
        return parts.AssistantMessage(role="assistant", tool_calls=[made], cost=0.0)

    def _refused(self, call: ToolCall) -> str | None:
        """Reason for refusing a message to the user; None if it is valid, or no message."""
        if call.name != SPEAK:
            return None
        said = call.arguments.get("content")
        if set(call.arguments) != {"content"} or not isinstance(said, str) or not said.strip():
            return f"Error: {SPEAK} takes one argument, content: the text of your message."
        return None

    def _told(self) -> Message:
        """The last message as the agent sees it."""
        last = self._orchestrator.message
        said = str(last.content or "")
        return Message("tool" if isinstance(last, self.parts.ToolMessage) else "user", said)

    def _tool_error(self, call: ToolCall, last: Any) -> Literal["", "wrong_tool", "wrong_argument"]:
        if not isinstance(last, self.parts.ToolMessage) or not last.error:
            return ""
        known = call.name in self.tools
        return "wrong_argument" if known else "wrong_tool"

    # ---- the end

    def _reason(self) -> str:
        reason = self._orchestrator.termination_reason
        return "" if reason is None else str(getattr(reason, "value", reason))

    def _simulation(self) -> Any:
        """The simulation in tau2's format, marked as normally ended: otherwise its evaluation
        ignores everything."""
        reason = self._reason()
        return self.parts.SimulationRun(
            id=self._id,
            task_id=self.task.id,
            start_time=self._began_at,
            end_time=datetime.now(tz=UTC).isoformat(),
            duration=time.monotonic() - self._begun,
            termination_reason=reason if reason in _STOPPED else "agent_stop",
            messages=self._orchestrator.get_trajectory(),
            seed=self._seed % _SEEDS,
        )

    def _measure(self, simulation: Any) -> tuple[_EpisodeWorth, dict[str, Any]]:
        parts, task = self.parts, self.task
        basis = basis_of(task)
        try:
            info = parts.evaluate_simulation(
                simulation=simulation,
                task=without_assertions(task) if NL_BASIS in basis else task,
                evaluation_type=parts.EvaluationType.ALL,
                solo_mode=False,
                domain=self.domain,
            ).model_dump(mode="json")
        except Exception as error:
            raise _crashed("its evaluation failed", error) from error
        measured, assertions = read_reward_info(info), assertions_of(task)
        if NL_BASIS not in basis or not assertions:
            return measured, info
        judge = self.judge
        if judge is None:
            return replace(measured, excluded=("nl",)), info
        transcript = "\n".join(lines_of(simulation.messages))
        return with_judged(measured, assertions, transcript, judge), info


def _agent_class(parts: Parts) -> type[Any]:
    """Its gym's agent, but given its message in advance, so that nothing waits."""

    base: Any = parts.GymAgent

    class PreparedAgent(base):  # type: ignore[misc]
        def __init__(self, tools: list[Any], policy: str) -> None:
            super().__init__(tools=tools, domain_policy=policy)
            self.given: Any = None

        def set_seed(self, seed: int) -> None:
            """Do nothing: sampling happens elsewhere."""

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            given, self.given = self.given, None
            return given, state

    return PreparedAgent


def _user_tools(environment: Any, task: Any) -> list[Any] | None:
    """The tools of a user; None if the domain has none."""
    include = getattr(task, "user_tools", None)
    try:
        tools = environment.get_user_tools(**({} if include is None else {"include": include}))
    except ValueError:  # its way of saying "not available"
        return None
    return list(tools) or None


def _crashed(what: str, error: Exception) -> InfrastructureError:
    return InfrastructureError(
        f"tau2-bench: {what} ({type(error).__name__}: {error}).",
        kind="tool_crashed",
        expected="that its tools answer whatever an agent does",
        fix="if it comes back, leave the task out and report it to tau2-bench",
    )


NL_BASIS = "NL_ASSERTION"
_COMPONENTS = {
    "DB": "db",
    "ENV_ASSERTION": "env_assertions",
    "ACTION": "action",
    "COMMUNICATE": "communicate",
    NL_BASIS: "nl",
}
HANDING_OVER = "transfer_to_human_agents"
_QUESTION = "A conversation of a service agent with a customer, and with tools."


@dataclass(frozen=True)
class _EpisodeWorth:
    """Measured value of an episode."""

    reward: float
    components: Mapping[str, float]
    checks: tuple[Check, ...]
    excluded: tuple[str, ...] = ()


def read_reward_info(reward_info: Mapping[str, Any] | str) -> _EpisodeWorth:
    """Components and checks.

    Raises
    ------
    InfrastructureError
        It has another shape (kind ``unreadable_reward``): no number is invented for it.
    """
    try:
        values = json.loads(reward_info) if isinstance(reward_info, str) else reward_info
        reward = _number(values["reward"])
        parts = values.get("reward_breakdown") or {}
        components = {_COMPONENTS[name]: _number(part) for name, part in parts.items()}
        return _EpisodeWorth(reward, components, tuple(_checks(values)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InfrastructureError(
            f"The reward_info of tau2-bench cannot be read ({type(error).__name__}: {error}).",
            kind="unreadable_reward",
            expected="a reward, reward_breakdown, and lists of checks, as version 1.0 has them",
            fix="install a version that this adapter was tested with (1.0)",
        ) from error


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is no number")
    return number


def _checks(values: Mapping[str, Any]) -> list[Check]:
    checks = []
    for one in values.get("action_checks") or ():
        action = one["action"]
        name, met = str(action.get("action_id") or action["name"]), _truth(one["action_match"])
        checks.append(Check("action", name, met, _call_text(action)))
    for one in values.get("communicate_checks") or ():
        checks.append(Check("communicate", str(one["info"]), _truth(one["met"])))
    for one in values.get("env_assertions") or ():
        assertion = one["env_assertion"]
        name = f"{assertion['func_name']}({_json(assertion.get('arguments') or {})})"
        checks.append(Check("environment", name, _truth(one["met"])))
    if values.get("db_check") is not None:
        checks.append(Check("db", "database", _truth(values["db_check"]["db_match"])))
    for one in values.get("nl_assertions") or ():
        checks.append(Check("nl", str(one["nl_assertion"]), _truth(one["met"])))
    return checks


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _call_text(action: Mapping[str, Any]) -> str:
    by = "the user: " if action.get("requestor") == "user" else ""
    return f"{by}{action['name']}({_json(action.get('arguments') or {})})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def with_judged(
    measured: _EpisodeWorth, assertions: Sequence[str], transcript: str, judge: Judge
) -> _EpisodeWorth:
    """Add assertions in plain language, each put to the judge: an assertion holds if
    the judge gives the full score.

    Raises
    ------
    InfrastructureError
        A judgement failed, or the judge is unreachable (kind ``judge_failed``).
    Interrupted
        A stop was requested while waiting for the judge's servers.
    """
    requests = [JudgeRequest("rubric", _QUESTION, transcript, text) for text in assertions]
    try:
        judgements = judge.judge(requests)
    except Interrupted:
        raise
    except RefinerError as error:
        raise _judge_failed(str(error)) from error
    checks = []
    for text, judgement in zip(assertions, judgements, strict=True):
        if judgement.score is None:
            raise _judge_failed(judgement.detail or "a judgement failed")
        checks.append(Check("nl", text, judgement.score >= 1.0 - 1e-9, f"{judgement.score:g}"))
    holds = float(all(check.passed for check in checks))
    return replace(
        measured,
        reward=measured.reward * holds,
        components={**measured.components, "nl": holds},
        checks=(*measured.checks, *checks),
    )


def _judge_failed(why: str) -> InfrastructureError:
    return InfrastructureError(
        f"The judge did not say whether an assertion holds: {why}",
        kind="judge_failed",
        expected="a score for each assertion",
        fix="check the judge's log, or set environment.nl_assertions=exclude",
    )


def failure_of(
    measured: _EpisodeWorth, *, reason: str, tools: Sequence[str], errors: Sequence[str]
) -> Failure | None:
    """Reason why an episode failed, None if it did not; the first applicable one of
    :data:`~refiner_core.environments.protocol.FAILURES`.

    ``reason`` is tau2-bench's reason for the end (empty: it was interrupted); ``tools`` are the
    agent's calls in order, ``errors`` the refusals of tools (``wrong_tool``, ``wrong_argument``).
    A refusal because of content counts as a wrong argument: tau2-bench does not distinguish rules
    from values.
    """
    if measured.reward >= 1.0 - 1e-9:
        return None
    if reason not in ("agent_stop", "user_stop"):
        return "limit"
    if "wrong_tool" in errors:
        return "wrong_tool"
    if "wrong_argument" in errors:
        return "wrong_argument"
    actions = [check for check in measured.checks if check.kind == "action"]
    wanted = any(HANDING_OVER in check.detail for check in actions)
    if HANDING_OVER in tools and not wanted:
        return "gave_up"
    if reason == "agent_stop" and actions and not any(check.passed for check in actions):
        return "gave_up"
    return "incomplete"


#: Fields of its messages that its own tools read.
_KEPT = frozenset(
    {
        *("role", "content", "tool_calls", "id", "requestor", "error", "turn_idx", "timestamp"),
        *("cost", "usage", "generation_time_seconds"),
    }
)


def basis_of(task: Any) -> tuple[str, ...]:
    """Factors of a task's reward, by tau2's names."""
    criteria = task.evaluation_criteria
    if criteria is None:
        return ()
    return tuple(str(getattr(basis, "value", basis)) for basis in criteria.reward_basis or ())


def assertions_of(task: Any) -> tuple[str, ...]:
    """A task's assertions in plain language."""
    criteria = task.evaluation_criteria
    return () if criteria is None else tuple(criteria.nl_assertions or ())


def without_assertions(task: Any) -> Any:
    """The task without assertions in its reward's basis."""
    copy = task.model_copy(deep=True)
    criteria = copy.evaluation_criteria
    criteria.reward_basis = [
        basis for basis in criteria.reward_basis if getattr(basis, "value", basis) != NL_BASIS
    ]
    return copy


def earlier_messages(task: Any) -> tuple[Message, ...]:
    """The conversation before a task that starts in the middle, as one message: an agent cannot be
    given words of its own."""
    state = task.initial_state
    history = [] if state is None else list(state.message_history or ())
    if not history:
        return ()
    said = "\n".join(lines_of(history[:-1]))
    return (Message("user", f"What was said before you took over:\n{said}"),)


def lines_of(messages: Sequence[Any]) -> list[str]:
    """Lines of a conversation, one for each message."""
    lines = []
    for message in messages:
        for call in getattr(message, "tool_calls", None) or ():
            lines.append(f"{message.role} calls {call.name}({call.arguments})")
        if message.content:
            lines.append(f"{message.role}: {message.content}")
    return lines


def slim(simulation: dict[str, Any]) -> dict[str, Any]:
    """A simulation reduced to the fields that tau2's own tools read."""
    messages = simulation.get("messages", [])
    kept = [{k: v for k, v in message.items() if k in _KEPT} for message in messages]
    return {**simulation, "messages": kept}
