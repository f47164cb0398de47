"""New weights on their way into vLLM's worker, at its gate or by a broadcast: what the engine in front of it asks, and
remembers of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from treadle.engines.arrival import Arrival
from treadle.engines.receiving import refuse_other_group
from treadle.engines.vllm.client import VllmClient, refuse_errors
from treadle.errors import EngineError, RequestError
from treadle.wire.bridge import Adopt, JoinGroup, Received, ReceiveWeights

MARGIN_S = 10.0  # the worker keeps the deadline by itself, a last bucket may take as long again


class Arrivals:
    """To one life of the server."""

    def __init__(self) -> None:
        self._group: str | None = None
        self.damage: str | None = None  # why its weights can be no version's; a restart mends it
        self._arrival = Arrival()

    async def join(self, client: VllmClient, request: JoinGroup) -> None:
        plain = msgspec.to_builtins(request)
        await client.rpc("treadle_join", within_s=2 * request.timeout_s + MARGIN_S, request=plain)
        self._group = request.group

    async def receive(self, client: VllmClient, body: ReceiveWeights) -> Received:
        refuse_other_group(self._group, body.group)  # nothing is written yet
        self._arrival.begin()
        try:
            plain = await client.rpc("treadle_receive", within_s=2 * body.timeout_s + MARGIN_S, group=body.group)
        except RequestError as error:  # the worker's own: it has stopped receiving
            self._arrival.broke_off(error.message)
            raise EngineError(error.message, fix=error.fix) from None
        except EngineError as error:
            self.damaged(f"weights of a broadcast were taken over in part, or may yet be: {error.message}")
            raise
        self._arrival.came()
        return msgspec.convert(plain, Received)

    async def stand_still(self, client: VllmClient, gate: Path, order: Adopt) -> float:
        """Until the trainer has written the shared weights. A RequestError: nothing was."""
        body = {"gate": str(gate), "number": order.number, "timeout_s": order.timeout_s}
        try:
            answers = await client.call("/treadle/adopt", body, order.timeout_s + MARGIN_S)
        except EngineError as error:
            self._arrival.broke_off(error.message)
            raise
        refuse_errors(answers)
        self._arrival.named()
        return max(float(answer["held_s"]) for answer in answers)

    @property
    def are_settled(self) -> bool:
        return self._arrival.is_settled

    def damaged(self, reason: str) -> None:
        """The worker may be writing yet: nothing that comes later mends that."""
        self.damage = reason
        self._arrival.broke_off(reason)

    def refuse_going_on(self, policy_version: int | None) -> None:
        self._arrival.refuse_going_on(policy_version)

    def named(self) -> None:
        self._arrival.named()
