"""Chat templates: what transformers renders, and what a hostile or unsuitable one may do (R46, R54)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError, RequestError
from octavo.text import sandbox
from octavo.text.chat import ChatTemplate
from texts import byte_level

USER = [{"role": "user", "content": "Hi <b>& 'you'"}]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"é": "<"}}}]},
    {"role": "tool", "content": "3"},
    {"role": "user", "content": "So?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, 2.5, None]}}}]

CHATML = """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '
' + (message['content'] or '') + '<|im_end|>' + '
'}}{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant
' }}{% endif %}"""
WITH_TOOLS = """{{ bos_token }}
{%- if tools %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" ~ tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=none) %}
    {% for message in messages %}
  {%- if loop.first and message.role == 'system' %}{{- message.content | trim }}{% continue %}{% endif %}
  {%- if message.tool_calls is defined %}{{- message.tool_calls | tojson(indent=2) }}{%- endif %}
  {%- set ns.last = message %}{{- '[' ~ message.role ~ ']' ~ message.content }}
    {%- generation %}x{% endgeneration %}
{% endfor %}
{%- macro shout(text) %}{{ text | upper }}{% endmacro %}{{ shout(ns.last.content) }}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ eos_token }}"""


def render(source: Any, messages: Any = USER, **more: Any) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages, **more)


@pytest.mark.parametrize("source", [CHATML, WITH_TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("messages", [USER, LONG], ids=["one", "long"])
@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}, {"enable_thinking": False}])
def test_text_equals_transformers(source: str, messages: Any, more: dict[str, Any], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(None), bos_token="<s>", eos_token="</s>")
    arguments = {"add_generation_prompt": True} | more
    want = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
    assert render(source, messages, **more) == want


def test_messages_that_the_template_refuses_come_with_its_own_words() -> None:
    """R46: a system role, two users in a row, a tool: the template knows, and says so."""
    source = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}
    {% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {% endfor %}ok"""
    assert render(source).strip() == "ok"
    with pytest.raises(RequestError, match="System role not supported") as error:
        render(source, LONG)
    assert error.value.field == "messages"
    with pytest.raises(RequestError, match="Roles must alternate"):
        render(source, USER + USER)


def test_no_template_is_an_error_and_not_a_guess() -> None:
    """R46: a base model."""
    for source in (None, {}, {"rag": "x"}):
        with pytest.raises(RequestError, match="no chat template"):
            render(source)


def test_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="chat template"):
        render("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s.replace('x', 'xx') %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s | replace('x', 'xx') %}{% endfor %}",
        "{% set n = namespace(s=[]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}{{ n.s }}",
        "{{ messages[0].content * 10 ** 9 }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ messages[0].content.ljust(10 ** 9) }}",
        "{{ messages[0].content | center(1000000000) }}",
        "{{ '%999999999d' % 7 }}",
        "{{ '%*d' % (999999999, 7) }}",
        "{{ '{:>999999999}'.format(7) }}",
        "{{ '{:>{}}'.format(7, '999999999') }}",
        "{{ [] | slice(1000000000) | list }}",
        "{% for x in [1] recursive %}{{ loop(range(90000)) }}{% endfor %}",
    ],
)
def test_templates_that_run_away_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R46: loops without end and texts without end."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 20_000)
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 1e9)  # the counts alone have to do it
    monkeypatch.setattr(sandbox, "MAX_CHARS", 1 << 20)
    with pytest.raises((RequestError, ModelError), match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ open('/etc/passwd').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
    ],
)
def test_templates_reach_nothing_outside(source: str) -> None:
    """R46: no files, no modules, no internals, and the messages stay as they are."""
    messages = json.loads(json.dumps(USER))
    try:
        text = render(source, messages)
    except RequestError as error:
        assert "chat template" in str(error)
    else:
        assert text == ""  # an attribute that isn't there prints as nothing
    assert messages == USER


def test_a_long_conversation_is_within_bounds() -> None:
    messages = [{"role": role, "content": "word " * 200} for _ in range(1000) for role in ("user", "assistant")]
    assert render(CHATML, messages).count("<|im_start|>") == 2001


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 7, "content": "hi"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages_are_refused_with_the_field(messages: Any, field: str) -> None:
    """R36 (no messages), R46."""
    with pytest.raises(RequestError) as error:
        render(CHATML, messages)
    assert error.value.field == field


def test_empty_content_is_content() -> None:
    """R36."""
    assert render(CHATML, [{"role": "user", "content": ""}]).startswith("<|im_start|>user\n<|im_end|>")


def test_text_parts_go_to_templates_that_know_them_and_are_joined_for_others() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in render(CHATML, parts)
    knows = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[1].text }}{% endif %}"
    )
    assert render(knows + "{% endfor %}", parts) == "b"
    loops = "{% for m in messages %}{% for p in m['content'] %}({{ p.text }}){% endfor %}{% endfor %}"
    assert render(loops, parts) == "(a)(b)"


def test_the_template_for_tools_is_taken_when_there_are_tools() -> None:
    sources = {"default": "plain", "tool_use": "tools"}
    assert render(sources) == "plain"
    assert render(sources, tools=TOOLS) == "tools"


def test_arguments_of_the_template_cannot_replace_the_messages() -> None:
    with pytest.raises(RequestError) as error:
        ChatTemplate(CHATML).render(USER, **{"messages": []})
    assert error.value.field == "chat_template_kwargs"
