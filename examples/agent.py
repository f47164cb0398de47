"""A plain agent: OpenAI's client, a loop, a tool. It has no training code, and is trained unmodified.

    treadle env agent serve --env.data rows.jsonl --env.args '{"command": "python examples/agent.py"}'

with rows like {"question": "What is 17 * 23?", "answer": "391"}. It is started once for every rollout; OPENAI_BASE_URL
and OPENAI_API_KEY, which the client reads automatically, point to the model. The client: pip install openai
"""

import json
import os
import sys
import urllib.request

import openai

MAX_TURNS = 4
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def solve(client: openai.OpenAI, messages: list[dict]) -> str:
    """Call the model until it answers without a tool call; return its last reply."""
    reply = None
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        reply = answer.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})
    return (reply.content if reply else None) or ""


def multiply(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(given["a"] * given["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"  # the model made the call, so it gets the error


def post_score(url: str, score: float) -> None:
    body = json.dumps({"score": score}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()  # noqa: S310


if __name__ == "__main__":
    item = json.load(sys.stdin)
    # Remove them from the environment: a tool that runs programs for the model must not pass on the answer or the URL.
    score_url, _ = os.environ.pop("TREADLE_SCORE_URL"), os.environ.pop("TREADLE_ITEM", None)
    said = solve(openai.OpenAI(), item["messages"])
    post_score(score_url, float(item["answer"] in said))
