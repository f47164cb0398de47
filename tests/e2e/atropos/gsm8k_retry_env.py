"""The same task in two turns, on the real atroposlib: after a wrong answer the model gets one retry."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from atroposlib.envs.base import ScoredDataGroup
from gsm8k_env import GSM8kEnv, conversation, is_right

CORRECTION = "That is wrong. Correct your answer. "


class GSM8kRetryEnv(GSM8kEnv):
    name = "gsm8k_retry"

    async def collect_trajectories(self, item: dict[str, str]) -> tuple[ScoredDataGroup | None, list[Any]]:
        answered = await asyncio.gather(*(self.talk(item) for _ in range(self.config.group_size)))
        return self.score(item, list(answered)), []

    async def talk(self, item: dict[str, str]) -> tuple[str, Any]:
        messages = conversation(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await self.ask(managed, messages)
            if not is_right(reply, item):
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": CORRECTION}]
                reply = await self.ask(managed, messages)
            (node,) = managed.get_state()["nodes"]
        return reply, node

    async def ask(self, managed: Any, messages: list[dict[str, str]]) -> str:
        answer = await managed.chat_completion(
            messages=messages, n=1, max_tokens=self.config.max_token_length // 2, temperature=1.0
        )
        return answer.choices[0].message.content


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    GSM8kRetryEnv.cli()
