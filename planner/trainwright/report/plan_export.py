"""Plan as it is written for another trainer: the nearest one that this supports, what is lost, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version

from trainwright.accelerators import best_format, data_sheet, has_data_sheet, is_native
from trainwright.answer import Answer, answer_of_plan
from trainwright.answer.formats import in_format
from trainwright.exports import Capabilities, ExportFile, ExportRequest, Target, format_loss, losses, training_refusal
from trainwright.families import T5
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.report.export_price import ExportPrice, exported
from trainwright.report.plan_summary import short_names
from trainwright.report.remark import Remark
from trainwright.search import Candidate, Problem
from trainwright.search.expressible import nearest_candidate
from trainwright.training import Optimizer


@dataclass(frozen=True)
class PlanExport:
    """Plan that is written for a target.

    Attributes:
        model: in the number format that is written; None if it was not given.
        price: of the given plan and of the one that is written; None if there is none.
        given_dtype: number format of the given plan; None where it is not known.
        dtype_reason: why the format that is written is this one; empty if the plan states it.
        formats: answer on the plan's format, if that is written and priced.
    """

    target: Target
    given: Plan
    plan: Plan
    model: Model | None
    optimizer: Optimizer
    price: ExportPrice | None
    given_dtype: Dtype | None = None
    dtype_reason: str = ""
    states_format: bool = True
    formats: Answer | None = None

    @property
    def lost(self) -> tuple[str, ...]:
        capabilities = self.target.capabilities
        if self.model is not None:
            capabilities = capabilities.of(self.model, self.optimizer)
        dtype = None if self.given_dtype is None else format_loss(self.given_dtype, capabilities)
        return (*losses(self.given, capabilities), *([] if dtype is None else [dtype]))

    @property
    def remark(self) -> Remark:
        """Loss of the export, and its cost."""
        return exported(self.target.software, self.lost, self.price)

    @property
    def format_sentences(self) -> list[str]:
        """Sentence on the number format of a plan that states none; empty for one that states it."""
        if self.states_format:
            return []
        written = self.plan.dtype
        if written is None:
            return ["The plan states no number format; neither does a model (--model), so it is yours."]
        return [f"The plan states no number format; it is written in {written}: {self.dtype_reason}."]

    @property
    def length_sentences(self) -> list[str]:
        """Sentence on the tokens of a row, which a plan does not state; empty for a model without them."""
        family = None if self.model is None else self.model.family
        tokens = getattr(family, "sequence_length", None)
        if tokens is None:
            return []
        decoder = f" and {family.decoder_tokens} of the decoder" if isinstance(family, T5) else ""
        return [
            f"It is for rows of {tokens} tokens{decoder}, by --sequence-length or the model file; the plan states none."
        ]

    @property
    def missing_kernels(self) -> list[str]:
        """Sentence on GPUs that the trainer's own PyTorch does not know; empty if there are none, or without a cluster."""
        if self.price is None:
            return []
        cluster, missing = self.price.problem.cluster, self.target.capabilities.missing_generations
        used = cluster.accelerators_of(self.plan.nodes)
        older = [name for name in used if has_data_sheet(name) and data_sheet(name).generation in missing]
        if not older:
            return []
        named = " and ".join(short_names(cluster)[name] for name in older)
        sentence = f"The PyTorch that {self.target.software} is tested with has no kernels for {named}"
        others = (
            f", or leave {named} out" if {accelerator.name for accelerator in cluster.accelerators} - {*older} else ""
        )
        return [f"{sentence}: build it against PyTorch 2.10, which is not tested{others}."]

    def files(self, source: str) -> tuple[ExportFile, ...]:
        price = (
            ["No price: give --cluster and --model."]
            if self.price is None
            else [self.price.sentence(), *self.price.origin_sentences()]
        )
        lost = f"Not expressible there: {'; '.join(self.lost)}." if self.lost else "Nothing of the plan is lost."
        remarks = (
            f"{self.plan.summary()} for {self.target.software}, by Trainwright {version('trainwright')} from {source}.",
            lost,
            " ".join(price),
            *self.format_sentences,
            *self.missing_kernels,
            self.target.remark,
        )
        request = ExportRequest(
            self.plan,
            self.model,
            self.optimizer,
            remarks,
            runtime=None if self.price is None else self.price.problem.runtime,
        )
        if self.dtype_reason:
            request = replace(request, dtype_reason=self.dtype_reason)
        return self.target.files(request)

    @classmethod
    def priced(
        cls, target: Target, problem: Problem, plan: Plan, *, is_open: bool, named_by: str = "model"
    ) -> PlanExport:
        """Return the export with its price, in a format that the target has.

        `problem`: in the plan's number format, if the plan states one. `is_open`: a search would choose the format of one that
        states none, which else `named_by` names. Raises ValueError for a model or an optimizer that the target lacks.
        """
        states = plan.dtype is not None
        if states or not is_open:  # a slow format is compared with those of the target
            own_formats = Capabilities(every_plan=True, dtypes=target.capabilities.dtypes)
            problem = replace(problem, limits=replace(problem.limits, expressible_by=own_formats))
        answer = answer_of_plan(problem, plan)
        original, requested = answer.best, answer.problem
        check_training(target, requested.model, requested.optimizer, original.plan)
        problem = replace(
            requested, limits=requested.limits.leaving_unknown_memory(requested.runtime, requested.cluster)
        )
        formats: Answer | None = answer
        dtype = problem.model.dtype
        reason = (
            "" if states else "the one that a search would choose" if is_open else f"number format of the {named_by}"
        )
        if dtype in target.capabilities.dtypes:
            nearest = nearest_candidate(problem, original.plan, target.capabilities)
        else:
            problem, nearest = _nearest_in_own_format(target, problem, original.plan)
            given = "is" if states or not is_open else "is taken to be"
            reason = (
                f"the fastest that these GPUs compute natively and {target.software} has; the plan {given} in {dtype}"
            )
            formats = None
        written = problem.model.dtype
        nearest = replace(nearest, dtype=written, plan=replace(nearest.plan, dtype=written))
        price = ExportPrice(requested, original, nearest)
        return cls(
            target, original.plan, nearest.plan, problem.model, problem.optimizer, price, dtype, reason, states, formats
        )


def check_training(target: Target, model: Model, optimizer: Optimizer, plan: Plan) -> None:
    """Raise ValueError for a model or an optimizer that a target lacks, with the targets that run the plan."""
    if refusal := training_refusal(target.capabilities, model, optimizer, plan):
        raise ValueError(refusal)


def _nearest_in_own_format(target: Target, problem: Problem, plan: Plan) -> tuple[Problem, Candidate]:
    """Return the fastest of the nearest plans in each of a target's formats that all its devices compute natively."""
    priced_plans: list[tuple[Problem, Candidate]] = []
    own = best_format(problem.cluster.accelerators_of(plan.nodes), target.capabilities.dtypes)
    for dtype in sorted(
        target.capabilities.dtypes, key=lambda other: other is not own
    ):  # the first one is named in errors
        in_dtype = _in_format_of(target, problem, dtype)
        nearest = nearest_candidate(in_dtype, plan, target.capabilities)
        if all(is_native(name, dtype) for name in problem.cluster.accelerators_of(nearest.plan.nodes)):
            priced_plans.append((in_dtype, nearest))

    def order(pair: tuple[Problem, Candidate]) -> tuple[bool, float]:
        return not pair[1].estimate.feasible, pair[1].estimate.iteration_seconds

    return min(priced_plans, key=order)


def _in_format_of(target: Target, problem: Problem, dtype: Dtype) -> Problem:
    try:
        return in_format(problem, dtype)
    except ValueError as error:
        raise ValueError(
            f"{target.software} has no {problem.model.dtype}, and the profiles cannot be converted: {error}; measure them in "
            f"{dtype}, or leave --cluster out to export without a price"
        ) from None
