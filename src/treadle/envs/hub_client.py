"""Client of the hub for environments: register, read the step, deliver groups without losing any."""

from __future__ import annotations

import asyncio
import gzip
import os
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from treadle.envs.transport import Peer
from treadle.errors import HubError
from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE
from treadle.net.address import is_loopback, shown_url
from treadle.net.client import HttpClient, RetryPolicy
from treadle.watch.waits import Wait, Waits, WaitSpec
from treadle.wire.groups import BINARY_TYPE, ScoredGroup, join_groups, pack_group
from treadle.wire.hub import BatchInfo, EnvState, Progress, RegisteredEnv, RegisterEnv

log = get_logger("env")

_LARGEST_POST_BYTES = 12 * 2**20  # the hub takes 16 MiB compressed, and no more
_REGISTER_POLL_S = 0.25
_NO_TRAINER = "wait for trainer to start"
_CALL_TIMEOUT_S = 60.0
_CONFLICT = 409
STEP_LATE_S = 600.0  # without a step of the trainer the watchdog reports it


class HubClient(AbstractAsyncContextManager["HubClient"]):
    """Registration gives up after `retry_policy`; status calls and deliveries are retried until they succeed."""

    def __init__(
        self,
        url: str,
        *,
        retry_policy: RetryPolicy | None = None,
        transport: HttpClient | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.waits = waits or Waits()
        self._step = 0  # optimizer steps taken, as of the last standing
        self._publish_interval = 1
        self._retry_policy = retry_policy or RetryPolicy(give_up_after_s=300.0)
        self._never_give_up = RetryPolicy(None, self._retry_policy.first_pause_s, self._retry_policy.longest_pause_s)
        self._peer = Peer(
            "hub",
            url,
            error=HubError,
            timeout_s=_CALL_TIMEOUT_S,
            api_key=os.environ.get(HUB_TOKEN_VARIABLE, ""),
            transport=transport,
            waits=self.waits,
            how_to_start="start it with `treadle hub`, or name another with --env.hub-url",
        )

    async def __aexit__(self, *_: object) -> None:
        await self._peer.close()

    async def register_env(self, registration: RegisterEnv) -> RegisteredEnv:
        """Wait for the trainer and register; a known name gets its count of accepted groups back."""
        body = msgspec.json.encode(registration)
        with CurrentWait(self.waits) as current_wait:
            while True:
                response = await self._peer.send(
                    "POST", "/register-env", body=body, headers={"Treadle-Resume": "1"}, retry_policy=self._retry_policy
                )
                answer = self._peer.read(response, RegisteredEnv)
                if answer.status != _NO_TRAINER:
                    break
                current_wait.set(self.trainer_wanted)
                await asyncio.sleep(_REGISTER_POLL_S)
        if answer.status != "success":
            raise HubError(f"the hub did not register '{registration.desired_name}': {answer.status}")
        self._publish_interval = max(1, answer.publish_interval)
        return answer

    @property
    def trainer_wanted(self) -> WaitSpec:
        """The wait to report while no trainer is registered."""
        return WaitSpec(
            f"a trainer to register at the hub ({shown_url(self._peer.url)})",
            fix="start one with `treadle train`, or everything at once with `treadle run`",
            of="trainer",
        )

    async def info(self) -> BatchInfo:
        return self._peer.read(await self._peer.send("GET", "/info", retry_policy=self._retry_policy), BatchInfo)

    async def status(self) -> Progress:
        """Progress of the run; waits for a hub that restarts."""
        return self._peer.read(await self._peer.send("GET", "/status", retry_policy=self._never_give_up), Progress)

    async def standing(self, env_id: int) -> EnvState:
        """The data for deciding whether to sample more; the request also serves as this environment's heartbeat."""
        response = await self._peer.send("GET", f"/v1/envs/{env_id}", retry_policy=self._never_give_up)
        standing = self._peer.read(response, EnvState)
        self._step = standing.step
        return standing

    def oldest_version(self, max_age: int) -> int:
        """The oldest policy version that may be sampled now: `max_age` behind what the trainer has published."""
        return self._step - (self._publish_interval - 1) - max_age

    async def post_groups(self, groups: list[ScoredGroup], key: str) -> None:
        """Deliver groups exactly once: `key` is the idempotency key. Large deliveries are split."""
        await self.post_packed([pack_group(group) for group in groups], key)

    async def post_packed(self, packed: list[bytes], key: str) -> None:
        for number, part in enumerate(_parts(packed, _LARGEST_POST_BYTES)):
            body, part_key = join_groups(part), f"{key}.{number}" if number else key
            headers = {"Idempotency-Key": part_key, "Content-Type": BINARY_TYPE}
            if not is_loopback(self._peer.url):  # on one machine, to compress costs more than to copy
                body = await asyncio.to_thread(gzip.compress, body, 1, mtime=0)
                headers["Content-Encoding"] = "gzip"
            response = await self._peer.send(
                "POST", "/v1/groups", body=body, headers=headers, retry_policy=self._never_give_up
            )
            if response.http.status == _CONFLICT:
                # After a restart the same prompts may get other completions. The first delivery stands.
                log.warning("groups_were_already_accepted", key=part_key, hub_says=response.http.message)
            else:
                self._peer.read(response, dict[str, Any])

    async def disconnect(self, env_id: int) -> None:
        """Unregister, without retries: the hub must not wait for an environment that is gone."""
        at_once = RetryPolicy(give_up_after_s=0.0)
        body = msgspec.json.encode({"env_id": env_id})
        self._peer.read(
            await self._peer.send("POST", "/disconnect-env", body=body, retry_policy=at_once), dict[str, Any]
        )


def _parts(packed: list[bytes], max_bytes: int) -> list[list[bytes]]:
    """Split a list, in order, so that no part is larger than `max_bytes`, unless a single group is."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for group in packed:
        if parts[-1] and size + len(group) > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += len(group)
    return parts


def next_step(step: int) -> WaitSpec:
    """Wait for the step after `step`. Each step is a separate wait with its own deadline."""
    return WaitSpec(f"the trainer to take step {step + 1}", of="trainer", deadline_s=STEP_LATE_S)


@dataclass
class CurrentWait(AbstractContextManager["CurrentWait"]):
    """Registers what a loop waits for, which changes over time: `current_wait.set(next_step(4))`."""

    waits: Waits
    _wanted: WaitSpec | None = None
    _wait: Wait | None = None

    def __exit__(self, error: object, *_: object) -> None:
        self._end(was_met=error is None)

    def set(self, wanted: WaitSpec | None) -> None:
        """Replace the current wait, unless it is the same one; None: not waiting."""
        if wanted == self._wanted:
            return
        self._end(was_met=True)
        if wanted is not None:
            self._wanted, self._wait = wanted, self.waits.begin(wanted)

    def _end(self, *, was_met: bool) -> None:
        if self._wait is not None:
            self.waits.end(self._wait, was_met=was_met)
        self._wanted = self._wait = None
