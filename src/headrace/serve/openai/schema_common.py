"""What the request bodies of all endpoints share: strictness, refused fields, sampling fields, usage.

Bodies are strict: an unknown field, at any depth, is an error with the nearest known name (or, in lenient mode, is
logged and dropped); a wrong type is an error, never a conversion. Must not know the engine.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from headrace.base.errors import NotImplementedFeatureError
from headrace.base.log import get_logger

_log = get_logger(__name__)

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that the wire format can carry."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# A list with a million wrong items is one error, not a million.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
_NAME_CHARS = 64
"""Names of the request that are longer are cut in messages and have no near match (comparing is quadratic)."""
_MAX_BIASES = 100_000


class Refusal(NamedTuple):
    """A field that the API knows and Headrace does not implement.

    Attributes:
        feature: what it would do, in words.
        harmless: values that ask for nothing and are therefore accepted.
    """

    feature: str
    harmless: tuple[Any, ...] = (None,)


class RequestModel(BaseModel):
    """Base of every object in a request body.

    Attributes:
        refused: fields that are known but not implemented; any value that is not harmless is a 501.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    refused: ClassVar[dict[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        unknown = [name for name in data if name not in cls.model_fields]
        if not unknown:
            return data
        if info.context is not None and info.context.get("unknown_fields") == "ignore":
            shown = ", ".join(repr(name[:_NAME_CHARS]) for name in unknown[:10])
            _log.warning("%d unknown request fields ignored: %s", len(unknown), shown)
            return {name: value for name, value in data.items() if name in cls.model_fields}
        name = unknown[0]
        near = difflib.get_close_matches(name, cls.model_fields, n=1) if len(name) <= _NAME_CHARS else []
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise PydanticCustomError("unknown_field", "unknown field{hint}", {"field": name[:_NAME_CHARS], "hint": hint})

    def check_refused(self) -> None:
        """Refuse fields that are known but not implemented.

        Raises:
            NotImplementedFeatureError: naming the field and what it would do.
        """
        for name, refusal in self.refused.items():
            value = getattr(self, name)
            if not any(value is item or value == item for item in refusal.harmless):
                raise NotImplementedFeatureError(
                    f"'{name}' ({refusal.feature}) is not implemented in Headrace; remove the field", param=name
                )


def _one_or_many(value: Any) -> Any:
    """Turn a single stop string into a list of one, so that the rest sees one shape."""
    return [value] if isinstance(value, str) else value


def _not_too_many(value: Any) -> Any:
    """Refuse a huge map before its items are looked at."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise PydanticCustomError("expected", "a map of at most {most} items", {"most": _MAX_BIASES})
    return value


StopStrings = Annotated[
    Texts | None,
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str] | None),
    Field(description="One text or a list of texts that end the output."),
]


class StreamOptions(RequestModel):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Send the token counts so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; Headrace sends no padding.")


class ResponseFormat(RequestModel):
    """Output format. Only plain text is implemented."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Any = None
    structures: Any = None
    triggers: Any = None


COMMON_REFUSED: dict[str, Refusal] = {
    "use_beam_search": Refusal("beam search", (None, False)),
    "length_penalty": Refusal("a parameter of beam search", (None, 1.0)),
    "structured_outputs": Refusal("structured output"),
    "guided_json": Refusal("structured output"),
    "guided_regex": Refusal("structured output"),
    "guided_choice": Refusal("structured output"),
    "guided_grammar": Refusal("structured output"),
    "logprob_token_ids": Refusal("log-probabilities of chosen tokens"),
    "return_token_offsets": Refusal("offsets of tokens", (None, False)),
    "kv_transfer_params": Refusal("transfer of the KV cache between servers"),
    "ec_transfer_params": Refusal("transfer of encoder outputs between servers"),
    "vllm_xargs": Refusal("arguments of vLLM plugins", (None, {})),
    "repetition_detection": Refusal("stopping at repetitions"),
    "thinking_token_budget": Refusal("a budget for reasoning tokens"),
    "stream_interval": Refusal("several tokens in one event", (None, 1)),
    "watermarking": Refusal("watermarks", (None, False)),
    "store": Refusal("storing answers on the server", (None, False)),
}


class SamplingFields(RequestModel):
    """Fields of both text endpoints. Absent ones take the model's default, then the neutral value."""

    model: str | None = Field(None, description="Name of the served model; see /v1/models.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="Answers for one prompt.")
    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = Field(None, description="In (0, 1].")
    top_k: Int64 | None = Field(None, description="0 or -1: off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = Field(None, description="In [-2, 2].")
    frequency_penalty: float | None = Field(None, description="In [-2, 2].")
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_not_too_many)] = Field(
        None, description="Token id (as text) to a value in [-100, 100]."
    )
    allowed_token_ids: TokenIds | None = Field(None, description="No other token can be sampled.")
    bad_words: Texts | None = Field(None, description="Texts that must not appear.")
    max_tokens: Int64 | None = Field(None, description="Most output tokens.")
    min_tokens: Int64 | None = Field(None, description="No end before this many output tokens.")
    stop: StopStrings = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = Field(None, description="Makes the output reproducible.")
    prompt_logprobs: int | None = Field(None, description="Alternatives for each prompt token; 0 only the token.")
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Keep this many prompt tokens; -1 keeps as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where truncation drops tokens.")
    priority: Int64 | None = Field(None, description="Smaller runs earlier (priority policy only).")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Longest life of the request in seconds; over it: status 504, or an error event."
    )
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Separates prefix-cache entries of different tenants."
    )
    return_token_ids: bool | None = Field(None, description="Add the token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Show tokens as 'token_id:N' in logprobs.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its special tokens.")
    response_format: ResponseFormat | None = Field(None, description="Only {'type': 'text'} is implemented.")
    # Accepted and harmless: they change nothing in the answer.
    user: str | None = Field(None, description="Accepted, not used.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted, not used.")
    service_tier: str | None = Field(None, description="Accepted, not used.")
    safety_identifier: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(None, description="Accepted, not used.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, not used.")
    session_id: str | None = Field(None, description="Accepted, not used.")
    # Known, not implemented: refused unless the value asks for nothing.
    store: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logprob_token_ids: Any = None
    return_token_offsets: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    stream_interval: Any = None
    watermarking: Any = None

    refused: ClassVar[dict[str, Refusal]] = COMMON_REFUSED

    def check_refused(self) -> None:
        """Refuse known but missing features, structured output among them.

        Raises:
            NotImplementedFeatureError: naming the field.
        """
        super().check_refused()
        if self.response_format is not None and self.response_format.type != "text":
            raise NotImplementedFeatureError(
                f"response_format of type '{self.response_format.type}' is not implemented in Headrace; "
                "use {'type': 'text'} or remove the field",
                param="response_format",
            )


class PromptTokensDetails(BaseModel):
    """Parts of the prompt's token count."""

    cached_tokens: int = Field(description="Prompt tokens taken from the prefix cache.")


class Usage(BaseModel):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ErrorBody(BaseModel):
    """The error itself."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(BaseModel):
    """Every error answer has this shape."""

    error: ErrorBody
