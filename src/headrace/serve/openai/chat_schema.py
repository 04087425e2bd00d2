"""Request and answer of ``/v1/chat/completions``. Must not know the engine or the chat template."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from headrace.base.errors import NotImplementedFeatureError, RequestError
from headrace.serve.openai.schema_common import COMMON_REFUSED, Int64, Refusal, RequestModel, SamplingFields, Usage


class ContentPart(RequestModel):
    """One part of a message's content. Only text is implemented."""

    type: Literal["text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "file"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    uuid: Any = None


def _content_kind(value: Any) -> str | None:
    """Name the shape of a content; None is neither."""
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(_content_kind, custom_error_type="expected", custom_error_message="a string or a list of parts"),
]


class ChatMessage(RequestModel):
    """One message. Fields of an earlier answer may be sent back as they came."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(None, description="A text or a list of text parts.")
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None

    refused: ClassVar[dict[str, Refusal]] = {
        "annotations": Refusal("annotations", (None, [])),
        "audio": Refusal("audio"),
        "tool_calls": Refusal("tool calling", (None, [])),
        "tool_call_id": Refusal("tool calling"),
        "function_call": Refusal("tool calling"),
    }

    def to_template(self, index: int) -> dict[str, Any]:
        """Return the message as the chat template sees it: ``developer`` becomes ``system``, every part a text.

        Raises:
            NotImplementedFeatureError: tools, images, audio or files.
            RequestError: no content.
        """
        where = f"messages[{index}]"
        if self.role in ("tool", "function"):
            raise NotImplementedFeatureError(
                f"{where}: role '{self.role}' (tool calling) is not implemented in Headrace", param=f"{where}.role"
            )
        try:
            self.check_refused()
        except NotImplementedFeatureError as error:
            raise NotImplementedFeatureError(error.message, param=f"{where}.{error.param}") from None
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._content(where),
        }
        for name in ("name", "reasoning", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message

    def _content(self, where: str) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":
                return self.refusal or ""
            raise RequestError(f"'{where}.content' is required", param=f"{where}.content")
        return [
            {"type": "text", "text": self._part_text(part, f"{where}.content[{number}]")}
            for number, part in enumerate(self.content)
        ]

    @staticmethod
    def _part_text(part: ContentPart, where: str) -> str:
        if part.type not in ("text", "refusal"):
            raise NotImplementedFeatureError(
                f"{where}: parts of type '{part.type}' are not implemented in Headrace; only 'text' is", param=where
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise RequestError(f"'{where}.{part.type}' is required", param=f"{where}.{part.type}")
        return text


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]

CHAT_REFUSED: dict[str, Refusal] = {
    **COMMON_REFUSED,
    "functions": Refusal("tool calling", (None, [])),
    "function_call": Refusal("tool calling", (None, "none")),
    "modalities": Refusal("output other than text", (None, ["text"])),
    "audio": Refusal("audio output"),
    "prediction": Refusal("predicted outputs"),
    "web_search_options": Refusal("web search"),
    "reasoning_effort": Refusal("control of reasoning"),
    "include_reasoning": Refusal("leaving reasoning out", (None, True)),
    "verbosity": Refusal("control of verbosity", (None, "medium")),
    "documents": Refusal("documents for the template", (None, [])),
    "media_io_kwargs": Refusal("media", (None, {})),
    "mm_processor_kwargs": Refusal("media", (None, {})),
    "return_prompt_text": Refusal("returning the rendered prompt", (None, False)),
}


class TemplateFields(RequestModel):
    """How messages become a prompt."""

    chat_template: str | None = Field(None, description="Jinja template in place of the model's own.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the template.")
    add_generation_prompt: bool | None = Field(None, description="End the prompt where an answer begins (default).")
    continue_final_message: bool | None = Field(None, description="Let the model continue the last message.")


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Int64 | None = Field(None, description="Most output tokens; beats max_tokens.")
    logprobs: bool | None = Field(None, description="Return log-probabilities of the output tokens.")
    top_logprobs: int | None = Field(None, description="Alternatives for each token; needs logprobs.")
    echo: bool | None = Field(None, description="Put the last message before the output, if it is the assistant's.")
    parallel_tool_calls: bool | None = Field(None, description="Accepted, not used.")
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    include_reasoning: Any = None
    verbosity: Any = None
    documents: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    return_prompt_text: Any = None

    refused: ClassVar[dict[str, Refusal]] = CHAT_REFUSED

    def check_refused(self) -> None:
        """Refuse known but missing features, tool calling among them.

        Raises:
            NotImplementedFeatureError: naming the field.
        """
        super().check_refused()
        if self.tool_choice not in (None, "none"):
            raise NotImplementedFeatureError(
                "'tool_choice' (tool calling) is not implemented in Headrace; use 'none' or remove the field",
                param="tool_choice",
            )
        if self.tools and self.tool_choice != "none":
            raise NotImplementedFeatureError(
                "'tools' (tool calling) is not implemented in Headrace; remove the field or set tool_choice='none'",
                param="tools",
            )


class TopLogprob(BaseModel):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the output."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionAnswer(BaseModel):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    """What a streamed event adds; empty in the last event of a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatStreamChoice(BaseModel):
    """One answer's part of a streamed event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "error"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One streamed event of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
