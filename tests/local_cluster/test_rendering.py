"""Files rendered for the cluster's programs: certificates, settings, manifests, images."""

from __future__ import annotations

import io
import json
import re
import tarfile
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from local_cluster.addons import adapt_jobset, adapt_kueue, adapt_training_operator
from local_cluster.binaries import API_SERVER_PROGRAMS, GO_MODULES, HELM, KUBERNETES, KUEUE_RELEASE, KUEUES, Binaries
from local_cluster.certificates import make_certificates
from local_cluster.cli import app
from local_cluster.config import SYSTEM_NODE_NAME, ClusterConfig
from local_cluster.control_groups import ControlGroups
from local_cluster.image_stores import write_archive
from local_cluster.images import KUEUE as KUEUE_IMAGE
from local_cluster.images import Images, build_arguments, requirements
from local_cluster.node import Node, device_patch, node_patch
from local_cluster.paths import Folders, project_root
from local_cluster.processes import Processes


@pytest.fixture
def node(folders: Folders, shape: ClusterConfig) -> Node:
    groups = ControlGroups("rehearsal", (), unified=False)
    return Node("left", folders, shape, Binaries(folders), Processes(folders.run, folders.logs, groups), groups)


def test_certificates_have_two_authorities_and_are_kept(tmp_path: Path, shape: ClusterConfig) -> None:
    made = make_certificates(tmp_path, shape)
    serving = x509.load_pem_x509_certificate(made.pair("apiserver").certificate.read_bytes())
    serving.verify_directly_issued_by(x509.load_pem_x509_certificate(made.authority.certificate.read_bytes()))
    names = serving.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {shape.host_address, shape.api_service_address} <= set(names.get_values_for_type(x509.IPAddress))
    client = x509.load_pem_x509_certificate(made.pair("etcd-client").certificate.read_bytes())
    client.verify_directly_issued_by(x509.load_pem_x509_certificate(made.etcd_authority.certificate.read_bytes()))
    kubelet = x509.load_pem_x509_certificate(made.pair("kubelet-left").certificate.read_bytes())
    assert kubelet.subject.rfc4514_string() == "O=system:nodes,CN=system:node:left"
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    make_certificates(tmp_path, shape)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in tmp_path.glob("*.key"))


def test_node_has_the_labels_and_resources_of_a_gpu_node(shape: ClusterConfig) -> None:
    metadata = node_patch(shape, "right")["metadata"]
    assert metadata["labels"]["nvidia.com/gpu.product"] == "emulated-fast"
    assert metadata["labels"]["nvidia.com/gpu.count"] == "4"
    assert metadata["labels"]["nvidia.com/gpu.memory"] == "16384"
    emulation = json.loads(metadata["annotations"]["trainwright.dev/emulation"])
    assert emulation == {"flops_per_second": 1.2e9, "floor_seconds": 0.002, "updated_parameters_per_second": 5.0e7}
    devices = device_patch(shape, "right")
    assert devices is not None
    assert devices["status"]["allocatable"] == devices["status"]["capacity"] == {"nvidia.com/gpu": "4"}


def test_the_system_node_has_no_devices(shape: ClusterConfig) -> None:
    assert device_patch(shape, SYSTEM_NODE_NAME) is None
    assert node_patch(shape, SYSTEM_NODE_NAME)["metadata"] == {"labels": {"trainwright.dev/system": "true"}}


def test_containerd_uses_folders_of_its_node(node: Node, folders: Folders) -> None:
    program = node._containerd()
    assert program.arguments[:2] == ("nsenter", "--net=/run/netns/rehearsal-left")
    settings = tomllib.loads(Path(program.arguments[-1]).read_text())
    runtime = settings["plugins"]["io.containerd.grpc.v1.cri"]
    assert Path(settings["root"]).is_relative_to(folders.node("left"))
    assert Path(settings["grpc"]["address"]).is_relative_to(folders.node_run("left"))
    assert runtime["restrict_oom_score_adj"]
    assert runtime["netns_mounts_under_state_dir"]
    assert Path(runtime["containerd"]["runtimes"]["runc"]["options"]["Root"]).is_relative_to(folders.run)
    network = json.loads((Path(runtime["cni"]["conf_dir"]) / "10-pods.conflist").read_text())
    bridge = network["plugins"][0]
    assert bridge["ipam"]["ranges"] == [[{"subnet": str(node.config.pod_range("left"))}]]
    assert not bridge["ipMasq"]


def operator_manifests() -> list[dict[str, Any]]:
    container = {
        "name": "training-operator",
        "image": "elsewhere/training-operator",
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [],
        "readinessProbe": {"periodSeconds": 15},
    }
    return [
        {"kind": "Namespace", "metadata": {"name": "kubeflow"}},
        {"kind": "CustomResourceDefinition", "metadata": {"name": "mpijobs.kubeflow.org"}},
        {"kind": "CustomResourceDefinition", "metadata": {"name": "pytorchjobs.kubeflow.org"}},
        {
            "kind": "Deployment",
            "metadata": {"name": "training-operator", "namespace": "kubeflow"},
            "spec": {"template": {"spec": {"containers": [container], "volumes": []}}},
        },
    ]


def test_the_training_operator_serves_pytorch_jobs_from_images_on_the_nodes() -> None:
    adapted = adapt_training_operator(operator_manifests(), "- name: init-pytorch\n")
    kinds = [document["kind"] for document in adapted]
    assert kinds == ["Namespace", "ConfigMap", "CustomResourceDefinition", "Deployment"]
    assert adapted[1]["data"] == {"initContainer.yaml": "- name: init-pytorch\n"}
    pod = adapted[-1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == "docker.io/trainwright/training-operator:dev"
    assert container["imagePullPolicy"] == "Never"
    assert "--pytorch-init-container-image=docker.io/trainwright/base:dev" in container["args"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["nodeSelector"] == {"trainwright.dev/system": "true"}


def test_jobset_runs_from_its_image_on_the_system_node() -> None:
    *_, deployment = adapt_jobset(operator_manifests())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "docker.io/trainwright/jobset:dev"
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": "50m", "memory": "128Mi"}}
    assert pod["nodeSelector"] == {"trainwright.dev/system": "true"}


def test_kueue_queues_jobsets_and_its_webhooks_see_nothing_else() -> None:
    settings = {"integrations": {"frameworks": ["batch/job"]}, "leaderElection": {"leaderElect": True}}
    webhooks = [{"rules": [{"resources": [kind]}]} for kind in ("pods", "jobsets", "clusterqueues")]
    added = [
        {"kind": "ConfigMap", "data": {"controller_manager_config.yaml": yaml.safe_dump(settings)}},
        {"kind": "ValidatingWebhookConfiguration", "webhooks": webhooks},
        {"kind": "APIService"},
        {"kind": "CustomResourceDefinition", "metadata": {"name": "workloads.kueue.x-k8s.io"}},
    ]
    found = {document["kind"]: document for document in adapt_kueue([*operator_manifests(), *added])}
    told = yaml.safe_load(found["ConfigMap"]["data"]["controller_manager_config.yaml"])
    assert told["integrations"]["frameworks"] == ["jobset.x-k8s.io/jobset"]
    assert [one["rules"][0]["resources"] for one in found["ValidatingWebhookConfiguration"]["webhooks"]] == [
        ["jobsets"],
        ["clusterqueues"],
    ]
    assert found["CustomResourceDefinition"]["metadata"]["name"] == "workloads.kueue.x-k8s.io"
    assert "APIService" not in found
    assert found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] == KUEUE_IMAGE


def test_kueue_is_built_only_for_clusters_that_ask_for_it(folders: Folders) -> None:
    assert "kueue" not in [program for _, program in Binaries(folders).missing()]
    assert "kueue" in [program for _, program in Binaries(folders, (KUEUES[KUEUE_RELEASE],)).missing()]


def test_api_server_without_nodes_needs_four_programs(folders: Folders) -> None:
    missing = [program for _, program in Binaries(folders).missing(API_SERVER_PROGRAMS)]
    assert sorted(missing) == sorted(API_SERVER_PROGRAMS)
    assert {"kubelet", "jobset"} <= {program for _, program in Binaries(folders).missing()}


@pytest.mark.parametrize("release", KUEUES)
def test_release_of_kueue_is_what_its_name_says_and_is_built_apart(release: str, folders: Folders) -> None:
    part = KUEUES[release]
    version = part.version(folders)
    assert version is not None
    assert version.startswith(f"v{release}.")
    assert part.build_folder(folders).name.startswith(f"kueue-{release}-")


def test_release_of_kueue_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["build", "--kueue", "--kueue-release", "0.1"])
    assert ended.value.code == 2
    assert "must be one of 0.18, 0.19, got '0.1'" in capsys.readouterr().err


def test_makefile_builds_every_release_of_kueue_for_the_nightly_tests() -> None:
    built = re.findall(r"--kueue-release (\S+)\)", (project_root() / "Makefile").read_text())
    assert built == list(KUEUES)


def test_every_part_is_pinned_with_checksums(folders: Folders) -> None:
    assert KUBERNETES.version(folders) == "v1.34.4"
    assert "gitVersion=v1.34.4" in KUBERNETES.linker_flags(folders)
    assert "gitMinor=34" in KUBERNETES.linker_flags(folders)
    assert HELM.version(folders) == "v3.19.5"
    for part in (*GO_MODULES, *KUEUES.values()):
        requires = "require" in (part.folder(folders) / "go.mod").read_text()
        assert (part.folder(folders) / "go.sum").exists() == requires, part.name


@pytest.mark.parametrize(
    ("dockerfile", "extra"), [("profiler-image/Dockerfile", "worker"), ("operator/Dockerfile", "operator")]
)
def test_requirements_equal_those_of_the_dockerfile(
    dockerfile: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (project_root() / dockerfile).read_text()
    command = text.partition('python3 -c "')[2].partition('"')[0].replace("'/pyproject.toml'", "'pyproject.toml'")
    monkeypatch.chdir(project_root())
    exec(compile(command, dockerfile, "exec"), {})
    assert capsys.readouterr().out.splitlines() == list(requirements(project_root(), extra))


def test_builds_use_the_machines_certificates() -> None:
    plain = build_arguments({})
    assert "PIP_CERT=/etc/ssl/certs/ca-certificates.crt" in plain
    elsewhere = build_arguments({"PIP_CERT": "/srv/bundle.crt", "PIP_INDEX_URL": "https://index.example/simple"})
    assert "/srv/bundle.crt:/srv/bundle.crt:ro" in elsewhere
    assert "PIP_INDEX_URL=https://index.example/simple" in elsewhere


def test_archive_holds_only_the_requested_blobs(folders: Folders) -> None:
    images = Images(folders, Binaries(folders))
    blobs = images.layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes) -> str:
        name = sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return f"sha256:{name}"

    config, old, new = blob(b"{}"), blob(b"torch"), blob(b"code")
    content = {"config": {"digest": config}, "layers": [{"digest": old}, {"digest": new}]}
    manifest = blob(json.dumps(content).encode())
    name = "docker.io/trainwright/worker:dev"
    entry = {"digest": manifest, "annotations": {"org.opencontainers.image.ref.name": name}}
    (images.layout / "index.json").write_text(json.dumps({"manifests": [entry]}))
    unused = blob(b"of an earlier build")

    assert images.blobs(name) == [manifest, config, old, new]
    stream = io.BytesIO()
    write_archive(stream, images, name, [manifest, config, new])
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        names = archive.getnames()
        index = json.loads((archive.extractfile("index.json") or io.BytesIO()).read())
    wanted = [f"blobs/sha256/{digest.removeprefix('sha256:')}" for digest in (manifest, config, new)]
    assert names == ["oci-layout", "index.json", *wanted]
    assert index["manifests"][0]["annotations"] == {"io.containerd.image.name": name}
    images.discard_unused()
    assert not images.blob(unused).exists()
    assert images.blob(old).exists()
