"""Tables of evaluations in HTML: success by condition, change, task, goal and wording, paired
comparisons on the same starts, and every episode.

All text from users is escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from models.files.page import table
from sim.report import charts
from sim.report.page import chart
from sim.results import Evaluation, Perturbed
from sim.statistics import Paired, Rate

_ABOUT = {
    "trained": "the policy of this run",
    "untrained": "the same network before training",
    "expert": "the script that recorded the data; it sees the physics",
    "wrong prompt": "given the prompt of another goal than the episode's own",
    "blank image": "all images black",
    "compared": "the policy of another checkpoint",
}
_DIFFERENCE = ["Difference, points", "95 % CI", "Won", "Lost", "p"]
_PAIRS = (
    "Won and lost are the starts on which only one of the two succeeded; p is from McNemar’s "
    "exact two-sided test, the interval is Newcombe’s for paired rates."
)


def success(evaluations: Mapping[str, Evaluation]) -> str:
    """A chart and a table of all conditions."""
    bars, rows = [], []
    for i, (name, e) in enumerate(evaluations.items()):
        kind = "main" if i == 0 else "plain"
        if redirected(e):
            bars.append(charts.rate_bar(f"{name}: original goal", e.success, kind))
            if e.named:
                bars.append(charts.rate_bar(f"{name}: named goal", e.named, "control"))
        else:
            bars.append(charts.rate_bar(name, e.success, kind))
        about = f"<small>{escape(_ABOUT[name])}</small>" if name in _ABOUT else ""
        rows.append(
            [
                f"{escape(name)}{about}",
                f"{e.success.successes}/{e.success.trials}",
                percent(e.success.value),
                e.success.interval_text,
                _named(e),
                f"{median(x.length for x in e.episodes):g}",
                f"{e.roughness:.3g}",
                f"{1000 * e.latency.p50:.1f} / {1000 * e.latency.p99:.1f}" if e.latency else "",
            ]
        )
    heads = ["Policy", "Episodes", "Success", "95 % CI", "Named goal", "Median steps"]
    heads += ["Roughness", "Call p50 / p99, ms"]
    return (
        _rates(
            bars, "Share of episodes that reached their goal; whiskers are 95 % Wilson intervals."
        )
        + table(heads, rows, "All conditions")
        + '<p class="note">Roughness is the mean absolute second difference of the executed '
        "actions. A call computes a chunk for every episode that waits; the first call, which "
        "compiles, is left out.</p>"
    )


def lost(evaluations: Mapping[str, Evaluation]) -> str:
    """Episodes that were rerun or given up because a simulator failed, and omitted clips."""
    notes = []
    for name, e in evaluations.items():
        if e.reruns:
            notes.append(f"{name}: {e.reruns} reruns after failures of the simulator.")
        notes += [
            f"{name}: {f.task}, seed {f.seed}, was given up and is not counted: {f.error}"
            for f in e.failures
        ]
        if e.unrepeatable:
            notes.append(
                f"{name}: {e.unrepeatable} videos are left out, because their episodes ended "
                "differently when the actions were repeated."
            )
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def compared(name: str, comparisons: Mapping[str, Paired]) -> str:
    """One policy compared with others on the same starts."""
    rows = [
        [
            f"{escape(name)} − {escape(other)}",
            f"{p.trials}",
            *_difference(p),
        ]
        for other, p in comparisons.items()
    ]
    heads = ["Policies", "Same starts", *_DIFFERENCE]
    note = f'<p class="note">{_PAIRS}</p>'
    return table(heads, rows, "Success on the same starts") + note if rows else ""


def robustness(
    name: str, main: Evaluation, perturbed: Mapping[str, Perturbed], left_out: Mapping[str, str]
) -> str:
    """A chart and a table of one policy under changes, the wordings that only these have, and the
    changes that were left out."""
    notes = [f"{change} is left out: {why}" for change, why in left_out.items()]
    told = "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)
    if not perturbed:
        return told
    bars = [charts.rate_bar("unchanged", main.success, "main")]
    rows = [["unchanged", *_rate(main.success), "", "", "", "", ""]]
    wordings = ""
    for change, p in perturbed.items():
        bars.append(charts.rate_bar(change, p.evaluation.success, "plain"))
        rows.append(
            [
                f"{escape(change)}<small>{escape(p.about)}</small>",
                *_rate(p.evaluation.success),
                *_difference(p.difference),
            ]
        )
        if p.evaluation.by_prompt.keys() - main.by_prompt.keys():
            wordings += by_prompt(change, p.evaluation)
    heads = ["Change", "Episodes", "Success", "95 % CI", *_DIFFERENCE]
    return (
        _rates(
            bars,
            f"Share of episodes in which “{escape(name)}” reached the goal under each change; "
            "whiskers are 95 % Wilson intervals.",
        )
        + table(heads, rows, "Success under changes, and its difference from unchanged")
        + '<p class="note">Pairs are episodes of the same task and seed. '
        + f"{_PAIRS}</p>\n{told}{wordings}"
    )


def by_task(evaluations: Mapping[str, Evaluation]) -> str:
    """Success by task; nothing if there is a single one."""
    parts = {name: e.by_task for name, e in evaluations.items()}
    tasks = list(dict.fromkeys(task for part in parts.values() for task in part))
    if len(tasks) < 2:
        return ""
    rows = [
        [
            escape(task),
            *(
                _cell(part[task].success, f", {part[task].mean_length:.0f} steps")
                if task in part
                else ""
                for part in parts.values()
            ),
        ]
        for task in tasks
    ]
    note = '<p class="note">Below each rate: episodes, 95 % interval, mean steps.</p>'
    return table(["Task", *map(escape, parts)], rows, "Success by task") + note


def by_goal(evaluations: Mapping[str, Evaluation]) -> str:
    """Success by the episode's own goal."""
    parts = {name: e.by_goal for name, e in evaluations.items()}
    goals = list(dict.fromkeys(goal for e in evaluations.values() for goal in e.goals))
    rows = [
        [escape(goal), *(_cell(part[goal]) if goal in part else "" for part in parts.values())]
        for goal in goals
    ]
    return table(["Goal", *map(escape, parts)], rows, "Success by the episode's own goal")


def by_prompt(name: str, main: Evaluation) -> str:
    """Success by wording."""
    rows = [
        [f"“{escape(prompt)}”", *_rate(rate), charts.strip(rate)]
        for prompt, rate in main.by_prompt.items()
    ]
    heads = ["Prompt", "Episodes", "Success", "95 % CI", ""]
    return table(heads, rows, f"Success by wording, {name}")


def episodes(evaluation: Evaluation) -> str:
    """A table of all episodes."""
    rows = [
        [
            escape(e.task),
            f"{e.seed}",
            escape(e.goal),
            f"“{escape(e.prompt)}”",
            "✓ success" if e.success else "✗ failure",
            f"{e.length}",
            f"{e.reward:.3g}",
        ]
        for e in evaluation.episodes
    ]
    heads = ["Task", "Seed", "Goal", "Prompt", "Outcome", "Steps", "Return"]
    return table(heads, rows, "Every episode once")


def redirected(evaluation: Evaluation) -> bool:
    """True if a prompt names a goal other than the episode's own."""
    return any(e.goal != e.named_goal for e in evaluation.episodes)


def percent(share: float) -> str:
    """Percentage, with a non-breaking space."""
    return f"{100 * share:.1f}\u00a0%"


def _rates(bars: Sequence[charts.Bar], caption: str) -> str:
    return chart(charts.bars(bars, name="Success rates", most=100, unit=" %"), caption)


def _named(evaluation: Evaluation) -> str:
    """Rate of reaching the goal that a prompt named instead of the episode's own."""
    if not redirected(evaluation):
        return ""
    rate = evaluation.named
    return f"{percent(rate.value)}<small>{rate.interval_text}</small>" if rate else "not measured"


def _cell(rate: Rate, more: str = "") -> str:
    return (
        f"{percent(rate.value)}<small>{rate.successes}/{rate.trials}, {rate.interval_text}{more}"
        "</small>"
    )


def _rate(rate: Rate) -> list[str]:
    return [f"{rate.successes}/{rate.trials}", percent(rate.value), rate.interval_text]


def _difference(paired: Paired) -> list[str]:
    return [
        f"{100 * paired.difference:+.1f}",
        " to ".join(f"{100 * end:+.1f}" for end in paired.interval),
        f"{paired.first_only}",
        f"{paired.second_only}",
        f"{paired.p_value:.3g}",
    ]
