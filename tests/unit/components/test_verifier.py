"""Sources are held against their cases in the sandbox, and nothing but a solution passes."""

import subprocess
import sys

import pytest
from component_samples import DOUBLE, GOOD, GUARDED, PLAN, QUADRUPLE, USES, patient_sandbox

from graftwork.components.attempts import GenerationJournal
from graftwork.components.cases import CallCase, ComponentCases, PropertyCase
from graftwork.components.inside import read_facts, refuse, refuse_reach
from graftwork.components.session import find_accepted_hacks, list_hacks, require_no_hack
from graftwork.components.verifier import ALWAYS_ALLOWED, MODULES, Submission, Verifier
from graftwork.records.errors import UserError


@pytest.fixture(scope="module")
def verifier():
    return Verifier(PLAN, patient_sandbox())


def test_verdicts_name_the_case_that_does_not_hold(verifier):
    wrong = "def double(number):\n    return 2\n"
    good, bad, prose, late = verifier.verify(
        [
            Submission(DOUBLE, text, stage)
            for text, stage in ((GUARDED, 4), (wrong, 1), ("Sure!", 1), (GOOD, 4))
        ]
    )
    assert good.ok
    assert set(good.cases.values()) == {""}
    assert "[5] should give 10, gives 2" in bad.reason
    assert "is not Python" in prose.reason
    assert [case for case, reason in late.cases.items() if reason] == [DOUBLE.cases.calls[3].id]


def test_sources_that_import_or_reach_beyond_the_spec_are_not_run(verifier):
    refused = verifier.verify(
        [
            Submission(DOUBLE, text, 1)
            for text in (
                "import os\n" + GOOD,
                "from numbers_demo.quadruple import quadruple\n" + GOOD,
                "def double(number):\n    return (0).__class__(2 * number)\n",
                "def double(number):\n    return eval('2 * number')\n",
                "def other(number):\n    return 2 * number\n",
            )
        ]
    )
    reasons = [verdict.reason for verdict in refused]
    assert reasons[0] == "imports os, which the spec does not allow"
    assert "numbers_demo.quadruple" in reasons[1]
    assert "__class__" in reasons[2]
    assert "eval" in reasons[3]
    assert "does not define" in reasons[4]


def test_a_component_is_verified_with_its_real_dependencies(verifier):
    real, broken = verifier.verify(
        [
            Submission(QUADRUPLE, USES, 4, (("double.py", GOOD),)),
            Submission(QUADRUPLE, USES, 4, (("double.py", GOOD.replace("+", "-")),)),
        ]
    )
    assert real.ok
    assert not broken.ok


def test_evidence_counts_executed_lines_and_coverage(verifier):
    loop = "def double(number):\n    for _ in range(5):\n        pass\n    return 2 * number\n"
    plain, slow = verifier.measure([Submission(DOUBLE, GOOD, 1), Submission(DOUBLE, loop, 1)])
    assert plain.events < slow.events
    assert plain.coverage == slow.coverage == 1.0


def test_mutants_that_no_case_notices_are_named_by_line(verifier):
    weak = DOUBLE.model_copy(update={"cases": ComponentCases(calls=(CallCase(args=(2,), gives=4),))})
    source = "def double(number):\n    if number > 100:\n        return 7\n    return number * 2\n"
    strong, weakly = verifier.mutate([Submission(DOUBLE, GOOD, 2), Submission(weak, source, 2)])
    assert strong.score == 1.0
    assert weakly.score < 1.0
    assert 3 in weakly.survived


def test_equal_behaviour_has_equal_values_and_other_behaviour_has_not(verifier):
    other = "def double(number):\n    return 2 * number\n"
    odd = "def double(number):\n    return 2 * number if number < 900 else 0\n"
    one, two, three = verifier.verify([Submission(DOUBLE, text, 1) for text in (GOOD, other, odd)])
    assert one.values == two.values
    assert one.ok
    assert three.ok or three.values != one.values


def test_no_hack_of_the_catalogue_is_accepted(verifier, tmp_path):
    journal = GenerationJournal(tmp_path)
    assert find_accepted_hacks(PLAN.components, verifier, journal) == {}
    tried = [entry["tried"] for entry in journal.of_kind("hacks")]
    assert tried == [len(list_hacks(DOUBLE))] * 2
    before = verifier.verified
    assert find_accepted_hacks(PLAN.components, verifier, journal) == {}
    assert verifier.verified == before


def test_cases_that_a_constant_or_a_table_of_the_shown_ones_solves_are_found(verifier, tmp_path):
    journal = GenerationJournal(tmp_path)
    constant = (CallCase(args=(1,), gives=2), CallCase(args=(5,), gives=2))
    shown = tuple(CallCase(args=(n,), gives=2 * n, hidden=False) for n in range(4))
    weak = [
        DOUBLE.model_copy(update={"id": str(n), "cases": ComponentCases(calls=calls)})
        for n, calls in enumerate((constant, shown))
    ]
    assert find_accepted_hacks(weak, verifier, journal) == {
        "0": ["the same value for everything", "a table of the shown cases"],
        "1": ["a table of the shown cases"],
    }


def test_cases_that_accept_a_hack_are_refused_with_the_id_of_their_component(verifier, tmp_path):
    weak = DOUBLE.model_copy(update={"cases": ComponentCases(calls=(CallCase(args=(0,), gives=0),))})
    plan = PLAN.model_copy(update={"components": (weak,)})
    accepted = find_accepted_hacks(
        plan.components, Verifier(plan, patient_sandbox()), GenerationJournal(tmp_path)
    )
    assert accepted["1.1"][0] == "returns its argument"
    with pytest.raises(UserError, match=r"component 1\.1 .* returns its argument"):
        require_no_hack(accepted)


def test_properties_see_their_names_in_nested_scopes_and_failed_evaluation_is_named(verifier):
    def with_property(holds):
        rule = PropertyCase(name="rule", holds=holds)
        return DOUBLE.model_copy(update={"cases": ComponentCases(properties=(rule,))})

    nested, wrong, broken = verifier.verify(
        [
            Submission(with_property(holds), GOOD, 4)
            for holds in ("all(result == number * n for n in [2])", "result == 1", "result[0] == 1")
        ]
    )
    assert nested.ok, nested.reason
    assert "does not hold" in wrong.reason
    assert "cannot be evaluated" in broken.reason


@pytest.mark.parametrize(
    "route",
    [
        "from logging import os",
        "from typing import sys",
        "import logging\nx = logging.os",
        "import logging as log\nlog.os.system('true')",
        "import logging\nother = logging\nother.os.system('true')",
        "import logging\ndef use(x=logging.os): pass",
        "import logging\ndef use(logging):\n    import logging\n    logging.os",
        "import collections.abc\nx = collections.abc\nx.sys",
        "class Holder:\n    import logging\nHolder.logging.os",
        "import logging\nx = getattr(logging, 'os')",
        "from typing import get_type_hints",
        "x = getattr(1, 'o' + 's')",
        "x = getattr(1, '__class__')",
        "setattr(double, '__code__', 1)",
        "delattr(double, str(1))",
        "read = getattr",
        "match 1:\n    case object(__class__=x): pass",
    ],
)
def test_allowed_imports_lead_to_no_other_module(route):
    facts = read_facts(GOOD + route + "\n", "double")
    allowed = set(ALWAYS_ALLOWED)
    assert refuse(facts, allowed) or refuse_reach(GOOD + route + "\n", "demo.double", allowed)


def test_dependencies_give_their_functions_and_not_what_they_import(verifier):
    double = ("double.py", "import logging\n" + GOOD)
    plain, through, star = verifier.verify(
        [
            Submission(QUADRUPLE, text, 4, (double,))
            for text in (
                USES,
                USES.replace("import double", "import double, logging"),
                USES.replace("import double\n", "import *\n"),
            )
        ]
    )
    assert plain.ok, plain.reason
    assert through.reason == "reaches numbers_demo.double.logging through an import"
    assert not star.ok


def test_usual_imports_are_allowed():
    source = (
        "from __future__ import annotations\nimport collections.abc\nimport logging\nimport string\n"
        "import xml.etree.ElementTree\nfrom typing import Any\nfrom collections.abc import Iterable\n"
        "LOG = logging.getLogger('double')\nLETTERS = string.ascii_letters\n"
        "def read(string: str, other: collections.abc.Sequence[int]) -> Any:\n"
        "    LOG.log(logging.INFO, getattr(other, 'name', ''))\n"
        "    return xml.etree.ElementTree.fromstring(string)\n"
    )
    allowed = {*ALWAYS_ALLOWED, "string", "xml.etree.ElementTree"}
    assert refuse(read_facts(source, "read"), allowed) == ""
    assert refuse_reach(source, "demo.read", allowed) == ""


def test_reading_a_source_imports_nothing_that_every_sandboxed_answer_would_import_again():
    """A module that is not in the prelude is loaded for every answer: `inspect` took half of the time."""
    program = (
        "import sys\n"
        f"for name in {list(MODULES)!r}: __import__(name)\n"
        "from graftwork.components import inside\n"
        "before = set(sys.modules)\n"
        'source = \'def f(x: int) -> int:\\n    """Add."""\\n    return x + 1\\n\'\n'
        "facts = inside.read_facts(source, 'f')\n"
        "assert not inside.refuse(facts, set()) and not inside.refuse_reach(source, 'package.f', set())\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
