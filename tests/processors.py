"""Requirements of some tests on the processor."""

from __future__ import annotations

import pytest

from treadle.support import fast_dtype

# torch's Muon multiplies in bf16, whatever the weights are: minutes on a processor that cannot.
NEEDS_BF16 = pytest.mark.skipif(fast_dtype("cpu") != "bfloat16", reason="needs a processor with bf16")
