"""Our own routes under /v1: batches that are leased and acknowledged, and a hub that says what it is doing.

lease(step) --> renew ... --> ack    the step is trained
                   |
                   +--------> nack   the same batch comes again, until it is dead-lettered
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.hub.answers import Refused, json_answer, raw_json, unprocessable
from treadle.hub.batching import choose, explain
from treadle.hub.body import check_numbers, read_json
from treadle.hub.routing import get, post
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.store import Batch, StoredGroup
from treadle.wire.hub import EnvStatus, HubStatus, LeaseAnswer, LeaseRequest, LeaseUpdate

MAX_WAIT_S = 300.0
MAX_TEXT_CHARS = 1000
MAX_STEP_DIGITS = 18  # any such number fits in 64 bits
LEASE = msgspec.json.Decoder(LeaseRequest, strict=False)
UPDATE = msgspec.json.Decoder(LeaseUpdate, strict=False)
log = get_logger("hub")


class OwnRoutes:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    def routes(self) -> list[Route]:
        return [
            post("/v1/lease", self.lease),
            post("/v1/batches/{step}/renew", self.renew),
            post("/v1/batches/{step}/ack", self.ack),
            post("/v1/batches/{step}/nack", self.nack),
            get("/v1/dead-letters", self.dead_letters),
            get("/v1/explain", self.explain),
            get("/v1/status", self.status),
            get("/healthz", self.healthz),
        ]

    async def lease(self, request: Request) -> Response:
        """Answer with a batch as soon as there is one, or with the reason once `wait_s` is over."""
        asked = await read_json(request, LEASE)
        check_numbers(asked)
        if asked.step < 0:
            raise unprocessable("greater_than_equal", ("step",), "must be 0 or more", asked.step)
        if not 0 < len(asked.holder) <= MAX_TEXT_CHARS:
            raise unprocessable("value_error", ("holder",), "must name the trainer", asked.holder[:100])
        batch = await self._wait_for_batch(asked)
        if batch is None:
            return json_answer(LeaseAnswer(batch=None, reason=self._reason()))
        log.info(
            "leased",
            step=batch.step,
            holder=asked.holder,
            groups=len(batch.groups),
            delivery=batch.deliveries,
        )
        return raw_json(_lease_json(batch, self._hub.config.lease_s))

    async def _wait_for_batch(self, asked: LeaseRequest) -> Batch | None:
        hub = self._hub
        until_s = asyncio.get_running_loop().time() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        while True:
            rung = hub.bell.listen()
            batch = await asyncio.wrap_future(hub.store.lease(asked.step, asked.holder, hub.terms))
            if batch is not None or hub.bell.closing:
                return batch
            try:
                async with asyncio.timeout_at(until_s):
                    await rung.wait()
            except TimeoutError:
                return None

    async def renew(self, request: Request) -> Response:
        step, update = await self._read_update(request)
        await asyncio.wrap_future(self._hub.store.renew(step, update.token, self._hub.config.lease_s))
        return json_answer({"status": "renewed", "lease_s": self._hub.config.lease_s})

    async def ack(self, request: Request) -> Response:
        step, update = await self._read_update(request)
        await asyncio.wrap_future(self._hub.store.ack(step, update.token))
        log.info("acknowledged", step=step)
        return json_answer({"status": "acknowledged", "current_step": step})

    async def nack(self, request: Request) -> Response:
        step, update = await self._read_update(request)
        hub = self._hub
        reason = update.reason[:MAX_TEXT_CHARS]
        is_dead = await asyncio.wrap_future(
            hub.store.nack(step, update.token, reason=reason, max_deliveries=hub.config.max_deliveries)
        )
        hub.bell.ring()
        log.warning("dead_lettered" if is_dead else "given_back", step=step, reason=reason)
        return json_answer({"status": "dead-lettered" if is_dead else "returned"})

    async def _read_update(self, request: Request) -> tuple[int, LeaseUpdate]:
        step = request.path_params["step"]
        if not step.isdecimal() or len(step) > MAX_STEP_DIGITS:
            raise Refused(404, "Not Found")
        return int(step), await read_json(request, UPDATE)

    async def dead_letters(self, _: Request) -> Response:
        """The newest first."""
        return json_answer({"dead_letters": [asdict(group) for group in self._hub.store.dead_groups()]})

    async def explain(self, _: Request) -> Response:
        return json_answer({"reason": self._reason()})

    def _reason(self) -> str:
        store = self._hub.store
        trainer = store.run_state().trainer
        if trainer is None:
            return "no trainer has registered, so the size of a batch is not known"
        if trainer.batch_size > 0 and choose(store.waiting(trainer.batch_size), trainer.batch_size):
            return "a batch can be formed: it waits for the trainer to ask"
        told = explain(store.waiting_sizes(), trainer.batch_size)
        connected = sum(env.connected for env in store.envs())
        return f"{told}; {connected} environment{'' if connected == 1 else 's'} registered"

    async def status(self, _: Request) -> Response:
        hub = self._hub
        run, counts = hub.store.run_state(), hub.store.counts()
        envs = [
            EnvStatus(
                env_id=env.env_id,
                name=env.name,
                connected=env.connected,
                group_size=env.group_size,
                weight=env.weight,
                groups_accepted=env.groups_accepted,
                idle_s=round(hub.presence.idle_s(env.env_id), 3),
            )
            for env in hub.store.envs()
        ]
        return json_answer(
            HubStatus(
                step=run.current_step,
                started=run.started,
                batch_size=run.trainer.batch_size if run.trainer else None,
                queued_groups=counts.queued.groups,
                queued_sequences=counts.queued.sequences,
                leased_groups=counts.leased.groups,
                trained_groups=counts.trained.groups,
                dead_groups=counts.dead.groups,
                accepted_groups=counts.accepted_groups,
                envs=envs,
            )
        )

    async def healthz(self, _: Request) -> Response:
        self._hub.store.run_state()  # a hub that cannot read its queue is not well
        if self._hub.store.is_broken:
            raise Refused(503, "the disk failed: restart the hub")
        return json_answer({"status": "ok"})


def _lease_json(batch: Batch, lease_s: float) -> bytes:
    """A LeaseAnswer written around the stored bytes.

    To decode a large batch only to encode it again would hold up every other request for as long.
    """
    head = b'{"batch":{"step":%d,"token":"%s","lease_s":%s,"groups":[' % (
        batch.step,
        batch.token.encode(),
        msgspec.json.encode(lease_s),
    )
    return head + b",".join(map(_group_json, batch.groups)) + b']},"reason":""}'


def _group_json(group: StoredGroup) -> bytes:
    ours = (
        msgspec.json.encode(group.policy_version),
        msgspec.json.encode(group.item),
        group.metrics or b"null",
    )
    return group.payload[:-1] + b',"policy_version":%s,"item":%s,"metrics":%s}' % ours
