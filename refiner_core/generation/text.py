"""What a completion says: the text that rewards, judges and people read.

In: a tokenizer and a completion. Out: its text, without the token that ended it; and the token that
should have ended it. Training and evaluation read completions through this file alone, so that a
reward is given for the text that is evaluated.
"""

from __future__ import annotations

from typing import Any

from refiner_core.contract.types import Completion


def completion_text(tokenizer: Any, completion: Completion) -> str:
    """The text of a completion.

    Only the final stop token is dropped. Other special tokens stay visible: a policy that opens a
    new turn inside its answer has not kept the format, and a decoder that skips them would hide it.
    """
    ids = list(completion.token_ids)
    if _ended_by_token(tokenizer, completion):
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def closing_ids(tokenizer: Any, completion: Completion) -> tuple[int, ...]:
    """The end-of-text token where a completion stopped without one, at a stop string; else nothing.

    Training appends it, as the reference trainer does: a model that has only ever been cut off at a
    stop string never learns to end.
    """
    stopped = completion.finish_reason == "stop"
    if not stopped or _ended_by_token(tokenizer, completion) or tokenizer.eos_token_id is None:
        return ()
    return (int(tokenizer.eos_token_id),)


def _ended_by_token(tokenizer: Any, completion: Completion) -> bool:
    ids = completion.token_ids
    stopped = completion.finish_reason == "stop"
    return stopped and bool(ids) and ids[-1] in tokenizer.all_special_ids
