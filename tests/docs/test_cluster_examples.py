"""The files for a cluster: what they name exists."""

import ast
import re
from pathlib import Path

import pytest
import typer
import yaml

from minipaged.cli.main import app
from minipaged.serving.fleet import TO_LEAVE
from minipaged.serving.gate import OPEN
from minipaged.serving.settings import ServerSettings

FOLDER = Path(__file__).parents[2] / "docs/examples/cluster"


@pytest.fixture(scope="module")
def manifest():
    found = {part["kind"]: part for part in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}
    assert set(found) == {"Deployment", "Service"}
    return found


@pytest.fixture(scope="module")
def pod(manifest):
    return manifest["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def flags(pod):
    """What `minipaged serve` understands of the container's arguments: option -> value."""
    first, *arguments = pod["containers"][0]["args"]
    command = typer.main.get_command(app).commands[first]
    return command.make_context("serve", arguments, resilient_parsing=False).params


def test_the_command_takes_the_arguments_of_the_manifest(flags):
    """Catches a flag that has another name by now, and a number that is not one."""
    assert (flags["host"], flags["port"], flags["replicas"]) == ("0.0.0.0", 8000, 2)
    assert flags["kv_cache_memory"] == 1 << 30


def test_the_pod_has_the_key_that_its_address_demands(pod, flags):
    """Catches a pod that ends at once, since it listens to the network without a key."""
    names = [variable["name"] for variable in pod["containers"][0]["env"]]
    assert "MINIPAGED_API_KEY" in names
    ServerSettings(host=flags["host"], port=flags["port"], api_keys=("key",))


def test_probes_ask_the_port_of_the_server_for_what_needs_no_key(manifest, pod, flags):
    """Catches a probe that gets 401 or 404 forever."""
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert port["containerPort"] == flags["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] == "/health" in OPEN
        assert asked["port"] == port["name"] == manifest["Service"]["spec"]["ports"][0]["targetPort"]


def test_a_pod_has_time_to_finish_what_runs(pod, flags):
    """Catches streams that are cut by SIGKILL, and a probe that ends a pod which is finishing them."""
    needed = flags["shutdown_timeout"] + TO_LEAVE
    assert pod["terminationGracePeriodSeconds"] > needed
    probe = pod["containers"][0]["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > needed


def test_labels_lead_from_the_service_to_the_pods(manifest):
    """Catches a service without a pod."""
    spec = manifest["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == manifest["Service"]["spec"]["selector"]


def test_the_ray_application_uses_what_there_is():
    """Catches an import that moved; Ray itself is no dependency of the tests."""
    tree = ast.parse((FOLDER / "ray_serve.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("minipaged"):
            module = __import__(node.module, fromlist=["x"])
            assert all(hasattr(module, name.name) for name in node.names)
    from minipaged.serving.service import Service

    assert isinstance(Service.ailment, property)


def test_the_image_is_built_by_files_that_there_are():
    """Catches an extra or a file that was renamed, and another image than the manifest runs."""
    text = (FOLDER / "Dockerfile").read_text()
    root = FOLDER.parents[2]
    assert (root / "constraints.txt").exists()
    extra = re.search(r'"\.\[(\w+)\]"', text)[1]
    assert f"\n{extra} = [" in (root / "pyproject.toml").read_text()
    image = re.search(r"-t (\S+)", text)[1]
    assert f"image: {image}\n" in (FOLDER / "kubernetes.yaml").read_text()
