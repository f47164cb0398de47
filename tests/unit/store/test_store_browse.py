"""Search the groups of a queue by their content, without blocking the queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from treadle.store import LeaseTerms, Limits, NewGroup, Post, ReadFailed, SqliteStore, Store, runs
from treadle.store.browse import Browser, GroupFilter
from treadle.wire.groups import ATROPOS_KEYS, IGNORED, ScoredGroup, from_stored, pack_group
from treadle.wire.hub import RegisterTrainer

LIMITS = Limits(groups=1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hub.sqlite"


@pytest.fixture
def store(queue, trainer: RegisterTrainer) -> Iterator[Store]:
    with queue.open() as opened:
        opened.register_trainer(trainer).result()
        yield opened


@pytest.fixture
def browser(store: Store) -> Iterator[Browser]:
    with store.open_browser() as opened:
        yield opened


def new_group(score: float, length: int = 3, *, is_json: bool = True, env_id: int | None = None) -> NewGroup:
    row, mask = [1] * (2 + length), [-100, -100] + [1] * length
    group = ScoredGroup(
        tokens=[row, row], masks=[mask, mask], scores=[score, score],
        messages=[[{"role": "user", "content": f"say {score}"}, {"role": "assistant", "content": "yes"}]] * 2,
    )  # fmt: skip
    as_json = msgspec.json.encode({key: getattr(group, key) for key in ATROPOS_KEYS})
    payload = as_json if is_json else pack_group(group)
    return NewGroup(payload, size=2, num_tokens=10, format="json" if is_json else "binary", env_id=env_id)


def learn_all(browser: Browser) -> None:
    while browser.learn(3):
        pass


def ids(browser: Browser, **wanted) -> list[int]:
    return [group.id for group in browser.find(GroupFilter(**wanted), 100)]


def test_groups_are_found_by_score_and_length_in_both_forms(store: Store, browser: Browser):
    store.append(Post([new_group(0.0), new_group(0.5, 9, is_json=False), new_group(1.0, 9)]), LIMITS).result()
    assert ids(browser, score_from=0.4) == []  # nothing is known yet
    learn_all(browser)
    assert ids(browser) == [3, 2, 1]
    assert ids(browser, score_from=0.4, score_to=0.6) == [2]
    assert ids(browser, length_from=9) == [3, 2]
    assert ids(browser, length_to=3) == [1]
    (found,) = browser.find(GroupFilter(score_to=0.0), 10)
    assert (found.prompt, found.shortest, found.longest) == ("say 0.0", 3, 3)


def test_a_nul_in_a_prompt_does_not_stop_the_search(store: Store, browser: Browser):
    content = {"role": "user", "content": "say\0 this"}
    payload = {"tokens": [[1, 2]], "masks": [[IGNORED, 2]], "scores": [1.0], "messages": [[content]]}
    group = NewGroup(msgspec.json.encode(payload), size=1, num_tokens=2)
    store.append(Post([group, new_group(0.0)]), LIMITS).result()
    learn_all(browser)
    assert [group.prompt for group in browser.find(GroupFilter(), 10)] == ["say 0.0", "say this"]


def test_groups_are_found_by_step_and_state(store: Store, browser: Browser, terms: LeaseTerms):
    store.append(Post([new_group(float(n)) for n in range(5)]), LIMITS).result()
    for step in (1, 2):
        lease = store.lease(step, "t", terms).result()
        assert lease is not None
    store.ack(1, store.lease(1, "t", terms).result().token).result()
    learn_all(browser)
    assert ids(browser, step=1) == [2, 1]
    assert ids(browser, state="trained") == [2, 1]
    assert ids(browser, state="queued") == [5]
    assert [group.step for group in browser.find(GroupFilter(), 10)] == [None, 2, 2, 1, 1]


def test_what_comes_later_is_learned_first_and_paging_reaches_everything(store: Store, browser: Browser):
    store.append(Post([new_group(float(n)) for n in range(10)]), LIMITS).result()
    browser.learn(3)
    assert (browser.reach().num_known, browser.reach().num_groups) == (3, 10)
    store.append(Post([new_group(99.0)]), LIMITS).result()
    browser.learn(1)
    assert ids(browser, score_from=99.0) == [11]
    learn_all(browser)
    assert browser.reach().num_known == 11
    first = browser.find(GroupFilter(), 6)
    assert [group.id for group in first] + ids(browser, before=first[-1].id) == list(range(11, 0, -1))


def test_after_a_reset_the_old_facts_are_gone(store: Store, browser: Browser, trainer: RegisterTrainer):
    store.append(Post([new_group(1.0), new_group(1.0)]), LIMITS).result()
    learn_all(browser)
    store.write(runs.reset).result()
    store.append(Post([new_group(0.0)]), LIMITS).result()
    learn_all(browser)
    assert ids(browser) == ids(browser, score_to=0.0) == [3]


def test_facts_survive_restarts_and_belong_to_one_queue(path: Path, trainer: RegisterTrainer):
    with SqliteStore.open(path) as store:
        store.append(Post([new_group(1.0)]), LIMITS).result()
        with Browser.open(path) as browser:
            learn_all(browser)
        with Browser.open(path) as browser:
            assert ids(browser, score_from=1.0) == [1]
    path.unlink()
    path.with_name("hub.sqlite.progress").unlink()
    with SqliteStore.open(path) as store, Browser.open(path) as browser:
        store.append(Post([new_group(0.0)]), LIMITS).result()
        learn_all(browser)
        assert ids(browser, score_from=1.0) == []
        assert ids(browser, score_to=0.0) == [1]


def test_a_damaged_facts_file_is_rebuilt_with_owner_only_access(path: Path):
    facts = path.with_name("hub.sqlite.facts")
    facts.write_bytes(b"rubbish" * 1000)
    with SqliteStore.open(path) as store, store.open_browser() as browser:
        store.append(Post([new_group(1.0)]), LIMITS).result()
        learn_all(browser)
        assert ids(browser, score_from=1.0) == [1]
    assert facts.stat().st_mode & 0o777 == 0o600


def test_the_queue_itself_cannot_be_changed_from_here(path: Path):
    with SqliteStore.open(path) as store, store.open_browser() as browser, pytest.raises(ReadFailed) as refused:
        browser._session.change(lambda db: db.execute("DELETE FROM treadle.groups"))
    assert "readonly" in str(refused.value.__cause__)


@pytest.mark.parametrize("is_json", [True, False])
def test_a_group_is_opened_as_it_was_posted(store: Store, browser: Browser, is_json: bool):
    store.append(Post([new_group(0.5, is_json=is_json)]), LIMITS).result()
    group = from_stored(browser.contents([1])[1].content())
    assert group.scores == [0.5, 0.5]
    assert group.messages[0][0]["content"] == "say 0.5"


def test_content_that_rotted_or_is_gone_is_not_shown(queue, store: Store, browser: Browser):
    store.append(Post([new_group(0.5), new_group(0.5)]), LIMITS).result()
    queue.rows("UPDATE payloads SET format = 'binary' WHERE id = 1")
    assert set(browser.contents([1, 2, 77])) == {2}
    learn_all(browser)
    assert [group.score for group in browser.find(GroupFilter(), 10)] == [0.5, None]
