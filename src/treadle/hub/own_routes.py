"""Our own routes under /v1: batches that are leased and acknowledged, and a hub that says what it is doing.

lease(step) --> renew ... --> ack    the step is trained
                   |
                   +--------> nack   the same batch comes again, until it is dead-lettered
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from treadle.hub.batching import freshness
from treadle.hub.endpoint import (
    ADMIN,
    ENVIRONMENT,
    IDEMPOTENCY_KEY,
    OBSERVER,
    TRAINER,
    Endpoint,
    Link,
    Parameter,
    json_answer,
    raw_json,
    read_message,
    receive_groups,
    stored_json,
)
from treadle.hub.messages import MAX_DIGITS, Refused, unprocessable, whole_number
from treadle.hub.state import HubState, explain, reset, why_no_batch
from treadle.log import get_logger
from treadle.store import Batch, DamagedGroups, groups, runs
from treadle.wire.groups import BINARY_TYPE, BinaryAnswer, BinaryBatch, LeaseAnswer
from treadle.wire.hub import (
    Acknowledged,
    DeadLetters,
    EnvState,
    EnvStatus,
    Explanation,
    Health,
    HubStatus,
    LeaseRequest,
    LeaseUpdate,
    PostedGroups,
    Renewed,
    Returned,
    WasReset,
)

MAX_WAIT_S = 300.0
STEP = Parameter(
    "step",
    "path",
    "the optimizer step that the batch is for",
    {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1},
)
ENV_ID = Parameter("env_id", "path", "as /register-env answered", {"type": "integer", "minimum": 0})
LEASE = msgspec.json.Decoder(LeaseRequest, strict=False)
UPDATE = msgspec.json.Decoder(LeaseUpdate, strict=False)
log = get_logger("hub")


class OwnRoutes:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "POST", "/v1/groups", self.groups, "post groups in our binary form", roles=ENVIRONMENT,
                body_type=BINARY_TYPE, parameters=(IDEMPOTENCY_KEY,), answer=PostedGroups,
                refusals=(409, 415, 507),
            ),
            Endpoint(
                "POST", "/v1/lease", self.lease, "lease the batch of a step; held until there is one, or for wait_s",
                roles=TRAINER, body=LeaseRequest, example={"step": 1, "holder": "trainer", "wait_s": 0.0},
                answer=LeaseAnswer, further_types=(BINARY_TYPE,), refusals=(409, 507),
                links={
                    verb: Link(
                        "POST", f"/v1/batches/{{step}}/{verb}", f"{verb} the batch that was leased",
                        parameters={"step": "$response.body#/batch/step"},
                        body={"token": "{$response.body#/batch/token}"},
                    )
                    for verb in ("renew", "ack", "nack")
                },
            ),
            *(
                Endpoint(
                    "POST", f"/v1/batches/{{step}}/{verb}", handler, summary, roles=TRAINER, body=LeaseUpdate,
                    parameters=(STEP,), answer=answer, refusals=(404, 409, 507),
                )
                for verb, handler, summary, answer in (
                    ("renew", self.renew, "hold a lease for longer", Renewed),
                    ("ack", self.ack, "the step is trained", Acknowledged),
                    ("nack", self.nack, "give a batch back", Returned),
                )
            ),
            Endpoint(
                "GET", "/v1/dead-letters", self.dead_letters, "groups that failed too often",
                roles=OBSERVER, answer=DeadLetters,
            ),
            Endpoint(
                "GET", "/v1/explain", self.explain, "why there is no batch now",
                roles=OBSERVER, answer=Explanation,
            ),
            Endpoint("GET", "/v1/status", self.status, "what the hub holds", roles=OBSERVER, answer=HubStatus),
            Endpoint(
                "GET", "/v1/envs/{env_id}", self.env, "how things stand for one environment",
                roles=ENVIRONMENT, parameters=(ENV_ID,), answer=EnvState, refusals=(404,),
            ),
            Endpoint(
                "POST", "/v1/reset", self.reset, "forget everything: from this machine, or with the admin token",
                roles=ADMIN, answer=WasReset, refusals=(507,),
            ),
            Endpoint("GET", "/healthz", self.healthz, "whether the hub can do its work", roles=OBSERVER, answer=Health),
        ]  # fmt: skip

    async def groups(self, request: Request) -> Response:
        received = await receive_groups(self._hub, request, "binary", BINARY_TYPE)
        return json_answer(received.message())

    async def lease(self, request: Request) -> Response:
        """Answer with a batch as soon as there is one, or with the reason once `wait_s` is over."""
        config = self._hub.config
        asked = await read_message(request, LEASE)
        if asked.step < 0:
            raise unprocessable("greater_than_equal", ("step",), "must be 0 or more", asked.step)
        if not asked.holder:
            raise unprocessable("value_error", ("holder",), "must name the trainer", asked.holder)
        run, _, newest = self._hub.store.read(runs.admission_facts)
        if run.trainer is not None and asked.step > newest + 1:
            # Steps are begun in order. One far ahead would make every later policy version and step acceptable.
            msg = f"the newest step is {newest}: lease at most step {newest + 1}"
            raise unprocessable("less_than_equal", ("step",), msg, asked.step)
        batch = await self._wait_for_batch(asked)
        if batch is not None:
            log.info(
                "leased", step=batch.step, holder=asked.holder, groups=len(batch.groups), delivery=batch.deliveries
            )
        max_age = self._hub.full_weight_age
        if BINARY_TYPE in request.headers.get("accept", ""):
            packed = (
                lease_binary(batch, config.lease_s, max_age)
                if batch is not None
                else msgspec.msgpack.encode(BinaryAnswer(batch=None, reason=why_no_batch(self._hub)))
            )
            return Response(packed, media_type=BINARY_TYPE)
        if batch is None:
            return json_answer(LeaseAnswer(batch=None, reason=why_no_batch(self._hub)))
        return raw_json(await lease_json(batch, config.lease_s, max_age))

    async def _wait_for_batch(self, asked: LeaseRequest) -> Batch | None:
        hub = self._hub
        until_s = asyncio.get_running_loop().time() + min(max(asked.wait_s, 0.0), MAX_WAIT_S)
        while True:
            rung = hub.batch_signal.event
            lease = await asyncio.wrap_future(hub.store.lease(asked.step, asked.holder, hub.terms))
            hub.batch_signal.asked(is_met=lease is not None)
            if lease is not None:
                try:
                    batch = await asyncio.to_thread(hub.store.batch_of, lease)
                except DamagedGroups:  # they are set aside: the next try has others
                    continue
                hub.metrics.deliver(batch, hub.full_weight_age)
                return batch
            if hub.batch_signal.closing:
                return None
            try:
                with hub.batch_signal.waiting():
                    async with asyncio.timeout_at(until_s):
                        await rung.wait()
            except TimeoutError:
                return None

    async def renew(self, request: Request) -> Response:
        step, update = await self._read_update(request)
        await asyncio.wrap_future(self._hub.store.renew(step, update.token, self._hub.config.lease_s))
        return json_answer(Renewed(status="renewed", lease_s=self._hub.config.lease_s))

    async def ack(self, request: Request) -> Response:
        step, update = await self._read_update(request)
        keep = self._hub.config.keep_trained_bytes
        await asyncio.wrap_future(self._hub.store.ack(step, update.token, keep_trained_bytes=keep))
        log.info("acknowledged", step=step)
        return json_answer(Acknowledged(status="acknowledged", current_step=step))

    async def nack(self, request: Request) -> Response:
        step, update = await self._read_update(request)
        hub = self._hub
        reason = update.reason
        is_dead = await asyncio.wrap_future(
            hub.store.nack(
                step,
                update.token,
                reason=reason,
                max_deliveries=hub.terms.max_deliveries,
                counts=update.counts,
            )
        )
        hub.batch_signal.ring()
        log.warning("dead_lettered" if is_dead else "given_back", step=step, reason=reason)
        return json_answer(Returned(status="dead-lettered" if is_dead else "returned"))

    async def _read_update(self, request: Request) -> tuple[int, LeaseUpdate]:
        step = whole_number(request.path_params["step"])
        if step is None or step < 0:
            raise Refused(404, "Not Found")
        return step, await read_message(request, UPDATE)

    async def dead_letters(self, _: Request) -> Response:
        """The newest first."""
        return json_answer(DeadLetters(dead_letters=self._hub.store.read(groups.dead_groups)))

    async def explain(self, _: Request) -> Response:
        return json_answer(Explanation(reason=explain(self._hub)))

    async def status(self, _: Request) -> Response:
        hub = self._hub
        await hub.settled()
        run, counts = hub.store.read(runs.read_run), hub.store.read(groups.counts)
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
            for env in hub.store.read(runs.read_envs)
        ]
        return json_answer(
            HubStatus(
                step=run.current_step,
                started=run.started,
                batch_size=run.trainer.batch_size if run.trainer else None,
                queued_groups=counts.queued.groups,
                queued_sequences=counts.queued.sequences,
                queued_bytes=counts.queued.bytes,
                leased_groups=counts.leased.groups,
                trained_groups=counts.trained.groups,
                dropped_groups=counts.dropped.groups,
                dead_groups=counts.dead.groups,
                accepted_groups=counts.accepted_groups,
                envs=envs,
            )
        )

    async def env(self, request: Request) -> Response:
        """Asking also shows that the environment is alive."""
        hub = self._hub
        env_id = whole_number(request.path_params["env_id"])
        await hub.settled()
        if env_id is None or (present := hub.presence.others_with(env_id)) is None:
            raise Refused(404, f"no environment has the id {request.path_params['env_id'][:100]}")
        hub.presence.mark(env_id)
        run = hub.store.read(runs.read_run)
        return json_answer(
            EnvState(
                step=run.current_step,
                num_steps=run.trainer.num_steps if run.trainer else 0,
                batch_size=max(0, run.trainer.batch_size) if run.trainer else 0,
                untrained_sequences=hub.store.read(groups.untrained_sequences, env_id),
                trainer_waits=hub.batch_signal.somebody_waits,
                share=present.batch_share(env_id),
                num_present=len(present.envs),
            )
        )

    async def reset(self, _: Request) -> Response:
        await reset(self._hub)
        return json_answer(WasReset(status="reset"))

    async def healthz(self, _: Request) -> Response:
        self._hub.store.read(runs.read_run)  # a hub that cannot read its queue is not well
        if failure := self._hub.store.failure:
            raise Refused(503, failure)
        return json_answer(Health(status="ok"))


# ---- leases as JSON or in binary form


async def lease_json(batch: Batch, lease_s: float, max_age: int | None) -> bytes:
    """A LeaseAnswer written around the stored bytes.

    Decoding and encoding a large batch would block every other request meanwhile.
    """
    head = b'{"batch":{"step":%d,"token":"%s","lease_s":%s,"groups":[' % (
        batch.step,
        batch.token.encode(),
        msgspec.json.encode(lease_s),
    )
    packed = []
    for group in batch.groups:
        payload = await stored_json(group.format, group.payload)
        ours = (
            msgspec.json.encode(group.policy_version),
            msgspec.json.encode(group.item),
            group.metrics or b"null",
            msgspec.json.encode(freshness(group.policy_version, batch.step, max_age)),
        )
        packed.append(payload[:-1] + b',"policy_version":%s,"item":%s,"metrics":%s,"weight":%s}' % ours)
    return head + b",".join(packed) + b']},"reason":""}'


def lease_binary(batch: Batch, lease_s: float, max_age: int | None) -> bytes:
    stored = [group.content(freshness(group.policy_version, batch.step, max_age)) for group in batch.groups]
    packed = BinaryBatch(step=batch.step, token=batch.token, lease_s=lease_s, groups=stored)
    return msgspec.msgpack.encode(BinaryAnswer(batch=packed))
