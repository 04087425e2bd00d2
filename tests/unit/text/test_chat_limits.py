from __future__ import annotations

import resource
import subprocess
import sys
import time

import pytest

from headrace.base.errors import TemplateError
from headrace.text.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
GROW = (
    "{{% set ns = namespace(v={start}) %}}{{% for i in range(80) %}}{{% set ns.v = {step} %}}{{% endfor %}}"
    "{{{{ ns.v | length }}}}"
)
TOO_LARGE = [
    "{{ 'a' * 999999999 }}",
    "{{ 999999999 * 'a' }}",
    "{{ [1] * 999999999 }}",
    "{{ 9 ** 9999 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x' | indent(999999999, true) }}",
    "{{ ('x\n' * 100000) | indent(9000) }}",
    "{{ [1] | batch(999999999, 'x') | list }}",
    "{{ 1.5 | round(999999999) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.zfill(999999999) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ (['x'] * 100000) | join('b' * 100000) }}",
    "{{ ('b' * 100000).join(['x'] * 100000) }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "{{ ([[1]] * 900000) | sum(start=[]) }}",
    "{{ (range(99999) | list) | tojson(indent=9999) }}",
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}{{ x | length }}",
    "{% macro m() %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['a' * 999999 ~ i] %}{% endfor %}",
    "{% for i in range(999999999) %}{% endfor %}",
    GROW.format(start="'ab'", step="ns.v ~ ns.v"),
    GROW.format(start="'ab'", step="ns.v + ns.v"),
    GROW.format(start="[1]", step="ns.v + ns.v"),
    GROW.format(start="[1]", step="[ns.v, ns.v]"),
    GROW.format(start="[1]", step="(ns.v, ns.v)"),
    GROW.format(start="{}", step="{'a': ns.v, 'b': ns.v}"),
    GROW.format(start="[1]", step="dict(a=ns.v, b=ns.v)"),
    GROW.format(start="[1]", step="[ns.v] | batch(2, ns.v) | list"),
    GROW.format(start="2", step="ns.v * ns.v"),
    GROW.format(start="[1]", step="namespace(a=ns.v, b=ns.v)").replace(" | length", ""),
]


@pytest.mark.parametrize("source", TOO_LARGE)
def test_what_grows_too_large_is_refused(source: str) -> None:
    start = time.process_time()
    with pytest.raises(TemplateError, match=r"not allowed|more than|Range too big|longer than"):
        ChatTemplate(source).render(USER)
    assert time.process_time() - start < 4.0


def test_memory_stays_small_meanwhile() -> None:
    code = f"""
import resource
from headrace.base.errors import TemplateError
from headrace.text.chat import ChatTemplate
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in {TOO_LARGE!r}:
    try:
        ChatTemplate(source).render({USER!r})
    except TemplateError:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 700, f"{done.stdout} MiB more"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


@pytest.mark.parametrize(
    "source",
    [
        *("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}"),
        *("{{ self.__init__.__globals__ }}", "{{ raise_exception.__globals__.x }}", "{{ ''.encode() }}"),
        *("{{ lipsum(999) }}", "{{ cycler('a') }}", "{{ '{0.__class__.__mro__}'.format(1) }}"),
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(USER)


def test_ordinary_sizes_pass() -> None:
    big = "é" * 3_000_000
    template = ChatTemplate(
        "{% for m in messages %}{{ '<' + m.content + '>' }}{{ m.content | trim ~ 'x' }}{% endfor %}"
    )
    assert len(template.render([{"role": "user", "content": big}])) == 2 * len(big) + 3
    assert (
        ChatTemplate(
            "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 'x'.ljust(3) }}|{{ '%5.1f' % 2.25 }}{{ '{:>4}'.format(7) }}"
        ).render(USER)
        == "ababab1024x  |  2.2   7"
    )
