"""``system_fingerprint``: what decides an answer's bytes besides its request, in one text that names its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

_TEXT = re.compile(
    r"octavo-(?P<version>[^-]+)"
    r"(-(?P<backend>.+)-(?P<build>[0-9a-f]{8})-w(?P<weights>[0-9a-f]{8})-(?P<kv_dtype>[^-]+)-(?P<compute>[^-]+))?"
)
_TOLD = {
    "version": "version of Octavo",
    "backend": "instruction set or GPU",
    "build": "build of the kernels",
    "weights": "weights (or tokenizer, template, --max-context)",
    "kv_dtype": "KV type",
    "compute": "compute mode",
}


@dataclass(frozen=True)
class Fingerprint:
    """What two servers have in common if they give the same request the same bytes.

    - ``version``: Octavo's; it stands for everything written in Python
    - ``backend``: whose kernels, and for which instruction set or GPU: ``cpu-avx512_vnni``, ``triton-sm_90``, or
      ``reference``
    - ``build``: a hash of the kernels' code
    - ``weights``: a hash of the model's files, tokenizer and template included, and of the spec made of them
    - ``kv_dtype``, ``compute``: as in :class:`octavo.config.EngineConfig`; on a GPU ``compute`` is what that calls gemm
    """

    version: str
    backend: str = ""
    build: str = ""
    weights: str = ""
    kv_dtype: str = ""
    compute: str = ""

    @classmethod
    def parse(cls, text: str) -> Fingerprint | None:
        """None if it is no fingerprint of Octavo's."""
        found = _TEXT.fullmatch(text)
        return None if found is None else cls(**{name: value or "" for name, value in found.groupdict().items()})

    def __str__(self) -> str:
        start = f"octavo-{self.version}"
        if not self.backend:  # a scripted executor: there are no weights
            return start
        return f"{start}-{self.backend}-{self.build}-w{self.weights}-{self.kv_dtype}-{self.compute}"

    def differences(self, other: Fingerprint) -> list[tuple[str, str, str]]:
        """Parts that differ, in words: (part, here, there)."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        if "backend" in names and "build" in names:  # another instruction set always is another build
            names.remove("build")
        return [(_TOLD[name], getattr(self, name) or "none", getattr(other, name) or "none") for name in names]
