"""Score a reversed text by how much of it is right."""

from difflib import SequenceMatcher

from treadle.envs.rewards import Judged, RewardInput, reward


@reward
def similarity(completion: RewardInput) -> float:
    """1 for the right text; else twice the letters in matching blocks over the letters of both texts."""
    said = completion.text.strip()
    matcher = SequenceMatcher(None, said, completion.answer, autojunk=False)
    return Judged(matcher.ratio(), correct=said == completion.answer)
