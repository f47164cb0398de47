"""An environment on the real atroposlib: the more digits an answer has, the better. `python digits_env.py serve ...`.

Not ours to shape: the loop, the retries, the checks before sending and the wire are atroposlib's own. A random model
already scores between 0 and 1 here, so that almost every group has the spread without which atroposlib drops it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

GROUP_SIZE = 4


class DigitsConfig(BaseEnvConfig):
    turns: int = 1
    max_new_tokens: int = 24
    record: str = ""  # file in which each group is noted before it is sent


class DigitsEnv(BaseEnv):
    name = "digits"
    env_config_cls = DigitsConfig

    @classmethod
    def config_init(cls) -> tuple[DigitsConfig, list[APIServerConfig]]:
        config = DigitsConfig(
            group_size=GROUP_SIZE, max_num_workers=1, max_token_length=128, steps_per_eval=0, use_wandb=False
        )
        # Our engine wants no key, but the OpenAI client that atroposlib makes beside its own refuses an empty one.
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    async def setup(self) -> None:
        self._next = 0

    async def get_next_item(self) -> dict[str, int]:
        self._next += 1
        return {"number": self._next}

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[ScoredDataGroup, list[Any]]:
        if self.config.turns == 1:
            nodes = await self._rollouts(item, n=self.config.group_size)
        else:  # several turns branch from the first answer on: a session of its own for each rollout
            one_by_one = (self._rollouts(item, n=1) for _ in range(self.config.group_size))
            nodes = [node for (node,) in await asyncio.gather(*one_by_one)]
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            scores=[self._share_of_digits(node) for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
        ), []

    async def postprocess_histories(self, trajectories: ScoredDataGroup) -> ScoredDataGroup:
        if self.config.record:
            self._note(trajectories)
        return trajectories

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing is held out."""

    async def _rollouts(self, item: dict[str, int], n: int) -> list[Any]:
        messages = [{"role": "user", "content": f"number {item['number']} is"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(self.config.turns):
                if turn > 0:
                    messages.append({"role": "user", "content": "and the next one is"})
                answer = await managed.chat_completion(
                    messages=messages, n=n, max_tokens=self.config.max_new_tokens, temperature=1.0
                )
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            return managed.get_state()["nodes"]

    def _note(self, group: ScoredDataGroup) -> None:
        with Path(self.config.record).open("a") as record:
            record.write(json.dumps(group) + "\n")

    def _share_of_digits(self, node: Any) -> float:
        answered = self.tokenizer.decode([token for token in node.masked_tokens if token != -100])
        return sum(c.isdigit() for c in answered) / max(1, len(answered.replace(" ", "")))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    DigitsEnv.cli()
