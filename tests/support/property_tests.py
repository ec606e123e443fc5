"""The number of examples of a property test, which depends on Hypothesis' profile."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

NIGHTLY_EXAMPLES = 100
"""Examples of a test that asks for no number, in the profile `nightly`; also Hypothesis' default."""
FEWEST_EXAMPLES = 2
"""A share of a small number is not smaller than this: Hypothesis' first examples are trivial."""

settings.register_profile("nightly", max_examples=NIGHTLY_EXAMPLES, deadline=None)  # a busy machine is not a failure
settings.register_profile("ci", max_examples=NIGHTLY_EXAMPLES // 10, deadline=None)


def examples(count: int, quick: int | None = None, **others: Any) -> settings:
    """Return settings with `count` examples in the profile `nightly`, else with `quick`, by default a tenth of them."""
    share = settings().max_examples / NIGHTLY_EXAMPLES
    fewer = max(min(count, FEWEST_EXAMPLES), round(count * share)) if quick is None else quick
    return settings(max_examples=count if share == 1 else fewer, **others)
