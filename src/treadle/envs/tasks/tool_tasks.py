"""Questions about a small invented world, which can be looked up but not known. Every item has a world of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.envs.seeds import stable_seed, stable_shuffle

_FIRST_NAMES = ("Orla", "Tamsin", "Bram", "Ilse", "Joss", "Maren", "Piet", "Runa", "Sorrel", "Wim", "Yara", "Edda")
_LAST_NAMES = (
    "Venn",
    "Askew",
    "Quill",
    "Marl",
    "Tolley",
    "Harrow",
    "Fenn",
    "Ludd",
    "Sparrow",
    "Wick",
    "Oake",
    "Dunmore",
)
_TOWN_BEGINNINGS = ("Tar", "Wesk", "Nym", "Pell", "Hag", "Corr", "Osk", "Ulv", "Bram", "Quen", "Sil", "Dorr")
_TOWN_ENDS = ("mouth", "by", "stead", "ford", "haven", "wick", "mere", "holt", "gate", "crag", "dale", "moor")
_GOODS = ("lantern", "kettle", "saddle", "compass", "blanket", "spindle", "hatchet", "candle", "basket", "whistle")


@dataclass(frozen=True)
class World:
    """A few people, towns and prices, as numbers and as the sentences that the search finds."""

    age: dict[str, int]
    home: dict[str, str]
    inhabitants: dict[str, int]
    price: dict[tuple[str, str], int]  # of a good in a town

    @property
    def facts(self) -> list[str]:
        return [
            *(f"{person} is {age} years old." for person, age in self.age.items()),
            *(f"{person} lives in {town}." for person, town in self.home.items()),
            *(f"{town} has {count} inhabitants." for town, count in self.inhabitants.items()),
            *(f"In {town}, a {good} costs {price} crowns." for (good, town), price in self.price.items()),
        ]


@dataclass(frozen=True)
class Puzzle:
    question: str
    answer: int
    facts: tuple[str, ...]


def make_puzzle(seed: int, difficulty: int = 0) -> Puzzle:
    """The puzzle of this seed. Difficulty 1: one fact; 2: two facts; 3: facts that lead to others; 0: any of these."""
    world = _make_world(seed)
    level = difficulty or 1 + stable_seed(seed, "level") % len(_LEVELS)
    kinds = _LEVELS[min(level, len(_LEVELS)) - 1]
    question, answer = kinds[stable_seed(seed, "kind") % len(kinds)](world, seed)
    return Puzzle(question, answer, tuple(stable_shuffle(world.facts, seed, "facts")))


def search(facts: Sequence[str], query: str, *, most: int = 3) -> list[str]:
    """The facts that have most words in common with the query; of equal ones, those that say least besides."""
    wanted = _words(query)
    ranked = sorted(facts, key=lambda fact: (-len(wanted & _words(fact)), len(fact), fact))
    return [fact for fact in ranked[:most] if wanted & _words(fact)]


_EMPTY_WORDS = {"a", "an", "the", "in", "of", "is", "are", "do", "does", "how", "many", "what", "who", "where", "old"}


def _words(text: str) -> set[str]:
    words = set(re.findall(r"\w+", text.lower()))
    return {word.removesuffix("s") for word in words - _EMPTY_WORDS or words}


def _make_world(seed: int) -> World:
    lists = (_FIRST_NAMES, _LAST_NAMES, _TOWN_BEGINNINGS, _TOWN_ENDS, _GOODS)
    first, last, beginnings, ends, goods = (stable_shuffle(names, seed, n) for n, names in enumerate(lists))
    people = [f"{one} {other}" for one, other in zip(first[:4], last[:4], strict=True)]
    towns = [f"{beginning}{end}" for beginning, end in zip(beginnings[:3], ends[:3], strict=True)]

    def draw(low: int, high: int, *what: str) -> int:
        return low + stable_seed(seed, *what) % (high - low + 1)

    return World(
        age={person: draw(18, 90, "age", person) for person in people},
        home={person: towns[draw(0, 2, "home", person)] for person in people},
        inhabitants={town: draw(200, 90_000, "inhabitants", town) for town in towns},
        price={(good, town): draw(2, 60, "price", good, town) for good in goods[:3] for town in towns},
    )


Ask = Callable[[World, int], tuple[str, int]]


def _age_later(world: World, seed: int) -> tuple[str, int]:
    person, age = next(iter(world.age.items()))
    years = 3 + seed % 40
    return f"How old will {person} be in {years} years?", age + years


def _many_goods(world: World, seed: int) -> tuple[str, int]:
    (good, town), price = next(iter(world.price.items()))
    count = 3 + seed % 20
    return f"How many crowns do {count} {good}s cost in {town}?", count * price


def _ages_together(world: World, _: int) -> tuple[str, int]:
    (one, age), (other, other_age), *_rest = world.age.items()
    return f"How old are {one} and {other} together, in years?", age + other_age


def _larger_town(world: World, _: int) -> tuple[str, int]:
    (one, count), (other, other_count), *_rest = world.inhabitants.items()
    return f"By how many inhabitants do {one} and {other} differ?", abs(count - other_count)


def _goods_at_home(world: World, seed: int) -> tuple[str, int]:
    person, town = next(iter(world.home.items()))
    good = next(iter(world.price))[0]
    count = 2 + seed % 12
    question = f"{person} buys {count} {good}s in the town where {person} lives. How many crowns is that?"
    return question, count * world.price[good, town]


def _neighbours(world: World, _: int) -> tuple[str, int]:
    person, town = next(iter(world.home.items()))
    return f"How many people besides {person} live in the town of {person}?", world.inhabitants[town] - 1


_LEVELS: tuple[tuple[Ask, ...], ...] = (
    (_age_later, _many_goods),
    (_ages_together, _larger_town),
    (_goods_at_home, _neighbours),
)
