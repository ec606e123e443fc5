"""Our own search: unequal devices by design."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

from trainwright.cost.memory import parameter_bytes
from trainwright.plan import Plan, Sharding
from trainwright.search.auto.alternatives import regrouped
from trainwright.search.auto.computing import Computing
from trainwright.search.auto.descent import Judge, Walk, descend
from trainwright.search.auto.drafts import Draft, Drafts
from trainwright.search.auto.efforts import (
    DEEP,
    DEEP_STAGES,
    FEW,
    FEW_DEVICES,
    LARGE,
    LARGE_PART,
    MANY,
    MANY_DEVICES,
    PART,
    Effort,
)
from trainwright.search.auto.exhaustive import exhaustive, is_small
from trainwright.search.auto.moves.schedules import other_schedules
from trainwright.search.auto.parts import on_fewer_devices, on_fewer_nodes
from trainwright.search.auto.seeds import amp_seeds, seeds
from trainwright.search.auto.setups import sharded
from trainwright.search.auto.variety import HARDLY_SLOWER, LEADERS, different, leaders
from trainwright.search.choice import Drafting, check_profiled, why_nothing_fits
from trainwright.search.degrees import divisors
from trainwright.search.lean import lean_plans
from trainwright.search.megatron import megatron_drafts
from trainwright.search.paced import paced_plans
from trainwright.search.packed import packed_plans
from trainwright.search.preference.adaption import adapted
from trainwright.search.protocol import Candidate, Control, NoFeasiblePlan, Problem
from trainwright.search.ranking import best_of, candidate_of, in_order

DRAFTS = 48
"""Plans of the programme that are costed exactly; what does not fit, which is sooner known, counts in part."""
LEAST_DRAFTS = 4
"""So many are costed though the time is over: without them all that was looked at till then were in vain."""
REPLAYED_DEVICES = 2**27
"""So many by the cube of the devices are the plans that are costed, at least LEAST_REPLAYS and at most MOST_REPLAYS."""
LEAST_REPLAYS, MOST_REPLAYS = 64, 1500
PART_COSTED = 4
"""So many plans may be costed of every part with fewer devices a node, beside all others."""
USUAL_SLOWNESS = 2.5
"""Where the best takes more times as long as computing alone, parts of the cluster are looked at, and more plans costed."""
FIRST_SHARE = 1 / 12
"""Of the plans that are costed near each leader before the best of them are gone on from."""
TINY_BEST, TINY_COSTED, TINY_REPLAYS = 8, 2000, 200
"""Of problems that are looked at whole: how many of the best plans are kept, how many are costed for that, at most, and
plans that are costed near them."""
_STEPS = 100
"""What progress is counted in: so many are the drafts, of which the first take half, as many the descent."""


def auto(problem: Problem, control: Control, top: int | None) -> list[Candidate]:
    """Candidates of any shape that the plan document expresses, the best of each choice, best first by the exact replay.

    Devices are laid out in lines (`line`): kinds of nodes one after the other, in several orders, or evenly mixed, and
    with one node at both ends where first and last layer share a weight. On each line, and for each size of
    micro-batches, a dynamic programme (`programme`) cuts layers and devices into stages at once, each stage with the
    degrees, sharding and recompute that suit its devices (`stack`); rows follow the devices' speeds (`rows`). Kinds of
    nodes may make pipelines of their own instead (`several`), and where links are slow few nodes may do better than all
    (`parts`). Where devices are few, AMP's and Galvatron-BMW's answers join in. The best drafts are costed exactly,
    those that lack memory with more of it spared (`relief`), and descended from by small moves (`descent`, `moves`),
    behind which layers are dealt out anew (`dealing`); a walk goes on from what no move betters. Tiny problems are
    looked at whole first (`exhaustive`). Last, others of the best one's shape join in (`alternatives`).

    The same seed gives the same answer, but for a budget of time. Raises NoFeasiblePlan, with what comes closest, where
    nothing fits.
    """
    check_profiled(problem)
    return _Run(problem, control).candidates()[:top]


class _Run:
    def __init__(self, problem: Problem, control: Control) -> None:
        self.problem, self.control = problem, control
        replays = min(max(REPLAYED_DEVICES // len(problem.devices) ** 3, LEAST_REPLAYS), MOST_REPLAYS)
        self.judge = Judge(problem, control, replays * control.effort)
        self.computing = Computing(problem)
        self.drafts: list[Draft] = []
        self.done = 0
        self.lean: list[Candidate] = []

    def candidates(self) -> list[Candidate]:
        if is_small(self.problem):
            self._look_at_all()
        else:
            self._begin()
            for effort in self._efforts():
                self._draft(Drafts(self.problem, effort), divisors(self.problem.global_batch_size))
                self._cost_drafts()
        self._seed()
        self._look_deeper()
        self._look_at_parts()
        self._descend()
        self._add_alternatives()
        found = in_order(self._found)
        if not found:
            raise self._refusal()
        self._step(2 * _STEPS)
        return different(found)

    def _refusal(self) -> NoFeasiblePlan:
        """With the draft that comes closest to fitting, where there is one; else with AMP's plan that does."""
        plans = [plan for _, plan in sorted(self.drafts, key=lambda one: one[0])[:DRAFTS]]
        return why_nothing_fits(self.problem, plans or Drafting.of(self.problem).unlimited_plans())

    @property
    def _found(self) -> list[Candidate]:
        return [*self.judge.feasible(), *self.lean]

    @property
    def _has_none(self) -> bool:
        return not self.judge.feasible()

    def _begin(self) -> None:
        """A first answer at once: the usual heuristic's, or where that does not fit layers dealt by memory; then AMP's.

        Where memory is short, one whose stages are as fast as it allows besides.
        """
        if drafts := megatron_drafts(Drafting.of(self.problem), Control()):
            self.judge.add(best_of(self.problem, drafts, Control(), 1)[0])
        else:
            for plan in packed_plans(self.problem):
                self.judge.cost(plan)
                self._step(0)
            if self._has_none:
                self.lean = [candidate_of(self.problem, plan) for plan in islice(lean_plans(self.problem), 1)]
        if self.lean or not self._has_none:
            self._step(0)
        for plan in paced_plans(self.problem) if self._is_deep and not self._is_over else ():
            self.judge.cost(plan)
            self._step(0)
        if not self._is_over:
            for candidate in amp_seeds(self.problem, self.control, lambda: self._is_over):
                self.judge.add(candidate)
            self._step(0)

    def _look_at_all(self) -> None:
        """Every plan whose stages have one degree each; those that mix degrees inside a stage are found by the descent."""
        self.judge.left = TINY_REPLAYS * self.control.effort
        try:
            for candidate in exhaustive(
                self.problem, self.control, TINY_BEST, most_costed=TINY_COSTED * self.control.effort
            ):
                self.judge.add(candidate)
        except NoFeasiblePlan:
            self.judge.left = 0

    def _descend(self) -> None:
        """From the leaders to what no small move betters; what is left is spent on a walk from the best.

        From each a few steps first, so that it is known by what becomes of it.
        """
        self._grant_more()
        for plan in self._best_in_other_schedules():
            self.judge.cost(plan)
        judge, first = self.judge, max(self.judge.left, 1.0)
        for leader in leaders(judge.feasible()):
            descend(leader, judge, first * FIRST_SHARE)
            self._step_down(first)
        for leader in leaders(judge.feasible()):
            if judge.is_over:
                return
            descend(leader, judge, judge.left / 2)
            self._step_down(first)
        if not self._has_none:
            for _ in Walk(judge, self.control.seed).steps(in_order(judge.feasible())[0]):
                self._step_down(first)

    def _grant_more(self) -> None:
        """More plans, up to what small problems have, where the best takes much longer than computing alone."""
        if self._is_slow and not is_small(self.problem):
            granted = min(self.judge.left * self._slowness / USUAL_SLOWNESS, MOST_REPLAYS * self.control.effort)
            self.judge.left = max(self.judge.left, granted)

    def _step_down(self, first: float) -> None:
        """Progress by what is left of so much."""
        self._step(_STEPS + int(_STEPS * (1 - max(self.judge.left, 0.0) / first)))

    def _add_alternatives(self) -> None:
        """The best in the other schedule, in case that is faster, and the very best at every tensor degree."""
        most_tensor = max((node.devices for node in self.problem.cluster.nodes), default=1)
        others = self._best_in_other_schedules()
        best = in_order(self.judge.feasible())[:1]
        others += [other for one in best for other in regrouped(one.plan, most_tensor)]
        self.judge.left = max(self.judge.left, len(others))
        for plan in others:
            self.judge.cost(plan)

    def _best_in_other_schedules(self) -> list[Plan]:
        """Some of the best plans, each in the schedule that it does not have."""
        best = [one.plan for one in in_order(self.judge.feasible())[:LEADERS]]
        return [replace(plan, schedule=other) for plan in best for other in other_schedules(plan)]

    def _draft(self, drafts: Drafts, sizes: Sequence[int]) -> None:
        """Until all is looked at, or the time is over."""
        for found, share in drafts.steps(sizes):
            if found and self._has_none:
                self.judge.cost(found[0][1])
            self.drafts += found
            self._step(int(_STEPS * share / 2))
            if self._is_over:
                break

    def _look_at_parts(self) -> None:
        """Parts of the cluster, with finer units than all of it has, where it is far from computing alone."""
        if len(self.problem.devices) <= FEW_DEVICES or not self._is_slow or self._is_over:
            return
        before = len(self.drafts)
        for part in on_fewer_nodes(self.computing, self._best_seconds):
            self._draft_part(part)
            if self._is_over:
                break
        for part in () if self._is_over else on_fewer_devices(self.computing, self._best_seconds):
            known = len(self.drafts)
            self._draft_part(part)
            if len(self.drafts) > known:
                self._cost_best(self.drafts[known:])
            if self._is_over:
                break
        if len(self.drafts) > before:
            self._cost_drafts()

    def _draft_part(self, part: Problem) -> None:
        effort = PART if len(part.devices) <= FEW_DEVICES else LARGE_PART
        self._draft(Drafts(part, effort), divisors(self.problem.global_batch_size))

    def _cost_best(self, drafts: Sequence[Draft]) -> None:
        """A part's best draft, and that with gradients sharded, beside what may be costed anyhow."""
        left, self.judge.left = self.judge.left, float(PART_COSTED)
        _, best = min(drafts, key=lambda one: one[0])
        for plan in (best, sharded(best, Sharding.ZERO2)):
            self.judge.cost_draft(plan)
        self.judge.left = left

    @property
    def _is_slow(self) -> bool:
        """Whether there is a plan, and the best takes much longer than computing alone."""
        return self._slowness > USUAL_SLOWNESS

    @property
    def _slowness(self) -> float:
        """How many times as long as computing alone the best takes; 0 where there is none."""
        alone = self.computing.all_seconds
        return self._best_seconds / alone if alone > 0 else 0.0

    @property
    def _best_seconds(self) -> float:
        """0 where there is none."""
        return min((one.estimate.iteration_seconds for one in self._found), default=0.0)

    def _look_deeper(self) -> None:
        """Where one of the best has about as many stages as coarse units have room for, its size of micro-batches and smaller ones."""
        if self._is_deep or len(self.problem.devices) <= FEW_DEVICES or not self.judge.feasible() or self._is_over:
            return
        hardly_slower = self._best_seconds * HARDLY_SLOWER
        long = [
            one.plan.pipelines[0]
            for one in leaders(self.judge.feasible())[: LEADERS if len(self.problem.devices) <= MANY_DEVICES else 1]
            if one.estimate.iteration_seconds <= hardly_slower
            and len(one.plan.pipelines[0].stages) > MANY.coarse.units // 2
        ]
        if long:
            sizes = divisors(self.problem.global_batch_size)
            here = max(index for index, size in enumerate(sizes) if size <= long[0].micro_batch_size)
            deeper = Drafts(self.problem, DEEP, joins_pipelines=False)
            self._draft(deeper, sizes[max(here - 2, 0) : here + 1])
            self._cost_drafts()

    def _efforts(self) -> Iterator[Effort]:
        if len(self.problem.devices) <= FEW_DEVICES:
            yield FEW
        elif self._is_deep:
            yield DEEP
        else:
            yield MANY if len(self.problem.devices) <= MANY_DEVICES else LARGE
            if not self.judge.feasible():
                yield DEEP

    @cached_property
    def _is_deep(self) -> bool:
        """Whether memory is short."""
        problem = self.problem
        needed = problem.model.parameters * parameter_bytes(
            problem.model, problem.optimizer, problem.runtime.gradient_dtype
        )
        memory = [problem.setting.memory_of_node[device.node] for device in problem.devices]
        return needed > DEEP_STAGES * sum(memory) / len(memory)

    @property
    def _most_drafts(self) -> int:
        return min(DRAFTS, int(self.judge.left / 5))

    def _cost_drafts(self) -> None:
        """The best drafts, those of every number of stages and of every size of micro-batches first."""
        drafts = [plan for _, plan in sorted(self.drafts, key=lambda one: one[0])]
        first: dict[object, Plan] = {}
        for plan in drafts:
            first.setdefault(tuple(len(pipeline.stages) for pipeline in plan.pipelines), plan)
            first.setdefault(plan.pipelines[0].micro_batch_size, plan)
        most = self._most_drafts
        for plans, count in ((first.values(), most // 2), (drafts, most)):
            # Lines that differ often have the same draft, which is costed, and counted, once.
            last = self.judge.left - count
            for number, plan in enumerate(plans):
                if self.judge.left <= last or (self._is_over and number >= LEAST_DRAFTS):
                    break
                # What the programme takes to be recomputed, and sharded, may not be enough.
                self.judge.cost_draft(plan)

    def _seed(self) -> None:
        """What other searches find, and what can be made of the plan that runs now."""
        if self.problem.preference.keep is not None:
            for plan in adapted(self.problem.preference.keep, self.problem)[: self._most_drafts]:
                self.judge.cost_relieved(plan)
        for candidate in seeds(self.problem, self.control, is_deep=self._is_deep, is_over=lambda: self._is_over):
            self.judge.add(candidate)

    @property
    def _is_over(self) -> bool:
        return self.control.expired() and bool(self._found)

    def _step(self, done: int) -> None:
        # What is looked at in turn each begins anew; what is told does not.
        self.done = done = max(done, self.done)
        best = min((one.estimate.iteration_seconds for one in self._found), default=None)
        self.control.step(done, 2 * _STEPS, best)
