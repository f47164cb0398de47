"""Define the settings of on-policy distillation: a teacher that scores the tokens that the policy sampled."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from treadle.config.section import PositiveInt, Seconds, Section, option

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_url(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError("write it as http://HOST:PORT")
    return url


HttpUrl = Annotated[str, AfterValidator(_check_url)]


class DistillationOptions(Section):
    """What the policy learns from: scores, a teacher, or both."""

    reward_coef: Coefficient = option(1.0, "weight of the advantages from scores; 0: learn from the teacher alone")
    distill_coef: Coefficient = option(
        0.0,
        "weight of the reverse KL to the teacher (policy's minus teacher's logprob of each sampled token), which is "
        "subtracted from the token's advantage; 0: off",
        default_text="0.0; with teacher_url 1.0",
    )
    teacher_url: HttpUrl = option(
        "",
        "URL of an engine that serves the teacher (treadle engine, or vLLM's OpenAI server), for the groups that come "
        "without a teacher's logprobs; its API key is read from TREADLE_TEACHER_TOKEN",
    )
    teacher_requests: PositiveInt = option(32, "rollouts that the teacher scores at the same time")
    teacher_timeout_s: Seconds = option(
        300.0, "retry failed teacher requests for this many seconds, then stop the trainer"
    )

    @model_validator(mode="before")
    @classmethod
    def _teacher_is_used(cls, values: Any) -> Any:
        """Who names a teacher wants to learn from it."""
        if isinstance(values, dict) and values.get("teacher_url"):
            return {"distill_coef": 1.0} | values
        return values

    @model_validator(mode="after")
    def _something_is_learned(self) -> DistillationOptions:
        if self.teacher_url and not self.distill_coef:
            raise ValueError(
                "distill_coef is 0, so the teacher of teacher_url is of no use: set it to 1, or leave both out"
            )
        if not self.reward_coef and not self.distill_coef:
            raise ValueError(
                "reward_coef and distill_coef are 0, so nothing is learned: set distill_coef, or leave reward_coef out"
            )
        return self
