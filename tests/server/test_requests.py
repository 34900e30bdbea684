"""What clients send, good and bad: fields, limits, prompts, templates, keys, hosts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.server.run import check_exposure
from octavo.server.settings import ServerSettings
from serving import Served, scripted, served, until, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANSWERS = {"fruit": "Apples, pears and plums.", "": "nothing"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        with scripted(ANSWERS, patch, context=200) as (llm, _, _), served(llm) as running:
            yield running


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["x", ""], [[1], []], None, 7, [None], [1.5], [True], {}, [{}]])
def test_r36_empty_and_odd_prompts_are_refused(prompt: Any, server: Served) -> None:
    """R36: 400, and the next request works."""
    param = server.error(TEXT, {"prompt": prompt})["param"]
    assert param and param.startswith("prompt")
    assert server.ask(TEXT, prompt="<fruit>", max_tokens=3)["choices"][0]["text"] == "App"


@pytest.mark.parametrize("messages", [[], None, "x", [7], [{}], [{"role": "user"}], [{"role": 7, "content": "x"}]])
def test_r36_odd_messages_are_refused(messages: Any, server: Served) -> None:
    assert server.error(CHAT, {"messages": messages})["param"].startswith("messages")


def test_r36_an_empty_content_is_a_question(server: Served) -> None:
    assert server.ask(CHAT, messages=user(""))["choices"][0]["message"]["content"] == "nothing"


def test_a_prompt_of_ids(server: Served) -> None:
    ids = list(b"<fruit>")
    for prompt, count in ((ids, 1), ([ids], 1), ([ids, ids], 2)):
        assert [c["text"] for c in server.ask(TEXT, prompt=prompt, max_tokens=3)["choices"]] == ["App"] * count
    assert server.error(TEXT, {"prompt": [257]})["param"] == "prompt"
    assert server.error(TEXT, {"prompt": [2**40]})["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "most", "good"), [(199, 1, 1), (200, 1, 0), (201, 1, 0), (150, 51, 0), (150, 50, 1)]
)
def test_r41_beyond_the_context_is_a_400_with_both_numbers(
    length: int, most: int, good: int, stream: bool, server: Served
) -> None:
    """R41: before any stream begins; nothing is cut."""
    body = {"prompt": "x" * length, "max_tokens": most, "stream": stream}
    if good:
        assert server.post(TEXT, body).status_code == 200
        return
    error = server.error(TEXT, body)
    assert error["code"] == "context_length_exceeded" and "200" in error["message"] and str(length) in error["message"]
    chat = {"messages": user("x" * (length - 16)), "max_completion_tokens": most, "stream": stream}
    assert server.error(CHAT, chat)["code"] == "context_length_exceeded"


def test_r45_unknown_fields_are_accepted_and_logged(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    body = {
        "messages": [{"role": "user", "content": "fruit", "id": "7", "name": "ann", "odd": 1}],
        "metadata": {"a": "b"},
        "store": True,
        "user": "ann",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "secret_thing": "do not log me",
    }
    with caplog.at_level(logging.INFO, "octavo.server"):
        assert server.ask(CHAT, **body)["choices"][0]["message"]["content"] == ANSWERS["fruit"]
    assert "secret_thing" in caplog.text and "do not log me" not in caplog.text and "fruit" not in caplog.text


def test_r45_limits_are_honoured(server: Served) -> None:
    """max_completion_tokens; both limits at once: the smaller; none: to the end in a chat, 16 in a completion."""

    def tokens(path: str, **body: Any) -> int:
        asked = {"messages": user("fruit")} if path == CHAT else {"prompt": "<fruit>"}
        return int(server.ask(path, **asked, **body)["usage"]["completion_tokens"])

    assert tokens(CHAT, max_completion_tokens=5) == 5
    assert tokens(CHAT, max_completion_tokens=5, max_tokens=9) == tokens(CHAT, max_tokens=5) == 5
    assert tokens(CHAT) == tokens(CHAT, max_tokens=None) == len(ANSWERS["fruit"]) + 1
    assert tokens(TEXT) == 16


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT, "suffix", "after"),
        (TEXT, "max_tokens", 0),
        (TEXT, "max_tokens", "5"),
        (TEXT, "best_of", 1000),
        (CHAT, "max_completion_tokens", 0),
        (CHAT, "max_tokens", -1),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "modalities", ["audio"]),
        (CHAT, "continue_final_message", True),
        (CHAT, "n", 0),
        (CHAT, "n", 129),
        (CHAT, "n", True),
        (CHAT, "temperature", -1),
        (CHAT, "temperature", "hot"),
        (CHAT, "top_p", 0),
        (CHAT, "top_k", 1.5),
        (CHAT, "seed", "x"),
        (CHAT, "logit_bias", {"x": 1}),
        (CHAT, "logit_bias", {"999": 1}),
        (CHAT, "stop_token_ids", [-1]),
        (CHAT, "prompt_logprobs", 21),
        (CHAT, "stream_options", {"include_usage": True}),
        (CHAT, "beam_width", 2),
        (CHAT, "chat_template_kwargs", 7),
        (CHAT, "response_format", {"type": "xml"}),
        (CHAT, "structured_outputs", {"json": {}, "regex": "a"}),
        (CHAT, "guided_choice", []),
        (CHAT, "guided_json", "{"),
        (CHAT, "priority", "high"),
    ],
)
def test_a_bad_value_is_a_400_that_names_the_field(path: str, field: str, value: Any, server: Served) -> None:
    asked: dict[str, Any] = {"messages": user("fruit")} if path == CHAT else {"prompt": "<fruit>"}
    error = server.error(path, {**asked, field: value})
    assert error["param"] is not None and error["param"].split(".")[0] == field and field in error["message"]
    assert error["type"] == "invalid_request_error"


def test_r51_stops(server: Served) -> None:
    """R51: null and [] switch nothing off; an empty stop is refused; five are fine."""
    for stop in (None, []):
        choice = server.ask(CHAT, messages=user("fruit"), stop=stop)["choices"][0]
        assert choice["message"]["content"] == ANSWERS["fruit"] and choice["finish_reason"] == "stop"
    for stop, rest in (("pears", "Apples, "), (["q", "w", ",", "y", "z"], "Apples")):
        choice = server.ask(CHAT, messages=user("fruit"), stop=stop)["choices"][0]
        assert choice["message"]["content"] == rest and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] in stop
    for stop in ("", [""], ["x", ""], 7, [7], [None], ["x"] * 17):
        assert server.error(CHAT, {"messages": user("fruit"), "stop": stop})["param"] == "stop"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"messages": [' * 3000, b'{"prompt": 1e999}', b"[" * 99999],
)
def test_bodies_that_are_no_json_objects(body: bytes, server: Served) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    assert server.http.get("/health").status_code == 200


def test_text_that_is_no_unicode(server: Served) -> None:
    for path, body in (
        (TEXT, '{"prompt": "\\ud800"}'),
        (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ):
        answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), answer.text


def test_a_body_that_is_too_large(server: Served) -> None:
    body = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    headers = {"Content-Type": "application/json"}
    assert server.http.post(TEXT, content=body, headers=headers).status_code == 413
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))  # without a Content-Length
    assert server.http.post(TEXT, content=pieces, headers=headers).status_code == 413


def test_r46_templates_that_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """R46: 400 with the template's own words; loops and files are stopped; no template is said, not guessed."""
    strict = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if loop.previtem is defined and loop.previtem.role == m.role %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    cases: list[tuple[str | None, list[dict[str, Any]], str]] = [
        (strict, [{"role": "system", "content": "x"}, *user("y")], "System role not supported"),
        (strict, [*user("x"), *user("y")], "Roles must alternate"),
        ("{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}", user("x"), "template"),
        ("{% include '/etc/passwd' %}", user("x"), "template"),
        ("{{ messages[0].nothing.at.all }}", user("x"), "template"),
        (None, user("x"), "no chat template"),
    ]
    for template, messages, words in cases:
        with scripted(ANSWERS, monkeypatch, template) as (llm, _, _), served(llm) as own:
            error = own.error(CHAT, {"messages": messages})
            assert words in error["message"] and error["param"] == "messages"
            assert own.post(TEXT, {"prompt": "<fruit>"}).status_code == 200


def test_message_forms(server: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "fruit"}]}]
    assert server.ask(CHAT, messages=parts)["choices"][0]["message"]["content"] == ANSWERS["fruit"]
    developer = [{"role": "developer", "content": "Be brief."}, *user("fruit")]
    system = [{"role": "system", "content": "Be brief."}, *user("fruit")]
    counts = [server.ask("/tokenize", messages=m)["count"] for m in (developer, system)]
    assert counts[0] == counts[1]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert "image_url" in server.error(CHAT, {"messages": image})["message"]


def test_models_tokens_and_the_version(server: Served) -> None:
    card = server.http.get("/v1/models").json()["data"][0]
    assert card["id"] == "tiny" and card["object"] == "model" and card["max_model_len"] == 200
    assert server.http.get("/v1/models/tiny").json() == card
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert server.error(CHAT, {"model": "other", "messages": user("x")}, 404)["param"] == "model"
    assert server.ask(CHAT, model="tiny", messages=user("fruit"), max_tokens=1)["model"] == "tiny"
    tokens = server.ask("/tokenize", prompt="caf\u00e9")
    assert tokens["tokens"] == list("caf\u00e9".encode()) and tokens["count"] == 5
    assert server.ask("/detokenize", tokens=tokens["tokens"]) == {"prompt": "caf\u00e9"}
    assert server.ask("/tokenize", messages=user("x"))["count"] == len("user:x\nassistant:")
    assert server.error("/tokenize", {})["param"] == "prompt"
    assert server.error("/detokenize", {"tokens": [999]})["param"] == "tokens"
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/nothing").json()["error"]["message"] == "there is no GET /nothing here"
    assert server.http.get(CHAT).status_code == 405


def test_a_name_of_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(port=0, access_log="off", served_model_name="mine")
    with scripted(ANSWERS, monkeypatch) as (llm, _, _), served(llm, settings, model="/models/some.gguf") as own:
        assert own.http.get("/v1/models").json()["data"][0]["id"] == "mine"
        for name in ("mine", "/models/some.gguf"):
            assert own.ask(TEXT, model=name, prompt="<fruit>")["model"] == "mine"


def test_request_ids(server: Served) -> None:
    for headers in ({"X-Request-Id": "mine-7"}, {}, {"X-Request-Id": "a b"}):
        for answer in (server.post(TEXT, {"prompt": "x"}, headers=headers), server.post(TEXT, {}, headers=headers)):
            given = answer.headers["x-request-id"]
            assert (given == "mine-7") == (headers.get("X-Request-Id") == "mine-7") and " " not in given


def test_keys(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"sk-first-key": "alice", "sk-other-key": "bob"}
    settings = ServerSettings(port=0)
    with scripted(ANSWERS, monkeypatch) as (llm, _, _), served(llm, settings, keys) as own:
        for header in (None, "Bearer", "Bearer wrong", "Basic sk-first-key", "sk-first-key", "Bearer sk-first-keys"):
            headers = {"Authorization": header} if header is not None else {}
            for path in ("/v1/models", "/metrics"):
                answer = own.http.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert own.http.get("/health").status_code == 200
        with caplog.at_level(logging.INFO, "octavo.access"):
            for key in keys:
                good = own.post(TEXT, {"prompt": "<fruit>"}, headers={"Authorization": f"Bearer {key}"})
                assert good.status_code == 200
            until(lambda: len([r for r in caplog.records if r.name == "octavo.access"]) == 2)
        lines = [json.loads(r.message) for r in caplog.records if r.name == "octavo.access"]
        assert [line["user"] for line in lines] == ["alice", "bob"]
        assert lines[0]["prompt_tokens"] == 7 and lines[0]["completion_tokens"] == 16
        assert "sk-" not in caplog.text and "fruit" not in caplog.text


def test_a_key_is_compared_with_all_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found first, last or not at all: as many comparisons, by the function that is made for it, of equal lengths."""
    from octavo.server import security
    from octavo.server.errors import ApiError

    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    guard = security.Guard(ServerSettings(), {"sk-first-key": "a", "sk-second-key": "b", "sk-the-third-key": "c"})
    for key, owner in (("sk-first-key", "a"), ("sk-the-third-key", "c"), ("sk", None), ("x" * 500, None)):
        compared.clear()
        headers = {b"host": b"localhost", b"authorization": f"Bearer {key}".encode()}
        try:
            assert guard.check("GET", "/v1/models", headers) == owner
        except ApiError as error:
            assert owner is None and error.status == 401
        assert compared == [(32, 32)] * 3


def test_prompts_are_logged_only_if_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for asked in (False, True):
        settings = ServerSettings(port=0, log_prompts=asked)
        with scripted(ANSWERS, monkeypatch) as (llm, _, _), served(llm, settings) as own:
            caplog.clear()
            with caplog.at_level(logging.INFO, "octavo.access"):
                own.ask(TEXT, prompt="<fruit>", max_tokens=2)
                until(lambda: [r for r in caplog.records if r.name == "octavo.access"])
            (line,) = (json.loads(r.message) for r in caplog.records if r.name == "octavo.access")
            assert line.get("prompts") == (["<fruit>"] if asked else None)


def test_prompts_of_a_request_are_bounded(server: Served) -> None:
    assert server.error(TEXT, {"prompt": ["x"] * 1025})["param"] == "prompt"
    assert "1024" in server.error(TEXT, {"prompt": [[1]] * 1025})["message"]


def test_the_limit_of_open_files_is_raised() -> None:
    """In a process of its own, which begins with a low limit."""
    program = (
        "import resource; from octavo.server.run import raise_file_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); raise_file_limit()\n"
        "soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "assert soft == (65536 if hard == resource.RLIM_INFINITY else hard), (soft, hard)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_priority_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"policy": "priority", "max_running": 1}
    with scripted(ANSWERS, monkeypatch, **given) as (llm, _, steps), served(llm) as own:
        steps.hold()
        ended: list[int] = []

        def ask(priority: int) -> None:
            own.ask(CHAT, messages=user("fruit"), priority=priority)
            ended.append(priority)

        def waits(count: int) -> bool:
            return own.state.admission.sequences == count

        threads = [threading.Thread(target=ask, args=(p,)) for p in (3, 9, 1, 5)]
        for i, thread in enumerate(threads):
            thread.start()
            until(partial(waits, i + 1))
        steps.delay = 0.002
        steps.free.set()
        for thread in threads:
            thread.join()
        assert [p for p in ended if p != 3] == [1, 5, 9]  # the first may be running by then


def test_keys_from_files_and_the_environment(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice sk-alice-1\n\nsk-nameless\n")
    settings = ServerSettings(api_key_file=str(file))
    assert settings.keys({}) == {"sk-alice-1": "alice", "sk-nameless": "key-2"}
    assert ServerSettings().keys({"OCTAVO_API_KEY": "sk-from-env, sk-second-one"}) == {
        "sk-from-env": "key-1",
        "sk-second-one": "key-2",
    }
    for text in ("", "short", "too many words here"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            settings.keys({})
    with pytest.raises(ConfigError, match="api_key_file"):
        ServerSettings(api_key_file=str(tmp_path / "none")).keys({})


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("localhost", True), ("localhost:8000", True), ("127.0.0.1:1", True), ("[::1]:8000", True), ("10.0.0.7", True),
        ("box.example", True), ("BOX.example:80", True), ("evil.example", False), ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False), ("", False), ("[", False),
    ],
)  # fmt: skip
def test_the_host_header(host: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a web page's owner makes lead here is not answered to."""
    from octavo.errors import OctavoError
    from octavo.server.security import Guard

    guard = Guard(ServerSettings(allowed_hosts=("box.example",)), {})
    if good:
        assert guard.check("GET", "/v1/models", {b"host": host.encode()}) == ""
    else:
        with pytest.raises(OctavoError, match="host"):
            guard.check("GET", "/v1/models", {b"host": host.encode()})


def test_pages_from_elsewhere(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's request names its origin: without leave it is refused, before anything runs."""
    body = {"prompt": "<fruit>"}
    for origin in ("https://evil.example", "null", server.url + "1"):
        assert server.post(TEXT, body, headers={"Origin": origin}).status_code == 403
    own = server.post(TEXT, body, headers={"Origin": server.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
    settings = ServerSettings(port=0, access_log="off", cors_origins=("https://good.example",))
    with scripted(ANSWERS, monkeypatch) as (llm, _, _), served(llm, settings) as open:
        answer = open.post(TEXT, body, headers={"Origin": "https://good.example"})
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert open.post(TEXT, body, headers={"Origin": "https://evil.example"}).status_code == 403


def test_a_server_for_others_needs_keys() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.1", "box"):
        with pytest.raises(ConfigError, match="allow-anyone"):
            check_exposure(ServerSettings(host=host), keyed=False)
        check_exposure(ServerSettings(host=host), keyed=True)
        check_exposure(ServerSettings(host=host, allow_anyone=True), keyed=False)
    for host in ("127.0.0.1", "localhost", "::1"):
        check_exposure(ServerSettings(host=host), keyed=False)


@pytest.mark.parametrize(
    "given",
    [{"port": 70000}, {"port": "x"}, {"map": "all"}, {"request_timeout": 0}, {"max_body": 3}, {"access_log": 1}],
)
def test_bad_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        ServerSettings(**given)


def test_r52_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """R52: stable names; used, cached and free apart; gauges go back to zero, counters never fall."""
    with scripted({"long": "x" * 500}, monkeypatch) as (llm, _, steps), served(llm) as own:

        def blocks(state: str) -> float:
            return own.metric(f'octavo:kv_blocks{{state="{state}",tier="device"}}')

        def scrape() -> dict[str, float]:
            text = own.http.get("/metrics").text
            rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, value in rows}

        before = scrape()
        assert blocks("free") == 400 and blocks("used") == blocks("cached") == 0
        steps.delay = 0.002
        thread = threading.Thread(target=own.ask, args=(CHAT,), kwargs={"messages": user("long")})
        thread.start()
        until(lambda: steps.done > 30)
        during = scrape()
        assert during['octavo:num_requests_running{model_name="tiny"}'] == 1
        assert during['octavo:kv_blocks{state="used",tier="device"}'] > 0
        assert during['vllm:kv_cache_usage_perc{model_name="tiny"}'] > 0
        thread.join()
        own.settled()
        after = scrape()
        assert blocks("used") == 0 and blocks("cached") > 10 and blocks("free") + blocks("cached") == 400
        for name, value in before.items():
            if "_total" in name or "_count" in name or "_bucket" in name:
                assert value <= during[name] <= after[name], name
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert after[f'octavo:{name}{{model_name="tiny"}}'] == after[f'vllm:{name}{{model_name="tiny"}}'] == 0
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
            assert after[f'octavo:{name}_count{{model_name="tiny"}}'] >= 1
            assert after[f'vllm:{name}_count{{model_name="tiny"}}'] >= 1
        for name in (
            "num_preemptions",
            "prompt_tokens",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
        ):
            assert f'vllm:{name}_total{{model_name="tiny"}}' in after
        for name in ("kv_copies", "swaps", "recomputes", "kv_evictions", "requests_refused"):
            assert f'octavo:{name}_total{{model_name="tiny"}}' in after


def test_r52_preemptions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """R52: under memory pressure, what the scheduler had to do can be scraped, before, during and after."""
    given: dict[str, Any] = {"pool": 20, "block_size": 4, "swap": 12}
    with scripted({"long": "x" * 40}, monkeypatch, **given) as (llm, _, _), served(llm) as own:
        names = ("num_preemptions_total", "swaps_total", "recomputes_total", "kv_demotions_total")

        def scrape() -> dict[str, float]:
            return {name: own.metric(f"octavo:{name}") for name in names}

        assert set(scrape().values()) == {0.0}
        body = {"prompt": "<long>", "max_tokens": 40, "n": 6}
        thread = threading.Thread(target=own.ask, args=(TEXT,), kwargs=body)
        thread.start()
        last = scrape()
        while thread.is_alive():
            now = scrape()
            assert all(now[name] >= last[name] for name in names)
            last = now
        thread.join()
        own.settled()
        found, counters = scrape(), llm.stats().counters
        assert found["num_preemptions_total"] == counters.preemptions == own.metric("vllm:num_preemptions_total") > 0
        assert found["swaps_total"] + found["recomputes_total"] == counters.preemptions
        assert own.metric('octavo:kv_blocks{state="used",tier="device"}') == 0
        assert own.metric('octavo:kv_blocks{state="used",tier="host"}') == 0
        assert own.metric("octavo:num_requests_waiting") == 0
