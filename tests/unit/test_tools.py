"""Tool calls read from what models write, streamed; and reasoning kept apart from the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError, RequestError
from octavo.text.chat import ChatTemplate
from octavo.text.jsonscan import JsonScanner
from octavo.text.reasoning import ReasoningStream
from octavo.text.tools import FORMATS, CallArguments, CallStart, Piece, TextPiece, tool_format

HERMES, LLAMA, MISTRAL, GEMMA = (FORMATS[name] for name in ("hermes", "llama3", "mistral", "gemma"))


def pieces(form: Any, text: str, cuts: list[int] | None = None, names: Any = None) -> list[Piece]:
    """All that a stream says of the text, cut before the given positions; by default into single characters."""
    stream, said = form.stream(names), []
    at = [0, *sorted(cuts if cuts is not None else range(1, len(text))), len(text)]
    for start, stop in zip(at, at[1:], strict=False):
        said += stream.feed(text[start:stop])
    return said + stream.finish()


def told(said: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call; checks that calls are told of in order, each once."""
    text, calls = "", []
    for piece in said:
        if isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.text
        else:
            text += piece.text
    return text, [(name, arguments) for name, arguments in calls]


TRIED = [
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
     "", {"f": {"a": [1, {"b": "}"}]}}),
    (HERMES, 'Hi!\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "Hi!\n", {"f": {"a": 1}}),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": null}</tool_call>',
     "", {"f": {}, "g": {}}),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} <tool_call>{"name": "g", "arguments": "{\\"x\\": 2}"}',
     "", {"f": {}, "g": {"x": 2}}),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call> bye', " bye", {"f": {"a": "x\ny"}}),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": {"ü": "\\u00fc\\\\"}}</tool_call>',
     "", {"f": {"ü": "ü\\"}}),
    (LLAMA, '{"name": "f", "parameters": {"q": "x"}}; {"name": "g", "parameters": {}}',
     "", {"f": {"q": "x"}, "g": {}}),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"q": -1.5e3}}', "", {"f": {"q": -1.5e3}}),
    (LLAMA, '\n{"name": "f", "parameters": {"q": 1}}\nDone', "\nDone", {"f": {"q": 1}}),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"q": 1}}, {"name": "g", "arguments": {}}]',
     "", {"f": {"q": 1}, "g": {}}),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{"b": 2}',
     "", {"f": {"a": 1}, "g": {"b": 2}}),
    (MISTRAL, '[{"name": "f", "arguments": {}}]', "", {"f": {}}),
    (GEMMA, '{"name": "f", "parameters": {"q": true}}', "", {"f": {"q": True}}),
    (GEMMA, 'So:\n```json\n{"name": "f", "parameters": {"q": 1}}\n``` done', "So:\n done", {"f": {"q": 1}}),
    (GEMMA, '```tool_code\nf(a=1, b="x, (", c=[1, 2])\ng()\n```',
     "", {"f": {"a": 1, "b": "x, (", "c": [1, 2]}, "g": {}}),
    (GEMMA, "[f(a=True), g.h(x=None, y='it\\'s')]", "", {"f": {"a": True}, "g.h": {"x": None, "y": "it's"}}),
]  # fmt: skip


@pytest.mark.parametrize("form, text, rest, calls", TRIED, ids=range(len(TRIED)))
def test_calls_are_read(form: Any, text: str, rest: str, calls: dict[str, Any]) -> None:
    said, found = told(pieces(form, text))
    assert said == rest
    assert [(name, json.loads(arguments)) for name, arguments in found] == list(calls.items())


@pytest.mark.parametrize(
    "form, text",
    [
        (HERMES, "<tool_call>oops</tool_call>"),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "argum'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
        (HERMES, "  a <tool b < c <tool_cal"),
        (LLAMA, '{"city": "Paris", "name": "f", "parameters": {}}'),
        (LLAMA, '{"name": "Bob"} is my name'),
        (LLAMA, 'I say {"name": "f", "parameters": {}}'),
        (LLAMA, '<|python_tag|>print("hello")'),
        (MISTRAL, "[1, 2, 3]"),
        (MISTRAL, "[TOO much]"),
        (MISTRAL, "[TOOL_CALLS] none"),
        (GEMMA, "[1] is a footnote (see below)"),
        (GEMMA, "[f(a)]"),
        (GEMMA, "[f(a=__import__('os'))]"),
        (GEMMA, '```json\n{"a": 1}\n```'),
        (GEMMA, "```python\nf(a=1)\n```"),
        (GEMMA, " \n "),
    ],
)
def test_broken_tool_text_is_content(form: Any, text: str) -> None:
    """R38: what only looks like a call is given back, every character of it."""
    assert told(pieces(form, text)) == (text, [])
    assert told(pieces(form, text, [])) == (text, [])


def test_calls_of_tools_that_are_not_there_are_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert told(pieces(HERMES, text, names=["g"])) == (text, [])
    assert told(pieces(HERMES, text, names=["f", "g"])) == ("", [("f", '{"a": 1}')])


def test_a_call_that_breaks_off_makes_nothing_up() -> None:
    """Cut by max_tokens: what has come is told, not closed; what breaks the JSON is content."""
    cut = '<tool_call>{"name": "f", "arguments": {"path": "/tmp'
    assert told(pieces(HERMES, cut)) == ("", [("f", '{"path": "/tmp')])
    broken = '<tool_call>{"name": "f", "arguments": {"a": tru!}} x'
    assert told(pieces(HERMES, broken)) == ("!}} x", [("f", '{"a": tru')])
    ended = '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool'
    assert told(pieces(HERMES, ended)) == ("", [("f", '{"a": 1}')])


def test_a_broken_call_does_not_hide_the_next() -> None:
    text = '<tool_call><tool_call>{"name": "f"}</tool_call>'
    assert told(pieces(HERMES, text)) == ("<tool_call>", [("f", "{}")])


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, GEMMA], ids=lambda form: form.name)
def test_arguments_come_as_they_are_written(form: Any) -> None:
    """R38: not all at once: after each piece, all that has been written of the arguments has been told."""
    arguments = json.dumps({"text": "word " * 200})
    text = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
        "llama3": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {arguments}}}]',
        "gemma": f'```json\n{{"name": "f", "parameters": {arguments}}}\n```',
    }[form.name]
    stream = form.stream()
    said: list[Piece] = []
    for start in range(0, len(text), 10):
        before = len(told(said)[1][0][1]) if told(said)[1] else 0
        said += stream.feed(text[start : start + 10])
        after = len(told(said)[1][0][1]) if told(said)[1] else 0
        assert after - before <= 10
        assert after >= min(start + 10, len(text)) - (len(text) - len(arguments)), "what was written is told at once"
    assert told(said + stream.finish()) == ("", [("f", arguments)])


WORDS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```json", "```tool_code", "```",
        '{"name": "f", "arguments": {"a": [1, 2.5, "x"]}}', '{"name": "f", "parameters": {}}', "f(a=1, b='x')", "[",
        "]", "{", "}", '"name"', ":", ",", ";", '"', "\\", "\n", " ", "f", "<", "`", "text", "1", "-", "null", "ü",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([HERMES, LLAMA, MISTRAL, GEMMA]), st.lists(WORDS, max_size=12), st.data())
def test_cuts_do_not_matter_and_nothing_is_lost(form: Any, words: list[str], data: Any) -> None:
    text = "".join(words)
    whole = told(pieces(form, text))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert told(pieces(form, text, cuts)) == whole
    said, calls = whole
    if not calls:
        assert said == text
    for word in ("text", "ü"):  # stands in no key: it must be somewhere
        assert said.count(word) + sum((n + a).count(word) for n, a in calls) >= text.count(word) - text.count("f(")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([HERMES, LLAMA, MISTRAL]), st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.booleans())
def test_any_arguments_come_through(form: Any, arguments: dict[str, Any], ascii: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii)
    call = f'{{"name": "f", "{form.arguments}": {written}}}'
    text = {"hermes": f"<tool_call>{call}</tool_call>", "llama3": call, "mistral": f"[TOOL_CALLS][{call}]"}[form.name]
    assert told(pieces(form, text)) == ("", [("f", written)])


def is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_constant=lambda word: int(word))
        return True
    except ValueError:
        return False


@settings(max_examples=500, deadline=None)
@given(st.one_of(JSON.map(json.dumps), st.text('{}[]",:\\u01e-+.ntrualse \n', max_size=14)))
def test_the_scanner_agrees_with_json(text: str) -> None:
    scan = JsonScanner()
    good = all(scan.push(char) for char in text) and scan.push(" ")  # white space ends a number
    assert (good and scan.done) == is_json(text)


def test_a_long_output_is_read_in_linear_time() -> None:
    body = "x" * 300_000
    text = f'{body}<tool_call>{{"name": "f", "arguments": {{"a": "{body}"}}}}</tool_call>'
    assert told(pieces(HERMES, text, [])) == (body, [("f", json.dumps({"a": body}))])


# ---- which format --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, name",
    [
        ("{{ '<tool_call>\\n' + tool | tojson }}", "hermes"),
        ("<tool_call>\\n<function={{ name }}>", None),
        ("{% if '[TOOL_CALLS]' %}", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("<start_of_turn>model", "gemma"),
        ("<|im_start|>", None),
        (None, None),
    ],
)
def test_the_format_is_recognised_from_the_template(template: str | None, name: str | None) -> None:
    found = tool_format(template)
    assert (found.name if found else None) == name


def test_the_format_by_name() -> None:
    assert tool_format("<start_of_turn>", "hermes") is HERMES
    with pytest.raises(ConfigError, match="gemma"):
        tool_format(None, "xml")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}


def test_grammars_of_calls() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    assert HERMES.grammar([], None) is None
    for form in FORMATS.values():
        for guide, names in (
            (form.grammar([TOOL, other], None), ("f", "g")),
            (form.grammar([TOOL, other], "g"), ("g",)),
        ):
            assert guide is not None
            assert [name in guide.value for name in ('"f"', '"g"')] == [name in names for name in ("f", "g")]
    with pytest.raises(RequestError, match="no tool 'h'"):
        HERMES.grammar([TOOL], "h")
    for bad in ({}, {"function": {}}, {"function": {"name": "f", "parameters": 3}}, 5):
        with pytest.raises(RequestError, match=r"tools\[0\]"):
            HERMES.grammar([bad], None)  # type: ignore[list-item]


# ---- templates -----------------------------------------------------------------------------------------------------


def test_templates_take_tools_and_earlier_calls() -> None:
    template = ChatTemplate(
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    assert template.takes_tools and not ChatTemplate("{{ messages }}").takes_tools
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert template.render(talk, tools=[TOOL]) == 'f;{"a": 1}'
    assert template.render(talk) == '{"a": 1}'
    call["function"] = {"name": "f", "arguments": "cut off {"}
    assert template.render(talk) == '"cut off {"'
    for bad in ({}, "f", ["f"], 3):
        with pytest.raises(RequestError, match="tools") as caught:
            template.render(talk, tools=bad)  # type: ignore[arg-type]
        assert str(caught.value.field).startswith("tools")
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls"):
        template.render([{"role": "assistant", "tool_calls": "f"}])


# ---- reasoning -----------------------------------------------------------------------------------------------------


def thought(text: str, cuts: list[int] | None = None, **given: Any) -> tuple[str, str]:
    stream = ReasoningStream(**given)
    at = [0, *sorted(cuts if cuts is not None else range(1, len(text))), len(text)]
    said = [stream.feed(text[a:b]) for a, b in zip(at, at[1:], strict=False)] + [stream.finish()]
    return "".join(r for r, _ in said), "".join(c for _, c in said)


@pytest.mark.parametrize(
    "text, inside, reasoning, content",
    [
        ("<think>\nhm, 1 < 2\n</think>\n\nYes.", False, "hm, 1 < 2", "Yes."),
        ("\n <think>hm</think>Yes </think>", False, "hm", "Yes </think>"),
        ("hm</think> Yes", True, "hm", "Yes"),
        ("<think>hm</think>Yes", True, "hm", "Yes"),
        ("hm, not done </thi", True, "hm, not done </thi", ""),
        ("No thought <think>here</think>", False, "", "No thought <think>here</think>"),
        (" <thi", False, "", " <thi"),
        ("<think></think>", False, "", ""),
        ("", False, "", ""),
        ("  ", False, "", "  "),
    ],
)
def test_reasoning_is_kept_apart(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert thought(text, inside=inside) == (reasoning, content)


THOUGHTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", " ", "\n", "a", "think>"]), max_size=9)


@settings(max_examples=300, deadline=None)
@given(THOUGHTS, st.booleans(), st.data())
def test_cuts_do_not_matter_to_reasoning(words: list[str], inside: bool, data: Any) -> None:
    text = "".join(words)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    reasoning, content = thought(text, cuts, inside=inside)
    assert (reasoning, content) == thought(text, inside=inside)
    assert (reasoning + content).replace(" ", "").count("a") == text.count("a")


def test_reasoning_streams() -> None:
    stream = ReasoningStream()
    assert stream.feed("<think>one ") == ("one", "")
    assert stream.feed("two </") == (" two", "")
    assert stream.feed("think> three") == ("", "three")
    assert stream.feed(" four") == ("", " four")


def test_texts_are_pieces() -> None:
    assert pieces(HERMES, "ab", []) == [TextPiece("ab")]
