"""What a completion says: the text that rewards, judges and people read.

In: a tokenizer and a completion. Out: its text, without the token that ended it.
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
    if completion.finish_reason == "stop" and ids and ids[-1] in set(tokenizer.all_special_ids):
        ids.pop()
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
