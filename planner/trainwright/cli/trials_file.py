"""A trials document on disk that grows by what is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.cli.answers import refuse_no_place_for, replace_document
from trainwright.cli.inputs import content_of, read
from trainwright.cost.checks import check_plan
from trainwright.cost.setting import Setting
from trainwright.documents import DocumentError
from trainwright.fitting import Trial, Trials


@dataclass(frozen=True)
class TrialsFile:
    """A file that a trial can be added to, and the trials that it holds; None where there is no file yet."""

    path: Path
    trials: Trials | None

    @classmethod
    def opened(cls, path: Path, setting: Setting) -> TrialsFile:
        """Raises DocumentError for a file that holds something else, or plans of another model or cluster."""
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DocumentError(f"{path}: is no file that a trial can be added to")
        refuse_no_place_for(path)
        if not path.exists():
            return cls(path, None)
        trials: Trials = read(path, Trials)
        _refuse_other_form(path)
        for plan in trials.plans:
            try:
                check_plan(plan, setting)
            except ValueError as error:
                raise DocumentError(
                    f"{path}: holds the trial of a plan ({plan.summary()}) for another model or cluster: {error}; "
                    "let --append begin a file for this one"
                ) from None
        return cls(path, trials)

    def append(self, trial: Trial) -> str:
        """Write the trial behind the others, and tell what was done. One that is there already does not count twice."""
        trials = self.trials
        if trials is not None and any(one.is_same_run_as(trial) for one in trials.trials):
            return f"{self.path} holds this trial already; nothing was added"
        grown = Trials((trial,)) if trials is None else replace(trials, trials=(*trials.trials, trial))
        replace_document(grown, self.path)
        several = len(grown.trials) > 1
        return f"the trial was added to {self.path}, which holds {len(grown.trials)} measured trial{'s' * several}"


def _refuse_other_form(path: Path) -> None:
    """Raises DocumentError for YAML: written anew, it would lose its comments."""
    try:
        json.loads(content_of(path))
    except ValueError:
        raise DocumentError(
            f"{path}: is YAML, whose comments would be lost; write it as JSON, or let --append begin a file of its own"
        ) from None
