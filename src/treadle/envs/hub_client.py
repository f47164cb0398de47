"""The hub as an environment sees it: register, ask for the step, deliver groups that must never be lost."""

from __future__ import annotations

import asyncio
import gzip
import os
from typing import Any, Self

import msgspec

from treadle.envs.transport import Patience, Peer, message_of
from treadle.errors import HubError
from treadle.log import get_logger
from treadle.net.client import HttpClient
from treadle.net.tokens import HUB_TOKEN_VARIABLE
from treadle.net.urls import is_loopback, shown_url
from treadle.watch.waits import Waits, Wanted
from treadle.wire.binary import CONTENT_TYPE, join_groups, pack_group
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import BatchInfo, EnvStanding, Progress, RegisteredEnv, RegisterEnv

log = get_logger("env")

_LARGEST_POST_BYTES = 12 * 2**20  # the hub takes 16 MiB compressed, and no more
_REGISTER_POLL_S = 0.25
_NO_TRAINER = "wait for trainer to start"
_CALL_TIMEOUT_S = 60.0
_CONFLICT = 409


class HubClient:
    """Calls that only ask give up after `patience`; a delivery is repeated for as long as it takes."""

    def __init__(
        self,
        url: str,
        *,
        patience: Patience | None = None,
        transport: HttpClient | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.waits = waits or Waits()
        self._step = 0  # optimizer steps taken, as the hub said last
        self._publish_interval = 1
        self._patience = patience or Patience(give_up_after_s=300.0)
        self._never_give_up = Patience(None, self._patience.first_pause_s, self._patience.longest_pause_s)
        self._peer = Peer(
            "hub",
            url,
            error=HubError,
            timeout_s=_CALL_TIMEOUT_S,
            api_key=os.environ.get(HUB_TOKEN_VARIABLE, ""),
            transport=transport,
            waits=self.waits,
            how_to_start="start it with `treadle hub`, or name another with --env.rollout-server-url",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._peer.__aexit__()

    async def register_env(self, registration: RegisterEnv) -> RegisteredEnv:
        """Register, waiting for the trainer; a name that was here before gets its count of groups back."""
        answer = await self._try_to_register(registration)
        if answer.status == _NO_TRAINER:
            with self.waits.waiting(self.trainer):
                while answer.status == _NO_TRAINER:
                    await asyncio.sleep(_REGISTER_POLL_S)
                    answer = await self._try_to_register(registration)
        if answer.status != "success":
            raise HubError(f"the hub did not register '{registration.desired_name}': {answer.status}")
        self._publish_interval = max(1, answer.publish_interval)
        return answer

    async def _try_to_register(self, registration: RegisterEnv) -> RegisteredEnv:
        body = msgspec.json.encode(registration)
        response = await self._peer.send(
            "POST", "/register-env", body=body, headers={"Treadle-Resume": "1"}, patience=self._patience
        )
        return self._peer.read(response, RegisteredEnv)

    @property
    def trainer(self) -> Wanted:
        """What is waited for while the hub knows of no trainer."""
        return Wanted(
            f"a trainer to register at the hub ({shown_url(self._peer.url)})",
            fix="start one with `treadle train`, or everything at once with `treadle run`",
            of="trainer",
        )

    async def info(self) -> BatchInfo:
        return self._peer.read(await self._peer.send("GET", "/info", patience=self._patience), BatchInfo)

    async def status(self) -> Progress:
        """A hub that restarts in the middle of a run is waited for, as a delivery would."""
        return self._peer.read(await self._peer.send("GET", "/status", patience=self._never_give_up), Progress)

    async def standing(self, env_id: int) -> EnvStanding:
        """What to decide by whether to sample more; also tells the hub that this environment is alive."""
        response = await self._peer.send("GET", f"/v1/envs/{env_id}", patience=self._never_give_up)
        standing = self._peer.read(response, EnvStanding)
        self._step = standing.step
        return standing

    def oldest_version(self, max_age: int) -> int:
        """The oldest policy version that may be sampled now: `max_age` behind what the trainer has published."""
        return self._step - (self._publish_interval - 1) - max_age

    async def post_groups(self, groups: list[ScoredGroup], key: str) -> None:
        """Deliver groups, once: the hub knows a repeated delivery by its key. What is too large goes in parts."""
        await self.post_packed([pack_group(group) for group in groups], key)

    async def post_packed(self, packed: list[bytes], key: str) -> None:
        for number, part in enumerate(_parts(packed, _LARGEST_POST_BYTES)):
            await self._post_body(join_groups(part), f"{key}.{number}" if number else key)

    async def _post_body(self, body: bytes, key: str) -> None:
        headers = {"Idempotency-Key": key, "Content-Type": CONTENT_TYPE}
        if not is_loopback(self._peer.url):  # on one machine, to compress costs more than to copy
            body = await asyncio.to_thread(gzip.compress, body, 1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        response = await self._peer.send("POST", "/v1/groups", body=body, headers=headers, patience=self._never_give_up)
        if response.http.status == _CONFLICT:
            # After a restart the same prompts may get other completions. The first delivery stands.
            log.warning("groups_were_already_accepted", key=key, hub_says=message_of(response.http))
            return
        self._peer.read(response, dict[str, Any])

    async def disconnect(self, env_id: int) -> None:
        """Say goodbye, once: the hub must not wait for an environment that is gone."""
        at_once = Patience(give_up_after_s=0.0)
        body = msgspec.json.encode({"env_id": env_id})
        self._peer.read(await self._peer.send("POST", "/disconnect-env", body=body, patience=at_once), dict[str, Any])


def _parts(packed: list[bytes], max_bytes: int) -> list[list[bytes]]:
    """Cut a list, in its order, so that no part is larger than `max_bytes` (but for a single group that is)."""
    parts: list[list[bytes]] = [[]]
    size = 0
    for group in packed:
        if parts[-1] and size + len(group) > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(group)
        size += len(group)
    return parts
