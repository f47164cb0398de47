"""Tasks, rewards and the program of the agent, written as the library's documentation says."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI


class DigitsData(vf.TaskData):
    answer: str = ""


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        """The share of the replies' characters that are digits: even a model of random weights differs in it."""
        replies = "".join(str(message.content or "") for message in trace.assistant_messages)
        return sum(letter.isdigit() for letter in replies) / max(1, len(replies))

    @vf.metric
    async def num_replies(self, trace: vf.Trace) -> float:
        return len(trace.assistant_messages)


class DigitsConfig(vf.TasksetConfig):
    num_tasks: int = 20


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> Iterator[DigitsTask]:
        if not self.config.num_tasks:
            raise LookupError("the numbers are not\ndownloaded yet")
        for number in range(self.config.num_tasks):
            data = DigitsData(prompt=f"Say {number}", system_prompt="Digits only. ", answer=str(number))
            yield DigitsTask(data, self.config.task)


class DigitsHarnessConfig(vf.HarnessConfig):
    second_prompt: str = "And again"


class DigitsHarness(vf.Harness[DigitsHarnessConfig]):
    """A loop in this process; every call goes through the library's interception, as its contract wants it."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for turn in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                if turn == 0:
                    messages.append({"role": "user", "content": self.config.second_prompt})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
