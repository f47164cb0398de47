"""Score a sorted list of names by how much of its order is right."""

from itertools import combinations

from treadle.envs.rewards import Judged, RewardInput, reward


@reward
def sorted_pairs(completion: RewardInput) -> float:
    """The share of pairs of names in the right order; 0 if the names are not exactly the given ones."""
    said = [name.strip() for name in completion.text.strip().split(",")]
    gold = completion.answer.split(", ")
    if sorted(said) != gold:
        return Judged(0.0, correct=False)
    pairs = list(combinations(said, 2))
    return Judged(sum(first < second for first, second in pairs) / len(pairs), correct=said == gold)
