"""lm-eval over HTTP against lm-eval on transformers: the same weights, the same figures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from conftest import TinyModels
from octavo.loadgen.process import ServerProcess

TASK = """
task: octavo_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
{body}
"""
CHOICES = """
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
doc_to_text: ""
doc_to_target: "{{question}} It is {{choices[answer]}}, as everybody knows who has ever looked."
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""
QUESTIONS = [
    ("What colour is the sky on a clear day?", ["blue", "green", "loud"], 0),
    ("How many legs has a spider?", ["six", "eight", "a hundred and twelve"], 1),
    ("Which of these is a fruit?", ["a hammer", "an apple", "Tuesday"], 1),
    ("Where do fish live?", ["in the water", "on the moon", "in the desert sand"], 0),
    ("What follows after Monday?", ["Sunday", "winter", "Tuesday"], 2),
    ("What does a baker make?", ["bread", "shoes", "clouds of rain"], 0),
    ("Which animal barks?", ["a cat", "a dog", "an ant"], 1),
    ("What is frozen water called?", ["steam", "ice", "sand"], 1),
]


@pytest.fixture
def folder(tiny_server: ServerProcess, tiny_models: TinyModels) -> Path:
    return tiny_models.root / "tiny-chat"


def evaluated(tmp_path: Path, kind: str, body: str, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval itself makes of our task with one of its own models."""
    data, tasks = tmp_path / "words.jsonl", tmp_path / "tasks"
    tasks.mkdir(exist_ok=True)
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = TASK.replace("{data}", str(data)).replace("{kind}", kind).replace("{body}", body)
    (tasks / "words.yaml").write_text(text)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["octavo_words"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
        cache_requests=False,
    )


@pytest.mark.parametrize(("kind", "body"), [("multiple_choice", CHOICES), ("loglikelihood_rolling", ROLLING)])
def test_equal_to_its_own_transformers_backend(
    tiny_server: ServerProcess,
    folder: Path,
    tmp_path: Path,
    kind: str,
    body: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    served = {
        "model": tiny_server.model,
        "base_url": f"{tiny_server.url}/v1/completions",
        "tokenizer": str(folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 1024,
    }
    here = {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "max_length": 1024}
    ours = evaluated(tmp_path, kind, body, "local-completions", served)
    theirs = evaluated(tmp_path, kind, body, "hf", here)
    scores, right = (_scores(found) for found in (ours, theirs))
    assert len(scores) == len(right) >= len(QUESTIONS)
    assert scores == pytest.approx(right, abs=1e-3)
    assert len({round(s, 2) for s in scores}) > len(QUESTIONS) / 2  # figures that could differ
    metrics = {k: v for k, v in theirs["results"]["octavo_words"].items() if isinstance(v, float)}
    assert metrics
    for name, value in metrics.items():
        assert ours["results"]["octavo_words"][name] == pytest.approx(value, rel=1e-3), name


def _scores(found: dict[str, Any]) -> list[float]:
    """Every log-likelihood of every sample, in the task's order."""
    samples = sorted(found["samples"]["octavo_words"], key=lambda s: s["doc_id"])
    scores = []
    for sample in samples:
        for answer in sample["resps"]:
            while isinstance(answer, (list, tuple)):
                answer = answer[0]
            scores.append(float(answer))
    return scores
