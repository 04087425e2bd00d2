from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest

from headrace.base.errors import HeadraceError, RequestError, TemplateError
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
CHATS: list[list[dict[str, Any]]] = [
    USER,
    [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "Hello  "},
        {"role": "user", "content": "中文 😀\n"},
    ],
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": "é<&>"}}}],
        },
        *USER,
    ],
    [{"role": "assistant", "content": "a", "reasoning_content": "because"}, *USER],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d <&> é", "parameters": {"type": "object"}}}]
# Own templates that use what templates of models use.
LOOPS = """{%- for message in messages %}
    {%- if loop.index0 == 9 %}{% break %}{% endif %}
    {{- '[' + message.role + ']' }}
    {%- if message.content is defined %}{{ message['content'] | trim }}{% endif %}
    {% generation %}
    x{{ loop.last }}
    {% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}[go]{% endif %}
"""
TOOLFUL = """{%- macro show(tool, depth=0) %}<{{ tool.function.name ~ ':' ~ depth }}>{% endmacro -%}
{%- set ns = namespace(count=0, names=[]) %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{{ show(tool) }}
{%- set ns.count = ns.count + 1 %}{% set ns.names = ns.names + [tool.function.name] %}{% endfor %}{% endif %}
{{ ns.count }}{{ ns.names | join(', ') }}{{ bos_token }}{{ eos_token }}
{% for m in messages if m.role != 'system' %}{{ m.content or 'none' }}{{ m.get('tool_calls', []) | length }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}
{{- c.function.arguments.items() | list }}{% endfor %}{% endif %}
{%- if m.reasoning_content is string %}<think>{{ m.reasoning_content.strip('\n') }}</think>{{ m.thinking }}{% endif %}
{{- m.role.upper().split('S')[-1] ~ m.role[::-1] ~ (m.role | length * 2) ~ '%s-%03d' % (m.role, 7) }}
{% endfor %}{{ documents is none }}{{ extra | default('no') }}{{ dict(a=1)['a'] }}{{ [1, 2, 3][-2:] }}
{{ {'k': (1, 2)} }}
"""
TEMPLATES = {"loops": LOOPS, "toolful": TOOLFUL}


def theirs(reference: Any, source: str | None, chat: list[dict[str, Any]], **options: Any) -> str:
    text = reference.apply_chat_template(chat, chat_template=source, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("number", range(len(CHATS)))
@pytest.mark.parametrize("name", ["smollm", *TEMPLATES])
@pytest.mark.parametrize("begin", [True, False])
def test_equals_transformers(smollm: Tokenizer, reference: Any, name: str, number: int, begin: bool) -> None:
    chat = CHATS[number]
    if name == "smollm" and number == 2:
        chat = [{**message, "content": "x"} for message in chat]  # its template needs a content
    source = TEMPLATES.get(name, smollm.chat_template or "")
    template = ChatTemplate(source, smollm.special_tokens)
    for tools in (None, TOOLS):
        expected = theirs(reference, source, chat, tools=tools, add_generation_prompt=begin)
        assert template.render(chat, tools=tools, add_generation_prompt=begin) == expected


def test_smollm_prompt(smollm: Tokenizer) -> None:
    template = ChatTemplate(smollm.chat_template or "", smollm.special_tokens)
    assert template.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " x\n\n", "Hi"])
@pytest.mark.parametrize("source", [None, "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"])
def test_continuing_the_last_message_equals_transformers(
    smollm: Tokenizer, reference: Any, source: str | None, content: str
) -> None:
    chat = [*USER, {"role": "assistant", "content": content}]
    template = ChatTemplate(source or smollm.chat_template or "", smollm.special_tokens)
    expected = theirs(reference, source or smollm.chat_template, chat, continue_final_message=True)
    got = template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert got == expected
    assert chat[-1]["content"] == content
    assert got.endswith((content, content.strip()))


def test_continuing_excludes_a_new_message_and_needs_a_text() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="add_generation_prompt=false"):
        template.render(USER, continue_final_message=True)
    with pytest.raises(RequestError, match="no text to continue"):
        template.render([*USER, {"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
    dropping = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(TemplateError, match="not in the rendered chat"):
        dropping.render(
            [*USER, {"role": "assistant", "content": "x"}], add_generation_prompt=False, continue_final_message=True
        )


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("source", "takes", "expected"),
    [
        ("{{ messages[0].content }}", False, "a\nb"),
        ("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}", True, "[a][b]"),
        ("{% for p in messages[0]['content'] | list %}[{{ p['text'] }}]{% endfor %}", True, "[a][b]"),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endfor %}",
            True,
            "[a][b]",
        ),
        ("{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}", False, "a\nb"),
    ],
)
def test_content_parts_are_joined_unless_the_template_takes_them(source: str, takes: bool, expected: str) -> None:
    template = ChatTemplate(source)
    assert template.takes_parts is takes
    assert template.render(PARTS) == expected


def test_parts_are_continued_in_the_last_text() -> None:
    template = ChatTemplate("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}")
    assert template.render(PARTS, add_generation_prompt=False, continue_final_message=True) == "[a][b"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 7])
@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{% for p in messages[0].content %}{% endfor %}"])
def test_parts_that_are_not_text_are_refused(part: Any, source: str) -> None:
    with pytest.raises(RequestError, match="only text parts"):
        ChatTemplate(source).render([{"role": "user", "content": [part]}])


def test_variables_reach_the_template_and_keep_their_types() -> None:
    template = ChatTemplate(
        "{{ enable_thinking is true }}{{ n + 1 }}{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<s>"}
    )
    assert template.render(USER, enable_thinking=True, n=1) == "True2Hi<s>"


def test_the_date_of_today() -> None:
    before = datetime.datetime.now().strftime("%Y")
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) in (before, str(int(before) + 1))


def test_messages_must_be_there() -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        ChatTemplate("x").render([])


def test_raise_exception_carries_its_message() -> None:
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x",
        "{% endfor %}",
        "{% for x in y %}",
        "{{ '" + "(" * 10,
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}",
    ],
)
def test_what_does_not_compile_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source)


def test_a_source_that_is_too_long() -> None:
    with pytest.raises(TemplateError, match="limit is"):
        ChatTemplate("x" * ((1 << 20) + 1))


ENDLESS = {
    "nested loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a filter that goes on": "{% for a in range(90000) %}{% set x = range(90000) | map('string') | list %}{% endfor %}",
}


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_a_template_that_goes_on_for_ever_is_ended(name: str) -> None:
    template = ChatTemplate(ENDLESS[name], limit_s=0.2)
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"longer than 0\.2 s|together"):
        template.render(USER)
    assert time.monotonic() - start < 2.0
    for thread in threading.enumerate():
        if thread.name == "chat-template":
            thread.join(2.0)
            assert not thread.is_alive()


def test_many_renders_at_the_edge_of_the_time_leave_no_thread_and_no_wrong_result() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% endfor %}done", limit_s=0.004)
    results = set()
    for n in range(0, 99000, 900):
        try:
            results.add(template.render(USER, n=n))
        except TemplateError as error:
            results.add(error.message)
    assert results <= {"done", "the chat template took longer than 0.004 s"}
    assert not [thread for thread in threading.enumerate() if thread.name == "chat-template"]


def test_renders_run_side_by_side(smollm: Tokenizer) -> None:
    template = ChatTemplate(smollm.chat_template or "")
    results: list[str] = []

    def work(number: int) -> None:
        for _ in range(20):
            results.append(
                template.render([{"role": "system", "content": str(number)}, *USER])[: 20 + len(str(number))]
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(set(results)) == [f"<|im_start|>system\n{number}<" for number in range(4)]


@pytest.mark.parametrize(
    "value",
    [object(), b"x", {1, 2}],
)
def test_objects_never_reach_a_template(value: Any) -> None:
    with pytest.raises(RequestError, match="cannot be given to a chat template"):
        ChatTemplate("x").render(USER, thing=value)


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RequestError, match="deep"):
        ChatTemplate("x").render([{"role": "user", "content": "x", "extra": deep}])


def test_the_messages_given_stay_as_they_are(smollm: Tokenizer) -> None:
    chat = [{"role": "user", "content": "a", "name": None}]
    ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").render(chat)
    assert chat == [{"role": "user", "content": "a", "name": None}]


def test_all_errors_are_of_the_hierarchy() -> None:
    for source in (
        "{{ 1 / 0 }}",
        "{{ nope.x.y }}",
        "{% include 'x' %}",
        "{{ messages[9].x }}",
        "{{ none() }}",
        "{{ 'a' + 1 }}",
        "{{ x | nofilter }}",
    ):
        with pytest.raises(HeadraceError):
            ChatTemplate(source).render(USER)
