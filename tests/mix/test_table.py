import json
import tomllib

import pytest

from stepwell.config import Run
from stepwell.mix import table
from tests.mix.test_propose import NAMES, proposed


@pytest.fixture(scope="module")
def proposal():
    return proposed(total_tokens=10_000_000)


def test_text_says_which_why_and_how_sure(proposal):
    lines = table.as_text(proposal).splitlines()
    web, books = lines[1], lines[3]
    assert web.split()[:3] == ["web", "8,000,000", "0.800"]
    assert "down in 100% of draws" in web
    assert "0.200" in books
    assert books.endswith("at its cap")
    assert "at its cap" not in web
    assert lines[-1].startswith("decision: the proposed weights, because the gain of 0.")
    assert "from 20 runs" in lines[-2]
    assert len({line.index(" 0.") for line in lines[1:4]}) == 1  # columns


def test_a_direction_that_few_draws_agree_on_is_unsure(proposal):
    from dataclasses import replace

    domain = replace(proposal.domains[0], share_up=0.2, share_down=0.94)
    assert table.direction(domain).startswith("unsure (up in 20%, down in 94%)")
    assert table.direction(replace(domain, share_down=0.95)).startswith("down in 95% of draws")


def test_json_has_every_number(proposal):
    found = json.loads(json.dumps(table.as_json(proposal)))
    assert found["weights"] == pytest.approx(proposal.weights)
    assert [d["name"] for d in found["domains"]] == list(NAMES)
    assert found["gain_low"] == proposal.gain_low


def test_the_recipe_is_one_that_a_run_reads(proposal):
    paths = {name: f"stores/{name}" for name in NAMES}
    text = table.as_recipe(proposal, paths, dict.fromkeys(NAMES, 4.0))
    sources = Run.parse(tomllib.loads(text)).data.sources
    assert [s.path for s in sources] == list(paths.values())
    assert sum(s.weight for s in sources) == pytest.approx(1, abs=1e-3)
    assert {s.max_epochs for s in sources} == {4.0}
