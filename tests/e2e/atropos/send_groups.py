"""What the real client does with the hub's answers: sends a good group and bad ones, and prints what happened as JSON.

`python send_groups.py HUB_URL TOKENIZER_FOLDER`. The hub must have a started trainer and room for one group only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

import aiohttp
from digits_env import GROUP_SIZE, DigitsEnv


class Lines(logging.Handler):
    """Keeps what the client logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "root" or record.name.startswith("atroposlib"):
            self.kept.append(f"{record.levelname} {record.getMessage()}")


def group(**fields: Any) -> dict[str, Any]:
    tokens = [[5, 6, 7, *range(10, 60), 10 + i] for i in range(GROUP_SIZE)]
    masks = [[-100] * 3 + t[3:] for t in tokens]
    logprobs = [[1.0] * 3 + [-0.5] * (len(t) - 3) for t in tokens]
    scores = [0.1 * i for i in range(GROUP_SIZE)]
    return {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs} | fields


def bad_group() -> dict[str, Any]:
    """The mask of one sequence lacks its last place."""
    bad = group()
    bad["masks"][1].pop()
    return bad


async def main(url: str, tokenizer: str) -> None:
    lines = Lines()
    logging.getLogger().addHandler(lines)
    logging.getLogger().setLevel(logging.DEBUG)
    config, (server,) = DigitsEnv.config_init()
    config = config.model_copy(update={"rollout_server_url": url, "tokenizer_name": tokenizer, "wandb_name": "sender"})
    env = DigitsEnv(config, [server.model_copy(update={"model_name": tokenizer, "base_url": "http://127.0.0.1:9/v1"})])
    await env.register_env()
    await env.get_server_info()
    report: dict[str, Any] = {"packed": await packed(env, url)}
    cases = {"bad": bad_group(), "list_with_a_bad_one": [group(), bad_group()], "too_many": group()}
    for name, posted in cases.items():
        lines.kept.clear()
        began = time.monotonic()
        await env.handle_send_to_api(posted)
        report[name] = {"seconds": time.monotonic() - began, "log": list(lines.kept)}
    print(json.dumps(report))


async def packed(env: DigitsEnv, url: str) -> dict[str, Any]:
    """The client's own way of sending a group, with the headers that it really sent."""
    async with (
        aiohttp.ClientSession() as session,
        env._post_json_with_compression(session, f"{url}/scored_data", group(env_id=env.env_id)) as answer,
    ):
        sent = answer.request_info.headers
        return {
            "encoding": sent.get("Content-Encoding"),
            "bytes": int(sent["Content-Length"]),
            "plain_bytes": len(json.dumps(group(env_id=env.env_id))),
            "status": answer.status,
            "answer": await answer.json(),
        }


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
