"""What of an exception was the user simulator's, and how.

In: what was raised while the user was asked. Out: an
:class:`~refiner_core.environments.protocol.InfrastructureError`. What servers say is quoted
nowhere, because they like to quote keys: only the class of the error and its status are.

================== ==============================================================================
``user_slow``      no answer in time
``user_down``      no connection, a refusal (wrong key, model or address), a server's own error
``user_off_script`` an answer that is none: nothing said, an unreadable call of a tool, a chat
                   completion without a choice, tools called without end, or in vain
================== ==============================================================================

A reply that is no JSON is ``user_down``: LiteLLM makes a server's error of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from refiner_core.contract.config import UserConfig
from refiner_core.environments.protocol import InfrastructureError

#: By name, since its client need not be importable here.
_SLOW = frozenset(
    {"Timeout", "TimeoutError", "APITimeoutError", "ReadTimeout", "TimeoutException", "PoolTimeout"}
)
_DOWN = frozenset(
    {
        *("APIConnectionError", "APIStatusError", "ConnectionError", "ConnectError", "OSError"),
        *("InternalServerError", "ServiceUnavailableError", "RateLimitError", "TransportError"),
        *("AuthenticationError", "PermissionDeniedError", "NotFoundError", "BadRequestError"),
    }
)
#: Base of all errors of its client; those that are none of the above.
_CLIENT = frozenset({"APIError", "OpenAIError"})
_UNREADABLE = frozenset({"APIResponseValidationError", "JSONSchemaValidationError"})


def user_fault(error: BaseException, user: UserConfig) -> InfrastructureError:
    """The error of the infrastructure that stands for ``error``."""
    kind, detail = _kind(error)
    words = {
        "user_slow": f"did not answer within {user.timeout_s:g} s",
        "user_down": "could not be asked",
        "user_off_script": "gave no usable answer",
    }[kind]
    fixes = {
        "user_slow": "raise the user's timeout_s, or give its server more room",
        "user_down": f"check its base_url, model and key ({user.api_key_env}), and its server",
        "user_off_script": "use a model that follows instructions and calls tools, and a server "
        "that reads its calls",
    }
    return InfrastructureError(
        f"The simulated user {user.model} {words} ({detail}, after {user.max_retries} more tries).",
        kind=kind,
        expected="one message, or calls of its tools",
        fix=fixes[kind],
    )


def off_script(what: str, user: UserConfig) -> InfrastructureError:
    """A user that answers, but not as a user does."""
    return InfrastructureError(
        f"The simulated user {user.model} {what}.",
        kind="user_off_script",
        expected="a customer who says what the scenario tells them",
        fix="use a model that follows instructions and calls tools",
    )


def _kind(error: BaseException) -> tuple[str, str]:
    for one in _chain(error):
        names = {base.__name__ for base in type(one).__mro__}
        if names & _UNREADABLE:
            return "user_off_script", _shown(one)
        if names & _SLOW:
            return "user_slow", _shown(one)
        if names & _DOWN or (names & _CLIENT):
            return "user_down", _shown(one)
    return "user_off_script", _shown(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """It and what it came from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _shown(error: BaseException) -> str:
    status = getattr(error, "status_code", None)
    code = f" {status}" if isinstance(status, int) and status else ""
    return f"{type(error).__name__}{code}"
