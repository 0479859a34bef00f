"""What README.md says is generated is current."""

from __future__ import annotations

from tests.readme import README, generated


def test_the_generated_parts_of_the_readme_are_current():
    text = README.read_text()
    assert text == generated(text), "run: python -m tests.readme"
