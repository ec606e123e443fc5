"""Container images without Docker or a registry: a Debian base, the project's Dockerfiles, an OCI layout."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster.binaries import Binaries
from local_cluster.commands import ClusterError, run, succeeds
from local_cluster.paths import Folders, fingerprint, write_if_changed
from local_cluster.progress import Steps

BASE = "docker.io/trainwright/base:dev"
WORKER = "docker.io/trainwright/worker:dev"
OPERATOR = "docker.io/trainwright/operator:dev"
WORKER_DEPENDENCIES = "docker.io/trainwright/worker-dependencies:dev"
OPERATOR_DEPENDENCIES = "docker.io/trainwright/operator-dependencies:dev"
SANDBOX = "docker.io/trainwright/sandbox:dev"
TRAINING_OPERATOR = "docker.io/trainwright/training-operator:dev"
JOBSET = "docker.io/trainwright/jobset:dev"
KUEUE = "docker.io/trainwright/kueue:dev"

SEEDED = (SANDBOX, BASE, TRAINING_OPERATOR, JOBSET, OPERATOR_DEPENDENCIES, WORKER_DEPENDENCIES)
"""Images in the seed store; code images are thin layers on top."""

_DOCKERFILES = {WORKER: ("profiler-image/Dockerfile", "worker"), OPERATOR: ("operator/Dockerfile", "operator")}
_PACKAGES = {
    "profiler-image/Dockerfile": ("planner/trainwright", "profiler-image/trainwright_worker"),
    "operator/Dockerfile": ("planner/trainwright", "operator/trainwright_operator"),
}
_PROGRAM_IMAGES = {SANDBOX: "sandbox", TRAINING_OPERATOR: "training-operator", JOBSET: "jobset", KUEUE: "kueue"}
_DEPENDENCIES = {WORKER_DEPENDENCIES: WORKER, OPERATOR_DEPENDENCIES: OPERATOR}
CONSTRAINTS = "deploy/development/constraints.txt"
_BASE_RECIPE = (
    "--variant=minbase",
    "--include=python3,python3-venv,ca-certificates",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "bookworm",
)
_HOST_CERTIFICATES = Path("/etc/ssl/certs")
RUN_ROOT = Path("/run/trainwright-images")
"""Image builder's files of one boot."""

_NEEDED_DISK_GB = {WORKER_DEPENDENCIES: 25, OPERATOR_DEPENDENCIES: 3}
"""Three times an image: container and layer while it is built, then layer, blob and snapshot."""


def check_free_disk(folder: Path, needed_gb: float) -> None:
    """Raise ClusterError if the folder's disk has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise ClusterError(
            f"{folder}: the images need {needed_gb:.0f} GB of disk, {free_gb:.0f} GB are free; free some, or set "
            "XDG_CACHE_HOME to a folder on a larger disk"
        )


@dataclass(frozen=True, slots=True)
class Images:
    """Image builds of this machine."""

    folders: Folders
    binaries: Binaries

    @property
    def layout(self) -> Path:
        """Return the OCI image layout; its layers are uncompressed, so their digests are reproducible."""
        return self.folders.images / "layout"

    def build_base(self, steps: Steps) -> None:
        """Build Debian with Python, equivalent to `python:3.11-slim`."""
        made_of = fingerprint(*_BASE_RECIPE)
        if self._is_current(BASE, made_of):
            return
        with steps.step("build the base image (Debian with Python)"), tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "base.tar"
            run(["mmdebstrap", "--quiet", *_BASE_RECIPE, archive], what="making the base image", deadline_seconds=900)
            (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
            self._build(BASE, Path(folder) / "Dockerfile", Path(folder), "--no-cache")
            self._stamp(BASE, made_of)

    def build_dependencies(self, steps: Steps) -> None:
        """Build the layers that change only with a requirement (torch's is 5 GB)."""
        for image, of in _DEPENDENCIES.items():
            dockerfile, extra = _DOCKERFILES[of]
            text = (self.folders.project / dockerfile).read_text()
            pins = (self.folders.project / CONSTRAINTS).read_text()
            made_of = fingerprint(self.digest(BASE), text, pins, *requirements(self.folders.project, extra))
            if self._is_current(image, made_of):
                continue
            with steps.step(f"build the dependencies of the {extra}'s image"):
                # Before the build, because the disk may not hold both.
                succeeds([*self._buildah(), "rmi", "--force", image, of], deadline_seconds=300)
                check_free_disk(self.folders.images, _NEEDED_DISK_GB[image])
                self._build_dockerfile(image, dockerfile, "--target", "dependencies")
                self._stamp(image, made_of)

    def build_programs(self, images: Iterable[str] = SEEDED) -> None:
        """Build those of the images that hold a single program."""
        for image in images:
            program = _PROGRAM_IMAGES.get(image)
            if program is None:
                continue
            dockerfile = self.folders.sources / "images" / program / "Dockerfile"
            built = self.binaries.path(program)
            made_of = fingerprint(str(built), dockerfile.read_text())
            if self._is_current(image, made_of):
                continue
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy2(built, Path(folder) / program)
                self._build(image, dockerfile, Path(folder), "--no-cache")
            self._stamp(image, made_of)

    def build_code(self, image: str) -> None:
        """Build the worker's or operator's image of the current checkout; only thin layers are new."""
        dockerfile, _ = _DOCKERFILES[image]
        made_of = fingerprint(self.digest(BASE), *_sources(self.folders.project, dockerfile))
        if self._is_current(image, made_of):
            return
        before = self._digest_or_none(image)
        self._build_dockerfile(image, dockerfile)
        if before is not None and before != self.digest(image):
            # Layers that are still in use stay.
            succeeds([*self._buildah(), "rmi", before])
        self._stamp(image, made_of)

    def export(self, image: str) -> None:
        """Export an image into the layout, without layers that it already holds."""
        self.layout.mkdir(parents=True, exist_ok=True)
        source = f"containers-storage:[overlay@{self._storage}+{RUN_ROOT}]{image}"
        # skopeo, because buildah's push to a layout recompresses every layer.
        copy = ["skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
        run([*copy, source, f"oci:{self.layout}:{image}"], what=f"exporting image {image}", deadline_seconds=900)

    def manifest(self, image: str) -> dict[str, Any]:
        """Return the layout's descriptor of an exported image."""
        index = json.loads((self.layout / "index.json").read_text())
        for descriptor in index["manifests"]:
            if descriptor.get("annotations", {}).get("org.opencontainers.image.ref.name") == image:
                return dict(descriptor)
        raise KeyError(f"{image} is not in {self.layout}")

    def blob(self, digest: str) -> Path:
        return self.layout / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def blobs(self, image: str) -> list[str]:
        """Return the digests of an exported image: manifest, configuration, layers."""
        descriptor = self.manifest(image)
        content = json.loads(self.blob(descriptor["digest"]).read_text())
        parts = [content["config"]["digest"], *(layer["digest"] for layer in content["layers"])]
        return list(dict.fromkeys([descriptor["digest"], *parts]))

    def discard_unused(self) -> None:
        """Remove blobs that no exported image needs."""
        index = json.loads((self.layout / "index.json").read_text())
        names = [entry.get("annotations", {}).get("org.opencontainers.image.ref.name") for entry in index["manifests"]]
        needed = {digest.removeprefix("sha256:") for name in names if name for digest in self.blobs(name)}
        for file in (self.layout / "blobs" / "sha256").iterdir():
            if file.name not in needed:
                file.unlink()

    def digest(self, image: str) -> str:
        """Return the builder's id of an image: the digest of its configuration and thus of all layers."""
        found = self._digest_or_none(image)
        if found is None:
            raise KeyError(f"{image} was not built")
        return found

    def _digest_or_none(self, image: str) -> str | None:
        arguments = [*self._buildah(), "images", "--json", image]
        if not succeeds(arguments):
            return None
        return str(json.loads(run(arguments, what=f"looking at image {image}"))[0]["id"])

    def _build_dockerfile(self, image: str, dockerfile: str, *options: str) -> None:
        self._build(
            image,
            self.folders.project / dockerfile,
            self.folders.project,
            "--layers",
            *["--build-arg", f"BASE={BASE}"],
            *build_arguments(os.environ),
            *options,
        )

    def _build(self, image: str, dockerfile: Path, context: Path, *options: str) -> None:
        # --force-rm, because the container of a failed build keeps gigabytes; it demands --layers or --no-cache.
        arguments = ["bud", "--quiet", "--isolation", "chroot", "--pull-never", "--force-rm", *options]
        self._run(*arguments, "--tag", image, "--file", str(dockerfile), str(context))

    def _run(self, *arguments: str) -> str:
        return run([*self._buildah(), *arguments], what=f"image build ({arguments[0]})", deadline_seconds=1500)

    def _buildah(self) -> list[str]:
        return ["buildah", "--root", str(self._storage), "--runroot", str(RUN_ROOT), "--storage-driver", "overlay"]

    @property
    def _storage(self) -> Path:
        return self.folders.images / "storage"

    def _stamp(self, image: str, made_of: str) -> None:
        write_if_changed(self._stamp_file(image), f"{made_of} {self.digest(image)}\n")

    def _is_current(self, image: str, made_of: str) -> bool:
        file = self._stamp_file(image)
        if not file.exists():
            return False
        return file.read_text().split() == [made_of, self._digest_or_none(image) or "gone"]

    def _stamp_file(self, image: str) -> Path:
        return self.folders.images / "stamps" / image.rpartition("/")[2].replace(":", "-")


def _sources(project: Path, dockerfile: str) -> Iterator[bytes]:
    """Iterate over the inputs of a code image: names and contents."""
    files = [project / name for name in (dockerfile, ".dockerignore", CONSTRAINTS, "pyproject.toml", "README.md")]
    for package in _PACKAGES[dockerfile]:
        files += sorted(file for file in (project / package).rglob("*") if file.is_file())
    for file in files:
        if "__pycache__" not in file.parts:
            yield str(file.relative_to(project)).encode()
            yield file.read_bytes()


def requirements(project: Path, extra: str) -> Sequence[str]:
    """Return pip's requirements for one extra, as the Dockerfiles read them."""
    document = tomllib.loads((project / "pyproject.toml").read_text())
    own = document["project"]
    return [*document["build-system"]["requires"], *own["dependencies"], *own["optional-dependencies"][extra]]


def build_arguments(environment: Mapping[str, str]) -> list[str]:
    """Return build arguments that give pip this machine's certificates and package index."""
    bundle = environment.get("PIP_CERT") or str(_HOST_CERTIFICATES / "ca-certificates.crt")
    arguments = ["--build-arg", f"PIP_CERT={bundle}", "--volume", f"{_HOST_CERTIFICATES}:{_HOST_CERTIFICATES}:ro"]
    if not Path(bundle).is_relative_to(_HOST_CERTIFICATES):
        arguments += ["--volume", f"{bundle}:{bundle}:ro"]
    if environment.get("PIP_INDEX_URL"):
        arguments += ["--build-arg", f"PIP_INDEX_URL={environment['PIP_INDEX_URL']}"]
    return arguments
