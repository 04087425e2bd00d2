"""The spin limit is set once and gives way to the user's choice."""

from __future__ import annotations

import pytest

from headrace.platforms.openmp import SPIN_COUNT, limit_spinning


def test_sets_a_short_spin() -> None:
    environ: dict[str, str] = {}
    assert limit_spinning(environ)
    assert environ == {"GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_choice_stays(name: str) -> None:
    environ = {name: "chosen"}
    assert not limit_spinning(environ)
    assert environ == {name: "chosen"}
