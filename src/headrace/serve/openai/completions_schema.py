"""Request and answer of ``/v1/completions``. Must not know the engine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from headrace.base.errors import NotImplementedFeatureError
from headrace.serve.openai.schema_common import COMMON_REFUSED, Refusal, SamplingFields, TokenIds, Usage


def _prompt_kind(value: Any) -> str | None:
    """Name the shape of a prompt, so that an error speaks about that shape only."""
    if isinstance(value, list):
        first = value[0] if value else ""
        if isinstance(first, list):
            return "<token lists>"
        return "<texts>" if isinstance(first, str) else "<tokens>"
    return "<text>" if isinstance(value, str) else None


TokenList = Annotated[TokenIds, Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("<texts>")]
    | Annotated[TokenList, Tag("<tokens>")]
    | Annotated[list[TokenList], Field(fail_fast=True, min_length=1), Tag("<token lists>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="expected",
        custom_error_message="a string, a list of strings, token ids, or a list of lists of token ids",
    ),
    Field(description="A text, a list of texts, token ids, or a list of lists of token ids."),
]


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: int | None = Field(None, description="Alternatives for each token, the classic shape.")
    best_of: int | None = Field(None, description="Only accepted when equal to n.")
    suffix: Any = None
    prompt_embeds: Any = None

    refused: ClassVar[dict[str, Refusal]] = {
        **COMMON_REFUSED,
        "suffix": Refusal("text after the completion"),
        "prompt_embeds": Refusal("prompts given as embeddings"),
    }

    def check_refused(self) -> None:
        """Refuse known but missing features.

        Raises:
            NotImplementedFeatureError: naming the field.
        """
        super().check_refused()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise NotImplementedFeatureError(
                f"best_of={self.best_of} with n={self.n or 1} (choosing among more answers than are returned) is not "
                "implemented in Headrace; remove best_of",
                param="best_of",
            )


class ClassicLogprobs(BaseModel):
    """Log-probabilities in the shape of the classic endpoint; the four lists are aligned."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: ClassicLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    """Answer of ``POST /v1/completions``; a streamed event has the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
