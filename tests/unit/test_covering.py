import itertools

import pytest

from tests.covering import covering_array, every_case, pairs_of
from tests.real_path import CASES, FACTORS, excluded

THREE = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}


def never_alike(case):
    return case["a"] != case["b"]


@pytest.mark.parametrize("allowed", [lambda case: True, never_alike])
def test_every_allowed_pair_is_met(allowed):
    chosen = covering_array(THREE, allowed)
    assert all(allowed(case) for case in chosen)
    wanted = set().union(*map(pairs_of, every_case(THREE, allowed)))
    assert set().union(*map(pairs_of, chosen)) == wanted
    assert len(chosen) <= 12 < 27


def test_each_case_adds_a_pair():
    met = set()
    for case in covering_array(THREE):
        assert not pairs_of(case) <= met
        met |= pairs_of(case)


def test_the_cheaper_of_equals_is_taken():
    factors = {"a": (1, 2, 3, 4), "b": (1, 2, 3, 4), "slow": (True, False)}
    chosen = covering_array(factors, cost=lambda case: float(case["slow"]))
    assert sum(case["slow"] for case in chosen) <= sum(not case["slow"] for case in chosen)
    assert chosen == covering_array(factors, cost=lambda case: float(case["slow"]))


def test_the_cases_of_the_real_path_hold_every_pair():
    """Written without the generator: pairs that no reason excludes are in some case."""
    for (one, ones), (two, twos) in itertools.combinations(FACTORS.items(), 2):
        for first, second in itertools.product(ones, twos):
            met = any(case[one] == first and case[two] == second for case in CASES)
            out = (one, two) == ("R", "micro_batch") and first == 3 and second in ("8", "32")
            assert met != out, (first, second)
    assert not any(excluded(case) for case in CASES)
    assert len(CASES) < 45 and sum(case["kill"] for case in CASES) <= 10
