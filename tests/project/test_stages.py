"""The program that shows the kernels' stages names them as the protocol text does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu import stages

HEADER = Path(__file__).parents[2] / "native" / "protocol" / "round" / "stage.h"


def test_stages_are_named_as_in_the_header() -> None:
    named = [name.lower() for name in re.findall(r"^  k([A-Z]\w*)", HEADER.read_text(), re.M)]
    assert named == [*stages.STAGES, "count"]
    assert set(stages.IN_COMBINE) <= set(stages.STAGES)
