"""A reply that calls tools, as OpenAI's clients read it. What was sampled stays as it was. Pure, but for fresh ids."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.envs.base import Message
from treadle.envs.tool_calls import ToolCall, find_tool_calls, without_tool_calls


@dataclass(frozen=True)
class Spoken:
    """One reply: the whole text as it was sampled, and its parts."""

    whole: str
    content: str | None  # what is said beside the calls; None: nothing
    calls: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's shape

    @property
    def message(self) -> Message:
        told: Message = {"role": "assistant", "content": self.content}
        return told | {"tool_calls": list(self.calls)} if self.calls else told


def understand(text: str, *, has_tools: bool) -> Spoken:
    """Calls are looked for where the agent offered tools. With one among them that is broken, the reply is text."""
    found = find_tool_calls(text) if has_tools else []
    calls = [call for call in found if isinstance(call, ToolCall)]
    if not calls or len(calls) < len(found):
        return Spoken(text, text)
    return Spoken(text, without_tool_calls(text).strip() or None, tuple(_as_openai(call) for call in calls))


def _as_openai(call: ToolCall) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
