"""`check_rule`: whether a rule keeps the promises that everything else relies on."""

from __future__ import annotations

from collections.abc import Collection

from fedstrata.clients.client import reason
from fedstrata.core.axes import Algorithm, Combination, Objective, Selection, ServerStep, Weighting
from fedstrata.core.determinism import steady
from fedstrata.core.errors import BadValue
from fedstrata.registry import did_you_mean
from fedstrata.testing import aggregation, federations, forms, general, objectives, selections
from fedstrata.testing.report import RULES, Check, CheckFailed, Failure, Report, Skipped, Unmet
from fedstrata.testing.subject import KINDS, Subject, Whole, axis_of

_MODULES = (forms, objectives, selections, general, aggregation, federations)

CHECKS = sorted(
    (found for module in _MODULES for found in vars(module).values() if isinstance(found, Check)),
    key=lambda one: one is not general.protocol,
)
"""Every check, in the order in which they run: first those of the form of an answer."""


def check_rule(
    rule: Objective | Selection | Weighting | ServerStep | Combination | Algorithm,
    *,
    checks: Collection[str] | None = None,
    skip: Collection[str] = (),
) -> Report:
    """Try a rule, or all rules of an algorithm, as training, resuming, workers and Flower will use it.

    `checks` names the only ones to run, `skip` those to leave out. The report says which were passed; if one fails,
    `CheckFailed` says which, what was expected and what was found. It takes a few seconds and leaves no files.

    >>> check_rule(FedLayerWise(), checks=["weights", "order_of_clients"])
    FedLayerWise(alpha=5.0, smoothing='participation') is a weighting: 2 checks passed
    """
    names = list(dict.fromkeys(one.name for one in CHECKS))
    for field, given in (("checks", checks or ()), ("skip", skip)):
        for name in given:
            if name not in names:
                raise BadValue(field, name, f"is no check{did_you_mean(name, names)}; there are: {', '.join(names)}")
    wanted = [one for one in CHECKS if one.name not in skip and (checks is None or one.name in checks)]
    passed, skipped, failures, untried = list[str](), dict[str, str](), list[Failure](), list[str]()
    with steady():
        for subject, one in _work(rule, wanted):
            name = f"{subject.axis}.{one.name}" if isinstance(rule, Algorithm) else one.name
            try:
                one.function(subject)
                passed.append(name)
            except Skipped as why:
                skipped[name] = str(why)
            except Unmet as found:
                failures.append(Failure(name, one.expected, str(found)))
            except Exception as error:
                if failures:
                    untried.append(name)  # what was found explains this one, too
                else:
                    failures.append(Failure(name, one.expected, reason(error)))
    kind = "an algorithm" if isinstance(rule, Algorithm) else KINDS[axis_of(rule)]
    report = Report(repr(rule), kind, tuple(passed), skipped, tuple(failures), tuple(untried))
    if failures:
        raise CheckFailed(report)
    return report


def _work(rule: object, checks: list[Check]) -> list[tuple[Subject, Check]]:
    """Which checks are made of what: of an algorithm, those of its rules that are not FedAvg's, and of the whole."""
    if isinstance(rule, Algorithm):
        changed = [axis for axis in RULES if getattr(rule, axis) != getattr(Algorithm(), axis)]
        whole: Subject = Whole(rule)
        subjects = [Subject(getattr(rule, axis), axis) for axis in changed]
    else:
        whole = Subject(rule, axis_of(rule))
        subjects = [whole]
    of_rules = [(subject, one) for subject in subjects for one in checks if subject.axis in one.axes]
    return of_rules + [(whole, one) for one in checks if not one.axes]
