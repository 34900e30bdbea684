"""What the machine can do at most, as the benchmarks measure it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.select import load_kernels, runnable_isas


@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("threads", [1, 2])
def test_rates_are_those_of_a_computer(isa: str, threads: int) -> None:
    kernels = load_kernels(isa)
    assert 1e7 < kernels.probe_read(np.zeros(1 << 20, np.uint8), threads) < 1e14
    assert 1e6 < kernels.probe_fma(10_000, threads) < 1e14


@pytest.mark.parametrize("size", [1, 63, 4097, 100_001])
def test_any_size_is_read_within_its_bounds(size: int) -> None:
    assert load_kernels().probe_read(np.zeros(size, np.uint8), 3) > 0


def test_nothing_to_measure_is_refused() -> None:
    kernels = load_kernels()
    for call in (
        lambda: kernels.probe_read(np.zeros(0, np.uint8), 1),
        lambda: kernels.probe_fma(0, 1),
        lambda: kernels.probe_fma(1, 0),
    ):
        with pytest.raises(ValueError):
            call()
