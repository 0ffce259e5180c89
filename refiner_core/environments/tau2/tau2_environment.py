"""Tasks, splits, policies and tools of tau2-bench behind our interface.

In: the configuration, the simulated user and a judge. Out: :class:`Tau2Environment`. The package is
imported on first use.

A task's id is ``DOMAIN-ID``, since tau2's own ids are unique only within a domain.
``environment.tasks`` may name a file with custom splits, JSON of the form
``{DOMAIN: {SPLIT: [ID, ...]}}``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from refiner_core.contract.config import EnvironmentConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.types import Judge
from refiner_core.environments.protocol import Task, ToolSpec
from refiner_core.environments.tau2.episode import (
    FINISH,
    MAX_ERRORS,
    NL_BASIS,
    SPEAK,
    Tau2Episode,
    assertions_of,
    basis_of,
)
from refiner_core.environments.tau2.package import (
    DATA_VARIABLE,
    DOMAINS,
    Parts,
    files_digest,
    load_tau2,
    widen_client,
)

_SUMMARY = 160
#: Sent to servers that need no key: the client refuses to work without one.
_NO_KEY = "none"
_TURNS = (
    "# How you act\n"
    f"Every turn of yours is exactly one tool call. To say something to the user, call `{SPEAK}`: "
    "the user sees nothing else. Where the user could do something with their own device or "
    f"account, ask them to. When everything is settled, call `{FINISH}`.\n\n"
)
_CONTENT = {"content": {"type": "string", "description": "The text of the message."}}
_SPOKEN = (
    ToolSpec(
        SPEAK,
        "Say something to the user, and wait for the answer.",
        {"type": "object", "properties": _CONTENT, "required": ["content"]},
    ),
    ToolSpec(
        FINISH,
        "End the conversation, when the user needs nothing more.",
        {"type": "object", "properties": {}},
    ),
)


class Tau2Environment:
    """Implements :class:`~refiner_core.environments.protocol.Environment`.

    Parameters
    ----------
    user
        Model and endpoint of the user simulator, called by tau2-bench through LiteLLM
        (``openai/MODEL``); the key is read from ``user.api_key_env`` when an episode starts and
        stored nowhere else. An empty ``base_url`` means OpenAI's own.
    judge
        Judges assertions in plain language, if ``config.nl_assertions`` is ``judge``.

    Raises
    ------
    ConfigurationError
        Assertions should be judged, but there is no judge.
    """

    name: Final = "tau2"
    deterministic: Final = False
    speak: Final = SPEAK
    finish: Final = FINISH

    def __init__(
        self, config: EnvironmentConfig, user: UserConfig, judge: Judge | None = None
    ) -> None:
        if config.nl_assertions == "judge" and judge is None:
            raise ConfigurationError(
                "Assertions in plain language are to be judged, but there is no judge "
                "(environment.nl_assertions=judge).",
                expected="a judge of the recipe",
                fix="set judge.kind and judge.model, or environment.nl_assertions=exclude",
            )
        self._config, self._user = config, user
        self._judge = judge if config.nl_assertions == "judge" else None
        self._lock = threading.RLock()
        self._parts: Parts | None = None
        self._known: dict[str, dict[str, Any]] = {}
        self._made: dict[str, tuple[str, dict[str, Any]]] = {}
        self._digest = ""

    # ---- identity

    @property
    def version(self) -> str:
        """The installed version, with a digest of its code and data."""
        with self._lock:
            if not self._digest:
                self._loaded()
                self._digest = files_digest(self.domains(), self._config.tasks)
        return f"tau2 {self._loaded().version} {self._digest[:16]}"

    def domains(self) -> tuple[str, ...]:
        """The configured domains, or the three with a train and a test split."""
        return tuple(dict.fromkeys(self._config.domains)) or DOMAINS

    def describe(self) -> Mapping[str, Any]:
        """Facts that affect comparability."""
        judged = self._config.nl_assertions == "judge"
        return {
            "name": self.name,
            "version": self.version,
            "domains": list(self.domains()),
            "splits": {"train": self._config.train_split, "test": self._config.test_split},
            "max_steps": self._config.max_turns,
            "max_errors": MAX_ERRORS,
            "user": {
                "simulator": "tau2-bench's own, over LiteLLM",
                "model": self._user.model,
                "temperature": self._user.temperature,
                "max_tokens": self._user.max_tokens,
            },
            "nl_assertions": "judged by the recipe's judge" if judged else "excluded",
            "excluded": [] if judged else ["nl"],
            "reward": "the product of the components in a task's reward_basis"
            + ("" if judged else " but NL_ASSERTION, which was not measured"),
        }

    # ---- tasks

    def tasks(self, split: str) -> tuple[Task, ...]:
        """The tasks of a split, domain by domain, in tau2-bench's order."""
        found: list[Task] = []
        for domain in self.domains():
            for own_id in self._ids(domain, split):
                found.append(self._task(domain, split, self._own_task(domain, own_id)))
        return tuple(found)

    def _own_task(self, domain: str, own_id: str) -> Any:
        known = self._tasks_of(domain)
        if own_id not in known:
            raise DataError(
                f"tau2-bench has no task {own_id!r} in {domain}.",
                expected=f"ids such as {next(iter(known), '(none)')}",
                fix="complete its data, correct the file that environment.tasks names, or run the "
                "data stage again with the version that is installed now",
            )
        return known[own_id]

    def _task(self, domain: str, split: str, task: Any) -> Task:
        if (
            basis_of(task) == (NL_BASIS,)
            and assertions_of(task)
            and self._config.nl_assertions == "exclude"
        ):
            raise DataError(
                f"Nothing of {domain} {task.id} would be measured: its reward is that of "
                "assertions in plain language alone.",
                expected="environment.nl_assertions=judge, or other tasks",
                fix="set environment.nl_assertions=judge, or leave the task out by a file of "
                "splits (environment.tasks)",
            )
        return Task(
            id=f"{domain}-{task.id}",
            domain=domain,
            split=split,
            summary=_summary(task),
            data={"task_id": str(task.id)},
        )

    def _ids(self, domain: str, split: str) -> Sequence[str]:
        splits = self._splits(domain)
        if split not in splits:
            raise DataError(
                f"{domain} has no split {split!r}.",
                expected=f"one of {', '.join(sorted(splits))}",
                fix="set environment.train_split and environment.test_split, or drop the domain "
                "from environment.domains",
            )
        wanted = set(splits[split])
        ordered = [own_id for own_id in self._tasks_of(domain) if own_id in wanted]
        return ordered + sorted(wanted - set(ordered))

    def _splits(self, domain: str) -> Mapping[str, Sequence[str]]:
        if self._config.tasks is not None:
            return _splits_of_file(Path(self._config.tasks).expanduser(), domain)
        loader = self._loaded().registry.get_task_splits_loader(domain)
        splits: Any = None if loader is None else _data(domain, loader)
        # Without any splits, all of its tasks are one split.
        return {"base": list(self._tasks_of(domain))} if splits is None else splits

    def _tasks_of(self, domain: str) -> dict[str, Any]:
        with self._lock:
            if domain not in self._known:
                loader = self._of_registry(domain, "get_tasks_loader")
                self._known[domain] = {str(t.id): t for t in _data(domain, lambda: loader(None))}
            return self._known[domain]

    # ---- policy and tools

    def policy(self, domain: str) -> str:
        """Rules for turns, then tau2's policy verbatim."""
        return _TURNS + self._domain(domain)[0]

    def tools(self, domain: str) -> tuple[ToolSpec, ...]:
        """Its agent's tools, plus those that speak and end."""
        own = [tool.openai_schema["function"] for tool in self._domain(domain)[1].values()]
        return (
            *(ToolSpec(f["name"], f.get("description", ""), f["parameters"]) for f in own),
            *_SPOKEN,
        )

    def _domain(self, domain: str) -> tuple[str, dict[str, Any]]:
        with self._lock:
            if domain not in self._made:
                make = self._of_registry(domain, "get_env_constructor")
                environment = _data(domain, lambda: make(solo_mode=False))
                tools = {tool.name: tool for tool in environment.get_tools()}
                self._made[domain] = (str(environment.get_policy()), tools)
            return self._made[domain]

    def _of_registry(self, domain: str, method: str) -> Any:
        registry = self._loaded().registry
        try:
            return getattr(registry, method)(domain)
        except KeyError:
            raise ConfigurationError(
                f"tau2-bench has no domain {domain!r} (environment.domains).",
                expected=f"one of {', '.join(registry.get_domains())}",
                fix="correct environment.domains",
            ) from None

    def _loaded(self) -> Parts:
        with self._lock:
            if self._parts is None:
                self._parts = load_tau2()
                widen_client(self._config.workers)
            return self._parts

    # ---- episodes

    def episode(self, task: Task) -> Tau2Episode:
        """An attempt at a task.

        Raises
        ------
        ConfigurationError
            There is no simulated user.
        """
        if not self._user.model:
            raise ConfigurationError(
                "tau2-bench has no user without a model.",
                expected="a simulated user at an OpenAI-compatible endpoint",
                fix="set environment.user.model and environment.user.base_url",
            )
        domain, own_id = task.domain, str(task.data["task_id"])
        parts, tools, most = self._loaded(), self._domain(domain)[1], self._config.max_turns
        given = (self._own_task(domain, own_id), tools, most, self._user)
        return Tau2Episode(parts, domain, *given, self._user_args, self._judge)

    def _user_args(self) -> dict[str, Any]:
        """Arguments for LiteLLM, made for each episode, so that none of our objects keeps the
        key."""
        user = self._user
        values: dict[str, Any] = {
            "temperature": user.temperature,
            "max_tokens": user.max_tokens,
            "timeout": user.timeout_s,
            "num_retries": user.max_retries,
            "api_key": os.environ.get(user.api_key_env, "").strip() or _NO_KEY,
        }
        if user.base_url:
            values["api_base"] = user.base_url
        return values


def _summary(task: Any) -> str:
    """One line: the purpose of a task, or the user's reason to call."""
    described = getattr(task.description, "purpose", None)
    instructions = task.user_scenario.instructions
    text = described or getattr(instructions, "reason_for_call", None) or str(instructions)
    line = " ".join(str(text).split())
    return line if len(line) <= _SUMMARY else line[: _SUMMARY - 1] + "…"


def _data(domain: str, load: Any) -> Any:
    """Result of one of tau2's loaders; raises if its data files are missing."""
    try:
        return load()
    except (OSError, ValueError) as error:
        raise DataError(
            f"tau2-bench cannot read its data of {domain}: {type(error).__name__}: {error}.",
            expected=f"its folder `data`, beside its source or where {DATA_VARIABLE} says",
            fix=f"export {DATA_VARIABLE}=…/tau2-bench/data",
        ) from error


def _splits_of_file(path: Path, domain: str) -> Mapping[str, Sequence[str]]:
    """The splits of a domain from a custom file."""
    form = TypeAdapter(dict[str, dict[str, list[str]]])
    try:
        return form.validate_json(path.read_bytes(), strict=True)[domain]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} cannot be read as splits of {domain}: {type(error).__name__}: {error}.",
            expected='JSON such as {"retail": {"train": ["1"], "test": ["2"]}}, with each domain '
            "in use",
            fix="correct the file that environment.tasks names",
        ) from error
