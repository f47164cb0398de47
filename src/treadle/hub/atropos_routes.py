"""Atropos' thirteen routes, in its shapes and words: its environments and trainers work unchanged."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from uuid import uuid4

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from treadle.hub import door
from treadle.hub.answers import Refused, json_answer, raw_json, unprocessable
from treadle.hub.body import check_numbers, read_body, read_json
from treadle.hub.routing import get, post
from treadle.hub.state import GONE_AFTER_S, HubState
from treadle.hub.status import env_status
from treadle.log import get_logger
from treadle.store import Appended, NewGroup, Post
from treadle.wire.hub import RegisteredEnv, RegisterEnv, RegisterTrainer

MAX_KEY_CHARS = 255
MAX_ID_CHARS = 18  # any such number fits in 64 bits
UNSET = -1
log = get_logger("hub")


class EnvIdBody(msgspec.Struct):
    env_id: int


TRAINER = msgspec.json.Decoder(RegisterTrainer, strict=False)
ENV = msgspec.json.Decoder(RegisterEnv, strict=False)
ENV_ID = msgspec.json.Decoder(EnvIdBody, strict=False)

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

    def routes(self) -> list[Route]:
        return [
            get("/", self.root),
            post("/register", self.register),
            post("/register-env", self.register_env),
            post("/disconnect-env", self.disconnect_env),
            get("/wandb_info", self.wandb_info),
            get("/info", self.info),
            get("/batch", self.batch),
            get("/latest_example", self.latest_example),
            post("/scored_data", self.scored_data),
            post("/scored_data_list", self.scored_data_list),
            get("/status", self.status),
            get("/status-env", self.status_env),
            get("/reset_data", self.reset_data),
        ]

    async def root(self, _: Request) -> Response:
        return json_answer({"message": "AtroposLib API"})

    # ---- registration

    async def register(self, request: Request) -> Response:
        """A trainer's values always replace the earlier ones, whether data came before it or not."""
        trainer = await read_json(request, TRAINER)
        check_numbers(trainer)
        holder = request.headers.get("treadle-holder")
        await asyncio.wrap_future(self._hub.store.register_trainer(trainer, holder))
        self._hub.bell.ring()
        log.info("trainer_registered", step=trainer.starting_step, batch_size=trainer.batch_size, holder=holder)
        return raw_json(b'{"uuid":%d}' % uuid4().int)  # Atropos' 128-bit number, too large for most encoders

    async def register_env(self, request: Request) -> Response:
        env = await read_json(request, ENV)
        check_numbers(env)
        hub = self._hub
        run = hub.store.run_state()
        if run.trainer is None or not run.started:
            return json_answer({"status": "wait for trainer to start"})
        resume = request.headers.get("treadle-resume") == "1"
        async with hub.registering:
            registered = await asyncio.wrap_future(
                hub.store.register_env(env, resume=resume, idle_s=hub.presence.idle_s, gone_after_s=GONE_AFTER_S)
            )
            hub.presence.mark(registered.env_id)
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
            )
        )

    async def disconnect_env(self, request: Request) -> Response:
        body = await read_json(request, ENV_ID)
        check_numbers(body)
        if await asyncio.wrap_future(self._hub.store.disconnect_env(body.env_id)):
            return json_answer({"status": "success"})
        return json_answer({"status": "failure", "error": f"no environment has the id {body.env_id}"})

    async def wandb_info(self, _: Request) -> Response:
        trainer = self._hub.store.run_state().trainer
        group, project = (trainer.wandb_group, trainer.wandb_project) if trainer else (None, None)
        return json_answer({"group": group, "project": project})

    async def info(self, _: Request) -> Response:
        trainer = self._hub.store.run_state().trainer
        sizes = (trainer.batch_size, trainer.max_token_len) if trainer else (UNSET, UNSET)
        return json_answer({"batch_size": sizes[0], "max_token_len": sizes[1]})

    # ---- data

    async def scored_data(self, request: Request) -> Response:
        body = await read_body(request)
        appended = await self._append(request, body, [door.read_group(body)])
        return json_answer({"status": "duplicate" if appended.duplicate else "received"})

    async def scored_data_list(self, request: Request) -> Response:
        body = await read_body(request)
        appended = await self._append(request, body, door.read_groups(body))
        status = "duplicate" if appended.duplicate else "received"
        return json_answer({"status": status, "groups_processed": appended.num_groups})

    async def _append(self, request: Request, body: bytes, groups: Sequence[NewGroup]) -> Appended:
        """The key stands for the inflated body: a client that compresses again may get other bytes."""
        hub = self._hub
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= MAX_KEY_CHARS:
            raise Refused(422, f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters")
        body_hash = hashlib.sha256(body).digest() if key is not None else b""
        for env_id in {group.env_id for group in groups if group.env_id is not None}:
            if hub.store.env(env_id) is not None:  # unknown ids are stored, but not kept in memory
                hub.presence.mark(env_id)
        new = Post(groups, key, body_hash)
        appended = await asyncio.wrap_future(hub.store.append(new, limit_groups=hub.config.queue_limit_groups))
        hub.bell.ring()
        return appended

    async def batch(self, _: Request) -> Response:
        """Each batch once, oldest first. A trainer that can acknowledge should use /v1/lease instead."""
        store = self._hub.store
        if store.run_state().trainer is None:
            message = "Trainer not registered. Call /register first."
            return json_answer({"status": "error", "message": message, "batch": []})
        batch = await asyncio.wrap_future(store.take(self._hub.terms))
        if batch is None:
            return json_answer({"batch": None})
        log.info("batch_taken", step=batch.step, groups=len(batch.groups))
        return raw_json(b'{"batch":[' + b",".join(group.payload for group in batch.groups) + b"]}")

    async def latest_example(self, _: Request) -> Response:
        payload = self._hub.store.latest_payload()
        return json_answer(NOTHING_YET) if payload is None else raw_json(payload)

    async def reset_data(self, _: Request) -> Response:
        await asyncio.wrap_future(self._hub.store.reset())
        self._hub.presence.forget()
        log.warning("reset")
        return PlainTextResponse("Reset successful")

    # ---- looking

    async def status(self, _: Request) -> Response:
        store = self._hub.store
        queued = store.counts().queued.groups
        return json_answer({"current_step": store.run_state().current_step, "queue_size": queued})

    async def status_env(self, request: Request) -> Response:
        """The id comes in a JSON body, as Atropos' environments send it, or as ?env_id=."""
        env_id = await self._asked_env_id(request)
        store = self._hub.store
        env = store.env(env_id)
        if env is None:
            raise Refused(404, f"no environment has the id {env_id}")
        self._hub.presence.mark(env_id)
        return json_answer(env_status(env, store.envs(), store.env_load(env_id), store.run_state()))

    async def _asked_env_id(self, request: Request) -> int:
        asked = request.query_params.get("env_id")
        if asked is None:
            body = await read_json(request, ENV_ID)
            check_numbers(body)
            return body.env_id
        if not asked.removeprefix("-").isdecimal() or len(asked) > MAX_ID_CHARS:
            raise unprocessable("int_parsing", ("env_id",), "expected an integer", asked[:100])
        return int(asked)
