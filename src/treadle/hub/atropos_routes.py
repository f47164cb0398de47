"""Atropos' thirteen routes, in its shapes and words: its environments and trainers work unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from uuid import uuid4

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from treadle.errors import TreadleError
from treadle.hub.endpoint import (
    ADMIN,
    ENVIRONMENT,
    IDEMPOTENCY_KEY,
    JSON,
    OBSERVER,
    RETRY_AFTER_S,
    TEXT,
    TRAINER,
    Endpoint,
    Link,
    Parameter,
    count_odd_groups,
    json_answer,
    raw_json,
    read_message,
    receive_groups,
    stored_json,
)
from treadle.hub.messages import MAX_DIGITS, MAX_NAME_CHARS, Refused, checked_header, unprocessable, whole_number
from treadle.hub.presence import GONE_AFTER_S
from treadle.hub.state import HubState, env_status, reset
from treadle.log import get_logger
from treadle.net.http_protocol import FLUSHED
from treadle.store import Batch, DamagedGroups, groups, runs
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import (
    BatchInfo,
    Disconnected,
    EnvProgress,
    LatestExample,
    PostedGroup,
    PostedGroups,
    Progress,
    RegisteredEnv,
    RegisteredTrainer,
    RegisterEnv,
    RegisterTrainer,
    Service,
    TakenBatch,
    TrackerInfo,
)

UNSET = -1
ENV_ID_IN_QUERY = Parameter(
    "env_id",
    "query",
    "in place of the body",
    {"type": "integer", "minimum": 1 - 10 ** (MAX_DIGITS - 1), "maximum": 10**MAX_DIGITS - 1},
)
MAX_ENVS = 10_000  # registrations in total: all are kept, and many calls scan them
HOLDER = Parameter(
    "Treadle-Holder",
    "header",
    "who leases: what it held before is free again",
    {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS},
)
RESUME = Parameter(
    "Treadle-Resume",
    "header",
    '"1": the newcomer is the one that was here before',
    {"type": "string"},
)
EXAMPLE = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}
log = get_logger("hub")


class EnvIdBody(msgspec.Struct):
    env_id: int


TRAINER_DECODER = msgspec.json.Decoder(RegisterTrainer, strict=False)
ENV_DECODER = msgspec.json.Decoder(RegisterEnv, strict=False)
ENV_ID_DECODER = msgspec.json.Decoder(EnvIdBody, strict=False)

NOTHING_YET: dict[str, list[object]] = {
    name: []
    for name in (
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
        "messages", "images",
    )
}  # fmt: skip


class AtroposRoutes:
    def __init__(self, hub: HubState) -> None:
        self._hub = hub

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/", self.root, "name of the service", roles=OBSERVER, answer=Service),
            Endpoint(
                "POST", "/register", self.register, "a trainer registers", roles=TRAINER,
                body=RegisterTrainer, parameters=(HOLDER,), answer=RegisteredTrainer, refusals=(507,),
            ),
            Endpoint(
                "POST", "/register-env", self.register_env, "an environment registers", roles=ENVIRONMENT,
                body=RegisterEnv, parameters=(RESUME,), answer=RegisteredEnv, refusals=(507,),
                links={
                    "status": Link("GET", "/status-env", "ask with the id", {"env_id": "$response.body#/env_id"}),
                    "leave": Link("POST", "/disconnect-env", "leave", body={"env_id": "{$response.body#/env_id}"}),
                },
            ),
            Endpoint(
                "POST", "/disconnect-env", self.disconnect_env, "an environment leaves", roles=ENVIRONMENT,
                body=EnvIdBody, answer=Disconnected, refusals=(507,),
            ),
            Endpoint(
                "GET", "/wandb_info", self.wandb_info, "group and project of the trainer's tracker",
                roles=OBSERVER, answer=TrackerInfo,
            ),
            Endpoint("GET", "/info", self.info, "batch size and longest sequence", roles=OBSERVER, answer=BatchInfo),
            Endpoint(
                "GET", "/batch", self.batch, "the next batch, given out once",
                roles=TRAINER, answer=TakenBatch, refusals=(507,),
            ),
            Endpoint(
                "GET", "/latest_example", self.latest_example, "the group that came last",
                roles=OBSERVER, answer=LatestExample,
            ),
            Endpoint(
                "POST", "/scored_data", self.scored_data, "post one group", roles=ENVIRONMENT,
                body=ScoredGroup, example=EXAMPLE, parameters=(IDEMPOTENCY_KEY,), answer=PostedGroup,
                refusals=(409, 507),
            ),
            Endpoint(
                "POST", "/scored_data_list", self.scored_data_list, "post several groups: all are stored, or none",
                roles=ENVIRONMENT, body=list[ScoredGroup], example=[EXAMPLE], parameters=(IDEMPOTENCY_KEY,),
                answer=PostedGroups, refusals=(409, 507),
            ),
            Endpoint("GET", "/status", self.status, "step and queue", roles=OBSERVER, answer=Progress),
            Endpoint(
                "GET", "/status-env", self.status_env, "step and queue as one environment sees them", roles=ENVIRONMENT,
                body=EnvIdBody, body_required=False, parameters=(ENV_ID_IN_QUERY,), answer=EnvProgress, refusals=(404,),
            ),
            Endpoint(
                "GET", "/reset_data", self.reset_data, "forget everything: from this machine, or with the admin token",
                roles=ADMIN, media_type=TEXT, refusals=(507,),
            ),
        ]  # fmt: skip

    async def root(self, _: Request) -> Response:
        return json_answer(Service(message="AtroposLib API"))

    # ---- registration

    async def register(self, request: Request) -> Response:
        """A trainer's values always replace the earlier ones, whether data came before it or not."""
        trainer = await read_message(request, TRAINER_DECODER)
        await self._hub.settled()
        holder = checked_header(request.headers.get("treadle-holder"), "Treadle-Holder")
        await asyncio.wrap_future(self._hub.store.register_trainer(trainer, holder))
        self._hub.batch_signal.asked(is_met=True)  # requests of its previous process no longer count as waiting
        self._hub.batch_signal.ring()
        log.info("trainer_registered", step=trainer.starting_step, batch_size=trainer.batch_size, holder=holder)
        return raw_json(b'{"uuid":%d}' % uuid4().int)  # Atropos' 128-bit number, too large for most encoders

    async def register_env(self, request: Request) -> Response:
        hub = self._hub
        env = await read_message(request, ENV_DECODER)
        await hub.settled()
        run, num_envs, _ = hub.store.read(runs.admission_facts)
        if run.trainer is None or not run.started:
            return json_answer({"status": "wait for trainer to start"})
        if num_envs >= MAX_ENVS:
            detail = f"{MAX_ENVS} environments have registered, and no more are taken: reset the hub"
            raise Refused(503, detail, {"Retry-After": RETRY_AFTER_S}, reason="too_many_envs")
        resume = request.headers.get("treadle-resume") == "1"
        async with hub.registering:
            registered = await asyncio.wrap_future(
                hub.store.write(
                    runs.register_env,
                    env,
                    resume=resume,
                    idle_s=hub.presence.idle_s,
                    gone_after_s=GONE_AFTER_S,
                    has_other_hubs=hub.store.is_shared,
                )
            )
            hub.presence.mark(registered.env_id)
            hub.presence.registrations_changed()
        log.info("env_registered", name=registered.name, groups_accepted=registered.groups_accepted)
        return json_answer(
            RegisteredEnv(
                status="success",
                env_id=registered.env_id,
                wandb_name=registered.name,
                checkpoint_dir=run.trainer.checkpoint_dir,
                starting_step=run.current_step,
                checkpoint_interval=run.trainer.save_checkpoint_interval,
                num_steps=run.trainer.num_steps,
                groups_accepted=registered.groups_accepted,
                run_id=run.run_id,
                publish_interval=run.trainer.publish_interval,
                trackers=run.trainer.trackers,
            )
        )

    async def disconnect_env(self, request: Request) -> Response:
        body = await read_message(request, ENV_ID_DECODER)
        is_known = await asyncio.wrap_future(self._hub.store.write(runs.disconnect_env, body.env_id))
        self._hub.presence.registrations_changed()
        if is_known:
            return json_answer(Disconnected(status="success"))
        return json_answer(Disconnected(status="failure", error=f"no environment has the id {body.env_id}"))

    async def wandb_info(self, _: Request) -> Response:
        trainer = self._hub.store.read(runs.read_run).trainer
        group, project = (trainer.wandb_group, trainer.wandb_project) if trainer else (None, None)
        return json_answer(TrackerInfo(group=group, project=project))

    async def info(self, _: Request) -> Response:
        trainer = self._hub.store.read(runs.read_run).trainer
        sizes = (trainer.batch_size, trainer.max_token_len) if trainer else (UNSET, UNSET)
        return json_answer(BatchInfo(batch_size=sizes[0], max_token_len=sizes[1]))

    # ---- data

    async def scored_data(self, request: Request) -> Response:
        received = await receive_groups(self._hub, request, "group", JSON)
        if received.duplicate:
            return json_answer(PostedGroup(status="duplicate"))
        num_odd, waiting = count_odd_groups(self._hub, received.groups)
        if num_odd:
            return json_answer(PostedGroup(status="buffered", buffer_size=waiting))
        return json_answer(PostedGroup(status="received"))

    async def scored_data_list(self, request: Request) -> Response:
        received = await receive_groups(self._hub, request, "groups", JSON)
        posted = received.message()
        num_odd, waiting = (0, 0) if received.duplicate else count_odd_groups(self._hub, received.groups)
        if num_odd:
            posted.buffered, posted.last_buffer_size = num_odd, waiting
        return json_answer(posted)

    async def batch(self, request: Request) -> Response:
        """Each batch once, oldest first. A trainer that can acknowledge should use /v1/lease instead.

        This one cannot, so the hub acknowledges when the response has left. If the trainer went away before that, the
        batch is given back and comes again before any other.
        """
        await self._hub.settled()
        if self._hub.store.read(runs.read_run).trainer is None:
            message = "Trainer not registered. Call /register first."
            return json_answer(TakenBatch(status="error", message=message, batch=[]))
        batch = await self._take()
        self._hub.batch_signal.asked(is_met=batch is not None)
        if batch is None:
            return json_answer(TakenBatch(batch=None))
        try:
            groups = [await stored_json(group.format, group.payload) for group in batch.groups]
            response = raw_json(b"".join((b'{"batch":[', b",".join(groups), b"]}")))
        except BaseException:
            self._give_back(batch, "the answer could not be made")
            raise
        response.background = BackgroundTask(self._after_answer, batch, request.scope.get(FLUSHED))
        return response

    async def _take(self) -> Batch | None:
        store = self._hub.store
        while (lease := await asyncio.wrap_future(store.take(self._hub.terms))) is not None:
            with contextlib.suppress(DamagedGroups):  # they are set aside: the next attempt takes others
                return await asyncio.to_thread(store.batch_of, lease)
        return None

    async def _after_answer(self, batch: Batch, flushed: Callable[[], Awaitable[bool]] | None) -> None:
        try:
            has_left = flushed is None or await flushed()
        except asyncio.CancelledError:  # the hub stops
            has_left = False
        if not has_left:
            self._give_back(batch, "the trainer went away before it had the whole batch")
            return
        log.info("batch_taken", step=batch.step, groups=len(batch.groups))
        self._hub.metrics.deliver(batch)
        keep = self._hub.config.keep_trained_bytes
        done = asyncio.wrap_future(self._hub.store.ack(batch.step, batch.token, keep_trained_bytes=keep))
        self._hub.settling.add(done)
        done.add_done_callback(self._hub.settling.discard)
        try:
            await done
        except TreadleError as error:  # a full disk, or a trainer that registered again: the batch is delivered again
            log.warning("batch_not_acknowledged", step=batch.step, problem=error.message)

    def _give_back(self, batch: Batch, reason: str) -> None:
        """Not awaited: if it fails, the lease expires."""
        log.warning("batch_not_delivered", step=batch.step, reason=reason)
        limit = self._hub.terms.max_deliveries
        self._hub.store.nack(batch.step, batch.token, reason=reason, max_deliveries=limit, counts=False)
        self._hub.batch_signal.ring()

    async def latest_example(self, _: Request) -> Response:
        latest = await asyncio.to_thread(self._hub.store.read, groups.latest_payload)  # may be tens of megabytes
        return json_answer(NOTHING_YET) if latest is None else raw_json(await stored_json(*latest))

    async def reset_data(self, _: Request) -> Response:
        await reset(self._hub)
        return PlainTextResponse("Reset successful")

    # ---- looking

    async def status(self, _: Request) -> Response:
        await self._hub.settled()
        store = self._hub.store
        queued = store.read(groups.counts).queued.groups
        return json_answer(Progress(current_step=store.read(runs.read_run).current_step, queue_size=queued))

    async def status_env(self, request: Request) -> Response:
        """The id comes in a JSON body, as Atropos' environments send it, or as ?env_id=."""
        asked = request.query_params.get("env_id")
        env_id = (await read_message(request, ENV_ID_DECODER)).env_id if asked is None else whole_number(asked)
        if env_id is None:
            raise unprocessable("int_parsing", ("env_id",), "expected an integer", (asked or "")[:100])
        await self._hub.settled()
        store = self._hub.store
        env = store.read(runs.read_env, env_id)
        if env is None:
            raise Refused(404, f"no environment has the id {env_id}")
        self._hub.presence.mark(env_id)
        return json_answer(
            env_status(env, store.read(runs.read_envs), store.read(groups.env_load, env_id), store.read(runs.read_run))
        )
