"""Grade-school math on the real atroposlib, as its users write it: `python gsm8k_env.py serve ...`.

One question, several answers in `\\boxed{}`; +1 or -1 by math_verify; the shorter the better once all are right.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    ScoredDataGroup,
)
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

SYSTEM_PROMPT = "Think between <think> and </think>. Then give the number in \\boxed{}. "
FEWEST_TRAINED_TOKENS = 10

BOXED_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
    ),
    boxed_match_priority=0,
    try_extract_without_anchor=False,
)


class GSM8kConfig(BaseEnvConfig):
    data_file: str = "gsm8k.jsonl"
    num_held_out: int = 2


class GSM8kEnv(BaseEnv):
    name = "gsm8k"
    env_config_cls = GSM8kConfig

    @classmethod
    def config_init(cls) -> tuple[GSM8kConfig, list[APIServerConfig]]:
        config = GSM8kConfig(
            group_size=4,
            max_num_workers=1,
            max_token_length=256,
            steps_per_eval=2,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
        )
        return config, [APIServerConfig(num_max_requests_at_once=32, num_requests_for_eval=8)]

    async def setup(self) -> None:
        rows = read_rows(self.config.data_file)
        self.test, self.train = rows[: self.config.num_held_out], rows[self.config.num_held_out :]
        random.Random(42).shuffle(self.train)
        self.iter = 0

    async def get_next_item(self) -> dict[str, str]:
        row = self.train[self.iter % len(self.train)]
        self.iter += 1
        return row

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    async def collect_trajectories(self, item: dict[str, str]) -> tuple[ScoredDataGroup | None, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=conversation(item),
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        reply = [choice.message.content for choice in answer.choices]
        return self.score(item, list(zip(reply, nodes, strict=True))), []

    def score(self, item: dict[str, str], answered: list[tuple[str, Any]]) -> ScoredDataGroup | None:
        random.shuffle(answered)
        kept = [
            (reply, node)
            for reply, node in answered
            if sum(token != -100 for token in node.masked_tokens) >= FEWEST_TRAINED_TOKENS
        ]
        scores = [1.0 if is_right(reply, item) else -1.0 for reply, _ in kept]
        if scores and all(score == 1.0 for score in scores):
            scores = [self.shortness(len(node.tokens)) for _, node in kept]
        if len(set(scores)) < 2:
            return None
        return ScoredDataGroup(
            tokens=[node.tokens for _, node in kept],
            masks=[node.masked_tokens for _, node in kept],
            scores=scores,
            inference_logprobs=[node.logprobs for _, node in kept],
        )

    def shortness(self, length: int) -> float:
        free = 0.5 * self.config.max_token_length
        return 1.0 - min(1.0, max(0.0, (length - free) / (self.config.max_token_length - free)))

    async def evaluate(self, *_: Any, **__: Any) -> None:
        began = time.time()
        right = await asyncio.gather(*(self.is_solved(item) for item in self.test))
        await self.evaluate_log(
            metrics={"eval/percent_correct": sum(right) / len(right)},
            start_time=began,
            end_time=time.time(),
            generation_parameters={"temperature": 0.6, "max_tokens": self.config.max_token_length},
        )

    async def is_solved(self, item: dict[str, str]) -> bool:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=conversation(item),
                n=1,
                max_tokens=self.config.max_token_length,
                temperature=0.6,
                split="eval",
            )
        return is_right(answer.choices[0].message.content, item)


def read_rows(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def conversation(item: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": item["question"]}]


def is_right(reply: str, item: dict[str, str]) -> bool:
    gold = item["answer"].split("#")[-1].strip().replace(",", "")
    _, _, final = reply.rpartition("</think>")
    answer = parse(final, extraction_config=[BOXED_LATEX], extraction_mode="first_match")
    return verify(answer, parse(f"\\boxed{{{gold}}}", extraction_mode="first_match"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    GSM8kEnv.cli()
