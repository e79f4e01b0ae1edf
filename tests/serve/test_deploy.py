"""The examples for containers give options, probes, users and times that the server and its image have."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

pytest.importorskip("fastapi")

from redrafter.app.flags import read_options
from redrafter.serve.command import build_parser
from redrafter.serve.config import ServeOptions
from redrafter.serve.network.guards import HEALTH_PATHS
from redrafter.serve.network.server_process import FORCED_END_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGE = (EXAMPLES / "server" / "Dockerfile").read_text()
HOME = re.search(r"--home-dir (\S+) --uid (\d+)", IMAGE)


@pytest.fixture
def service() -> dict:
    """Return the service of the Compose file."""
    return yaml.safe_load((EXAMPLES / "deploy" / "compose.yaml").read_text())["services"]["redrafter"]


@pytest.fixture
def pod() -> dict:
    """Return the pod of the Kubernetes file."""
    documents = {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "deploy/kubernetes.yaml").read_text())}
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == labels
    assert documents["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    return documents["Deployment"]["spec"]["template"]["spec"]


def options(words: list[str]) -> ServeOptions:
    """Return the options of the image's entry point with the words that follow it."""
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", IMAGE, re.MULTILINE)
    _, serve, *first = shlex.split(entry.strip("[]").replace(",", " "))
    assert serve == "serve"
    return read_options(ServeOptions, build_parser().parse_args([*first, *words]))


def test_compose_starts_a_server_of_the_image_and_lets_its_texts_end(service):
    given = options(service["command"])
    assert service["ports"] == [f"127.0.0.1:8000:{given.port}"]
    assert int(service["stop_grace_period"].rstrip("s")) > given.drain_timeout + FORCED_END_SECONDS
    assert (EXAMPLES / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert f"state:{HOME[1]}" in service["volumes"]
    assert service["restart"] == "unless-stopped"  # an engine that ends makes the exit code 2


def test_kubernetes_probes_routes_without_keys_and_waits_for_texts_to_end(pod):
    [container] = pod["containers"]
    given = options(container["args"])
    for probe, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        get = container[f"{probe}Probe"]["httpGet"]
        assert get == {"path": f"/v1/health/{path}", "port": "http"}
        assert get["path"] in HEALTH_PATHS
    assert container["ports"] == [{"name": "http", "containerPort": given.port}]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + given.drain_timeout + FORCED_END_SECONDS
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["state"] == HOME[1]
    assert Path(given.api_key_file).parent == Path(mounts["keys"])
    assert {*mounts} == {volume["name"] for volume in pod["volumes"]}


def test_images_run_as_a_numbered_user_as_kubernetes_requires(pod):
    for image in (IMAGE, (EXAMPLES / "ray" / "Dockerfile").read_text()):
        assert re.search(r"^USER (.*)$", image, re.MULTILINE)[1] == HOME[2]
    assert pod["securityContext"]["runAsUser"] == int(HOME[2])
    assert pod["securityContext"]["runAsNonRoot"]
