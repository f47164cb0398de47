"""Define the routes of the page: its files and its JSON answers. The server that mounts them checks access.

with open_pages(run_folder, store, explain, is_at_work) as pages:
    for path, handler in pages: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from treadle.dash.charts import charts_of, series_of, syncs_of
from treadle.dash.monitor import EngineMonitor, ProcessTable, ProcessView, QueueHistory
from treadle.dash.rollouts import GroupIndexer, TokenDecoder, open_group, search, view_group
from treadle.dash.run_folder import HeldOut, RunFolder, Runs, env_tables, task_of
from treadle.dash.status import (
    TRAINING_STEPS,
    WARNING_STEPS,
    EngineStatus,
    RunFacts,
    Standing,
    Tile,
    in_words,
    result_in_words,
    sampling_note,
    standing,
    tiles_of,
)
from treadle.dash.web import (
    INDEX,
    Handler,
    PageError,
    StaticFiles,
    answering_errors,
    as_json,
    float_param,
    int_param,
)
from treadle.store import Store, groups, runs
from treadle.store.browse import Browser, GroupFilter
from treadle.track.catalogue import METRICS

Page = tuple[str, Handler]  # (path, handler of GET)
PAGE_SIZE = 50
MAX_PAGE_SIZE = 200
MAX_POINTS = 4_000
MAX_TEXT_CHARS = 200
STATES = ("queued", "leased", "trained", "dropped", "dead")
NUM_HEALTH_LINES = 3


@contextlib.contextmanager
def open_pages(
    run_folder: Path | None, store: Store, explain: Callable[[], str], is_at_work: Callable[[], bool]
) -> Iterator[Sequence[Page]]:
    """`explain` says why there is no batch now; `is_at_work`: whether any process of the run reports."""
    run = None if run_folder is None else RunFolder(run_folder.expanduser().resolve())
    with store.open_browser() as browser:
        indexer = GroupIndexer(browser, first=run.metrics.read_on if run is not None else lambda: None)
        queue = QueueHistory(store)
        try:
            yield Routes(store, explain, is_at_work, browser, indexer, queue, Runs(run)).pages()
        finally:
            queue.close()
            indexer.close()


class Routes:
    def __init__(
        self,
        store: Store,
        explain: Callable[[], str],
        is_at_work: Callable[[], bool],
        browser: Browser,
        indexer: GroupIndexer,
        queue: QueueHistory,
        runs: Runs,
    ) -> None:
        self._store = store
        self._explain = explain
        self._is_at_work = is_at_work
        self._browser = browser
        self._learner = indexer
        self._queue = queue
        self._runs = runs
        self._files = StaticFiles()
        self._processes = ProcessTable(runs.own)
        config = runs.own.config() if runs.own is not None else {}
        self._config = config
        self._engine = EngineMonitor(config)
        model = (config.get("engine") or {}).get("model")
        self._decoder = TokenDecoder(Path(model).expanduser() if isinstance(model, str) else None)

    def pages(self) -> list[Page]:
        handlers: list[Page] = [
            ("/dash", self.redirect),
            ("/dash/", self.index),
            ("/dash/api/run", self.run),
            ("/dash/api/series", self.series),
            ("/dash/api/now", self.now),
            ("/dash/api/queue", self.queue),
            ("/dash/api/groups", self.groups),
            ("/dash/api/groups/{group_id}", self.group),
            ("/dash/api/search", self.search),
            ("/dash/api/logs/{name}", self.log),
            ("/dash/api/syncs", self.syncs),
            ("/dash/{name}", self.file),
        ]
        return [(path, answering_errors(handler)) for path, handler in handlers]

    # ---- files

    async def redirect(self, _: Request) -> Response:
        return RedirectResponse("/dash/")

    async def index(self, request: Request) -> Response:
        return self._files.answer(request, INDEX)

    async def file(self, request: Request) -> Response:
        return self._files.answer(request, request.path_params["name"])

    # ---- the run

    async def run(self, _: Request) -> Response:
        own = self._runs.own
        config = self._config
        others = await asyncio.to_thread(self._runs.names)
        return as_json(
            {
                "name": own.name if own is not None else "",
                "model": str(config.get("model") or ""),
                "env": task_of(config),
                "steps": config.get("steps"),
                "is_supervised": own is not None and own.is_supervised,
                "charts": await asyncio.to_thread(charts_of, own),
                "meanings": {name: entry.meaning for name, entry in METRICS.items()},
                "others": others,
                "envs": [{"env_id": env.env_id, "name": env.name} for env in self._store.read(runs.read_envs)],
                "states": STATES,
            }
        )

    async def series(self, request: Request) -> Response:
        run = self._chosen_run(request)
        first, last = int_param(request, "first"), int_param(request, "last")
        num_points = min(MAX_POINTS, max(2, int_param(request, "points") or 600))
        asked = request.query_params.get("names", "")
        charts = [] if asked else charts_of(run)
        names = asked.split(",") if asked else sorted({name for chart in charts for name in chart.names})
        return as_json(await asyncio.to_thread(series_of, run, names, first, last, num_points))

    async def syncs(self, request: Request) -> Response:
        """The last weight syncs: version, end time and duration of each part."""
        run = self._chosen_run(request)
        return as_json(await asyncio.to_thread(syncs_of, run))

    def _chosen_run(self, request: Request) -> RunFolder | None:
        name = request.query_params.get("run", "")
        found = self._runs.get(name)
        if found is None and name:
            raise PageError(404, f"there is no run {name[:100]!r} beside this one")
        return found

    # ---- now

    async def now(self, _: Request) -> Response:
        return as_json(await asyncio.to_thread(self._now))

    async def queue(self, _: Request) -> Response:
        return as_json({"samples": await asyncio.to_thread(self._queue.samples)})

    def _now(self) -> dict[str, Any]:
        run, counts, own = self._store.read(runs.read_run), self._store.read(groups.counts), self._runs.own
        engine = self._engine.look()
        latest = self._browser.latest_events(("leased", "trained"))
        leased, trained = latest.get("leased"), latest.get("trained")
        planned = self._config.get("steps")
        now = time.time()
        processes = self._processes.look()
        held_out = own.held_out() if own is not None else []
        by_env = own.held_out_by_env() if own is not None else {}
        steps = planned if isinstance(planned, int) else run.trainer.num_steps if run.trainer else None
        results = [result_in_words(held_out)]
        results += [f"{name}: {result_in_words(found)}" for name, found in by_env.items() if found]
        is_any_running = any(view.state == "running" and view.name != "hub" for view in processes)
        is_supervised = own is not None and own.is_supervised
        step = run.current_step
        if own is not None and is_supervised:  # its trainer does not know this hub
            with own.metrics.columns() as columns:
                step = columns.steps[-1] if columns.steps else 0
            is_any_running = not own.has_ended
        situation = RunFacts(
            explanation=self._explain(),
            has_trainer=run.trainer is not None,
            is_supervised=is_supervised,
            step=step,
            planned_steps=steps,
            leased_step=leased.step if leased else None,
            leased_s=max(0.0, now - leased.at) if leased else None,
            trained_s=max(0.0, now - trained.at) if trained else None,
            engine=engine,
            is_at_work=is_any_running or self._is_at_work(),
            last_words=own.last_words() if own is not None else "",
            is_measured=self._is_measured(held_out, steps),
            result="; ".join(filter(None, results)),
        )
        stands = standing(situation)
        health = own.health(step - WARNING_STEPS) if own is not None else []
        tiles, note = self._tiles(held_out, situation, len(health))
        return {
            "standing": stands,
            "words": in_words(situation),
            "tiles": tiles,
            "sampling_note": note,
            "health": health[-NUM_HEALTH_LINES:],
            "step": step,
            "steps": situation.planned_steps,
            "queued": {"groups": counts.queued.groups, "sequences": counts.queued.sequences},
            "groups": {state: getattr(counts, state).groups for state in STATES},
            "processes": [self._process(view, run.current_step, engine, stands) for view in processes],
            "logs": own.log_names() if own is not None else [],
        }

    def _tiles(self, held_out: Sequence[HeldOut], now: RunFacts, num_warnings: int) -> tuple[list[Tile], str]:
        """The tiles, and a note why held-out and training accuracy differ; empty without a run folder."""
        if self._runs.own is None:
            return [], ""
        with self._runs.own.metrics.columns() as columns:
            tiles = tiles_of(columns, held_out, now, num_warnings)
            last = held_out[-1] if held_out and held_out[-1].step else None
            training = [] if last is None else columns.known("rollout/accuracy", TRAINING_STEPS, last.step)
        tables = env_tables(self._config)
        if last is None or len(tables) > 1:  # several environments may have different sampling settings
            return tiles, ""
        return tiles, sampling_note(last, training, tables[0] if tables else {})

    def _is_measured(self, held_out: Sequence[HeldOut], steps: int | None) -> bool:
        """Whether the evaluation after the last step is done, or none is wanted."""
        tables = env_tables(self._config)
        evaluates = not tables or any(table.get("num_eval") != 0 for table in tables)
        return not evaluates or (steps is not None and any(one.step >= steps for one in held_out))

    def _process(self, view: ProcessView, step: int, engine: EngineStatus | None, stands: Standing) -> dict[str, Any]:
        row: dict[str, Any] = {name: getattr(view, name) for name in view.__struct_fields__}
        if view.name == "hub":
            row["heard_s"] = 0.0  # it is answering this request
        elif view.name.partition("-")[0] == "trainer":
            row["version"] = step
        elif view.name == "engine" and engine is not None:
            row["version"] = engine.version
            row["heard_s"] = 0.0 if engine.answers else view.heard_s
            if not engine.answers and stands != "complete":
                row["detail"] = "does not answer"
            elif engine.paused_s is not None:
                row["detail"] = "loading new weights"
        if stands == "complete" and view.state != "running":
            row["state"] = "finished"
        return row

    async def log(self, request: Request) -> Response:
        own = self._runs.own
        tail = None if own is None else await asyncio.to_thread(own.log_tail, request.path_params["name"])
        if tail is None:
            raise PageError(404, "this process has no log here")
        return as_json({"tail": tail})

    # ---- rollouts

    async def groups(self, request: Request) -> Response:
        self._learner.wake()
        await asyncio.to_thread(self._browser.learn, 0)  # at least the step of each group
        limit = min(MAX_PAGE_SIZE, max(1, int_param(request, "limit") or PAGE_SIZE))
        wanted = _wanted(request)
        reach = await asyncio.to_thread(
            self._browser.reach
        )  # first, so that it never counts more than the list below knows
        found = await asyncio.to_thread(self._browser.find, wanted, limit + 1)
        return as_json(
            {
                "groups": found[:limit],
                "go_on_before": found[limit - 1].id if len(found) > limit else None,
                "num_groups": reach.num_groups,
                "num_known": reach.num_known,
                "envs": {env.env_id: env.name for env in self._store.read(runs.read_envs)},
            }
        )

    async def search(self, request: Request) -> Response:
        text = request.query_params.get("text", "").strip()
        if not text or len(text) > MAX_TEXT_CHARS:
            raise PageError(422, f"text must have 1 to {MAX_TEXT_CHARS} characters")
        self._learner.wake()
        wanted = _wanted(request)
        return as_json(await asyncio.to_thread(search, self._browser, self._decoder, wanted, text, max_hits=PAGE_SIZE))

    async def group(self, request: Request) -> Response:
        text = request.path_params["group_id"]
        if not text.isascii() or not text.isdecimal() or len(text) > 15:
            raise PageError(404, "there is no such group")
        is_whole = request.query_params.get("form") == "whole"
        return as_json(await asyncio.to_thread(self._group, int(text), is_whole))

    def _group(self, group_id: int, is_whole: bool) -> object:
        found = self._browser.find(GroupFilter(before=group_id + 1), 1)
        if not found or found[0].id != group_id:
            raise PageError(404, f"there is no group {group_id}")
        stored = self._browser.contents([group_id]).get(group_id)
        if is_whole:
            if stored is None:
                raise PageError(404, f"the content of group {group_id} is no longer kept")
            return open_group(stored)
        names = {env.env_id: env.name for env in self._store.read(runs.read_envs)}
        older, newer = self._browser.neighbours(group_id)
        summary = found[0]
        env = names.get(summary.env_id, "none") if summary.env_id is not None else "none"
        tokens = self._runs.own.tokens if self._runs.own is not None else None
        return view_group(summary, stored, self._decoder, tokens, env=env, older=older, newer=newer)


def _wanted(request: Request) -> GroupFilter:
    state = request.query_params.get("state") or None
    if state is not None and state not in STATES:
        raise PageError(422, f"state must be one of {', '.join(STATES)}")
    return GroupFilter(
        step=int_param(request, "step"),
        env_id=int_param(request, "env"),
        state=state,
        version=int_param(request, "version"),
        score_from=float_param(request, "score_from"),
        score_to=float_param(request, "score_to"),
        length_from=int_param(request, "length_from"),
        length_to=int_param(request, "length_to"),
        before=int_param(request, "before"),
    )
