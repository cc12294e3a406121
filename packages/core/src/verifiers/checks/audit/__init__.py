"""``audit_environment``: is the reward paid only for solving the task?

    report = vf.audit_environment("reverse-text")
    assert report.ok, report

Plays an oracle (which must be paid in full), a panel of non-solutions in the right format, and a
search for more of them; scores rollouts again; and looks for answers in prompts and feedback,
contradictions, repetitions and overlap in the rows. Needs no model and no key. ``vf-audit`` is its
command; ``certificate`` stores the result beside a package.

Limits: it finds ways that it tries. A reward that needs a judge is audited with the judge that the
environment has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from verifiers.checks.audit.actions import code_policies, runs_code, tool_policies
from verifiers.checks.audit.answers import (
    Format,
    Oracle,
    answer_text,
    find_oracle,
    is_same,
    is_solution,
    solution_texts,
)
from verifiers.checks.audit.panel import CHANGES, Answers, NonSolution, hedges, panel, unseeing
from verifiers.checks.audit.playing import Player, Policy, Trial, Turn
from verifiers.checks.audit.report import MANY_ROWS, NOT_REPEATABLE, AuditReport, Paid, RowProfile
from verifiers.checks.audit.rows import check_rows
from verifiers.checks.audit.search import climb
from verifiers.checks.data import readable
from verifiers.checks.loading import load
from verifiers.checks.report import Findings, error_text, place_of, raised_at
from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import ConfigError, VerifiersError
from verifiers.parsers import ThinkParser
from verifiers.results.statistics import known_values, mean
from verifiers.runtime.calls import blocking
from verifiers.types import ModelRequest

__all__ = ["AuditReport", "Paid", "RowProfile", "a_audit_environment", "audit_environment"]

FULL = 0.9
"""Share of a right answer's reward from which a reward counts as paid in full."""
PARTLY = 0.25
"""Mean share of a right answer's reward from which a non-solution is reported."""
FIRST_ROWS = 3
"""Rows that every non-solution is tried on; those that earned something there are tried on all."""
REPEATS = 10
SAMPLE_CHARS = 160


def audit_environment(
    env_or_id: Environment | str | Callable[[], Environment],
    *,
    n: int = 8,
    seed: int = 0,
    search_steps: int = 120,
    timeout_s: float = 30.0,
    budget_s: float = 60.0,
) -> AuditReport:
    """Audit the reward of an environment: an id, an ``Environment``, or a function that returns
    an environment. Blocks.

    Args:
        env_or_id: An id, an ``Environment``, or a function that returns an environment. An
            environment passed as an object is not closed.
        n: Rows that are tried.
        seed: Chooses the rows and the search.
        search_steps: Programs that are tried beside the fixed non-solutions; 0 for none.
        timeout_s: Time limit of a rollout, in seconds.
        budget_s: Time limit of the whole audit, in seconds; what was left out is a note.

    Raises ``UnknownEnvironment`` for an unknown id and ``ConfigError`` for invalid arguments; every
    other problem is in the report.

    >>> def kind(completion, answer):  # a reward that looks for the answer anywhere
    ...     return float(answer in completion[-1].content)
    >>> rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(20, 40)]
    >>> report = vf.audit_environment(vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([kind])))
    >>> [finding.code for finding in report.errors]
    ['non-solution-is-paid']
    """
    return blocking(
        lambda: a_audit_environment(
            env_or_id,
            n=n,
            seed=seed,
            search_steps=search_steps,
            timeout_s=timeout_s,
            budget_s=budget_s,
        )
    )


async def a_audit_environment(
    env_or_id: Environment | str | Callable[[], Environment],
    *,
    n: int = 8,
    seed: int = 0,
    search_steps: int = 120,
    timeout_s: float = 30.0,
    budget_s: float = 60.0,
) -> AuditReport:
    """``audit_environment`` as a coroutine, in the caller's event loop."""
    for name, value, least in (
        ("n", n, 1),
        ("search_steps", search_steps, 0),
        ("timeout_s", timeout_s, 0.001),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be at least {least}", key=name)
    findings = Findings()
    loaded = load(env_or_id, findings)
    findings.notes.clear()  # what the check of the loader leaves out is not part of an audit
    findings.warnings.clear()
    started = time.monotonic()
    audit = _Audit(findings, n, seed, search_steps, timeout_s, started + budget_s)
    if loaded.env is not None:
        try:
            await audit.run(loaded.env)
        finally:
            if loaded.is_built_here:
                for env in filter(None, (loaded.env, loaded.again)):
                    # a failing teardown is reported by check_environment
                    with contextlib.suppress(Exception):
                        await env.aclose()
    return AuditReport(
        loaded.name,
        tuple(findings.errors),
        tuple(findings.warnings),
        tuple(findings.notes),
        audit.num_rollouts,
        audit.success_metric,
        audit.oracle,
        tuple(sorted(audit.paid, key=_known_reward, reverse=True)),
        num_rows=audit.num_rows,
        seconds=time.monotonic() - started,
    )


@dataclass(slots=True)
class _Audit:
    """An audit; its results beside the findings."""

    findings: Findings
    n: int
    seed: int
    search_steps: int
    timeout_s: float
    end: float
    """On the monotonic clock."""
    success_metric: str | None = None
    oracle: Paid | None = None
    paid: list[Paid] = field(default_factory=list)
    num_rows: int = 0
    num_rollouts: int = 0

    async def run(self, env: Environment) -> None:
        if isinstance(env, EnvGroup):
            for name, member in zip(env.env_names, env.envs, strict=True):
                with self.findings.of_member(name):
                    await self.run(member)
            return
        train: tuple[Example, ...] = ()
        held_out: tuple[Example, ...] = ()
        if env.train_table is not None:
            train = readable(env.train_table, "the training set", self.findings)
        if env.eval_table is not env.train_table:
            held_out = readable(env.eval_table, "the evaluation set", self.findings)
        rows = train or held_out
        if not rows:
            return
        check_rows(env, train, held_out, self.findings)
        step = max(1, len(rows) // self.n)
        examples = rows[self.seed % step :: step][: self.n]
        player = Player(env, self.timeout_s, self.seed)
        subject = _Subject(env, player, examples, Answers.of(rows, examples), self)
        try:
            await subject.audit()
        except (VerifiersError, TimeoutError) as error:
            self.findings.error(
                "audit-stopped",
                f"a run with this environment stops: {error_text(error)}",
                raised_at(error.__cause__ or error, type(env).__name__),
                "correct the cause; vf-eval --check says more about it",
            )
        self.num_rows += len(examples)
        self.num_rollouts += player.num_rollouts


@dataclass(slots=True)
class _Subject:
    """An environment under audit, which is no group."""

    env: Environment
    player: Player
    examples: Sequence[Example]
    answers: Answers
    audit_of: _Audit
    oracle: Oracle | None = None
    right: float = math.nan
    """Mean reward of a right answer."""
    is_graded: bool = False
    """Whether a reward other than 0 and 1 was seen."""
    unfinished: list[str] = field(default_factory=list)
    why_unknown: str = ""
    """Of the first non-solution whose reward is unknown: its error, after a colon."""

    @property
    def findings(self) -> Findings:
        return self.audit_of.findings

    @property
    def location(self) -> str:
        functions = [f for f in self.env.rubric.functions if f.weight]
        if len(functions) == 1:
            return place_of(functions[0].function)
        return place_of(type(self.env.rubric))

    async def audit(self) -> None:
        self.oracle = await find_oracle(self.player, self.examples)
        await self._play_oracle(self.oracle)
        if math.isnan(self.right):
            return
        write = self.oracle.write
        # replies may have thinking in tags: the parser removes it, or a prompt asks for it
        thinks = isinstance(self.env.parser, ThinkParser) or any(
            "<think>" in str(message) for message in self.examples[0].row["prompt"]
        )
        policies = panel(write, self.answers, thinks) + tool_policies(write, self.answers)
        texts = (solution_texts(self.env, example) for example in self.examples[:2])
        solution = "\n".join(itertools.chain.from_iterable(texts))
        if runs_code(self.env, self.examples, solution):
            policies += code_policies(self.examples, write, solution)
        for policy in policies:
            await self._play(policy)
        for policy in unseeing(write, self.answers, self.examples):
            await self._check_images(policy)
        for pair in hedges(write, self.answers) if self.answers.texts else ():
            await self._play_pair(*pair)
        await self._search(write)
        await self._check_feedback(write)
        await self._check_repeatable(self.oracle)
        self._conclude()

    # --- playing ----------------------------------------------------------------------------------

    async def _play_oracle(self, oracle: Oracle) -> None:
        policy: Policy = oracle.policy or (lambda turn: oracle.write(turn, "42"))
        trials = await self.player.play(policy, self.examples)
        self._look_at(trials)
        rewards = known_values(trial.reward for trial in trials)
        if not rewards:
            errors = filter(None, (trial.state["error"] for trial in trials))
            reason = next((f": {error_text(error)}" for error in errors), "")
            self.findings.note(
                f"no reward is known without a model or a judge{reason}; the reward was not audited"
            )
            return
        if oracle.policy is None:
            self.right = self._most()
            self.findings.warn(
                "no-oracle",
                "the rows have no answer, so a right reply is not known: 1 for each weighted"
                " function is assumed",
                type(self.env).__name__,
                "give the environment oracle=, a function of the row that returns the replies of a"
                " solution",
            )
            return
        self.right = max(rewards) if max(rewards) > 0 else self._most()
        self.audit_of.oracle = self._as_paid(
            NonSolution("a right answer", "oracle", policy), trials, math.nan
        )
        self._check_oracle(oracle, trials)

    def _most(self) -> float:
        """What a reply earns for which every function returns 1."""
        weights = self.env.rubric.plan().weights.values()
        return sum(weight for weight in weights if weight > 0) or 1.0

    def _check_oracle(self, oracle: Oracle, trials: Sequence[Trial]) -> None:
        most = self._most()
        unpaid = [trial for trial in trials if trial.reward < FULL * self.right]
        unsolved = [trial for trial in trials if trial.success == 0.0]
        is_low = self.env.rubric.success_metric is None and self.right < FULL * most
        if unpaid or unsolved or (is_low and not self.env.rubric.scores_itself):
            failed = (unsolved or unpaid or list(trials))[0]
            who = "oracle" if oracle.source == "oracle" else "row's answer"
            best = max(self.right, most if is_low else 0)
            self.findings.error(
                "solution-is-not-paid",
                f"the {who} ({oracle.format_name}) earns {failed.reward:g} of {best:g} on example"
                f" {failed.example.example_id}, replying {_cut(failed.replies)}",
                self.location,
                "pay the right answer of every row in full; where it cannot be written from the"
                " row, declare oracle=",
            )

    async def _play(self, policy: NonSolution) -> Paid | None:
        """Play a non-solution: on a few rows first, and on all when it earned something there."""
        if time.monotonic() > self.audit_of.end:
            self.unfinished.append(policy.name)
            return None
        first, more = self.examples[:FIRST_ROWS], self.examples[FIRST_ROWS:]
        trials = await self.player.play(policy.policy, first)
        earned = any(t.reward >= PARTLY * self.right or t.success > 0 for t in trials)
        if more and earned:
            trials += await self.player.play(policy.policy, more)
        self._look_at(trials)
        unknown = [trial for trial in trials if math.isnan(trial.reward)]
        if unknown and not self.why_unknown:
            error = unknown[0].state["error"]
            self.why_unknown = f": {error_text(error)}" if error else ""
        wrong = [trial for trial in trials if not self._solves(policy, trial)]
        share = sum(map(self._is_paid, wrong)) / len(wrong) if wrong else math.nan
        paid = self._as_paid(policy, trials, share, is_task=len(wrong) <= len(trials) / 2)
        unearned = sum(known_values(trial.reward for trial in wrong)) / len(trials)
        paid = replace(paid, unearned=unearned)
        self.audit_of.paid.append(paid)
        return paid

    async def _play_pair(self, first: NonSolution, second: NonSolution) -> None:
        """Play both orders of a hedge; what counts is the order that earned less."""
        if time.monotonic() > self.audit_of.end:
            self.unfinished.append(first.name)
            return
        both = [await self.player.play(order.policy, self.examples) for order in (first, second)]
        less = [min(pair, key=_known_reward) for pair in zip(*both, strict=True)]
        share = sum(map(self._is_paid, less)) / len(less)
        self.audit_of.paid.append(self._as_paid(first, less, share))

    async def _search(self, write: Format) -> None:
        async def measure(policy: NonSolution) -> float:
            if time.monotonic() > self.audit_of.end:
                return 0.0
            trials = await self.player.play(policy.policy, self.examples[:FIRST_ROWS])
            rewards = (trial.reward for trial in trials if not self._solves(policy, trial))
            return sum(known_values(rewards)) / len(trials)

        tasks = [paid.name for paid in self.audit_of.paid if paid.is_task]
        changes = [n for n in CHANGES if not any(task.endswith(f", {n}") for task in tasks)]
        steps, seed = self.audit_of.search_steps, self.audit_of.seed
        if steps and changes:
            for program in await climb(measure, write, self.answers, changes, steps, seed):
                await self._play(program)

    def _solves(self, policy: NonSolution, trial: Trial) -> bool:
        slots: list[str] = []
        if policy.slot is not None and trial.replies:
            slots = [policy.slot(turn) for turn in _turns_of(trial)]
        if self.env.oracle is None and policy.slot is None:
            answer, example = answer_text(trial.example), trial.example
            return any(is_same(reply, answer, example) for reply in trial.replies)
        return is_solution(self.env, trial, slots)

    def _is_paid(self, trial: Trial) -> bool:
        return trial.success == 1.0 or trial.reward >= FULL * self.right

    def _look_at(self, trials: Sequence[Trial]) -> None:
        rewards = known_values(trial.reward for trial in trials)
        self.is_graded |= any(reward not in (0.0, 1.0) for reward in rewards)

    def _as_paid(
        self, policy: NonSolution, trials: Sequence[Trial], share: float, is_task: bool = False
    ) -> Paid:
        return Paid(
            policy.name,
            policy.family,
            mean(trial.reward for trial in trials),
            mean(trial.success for trial in trials),
            share,
            len(trials),
            is_task,
            _cut(max(trials, key=_known_reward).replies),
        )

    async def _check_images(self, policy: NonSolution) -> None:
        """Whether a reply that ignores the images is paid as one that sees them; what it solves
        counts too."""
        paid = await self._play(policy)
        if paid is not None and paid.reward >= FULL * self.right:
            self.findings.error(
                "images-are-not-needed",
                f"{paid.name} earns {paid.reward:g} on average where a right answer earns"
                f" {self.right:g}: a policy that does not see its images learns the same; it replied"
                f" {paid.sample}",
                self.location,
                "ask what only the image tells: different images with the same question need"
                " different answers",
            )

    # --- further checks ---------------------------------------------------------------------------

    async def _check_feedback(self, write: Format) -> None:
        """Whether what the environment says after a wrong reply contains the answer, which a later
        turn is paid for."""
        if self.env.max_turns == 1 or not self.answers.texts:
            return

        def reads(turn: Turn) -> str:
            answer = answer_text(turn.example)
            is_told = turn.number > 0 and answer and answer.casefold() in turn.heard.casefold()
            return write(turn, answer if is_told else self.answers.another(turn))

        num_texts = {len(solution_texts(self.env, example)) for example in self.examples}
        if self.env.oracle is None or num_texts == {1}:
            trials = await self.player.play(reads, self.examples)
            leaks = [trial for trial in trials if self._is_paid(trial) and _says_it_late(trial)]
            if len(leaks) >= MANY_ROWS * len(trials):
                self.findings.error(
                    "feedback-tells-the-answer",
                    "after a wrong reply the environment says the answer, and repeating it is paid"
                    f" ({len(leaks)} of {len(trials)} rows)",
                    type(self.env).__name__,
                    "say the answer only when the rollout is over (final_env_response), or pay the"
                    " first reply alone",
                )

    async def _check_repeatable(self, oracle: Oracle) -> None:
        """Play one rollout ten times, half of them at once: every time it must earn the same."""
        policy: Policy = oracle.policy or (lambda turn: oracle.write(turn, "42"))
        wrong: Policy = lambda turn: oracle.write(turn, self.answers.another(turn))  # noqa: E731
        for example, tried in ((self.examples[0], policy), (self.examples[-1], wrong)):
            trials = [await self.player.play_one(tried, example) for _ in range(REPEATS // 2)]
            at_once = (self.player.play_one(tried, example) for _ in range(REPEATS // 2))
            trials += await asyncio.gather(*at_once)
            rewards = sorted({round(r, 9) for r in known_values(t.reward for t in trials)})
            if len(rewards) > 1:
                listed = ", ".join(f"{reward:g}" for reward in rewards[:5])
                self.findings.error(
                    NOT_REPEATABLE,
                    f"the same replies to example {example.example_id}, scored {REPEATS} times,"
                    f" earned {listed}",
                    self.location,
                    "draw from random.Random(…) seeded with the row, and keep nothing from one"
                    " rollout to the next",
                )
                return

    # --- conclusion -------------------------------------------------------------------------------

    def _conclude(self) -> None:
        metric, threshold = self.env.rubric.success_metric, self.env.pass_threshold
        if metric is None and threshold is not None:
            metric = f"reward ≥ {threshold:g}"
        self.audit_of.success_metric = metric or (None if self.is_graded else "reward")
        if metric is None and not self.is_graded:
            self.audit_of.paid = [replace(paid, success=paid.reward) for paid in self.audit_of.paid]
            if (oracle := self.audit_of.oracle) is not None:
                self.audit_of.oracle = replace(oracle, success=oracle.reward)
        if metric is None and self.is_graded:
            self.findings.warn(
                "no-success-metric",
                "the reward is graded and the rubric names no success metric, so nothing says when"
                " a task is solved",
                self.location,
                'name a function that is 1 or 0: vf.Rubric(…, success="exact")',
            )
        if self.unfinished:
            self.findings.note(
                f"the time was up: {len(self.unfinished)} non-solutions were not tried"
            )
        played = [paid for paid in self.audit_of.paid if not paid.is_task]
        if unknown := [paid for paid in played if math.isnan(paid.reward)]:
            self.findings.warn(
                "reward-is-unknown",
                f"the reward of {len(unknown)} of {len(played)} non-solutions is unknown, so"
                f" nothing is known of what they are paid{self.why_unknown}",
                self.location,
                "give the audit what the reward needs, a judge's server and key for example",
            )
        often = [paid for paid in played if paid.share_wrong_paid >= MANY_ROWS]
        full = [paid for paid in often if paid.family != "odd form"]
        odd = [paid for paid in often if paid.family == "odd form"]
        partly = [p for p in played if p.is_policy and p.unearned >= PARTLY * self.right]
        if full:
            self._report_paid(full)
        elif partly:
            self._report_partly(partly, metric)
        if odd:
            listed = ", ".join(paid.name.removeprefix("the right answer ") for paid in odd)
            self.findings.warn(
                "odd-forms-are-accepted",
                f"a right answer is accepted {listed}: {odd[0].sample}",
                self.location,
                "compare the final answer strictly, or say in the README that these forms count",
            )

    def _report_paid(self, full: Sequence[Paid]) -> None:
        most = max(full, key=lambda paid: (paid.share_wrong_paid, paid.reward))
        names = ", ".join(paid.name for paid in full[:4] if paid is not most)
        more = f" ({len(full) - 1} others too: {names})" if full[1:] else ""
        self.findings.error(
            "non-solution-is-paid",
            f"{most.name} earns {most.reward:g} where a right answer earns {self.right:g}, in"
            f" {most.share_wrong_paid:.0%} of the rows where it is wrong{more}; it replied"
            f" {most.sample}",
            self.location,
            "make the reward refuse it; if it solves the task after all, say so with oracle=",
        )

    def _report_partly(self, partly: Sequence[Paid], metric: str | None) -> None:
        most = max(partly, key=lambda paid: paid.unearned)
        report, advice = self.findings.warn, "read the reward against this line"
        if metric is None:
            report = self.findings.error
            advice += ", and name a strict success metric beside it: vf.Rubric(…, success=…)"
        report(
            "non-solution-is-paid-partly",
            f"{most.name} earns {most.unearned:.3g} of {self.right:g} on average without solving"
            f" the task; it replied {most.sample}",
            self.location,
            advice,
        )


def _turns_of(trial: Trial) -> list[Turn]:
    """The turns of a finished rollout as the policy saw them."""
    requests = (ModelRequest(step["prompt"], "scripted") for step in trial.state["trajectory"])
    return [Turn(trial.example, request, number) for number, request in enumerate(requests)]


def _says_it_late(trial: Trial) -> bool:
    """Whether the answer stands in a later reply and not in the first."""
    answer = answer_text(trial.example)
    return len(trial.replies) > 1 and answer in trial.replies[-1] and answer not in trial.replies[0]


def _known_reward(paid: Paid | Trial) -> float:
    """The reward for an order, in which an unknown reward is the lowest."""
    return -math.inf if math.isnan(paid.reward) else paid.reward


def _cut(replies: Sequence[str]) -> str:
    text = " | ".join(replies)
    return repr(text if len(text) <= SAMPLE_CHARS else text[: SAMPLE_CHARS - 1] + "…")
