"""`tune` from a manifest to the winner's files, with a worker that has no torch."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright_operator.flow.actions import Action
from trainwright_operator.local import loop, tuned_plan
from trainwright_operator.local.apply import Applier

pytestmark = pytest.mark.timeout(300)
Tune = Callable[..., int]
CLUSTER_WORDS = re.compile(r"\b(pods?|nodes?|containers?|kubectl|ConfigMaps?|image)\b")
PlanFile = Callable[..., Path]


def status_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load((path.parent / ".trainwright" / "tiny" / "status.yaml").read_text())["status"]


def states_of(path: Path) -> list[str]:
    return [trial["state"] for trial in status_of(path)["trials"]]


def test_plan_goes_to_a_winner_and_a_second_run_starts_nothing(tune: Tune, plan_file: PlanFile) -> None:
    path, shown = plan_file(), io.StringIO()
    assert tune(path, stream=shown) == loop.ANSWERED
    folder, status = path.parent / ".trainwright" / "tiny", status_of(path)
    assert status["winner"]["measuredSeconds"] > 0
    assert set(states_of(path)) == {"Succeeded"}
    assert {"plan.json", "launch.sh", "report.html"} <= {file.name for file in (folder / "winner").iterdir()}
    assert str(folder / "winner" / "report.html") in shown.getvalue()
    page = (folder / "winner" / "report.html").read_text(encoding="utf-8")
    assert "How the best was found" in page
    assert f"trainwright tune {path}" in page
    assert shown.getvalue().strip().endswith("says nothing about GPUs.")
    assert (
        len(re.findall(r"trial candidate-\d: predicted \S+ m?s, measured 1\.\d+ s \(\S+%\): pp", shown.getvalue())) == 2
    )
    assert not CLUSTER_WORDS.search(shown.getvalue())
    gangs, before = folder / "gangs", time.time_ns()
    assert tune(path, stream=io.StringIO()) == loop.ANSWERED
    assert all((gang / "order.json").stat().st_mtime_ns < before for gang in gangs.iterdir())


class LiveTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_a_bar_of_each_long_step(
    tune: Tune, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = LiveTerminal()
    assert tune(plan_file(), stream=shown) == loop.ANSWERED
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    for step in ("links", "profiles", "search", "trials"):
        assert re.search(rf"^{step}\b.*[━╸]", drawn.replace("\r", "\n"), re.MULTILINE), step
    assert "begun" not in drawn


def test_failed_trials_end_with_1_and_the_cause(
    tune: Tune, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORKER", "crash")
    path, shown = plan_file(), io.StringIO()
    assert tune(path, stream=shown) == loop.FAILED
    assert "Crashed" in {trial.get("reason") for trial in status_of(path)["trials"]}
    assert "trial candidate-1: predicted 775.4 ms; Failed: gang tiny-" in shown.getvalue()
    assert "crashed as asked" in shown.getvalue()
    assert str(path.parent / ".trainwright" / "tiny" / "gangs") in shown.getvalue()
    assert not CLUSTER_WORDS.search(shown.getvalue())


def test_plan_that_does_not_fit_ends_with_3(tune: Tune, plan_file: PlanFile) -> None:
    layers = {"layers": 2, "hiddenSize": 65536, "heads": 2, "sequenceLength": 8, "vocabularySize": 32}
    shown = io.StringIO()
    assert tune(plan_file(model={"gpt": layers}), stream=shown) == loop.NOTHING_FEASIBLE, shown.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_series_keeps_its_first_trial_and_the_next_run_goes_on(
    tune: Tune, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("LOCAL_WORKER", "slow")
    path = plan_file()
    folder = path.parent / ".trainwright" / "tiny"

    def interrupt() -> None:
        while not any("TRAINWRIGHT-PART" in log.read_text() for log in folder.glob("gangs/*/log")):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    shown = io.StringIO()
    assert tune(path, stream=shown) == loop.INTERRUPTED
    assert "goes on from here" in shown.getvalue()
    assert list((folder / "maps").glob("*-candidate-1s-result.json"))
    assert not (folder / "lock").read_text()
    monkeypatch.setenv("LOCAL_WORKER", "")
    assert tune(path, stream=io.StringIO()) == loop.ANSWERED
    assert set(states_of(path)) == {"Succeeded"}
    gangs = [gang.name.partition("tiny-")[2].partition("-")[2] for gang in folder.glob("gangs/*")]
    assert {"candidate-1s", "candidate-1"} & set(gangs) == {"candidate-1s"}


def test_edited_plan_runs_only_its_new_trials(tune: Tune, plan_file: PlanFile) -> None:
    path = plan_file(trials={"topK": 1, "baseline": "None"})
    assert tune(path, stream=io.StringIO()) == loop.ANSWERED
    before = time.time_ns()
    assert tune(plan_file(trials={"topK": 2, "baseline": "None"}), stream=io.StringIO()) == loop.ANSWERED
    assert len(states_of(path)) == 2
    orders = list((path.parent / ".trainwright" / "tiny" / "gangs").glob("*/order.json"))
    new = [order for order in orders if order.stat().st_mtime_ns > before]
    assert [json.loads(order.read_text())["kind"] for order in new] == ["trial"]


def test_other_plan_of_the_same_model_reuses_links_and_layers(tune: Tune, plan_file: PlanFile) -> None:
    path = plan_file()
    assert tune(path, stream=io.StringIO()) == loop.ANSWERED
    assert tune(path, stream=io.StringIO(), state=path.parent / "other") == loop.ANSWERED
    kinds = {json.loads(order.read_text())["kind"] for order in (path.parent / "other").glob("gangs/*/order.json")}
    assert kinds <= {"trial", "series"}


class Killed(BaseException):
    """End of the program as by SIGKILL: nothing is cleaned up."""


def test_run_that_is_killed_after_any_action_goes_on(
    tune: Tune, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, apply = plan_file(), Applier.apply
    plans: list[tuned_plan.TunedPlan] = []
    counts = {"actions": 0, "limit": 0, "kills": 0}

    def counted(self: Applier, action: Action, now: Any) -> None:
        plans.append(self._plan)
        apply(self, action, now)
        counts["actions"] += 1
        if counts["actions"] > counts["limit"]:
            raise Killed

    monkeypatch.setattr(Applier, "apply", counted)
    while True:
        counts["actions"] = 0
        try:
            assert tune(path, stream=io.StringIO()) == loop.ANSWERED
            break
        except Killed:
            counts["kills"] += 1
            counts["limit"] += 1
            plans[-1].kill()  # as Linux ends processes whose parent is gone
    assert counts["kills"] > 10
    assert set(states_of(path)) == {"Succeeded"}


def test_second_run_of_a_plan_is_refused_while_the_first_works(tune: Tune, plan_file: PlanFile) -> None:
    path = plan_file()
    folder = path.parent / ".trainwright" / "tiny"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another `trainwright tune` works on this plan"):
            tune(path, stream=io.StringIO())


def test_plan_waits_while_another_one_measures(tune: Tune, plan_file: PlanFile) -> None:
    path, shown = plan_file(), io.StringIO()
    lock = loop.cache_folder() / "machine.lock"
    lock.parent.mkdir(parents=True)
    file = lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    threading.Timer(3.0, file.close).start()
    assert tune(path, stream=shown) == loop.ANSWERED
    assert "links: waits for another `trainwright tune`" in shown.getvalue()


def test_killed_run_leaves_no_process_and_the_next_one_goes_on(
    tune: Tune, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORKER", "slow")
    path = plan_file()
    folder = path.parent / ".trainwright" / "tiny"
    program = (
        "import sys; from pathlib import Path; from trainwright_operator.local import gang_process, loop;"
        "gang_process.WORKER = 'local_worker'; loop.tune(Path(sys.argv[1]), cpu_devices=2)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.DEVNULL) as process:
        while not any("TRAINWRIGHT-PART" in log.read_text() for log in folder.glob("gangs/*/log")):
            assert process.poll() is None
            time.sleep(0.05)
        (worker,) = (folder / "lock").read_text().split()
        process.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    monkeypatch.setenv("LOCAL_WORKER", "")
    assert tune(path, stream=io.StringIO()) == loop.ANSWERED
