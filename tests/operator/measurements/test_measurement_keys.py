"""Keys of kept measurements: what makes two layers or two nodes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_world import node
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Accelerator
from trainwright.families import Gpt, Llama
from trainwright.families.fields import RotaryScaling
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright.worker_api import CheckedLayer, Gang, GangNode, ProfilingReport, ProfilingTask
from trainwright_operator.flow.measurements.measurement_keys import KeptProfile, ProfileKey, known_layers, layer_digest
from trainwright_operator.flow.measurements.spot_check import ExpectedLayer, choose_layer
from trainwright_operator.flow.nodes.device_types import driver_version
from trainwright_operator.flow.snapshot import SliceDevice

GPT = Gpt(4, 64, 4, 16, 512)
ROWS = st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1)


def digests(family: Gpt | Llama) -> list[str]:
    model = Model.of(family)
    return [layer_digest(model, model.kind(name)) for name in ("embedding", "block", "head")]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"layers": 9}, [True, True, True]),
        ({"vocabulary_size": 640}, [False, True, False]),
        ({"sequence_length": 32}, [False, False, False]),
        ({"hidden_size": 128}, [False, False, False]),
        ({"heads": 8}, [False, False, False]),  # fused attention writes no scores, of which there are more
    ],
)
def test_a_layer_is_the_same_whatever_the_number_of_layers(change: dict[str, int], same: list[bool]) -> None:
    pairs = zip(digests(GPT), digests(replace(GPT, **change)), strict=True)
    assert [one == other for one, other in pairs] == same


def test_a_layer_is_the_same_whatever_the_angles_and_the_epsilon() -> None:
    plain = Llama(2, 64, 4, 16)
    stated = replace(plain, rotary_base=5e5, rotary_scaling=RotaryScaling("linear", 2.0), norm_epsilon=1e-5)
    assert digests(plain) == digests(stated)


@given(ROWS, ROWS, st.one_of(st.none(), st.sampled_from([1, 2, 4, 8, 16])))
def test_a_layer_is_known_if_each_row_count_was_measured_or_did_not_fit(
    measured: set[int], wanted: set[int], too_large: int | None
) -> None:
    profiles = tuple(LayerProfile("x", "block", 1, rows, 0.1, 0.2, 0.0, 1, 1) for rows in sorted(measured))
    failed = () if too_large is None else (LayerTooLarge("x", "block", 1, too_large), LayerTooLarge("x", "head", 1, 1))
    found = known_layers(ProfilingReport(profiles, failed), "block", wanted)
    is_known = all(rows in measured or (too_large is not None and rows >= too_large) for rows in wanted)
    assert (found is not None) is is_known
    if found is not None:
        assert {one.rows for one in found[0]} == measured & wanted
        assert [one.kind for one in found[1]] == ["block"] * (too_large is not None)


@pytest.mark.parametrize(
    ("labels", "published", "version"),
    [
        ({"nvidia.com/cuda.driver-version.full": "550.54.15"}, "1.2.3", "550.54.15"),
        ({f"nvidia.com/cuda.driver.{part}": number for part, number in
          (("major", "550"), ("minor", "54"), ("rev", "15"))}, "", "550.54.15"),
        ({}, "550.54.15", "550.54.15"),
        ({}, "", ""),
    ],
)  # fmt: skip
def test_driver_is_what_labels_or_resource_slices_say(labels: dict[str, str], published: str, version: str) -> None:
    slices = [SliceDevice("other", "x", 1, driver="9.9.9"), SliceDevice("n1", "x", 1, driver=published)]
    assert driver_version(node("n1", labels=labels), slices) == version


def test_check_expects_the_newest_figure_of_each_node() -> None:
    task = ProfilingTask(Gang((GangNode("a", (0,), "x"),)), Model.of(GPT), 1, (8,))
    accelerator = Accelerator("x", 16 << 30)
    same = ("block", layer_digest(task.model, task.model.kind("block")))
    key = KeptProfile(ProfileKey.of(task, accelerator, "", ""), (same,), ("", ""))

    def report(seconds: float) -> ProfilingReport:
        return ProfilingReport((LayerProfile("x", "block", 1, 8, seconds, seconds, 0.0, 1, 1),))

    kept = [("a", key, report(4.0)), ("b", key, report(2.0)), ("a", key, report(1.0))]
    found = choose_layer(task, report(4.0).layers, kept)
    assert found is not None
    assert dict(found.seconds) == {"a": 8.0, "b": 4.0}


@pytest.mark.parametrize(
    ("where", "seconds", "drift"), [("a", 2.0, 2.0), ("b", 2.0, 1.0), ("c", 2.2, 1.1), ("c", 1.1, 1.1)]
)
def test_a_node_is_compared_with_itself_or_else_with_the_nearest(where: str, seconds: float, drift: float) -> None:
    expected = ExpectedLayer("x", Dtype.FLOAT32, "block", 8, (("a", 1.0), ("b", 2.0)))
    assert expected.drift(CheckedLayer(where, Dtype.FLOAT32, "block", 8, seconds)) == pytest.approx(drift)
