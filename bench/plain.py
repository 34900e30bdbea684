"""transformers in float32 on the same file, run beside Octavo: one request at a time, and beam search."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench import Ask, Measured


class Transformers:
    """Owns: the model of a GGUF file, dequantised to float32 by transformers itself.

    Promises: no answer ends early.
    """

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self.model.train(False)
        self.model.generation_config.eos_token_id = None

    def measure(self, load: Sequence[Ask]) -> Measured:
        """Runs a load greedily, one request after the other."""
        began = time.perf_counter()
        tokens = sum(self._generate(ask.prompt, ask.max_tokens).shape[1] - len(ask.prompt) for ask in load)
        return Measured(sum(len(ask.prompt) for ask in load), tokens, time.perf_counter() - began)

    def search(self, prompt: list[int], width: int, count: int) -> tuple[list[int], float]:
        """The best of ``width`` beams, and its score."""
        more = {"num_beams": width, "return_dict_in_generate": True, "output_scores": True}
        out = self._generate(prompt, count, **more)
        return out.sequences[0, len(prompt) :].tolist(), float(out.sequences_scores[0])

    def _generate(self, prompt: list[int], count: int, **more: Any) -> Any:
        ids = self.torch.tensor([prompt])
        mask = self.torch.ones_like(ids)
        with self.torch.inference_mode():
            return self.model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **more
            )
