"""What curing one cause gains while other ranks go on as they do, and what several causes gain together.

Enters: findings, each of which promises all of its time, and the run's exchanges. Leaves: findings that promise what is
left: from one exchange to the next it takes as long as the rank that comes last needs for its own, so taking a cause
away saves no more than the others have to spare. Waits for samples and work between steps have their place, before
a step's first exchange; what a rank computes longer is taken to be where it comes last. Causes that all ranks share
(communication, small operations) stay as they are. Chapter 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmcourse.monitor.diagnosis import thresholds as limit
from vlmcourse.monitor.diagnosis.exchanges import Meetings, find_meetings
from vlmcourse.monitor.diagnosis.facts import RunFacts
from vlmcourse.monitor.diagnosis.findings import Finding, Fix, build_fix, uncertainty_of, with_uncertainty
from vlmcourse.monitor.diagnosis.host import EVENT_CAUSES

OWN_COMPUTING = ("slow_rank", "imbalance", "throttling", "memory_thrash")
"""Causes for which one rank computes longer than it should."""
KIND_OF_EVENT = {cause: kind for kind, cause in EVENT_CAUSES.items()}


@dataclass(frozen=True)
class Part:
    """Seconds of ranks' own that a cause takes, all of them before one of some exchanges."""

    exchanges: Sequence[int]
    seconds: dict[int, float]
    """By rank."""


def promise_what_is_left(facts: RunFacts, findings: Sequence[Finding], noise: float) -> tuple[list[Finding], list[str]]:
    """Return the findings with what their fixes gain while other ranks go on, and notes.

    Args:
        facts: of the run.
        findings: with what their fixes would gain if nothing else held the ranks up, and their uncertainty.
        noise: as in `with_uncertainty`.
    """
    if len(facts.ranks) == 1 or not findings:
        return list(findings), []
    meetings = find_meetings(facts)
    parts = {finding.cause: _find_parts(facts, meetings, finding) for finding in findings}
    alone = {cause: _saved_s(meetings, of_cause) / facts.wall_s for cause, of_cause in parts.items()}
    both = _find_hiding(facts, meetings, findings, parts, alone)
    together = Together(both, min(sum(found.share for found in both), _saved_by(facts, meetings, both, parts)), noise)
    changed = []
    for finding in findings:
        lost = finding.share - alone[finding.cause]
        if finding in both or (parts[finding.cause] and lost > max(limit.HIDDEN_SHARE, _uncertainty(finding))):
            finding = _limit_fixes(facts, meetings, finding, parts[finding.cause], noise)
            finding = _say_why(facts, finding, alone[finding.cause], together)
        changed.append(finding)
    return changed, describe_places(facts, meetings, [found for found in findings if parts[found.cause]], findings)


@dataclass(frozen=True)
class Together:
    """Findings that hide each other; none, or two or more."""

    findings: Sequence[Finding]
    share: float
    """Of the time, that goes when all of them are cured."""
    noise: float

    def name_others(self, finding: Finding) -> str:
        """Return the others in words."""
        return " and ".join(_name(found) for found in self.findings if found is not finding)


def _name(finding: Finding) -> str:
    return finding.cause if finding.rank is None else f"{finding.cause} on rank {finding.rank}"


def _uncertainty(finding: Finding) -> float:
    return max((fix.uncertainty_share for fix in finding.fixes), default=0.0)


def _find_parts(facts: RunFacts, meetings: Meetings, finding: Finding) -> list[Part]:
    """Return which ranks' own time a cause takes, and before which exchanges; nothing where that cannot be told."""
    if finding.cause == "data_loading":  # between two steps, as the others: those that the next one waits for
        return [
            Part(exchanges[-1:], {rank: r.data_wait_s or 0.0 for rank, r in facts.following[step].items()})
            for step, exchanges in meetings.after.items()
        ]
    if finding.cause == "callbacks":
        return [
            Part(of_step, {r: facts.gap_s(r, step) for r in facts.ranks}) for step, of_step in meetings.after.items()
        ]
    if (kind := KIND_OF_EVENT.get(finding.cause)) is not None:
        return [
            Part(of_step, {rank: facts.event_s(rank, step, kind) for rank in facts.ranks})
            for step, of_step in meetings.after.items()
        ]
    if finding.cause in OWN_COMPUTING and finding.rank is not None and facts.tells_communication:
        return [Part(range(len(meetings.spare_s)), {finding.rank: finding.share * facts.wall_s})]
    return []


def _saved_s(meetings: Meetings, parts: Sequence[Part], fraction: float = 1.0) -> float:
    """Return what goes of the time between exchanges when this fraction of the parts does.

    What a rank does before one of several exchanges is where it comes last, as far as it does, and the rest anywhere.
    """
    gone_s: list[dict[int, float]] = [{} for _ in meetings.spare_s]
    for part in parts:
        for rank, seconds in part.seconds.items():
            leads_s = [meetings.lead_s(i, rank) for i in part.exchanges] if len(part.exchanges) > 1 else [0.0]
            leading_s = sum(leads_s)
            seen_s = min(seconds, leading_s)
            rest_s = (seconds - seen_s) / len(part.exchanges)
            for i, lead_s in zip(part.exchanges, leads_s, strict=True):
                here_s = rest_s + (seen_s * lead_s / leading_s if seen_s > 0 else 0.0)
                gone_s[i][rank] = gone_s[i].get(rank, 0.0) + fraction * here_s
    return sum(
        min(seconds + gone.get(rank, 0.0) for rank, seconds in spare_s.items())
        for spare_s, gone in zip(meetings.spare_s, gone_s, strict=True)
        if gone
    )


def _saved_by(facts: RunFacts, meetings: Meetings, findings: Sequence[Finding], parts: dict[str, list[Part]]) -> float:
    """Return the share of the time that goes when all of these findings are cured."""
    return _saved_s(meetings, [part for found in findings for part in parts[found.cause]]) / facts.wall_s


def _find_hiding(
    facts: RunFacts,
    meetings: Meetings,
    findings: Sequence[Finding],
    parts: dict[str, list[Part]],
    alone: dict[str, float],
) -> list[Finding]:
    """Return the findings above their thresholds that gain more when the others are cured too than they do alone."""
    known = [found for found in findings if parts[found.cause] and found.share >= limit.min_share(found.cause)]
    if len(known) < 2:
        return []
    all_of_them, hiding = _saved_by(facts, meetings, known, parts), []
    for finding in known:
        others = [found for found in known if found is not finding]
        as_last = all_of_them - _saved_by(facts, meetings, others, parts)
        hiding += [finding] if as_last - alone[finding.cause] > limit.HIDDEN_SHARE else []
    return hiding if len(hiding) > 1 else []


def _limit_fixes(facts: RunFacts, meetings: Meetings, finding: Finding, parts: Sequence[Part], noise: float) -> Finding:
    """Return the finding with fixes that save no more than the other ranks have to spare."""
    fixes = []
    for fix in finding.fixes:
        fraction = min(1.0, fix.saved_share / finding.share)
        saved = min(fix.saved_share, _saved_s(meetings, parts, fraction) / facts.wall_s)
        fixes.append(build_fix(fix.what, facts.tokens_per_s, saved))
    limited = replace(finding, fixes=tuple(sorted(fixes, key=lambda fix: -fix.gain_fraction)))
    return with_uncertainty(limited, noise, limit.MODEL_ERRORS.get(finding.cause, 0.0))


def _say_why(facts: RunFacts, finding: Finding, alone: float, together: Together) -> Finding:
    """Return the finding with a sentence about what holds the ranks up besides, and a fix of all of it at once."""
    mine = [found for found in together.findings if found.cause == finding.cause]
    said = (
        f"Cured alone, this saves {alone:.0%} of the time and not {finding.share:.0%}: the ranks then still wait for "
    )
    if not mine:
        said += "another one, which comes to the exchanges hardly earlier."
        return replace(finding, evidence=(*finding.evidence, said))
    others, number = together.name_others(mine[0]), "both" if len(together.findings) == 2 else "all"
    said += f"{others}. Cured together, they save {together.share:.0%}: {number} must go."
    fix = _fix_all(facts, f"all of this and of {others}, at once", together)
    return replace(finding, evidence=(*finding.evidence, said), fixes=(fix, *finding.fixes))


def _fix_all(facts: RunFacts, what: str, together: Together) -> Fix:
    fix = build_fix(what, facts.tokens_per_s, together.share)
    error = max(limit.MODEL_ERRORS.get(found.cause, 0.0) for found in together.findings)
    return replace(fix, uncertainty_share=uncertainty_of(fix, together.noise, error))


def describe_places(
    facts: RunFacts, meetings: Meetings, compared: Sequence[Finding], findings: Sequence[Finding]
) -> list[str]:
    """Say what was taken for granted of causes on several ranks, where waits are not known one by one.

    Args:
        facts: of the run.
        meetings: its exchanges.
        compared: those of the findings whose time is held against that of other ranks.
        findings: all.
    """
    of_ranks = [f for f in findings if f.rank is not None and f.share >= limit.min_share(f.cause)]
    if meetings.knows_each or len({found.rank for found in of_ranks}) < 2:
        return []
    named = " and ".join(map(_name, of_ranks))
    if facts.tells_communication:
        return [
            f"{named}: the waits of a step are not known one by one, so the ranks are taken to meet once a step; where "
            "these come before different exchanges, each gains its own time alone"
        ]
    if all(found in compared for found in of_ranks):
        return []
    return [
        f"{named} may go on at the same time, which cannot be told here: then one fix alone gains little, as the ranks "
        "still wait for the other"
    ]
