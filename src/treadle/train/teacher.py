"""Ask a teacher, served by an engine over HTTP, for its logprobs of the tokens that the policy sampled.

    batch is leased --start--> a request for each rollout, at most `teacher_requests` at once, in daemon threads
    batch is trained <-finish-- the answers, in the groups

A batch that is leased ahead is scored while the trainer finishes the step before it. Only rank 0 asks; the other ranks
get the answers with the batch. POST /v1/completions with prompt_logprobs is used, which `treadle engine` (with
transformers and with vLLM) and vLLM's own server have.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from tokenizers import Tokenizer

from treadle.background import BackgroundWorker
from treadle.config import TrainConfig
from treadle.errors import ConfigError, EngineError
from treadle.log import get_logger
from treadle.net.access_tokens import bearer_headers
from treadle.net.address import is_loopback, shown_url
from treadle.net.client import OK, BlockingHttpClient, Failure, HttpAnswer, NoAnswer, Retries, RetryPolicy
from treadle.tokenizer_file import encode, load_tokenizer
from treadle.train.prepare import is_without_advantage, teacher_logprobs, was_cut_off
from treadle.train.ranks import Ranks
from treadle.watch.waits import Waits, WaitSpec
from treadle.wire.groups import IGNORED, LeasedBatch, ScoredGroup, taught_group

log = get_logger("teacher")
T = TypeVar("T")

TOKEN_VARIABLE = "TREADLE_TEACHER_TOKEN"  # noqa: S105 - a variable's name
START_TEACHER = "start it with `treadle engine --model TEACHER --port 9100`, or check --train.teacher-url"
LOOK_AT_TEACHER = "see the teacher's log; --train.teacher-timeout-s is how long it may fail"
COMPLETIONS = "/v1/completions"
UNUSABLE_ROLLOUT = (400, 413, 422)  # statuses that concern one rollout: its tokens train without the teacher
POLL_S = 0.2
SPECIAL_PER_TEXT = 8
# Texts that are compared: letters, digits, indentation, accents, other scripts and an emoji.
PROBES = (
    "The answer is 31415.92, isn't it? 1234567890",
    "def total(xs):\n\treturn sum(x ** 2 for x in xs)\n\n    # O(n)\r\n",
    "$\\frac{a}{b}$ Gr\u00f6\u00dfe na\u00efve \u6771\u4eac\u306f\u9996\u90fd\u3067\u3059",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f642",
)


class _Logprob(msgspec.Struct):
    logprob: float


_Entry = dict[str, _Logprob] | None  # by token id; None: of the first token


class _Choice(msgspec.Struct):
    prompt_logprobs: list[_Entry] | None = None


class _Completion(msgspec.Struct):
    """The used fields of the answer to POST /v1/completions."""

    choices: list[_Choice]


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    """The used fields of GET /v1/models."""

    data: list[_Model]


@dataclass
class _Scoring:
    """The requests for one batch."""

    started_s: float
    ended_s: float  # of the newest answer
    num_tokens: int = 0
    answers: dict[tuple[int, int], Future[list[float] | None]] = field(default_factory=dict)  # by group and rollout


class Teacher:
    """`start(batch)` sends the requests, `finish(batch, ...)` waits for them and puts the answers into the groups."""

    def __init__(self, config: TrainConfig, waits: Waits) -> None:
        self.url = shown_url(config.teacher_url)
        self._config = config
        self._waits = waits
        self._workers = BackgroundWorker("teacher", config.teacher_requests)
        self._retries = RetryPolicy(give_up_after_s=config.teacher_timeout_s)
        base = config.teacher_url.rstrip("/").removesuffix("/v1")
        self._http = BlockingHttpClient(
            base,
            headers={"Content-Type": "application/json", **bearer_headers(os.environ.get(TOKEN_VARIABLE))},
            timeout_s=config.teacher_timeout_s,
            connect_timeout_s=min(10.0, config.teacher_timeout_s),
            trust_env=not is_loopback(base),
        )
        self._model = ""
        self._problem = ""  # the newest failed request
        self._scorings: dict[int, _Scoring] = {}
        self._metrics: dict[str, float] = {}

    def connect(self, folder: Path) -> None:
        """Wait until the teacher serves, and refuse one that cannot score what the model in `folder` samples."""
        with self._waits.waiting(WaitSpec(f"the teacher at {self.url} to be ready", fix=START_TEACHER)):
            answer = self._ask("GET", "/v1/models", None)
        models = self._decode(answer, _Models).data
        if not models:
            raise EngineError(f"the teacher at {self.url} serves no model", fix=START_TEACHER)
        self._model, longest = models[0].id, models[0].max_model_len
        if longest is not None and longest <= self._config.seq_len:
            raise ConfigError(
                f"the teacher at {self.url} takes {longest} tokens, and sequences of {self._config.seq_len} need one "
                "more than they have",
                fix=f"start it with --max-model-len {self._config.seq_len + 1}, or give --train.seq-len {longest - 1}",
            )
        file = folder / "tokenizer.json"
        if file.is_file():
            self._compare(load_tokenizer(file, fix="fetch the model again"), longest)
        else:
            log.warning("teacher_not_compared", reason=f"{folder} has no tokenizer.json")
        log.info("teacher", url=self.url, model=self._model, max_model_len=longest)

    def _compare(self, tokenizer: Tokenizer, longest: int | None) -> None:
        """Both tokenizers must give the same ids for some texts, and for the special tokens of the policy's."""
        special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
        starts = range(0, len(special), SPECIAL_PER_TEXT)
        for text in (*PROBES, *("a".join(["a", *special[i : i + SPECIAL_PER_TEXT]]) for i in starts)):
            own = [str(token) for token in encode(tokenizer, text, add_special_tokens=False)]
            if longest is not None and len(own) > longest - 2:  # it may add a token at the beginning, and samples one
                continue
            # The first token has no logprob, so its id is not known; it may be one that begins every text.
            teachers = [next(iter(entry or {}), "") for entry in self._prompt_logprobs(text)[1:]]
            if teachers not in (own, own[1:]):
                raise ConfigError(
                    f"the teacher {self._model} at {self.url} has another tokenizer than the policy: their token ids "
                    f"of {text!r} differ",
                    fix="distill from a model of the same family: logprobs are compared token by token",
                )

    # ---- a batch

    def start(self, batch: LeasedBatch) -> None:
        """Send the requests for the rollouts of `batch` that lack logprobs of the teacher. Does not wait."""
        now_s = time.monotonic()
        scoring = _Scoring(started_s=now_s, ended_s=now_s)
        for g, group in enumerate(batch.groups):
            for i in range(group.size):
                if (num_tokens := self._num_needed(group, i)) > 0:
                    score = partial(self._score, scoring, group.tokens[i][:num_tokens])
                    scoring.answers[g, i] = self._workers.submit(score)
                    scoring.num_tokens += num_tokens
        self._scorings[batch.step] = scoring

    def finish(self, batch: LeasedBatch, check_stop: Callable[[], None]) -> None:
        """Wait for the answers and put them into the groups; raises the first error of a request."""
        began_s = time.monotonic()
        scoring = self._scorings.pop(batch.step)
        what = f"the teacher at {self.url} to score the batch of step {batch.step}"
        spec = WaitSpec(what, of="teacher", deadline_s=self._config.teacher_timeout_s / 2)
        with self._waits.waiting(spec) as waiting:
            pending = set(scoring.answers.values())
            while pending:
                check_stop()
                done, pending = wait(pending, POLL_S, FIRST_EXCEPTION)
                for answer in done:
                    answer.result()
                waiting.problem, waiting.fix = self._problem, LOOK_AT_TEACHER if self._problem else ""
        found = {place: logprobs for place, answer in scoring.answers.items() if (logprobs := answer.result())}
        if scoring.answers and not found:
            raise EngineError(
                f"the teacher at {self.url} refused all {len(scoring.answers)} rollouts of step {batch.step}",
                fix="the trainer's log has its reasons (rollout_not_scored)",
            )
        for g in {g for g, _ in found}:
            group = batch.groups[g]
            answers = [found.get((g, i), []) for i in range(group.size)]
            batch.groups[g] = taught_group(group, list(map(_padded, group.tokens, answers)))
        self._metrics = {
            "distill/teacher_s": scoring.ended_s - scoring.started_s,
            "distill/teacher_wait_s": time.monotonic() - began_s,
            "distill/teacher_tokens": float(scoring.num_tokens),
        }

    def metrics(self) -> dict[str, float]:
        """Of the batch that was finished last."""
        return self._metrics

    def _num_needed(self, group: ScoredGroup, rollout: int) -> int:
        """Number of leading tokens that the teacher must read; 0: no trained token lacks its logprob."""
        tokens, config = group.tokens[rollout], self._config
        trained = np.array(group.masks[rollout]) != IGNORED
        trained[:1] = False  # nothing predicts the first token
        is_left_out = (
            not 0 < len(tokens) <= config.seq_len
            or (config.mask_overlong and was_cut_off(group, rollout, config.seq_len))
            or is_without_advantage(group, rollout)
        )
        if is_left_out or not (np.isnan(teacher_logprobs(group, rollout, trained)) & trained).any():
            return 0
        return int(np.flatnonzero(trained)[-1]) + 1

    # ---- one request

    def _score(self, scoring: _Scoring, tokens: list[int]) -> list[float] | None:
        """The logprob of each token but the first; None if the teacher refuses these tokens."""
        body = self._body(tokens)
        answer = self._ask("POST", COMPLETIONS, body)
        scoring.ended_s = time.monotonic()
        if answer.status in UNUSABLE_ROLLOUT:
            log.warning("rollout_not_scored", tokens=len(tokens), status=answer.status, teacher_says=answer.message)
            return None
        scored = self._scored(answer)
        try:
            return [(entry or {})[str(token)].logprob for entry, token in zip(scored[1:], tokens[1:], strict=True)]
        except (KeyError, ValueError):  # another token, or another number of them
            raise EngineError(
                f"the teacher at {self.url} gave no logprobs of the tokens that it was asked for", fix=LOOK_AT_TEACHER
            ) from None

    def _prompt_logprobs(self, prompt: str) -> list[_Entry]:
        return self._scored(self._ask("POST", COMPLETIONS, self._body(prompt)))

    def _body(self, prompt: str | list[int]) -> bytes:
        return msgspec.json.encode(
            {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        )

    def _scored(self, answer: HttpAnswer) -> list[_Entry]:
        choices = self._decode(answer, _Completion).choices
        if not choices or choices[0].prompt_logprobs is None:
            raise ConfigError(
                f"the server at {self.url} gives no logprobs of prompts, so it cannot be a teacher",
                fix="serve the teacher with `treadle engine`, or with vLLM's OpenAI server",
            )
        return choices[0].prompt_logprobs

    def _ask(self, method: str, path: str, body: bytes | None) -> HttpAnswer:
        """Ask again until the teacher answers, for at most `teacher_timeout_s`."""
        retries = Retries(self._retries)
        while True:
            try:
                outcome: HttpAnswer | NoAnswer = self._http.request(method, path, body=body)
            except NoAnswer as error:
                outcome = error
            checked = self._retries.check(outcome, "teacher")
            if isinstance(checked, HttpAnswer):
                self._problem = ""
                return checked
            self._problem = checked.problem
            pause_s = retries.pause_s(checked)
            if pause_s is None:
                raise self._unavailable(checked, retries.num_failures)
            time.sleep(pause_s)

    def _unavailable(self, failure: Failure, num_failures: int) -> EngineError:
        seconds = self._config.teacher_timeout_s
        return EngineError(
            f"the teacher at {self.url} did not answer for {seconds:g} s ({num_failures} requests): {failure.problem}",
            fix=f"{START_TEACHER}; then start the trainer again: its batches are kept at the hub",
        )

    def _decode(self, answer: HttpAnswer, kind: type[T]) -> T:
        if answer.status != OK:
            fix = f"put its API key into {TOKEN_VARIABLE}" if answer.status in (401, 403) else START_TEACHER
            raise ConfigError(f"the teacher at {self.url} refused: {answer.status} {answer.message}", fix=fix)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the server at {self.url} is no teacher: {error}", fix=START_TEACHER) from None


def open_teacher(config: TrainConfig, ranks: Ranks, folder: Path, waits: Waits) -> Teacher | None:
    """The teacher of `config`, which is ready and fits the model in `folder`; None on other ranks than 0, which wait
    for that, and without a teacher."""
    if not config.teacher_url:
        return None

    def connect() -> Teacher:
        teacher = Teacher(config, waits)
        teacher.connect(folder)
        return teacher

    return ranks.lead("connecting to the teacher", connect)


def _padded(tokens: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """`logprobs` are those of the second and the following tokens; the last tokens may not have been sent."""
    return [math.nan, *logprobs, *[math.nan] * (len(tokens) - 1 - len(logprobs))][: len(tokens)]
