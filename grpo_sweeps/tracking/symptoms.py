"""What looks wrong with a run, in sentences, from its configuration and the metrics of its steps so far.

The run says each sentence once, `check` says them after its two steps, and the report begins with them: all by the
rules of this file, which read only what metrics.jsonl holds. A sentence gives its numbers and what to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_sweeps.config import groups_a_step
from grpo_sweeps.config.checks import GROUP_BASELINES, STEP_BASELINES
from grpo_sweeps.text import count

LEAST = 128
"""Rollouts before a share is judged: the standard error of a share near a quarter is then below .04, and a policy that
is right in 2.4% of its answers has shown it with probability .95. A run that has ended is judged by what it has."""
CUT = 0.25  # share of cut completions above which the run looks wrong
WINDOW = 20  # last steps that are also judged alone, so that a long good beginning hides no bad end
SHORT = 64  # tokens: a lower limit may cut every answer; a higher one hardly all of them
FAILED = 0.05  # share of rewards that lack something above which the run looks wrong
SAME = 0.9  # share of groups with one text above which the run looks wrong
UNIFORM = 0.99  # share of log(vocabulary): entropy of a policy that draws tokens at random
GROWN = 10.0  # times the weights' norm before training, above which a run has diverged
JUMP = 2.0  # times their norm in one step: then the update was at least as large as they
DIVERGENCE = "divergence"  # the rule that says a run has diverged
NAMED = "looks wrong after step"  # how a run's note begins


@dataclass(frozen=True)
class Symptom:
    """One thing that looks wrong. `kind` is the rule's name."""

    kind: str
    sentence: str


class Course:
    """What the steps of a run say so far. `config` is its configuration in written form; keys may be missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        given = (_value(config, key) for key in ("R", "trainer.prompts", "budget_R"))
        self.R, prompts, budget_R = (value if isinstance(value, int) else 1 for value in given)
        self.groups_a_step = groups_a_step(self.R, prompts, str(_value(config, "budget")), budget_R)
        self.steps = 0
        self.last: Mapping[str, float] = {}
        self.only_zeros = self.no_gradient = True
        self.largest_update, self.largest_at = 0.0, 0
        self.first: Mapping[str, float] = {}
        self.largest_jump, self.jump_at = 0.0, 0  # of the weights' norm, in one step
        self._sums: dict[str, float] = {}
        self._cut: deque[float] = deque(maxlen=WINDOW)
        self._told: set[str] = set()

    def add(self, row: Mapping[str, float]) -> None:
        """Add a step's metrics, in the order of the steps; a row without a reward (an evaluation's) is ignored."""
        if "reward" not in row:
            return
        self.steps += 1
        self.first = self.first or row
        before, now = self.last.get("weights/norm", 0.0), row.get("weights/norm", 0.0)
        if before > 0 and now / before > self.largest_jump:
            self.largest_jump, self.jump_at = now / before, self.steps - 1
        self.last = row
        self.only_zeros &= row.get("reward/task", row["reward"]) == 0 and (
            "reward/task" in row or row.get("reward_std", 0.0) == 0
        )
        self.no_gradient &= row.get("grad_norm", 1.0) == 0
        for name in SUMMED:
            value = row.get(name)
            if value is None and name == "groups/mixed" and "frac_reward_zero_std" in row:  # an older record
                value = 1.0 - row["frac_reward_zero_std"]
            if value is not None:
                self._sums[name] = self._sums.get(name, 0.0) + value
        self._cut.append(row.get("completions/clipped_ratio", 0.0))
        update = row.get("update/relative_norm", 0.0)
        if update > self.largest_update:  # an infinite one too; NaN is none
            self.largest_update, self.largest_at = update, self.steps

    @property
    def groups(self) -> int:
        return self.steps * self.groups_a_step

    @property
    def rollouts(self) -> int:
        return self.groups * self.R

    def mean(self, name: str) -> float | None:
        """A metric's mean over the steps; None where no step has it."""
        return self._sums[name] / self.steps if name in self._sums else None

    def cut(self) -> tuple[float, int]:
        """Share of completions that reached the limit, over all steps or, where that is more, the last ones; and their
        number."""
        last = sum(self._cut) / max(1, len(self._cut))
        whole = self.mean("completions/clipped_ratio") or 0.0
        if whole > CUT or last <= CUT:
            return whole, self.rollouts
        return last, len(self._cut) * self.groups_a_step * self.R

    def value(self, key: str) -> Any:
        return _value(self.config, key)

    def symptoms(self, ended: bool = False) -> list[Symptom]:
        """What looks wrong. ended: nothing follows, so that few rollouts must suffice."""
        if not self.steps:
            return []
        rules = dict(AT_ONCE)
        if ended or self.rollouts >= LEAST:
            rules |= SHARES
        found = [Symptom(kind, sentence) for kind, rule in rules.items() if (sentence := rule(self))]
        return [symptom for symptom in found if symptom.kind == DIVERGENCE] or found  # what follows is no news

    def notes(self, ended: bool = False) -> list[str]:
        """The notes to say now: those of `symptoms` whose kind was not said before."""
        found = [symptom for symptom in self.symptoms(ended) if symptom.kind not in self._told]
        self._told |= {symptom.kind for symptom in found}
        return [f"{NAMED} {self.steps} ({symptom.kind}): {symptom.sentence}" for symptom in found]

    def said(self, notes: Iterable[str]) -> None:
        """Take the run's notes so far: their kinds are not said again, even with other numbers."""
        named = [note for note in notes if note.startswith(NAMED)]
        self._told |= {kind for kind in (*AT_ONCE, *SHARES) if any(f"({kind}): " in note for note in named)}


def symptoms(config: Mapping[str, Any], rows: Iterable[Mapping[str, float]], ended: bool = True) -> list[Symptom]:
    """What looks wrong with a run by the metrics of its steps. Pure; `ended` as in `Course.symptoms`."""
    course = Course(config)
    for row in rows:
        course.add(row)
    return course.symptoms(ended)


def known(row: Mapping[Any, Any]) -> dict[str, float]:
    """A step's metrics without those that it does not have, which are NaN in a table."""
    return {str(name): float(value) for name, value in row.items() if value is not None and value == value}


SUMMED = (
    "reward/strict", "reward/flexible", "groups/mixed", "groups/all_right", "groups/all_wrong", "groups/same_text",
    "completions/clipped_ratio", "entropy", "reward/failed",
)  # fmt: skip


def _value(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def percent(share: float) -> str:
    """A share in words, "43%" or "2.4%"; one that is not 0 or 1 is not rounded to it."""
    if share >= 0.995:
        return "100%" if share >= 1 else "over 99%"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else "under 0.1%" if share < 0.001 else f"{share:.1%}"


def equal_rewards(mixed: float, right: float, wrong: float) -> str:
    """The shares of groups of equal rewards in words: all right, all wrong and, where there are any, the rest.

    >>> equal_rewards(0.5, 0.125, 0.375), equal_rewards(0.0, 0.0, 0.25)
    ('12% all right, 38% all wrong', '0% all right, 25% all wrong, 75% equal otherwise')
    """
    otherwise = round(1.0 - mixed - right - wrong, 9)
    rest = f", {percent(otherwise)} equal otherwise" if otherwise > 0 else ""
    return f"{percent(right)} all right, {percent(wrong)} all wrong{rest}"


def _short(target: Any) -> str:
    return str(target or "unknown").removeprefix("grpo_sweeps.rewards.").removeprefix("grpo_sweeps.estimators.")


def _diverged(c: Course) -> str:
    entropy = c.last.get("entropy", 0.0)
    how = _weights_grown(c)
    if not how and not math.isfinite(entropy):
        how = f"the entropy is {entropy} at step {c.steps}"
    if how:
        return f"{how}: the run has diverged; lower trainer.lr={c.value('trainer.lr')}"
    return _at_random(c, entropy)


def _weights_grown(c: Course) -> str:
    """How the weights have grown beyond what training does; "" where they have not."""
    norm, first = c.last.get("weights/norm", 0.0), c.first.get("weights/norm", 0.0)
    if not math.isfinite(norm):
        return f"the weights' norm is {norm} at step {c.steps}"
    if c.largest_update > 1:
        return f"the update of step {c.largest_at} changed the weights by {c.largest_update:.2g} times their norm"
    if c.largest_jump > JUMP:
        return f"step {c.jump_at} made the weights' norm {c.largest_jump:.2g} times as large"
    if first > 0 and norm > GROWN * first:
        return f"the weights' norm is {norm:.3g} at step {c.steps}, {norm / first:.2g} times that of the first step"
    return ""


def _at_random(c: Course, entropy: float) -> str:
    share, at_first = c.last.get("entropy/normalized", 0.0), c.first.get("entropy/normalized", 1.0)
    if share < UNIFORM:
        return ""
    lr = f"lower trainer.lr={c.value('trainer.lr')}"
    seen = f"tokens are drawn almost at random at step {c.steps} (entropy {entropy:.3g} nats, {percent(share)} of a "
    if at_first < UNIFORM:
        before = c.first.get("entropy", 0.0)
        return f"{seen}uniform policy's; {before:.3g} at the first step): the run has diverged; {lr}"
    if c.last["reward"] == 0 and c.last.get("grad_norm") == 0:
        return (
            f"{seen}uniform policy's), reward and gradient are 0: the run has diverged, or the weights are not a "
            f"trained model's; {lr}, or check model.path={c.value('model.path')}"
        )
    return ""


def _one_rollout(c: Course) -> str:
    """Symptom of R = 1 under a baseline of the other rollouts; the gradient tells it for a user's own estimator."""
    if c.R > 1:
        return ""
    target = c.value("estimator._target_")
    alone = target in GROUP_BASELINES or (target in STEP_BASELINES and c.groups_a_step == 1)
    if not alone and not (c.no_gradient and not c.only_zeros):
        return ""
    return (
        f"R=1: a group of one rollout has no other to be compared with, so that estimator={_short(target)} gives "
        f"advantages of 0 and no gradient ({c.rollouts} rollouts); set R=2 or more, or estimator=reinforce"
    )


def _right_by_a_reading(c: Course) -> str:
    """What would find right answers where the reward finds none."""
    by = {name: c.mean(f"reward/{name}") or 0.0 for name in ("strict", "flexible")}
    best = max(by, key=lambda name: by[name])
    if not by[best]:
        return ""
    kind = c.value("task.verdict")
    if "." in str(kind):
        return f"task.verdict={_short(kind)} finds {percent(by[best])} right: reward=correct takes it"
    if kind in (None, "numbers"):
        words = {"strict": "the number after ####", "flexible": "the last number of the text"}[best]
        remedy = f"reward={({'strict': 'exact_match', 'flexible': 'exact_match_flexible'})[best]} takes it"
    else:
        words = {"strict": "an answer after #### or in a box", "flexible": "a looser one"}[best]
        wanted = "the prompt should ask for an answer after #### or in \\boxed{}, which reward=correct reads"
        remedy = "reward=correct takes it" if best == "strict" else wanted
    return f"{best} parsing ({words}) finds {percent(by[best])} right: {remedy}"


def _reward_failed(c: Course) -> str:
    """Symptom of reward functions that give nothing, with reward_on_failure=zero."""
    share = c.mean("reward/failed") or 0.0
    if share <= FAILED:
        return ""
    return (
        f"{percent(share)} of {c.rollouts} rewards lack something (reward/failed): a function raised, was ended or "
        "none applies, which counts as 0; the log names the first"
    )


def _verdict_stopped(c: Course) -> str:
    """Symptom of a verdict that does not come, which counts as not right."""
    stopped = int(c.last.get("verdict/stopped", 0))
    if stopped <= FAILED * c.rollouts:
        return ""
    return (
        f"{stopped} verdicts so far, of {c.rollouts} rollouts and the evaluations, took longer than their limit or "
        "ended their process (verdict/stopped), and count as not right: look at "
        f"task.verdict={_short(c.value('task.verdict'))}, or give it more time with reward_timeout"
    )


def _reward_zero(c: Course) -> str:
    if not c.only_zeros or c.mean("reward/failed") == 1 or c.last.get("verdict/stopped", 0) >= c.rollouts:
        return ""
    reward, unseen = _short(c.value("reward._target_")), 1 - 0.05 ** (1 / c.groups)
    sentence = (
        f"every reward is 0 (reward {reward}, {count(c.rollouts, 'rollout')} of {count(c.groups, 'prompt')}: "
        f"at 95% confidence less than "
        f"{percent(unseen)} would be right), so that nothing is learned; "
    )
    if right := _right_by_a_reading(c):
        return sentence + right
    kind = c.value("task.verdict")
    own = f"task.verdict={_short(kind)} finds no right answer: " if "." in str(kind) else ""
    nothing = "" if kind == "none" else own or "neither strict nor flexible parsing finds a right answer: "
    template = "" if c.value("model.chat_template") is True else "model.chat_template=true, "
    return sentence + (
        f"{nothing}read some completions, and try another "
        f"task.prompt, {template}a longer rollout.max_new_tokens or another model"
    )


def _cut_off(c: Course) -> str:
    share, rollouts = c.cut()
    if share <= CUT or _no_end(c):
        return ""
    limit = c.value("rollout.max_new_tokens")
    none = " (none ended: if a longer limit changes nothing, check the model's end tokens)" if share == 1 else ""
    if share == 1 and c.value("rollout.cut") == "mask":
        none = " (all of them, and rollout.cut=mask leaves them out: there is no gradient and nothing is learned)"
    return (
        f"{percent(share)} of {rollouts} completions are cut at rollout.max_new_tokens={limit}{none}, and what is cut "
        f"has seldom an answer; raise it, or ask for shorter answers in task.prompt"
    )


def _no_end(c: Course) -> str:
    """Symptom of completions that never end although there was room, or although answers were complete."""
    share, rollouts = c.cut()
    limit = c.value("rollout.max_new_tokens")
    right = c.mean("reward/strict") or 0.0  # a last number may be right in the middle of the work: no sign of an end
    long = isinstance(limit, int) and limit >= SHORT
    if share < 1 or not (long or right):
        return ""
    why = f"though {percent(right)} hold their final answer by then" if right else "which is no short limit"
    path, stop = c.value("model.path"), c.value("task.stop") or "[]"
    return (
        f"none of {rollouts} completions drew an end token or a stop string within rollout.max_new_tokens={limit}, "
        f"{why}; check that eos_token_id in the generation_config.json or the tokenizer of model.path={path} is what "
        f"the model writes at its end (a chat model's needs model.chat_template=true), and task.stop={stop}"
    )


def _same_text(c: Course) -> str:
    share = c.mean("groups/same_text")
    if c.R == 1 or share is None or share <= SAME:
        return ""
    temperature, entropy = c.value("rollout.temperature"), c.mean("entropy")
    low = isinstance(temperature, int | float) and temperature < 0.5
    todo = "raise it to 1" if low else "the policy writes one answer: lower trainer.lr, or start from other weights"
    return (
        f"in {percent(share)} of {c.groups} groups all {c.R} rollouts are the same text, so that there is nothing to "
        f"compare (rollout.temperature={temperature}, entropy {entropy or 0.0:.2g} nats per token); {todo}"
    )


def _not_mixed(c: Course) -> str:
    if c.R == 1 or c.only_zeros or c.mean("groups/mixed") != 0 or _same_text(c):
        return ""
    right, wrong = c.mean("groups/all_right"), c.mean("groups/all_wrong")
    shares = "" if right is None or wrong is None else f": {equal_rewards(0.0, right, wrong)}"
    baseline = c.value("estimator._target_") in GROUP_BASELINES or c.no_gradient
    what = "there is no gradient and nothing is learned" if baseline else "no spectrum is measured"
    parsed = [share for name in ("strict", "flexible") if (share := c.mean(f"reward/{name}")) is not None]
    unlike = bool(parsed) and 0 < max(parsed) < 1 and 1 in (right, wrong)  # answers differ and their rewards do not
    if (right or 0.0) + (wrong or 0.0) < 0.5 or unlike:
        todo = f"check that reward {_short(c.value('reward._target_'))} tells rollouts apart"
    elif (right or 0.0) >= (wrong or 0.0):
        todo = "the problems are too easy for this model: harder ones are needed"
    else:
        todo = "the problems are too hard for this model: easier ones, a larger R or another model are needed"
    return f"no group is mixed ({count(c.groups, 'group')}{shares}), so that {what}; {todo}"


Rule = Callable[[Course], str]
AT_ONCE: dict[str, Rule] = {DIVERGENCE: _diverged, "one rollout": _one_rollout}
SHARES: dict[str, Rule] = {
    "no end": _no_end, "cut": _cut_off, "reward failed": _reward_failed, "verdict stopped": _verdict_stopped,
    "reward 0": _reward_zero, "one text": _same_text, "none mixed": _not_mixed,
}  # fmt: skip
