"""The files of docs/fleet: valid by their schemas, and their commands those of the page."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from benchmark.common.machine import ROOT

from chunk_cache_tools.requirements import DISTRIBUTION, pinned
from doc_pages import blocks, section
from gateway import find_gateway

FOLDER = ROOT / "docs" / "fleet"
PAGE = (ROOT / "docs" / "fleet.md").read_text()
MANIFESTS = list(yaml.safe_load_all((FOLDER / "kubernetes.yml").read_text()))
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())


def named(kind: str, name: str) -> Any:
    (found,) = (one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod_of(name: str) -> Any:
    return named("Deployment", name)["spec"]["template"]


def args_of(name: str) -> list[str]:
    (container,) = pod_of(name)["spec"]["containers"]
    return list(container["args"])


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_manifests_are_valid(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_an_invalid_manifest_is_seen() -> None:
    wrong = {**named("Service", "store"), "spec": {"selector": {"app": "store"}, "prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.34", strict=True)


def test_the_image_has_the_sglang_that_a_server_needs_and_extras_that_there_are() -> None:
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    image = r"FROM lmsysorg/sglang:v(\S+)\nCOPY dist/\*.whl /tmp/\nRUN pip install .*\[(.*)\].*"
    found = re.fullmatch(image, "\n".join(lines))
    assert found is not None
    assert pinned("sglang").contains(found[1])
    known = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    assert set(found[2].split(",")) <= set(known)


def test_manifests_fit_each_other() -> None:
    for name in ("store", "replica", "gateway"):
        labels = pod_of(name)["metadata"]["labels"]
        assert named("Deployment", name)["spec"]["selector"]["matchLabels"] == labels
        (container,) = pod_of(name)["spec"]["containers"]
        ports = {port["containerPort"] for port in container["ports"]}
        probes = [probe for key, probe in container.items() if key.endswith("Probe")]
        assert probes
        assert {next(iter(set(probe) & {"httpGet", "tcpSocket"})) for probe in probes}
        assert all((probe.get("httpGet") or probe["tcpSocket"])["port"] in ports for probe in probes)
        scraped = pod_of(name)["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert scraped is None or int(scraped) in ports
    for name in ("store", "gateway"):
        service = named("Service", name)["spec"]
        assert service["selector"] == pod_of(name)["metadata"]["labels"]
    label = pod_of("replica")["metadata"]["labels"]["app"]
    assert f"app={label}" == value_of(args_of("gateway"), "--selector")
    assert pod_of("gateway")["spec"]["serviceAccountName"] == named("ServiceAccount", "gateway")["metadata"]["name"]
    binding = named("RoleBinding", "gateway")
    assert binding["roleRef"]["name"] == named("Role", "gateway")["metadata"]["name"]
    claims = {one["name"] for one in pod_of("replica")["spec"]["volumes"]}
    assert {mount["name"] for mount in pod_of("replica")["spec"]["containers"][0]["volumeMounts"]} == claims


SERVICE_KEYS = {
    *("image", "command", "volumes", "shm_size", "restart", "depends_on", "healthcheck", "ports", "deploy"),
}
"""Of the Compose specification, those that the file uses."""


def test_the_compose_file_fits_together() -> None:
    """Its structure; the specification's own schema is in no package."""
    assert set(COMPOSE) == {"name", "x-replica", "services"}
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        assert isinstance(service["image"], str)
        assert service["restart"] == "unless-stopped"
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in services[other]
        check = service.get("healthcheck", {"test": ["CMD"], "interval": "1s"})
        assert check["test"][0] == "CMD"
        assert all(re.fullmatch(r"\d+[sm]", check[key]) for key in {"interval", "timeout", "start_period"} & set(check))
        assert all(re.fullmatch(r"\d+:\d+", port) for port in service.get("ports", ()))
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            assert (FOLDER / source).exists() or source == "./models"
    devices = [
        tuple(services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"])
        for name in ("replica-1", "replica-2")
    ]
    assert len(set(devices)) == 2, "a GPU each"
    hosts = set(re.findall(r"(?://)([\w-]+):\d+", json.dumps([one.get("command") for one in services.values()])))
    assert hosts <= set(services)
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for config in job["static_configs"] for target in config["targets"]]
    assert {target.split(":")[0] for target in targets} == {"replica-1", "replica-2", "gateway"}


def value_of(words: Sequence[str], flag: str) -> str:
    return words[list(words).index(flag) + 1]


def commands(program: str) -> Iterator[list[str]]:
    """Of the page, the compose file and the manifests."""
    for block in blocks(section("fleet.md", "Start"), "bash"):
        yield from (shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.startswith(program))
    texts = (service.get("command", "") for service in COMPOSE["services"].values())
    yield from (shlex.split(text) for text in texts if text.startswith(program))
    yield from (args for args in map(args_of, ("store", "replica", "gateway")) if args[0] == program)


PLACES = {"--host", "--port", "--prometheus-port", "--model-path", "--worker-urls", "--selector"}
PLACES |= {"--service-discovery", "--service-discovery-namespace", "--service-discovery-port"}


@pytest.mark.parametrize("program", ["python", "smg"])
def test_all_start_the_same(program: str) -> None:
    """But for addresses, and how the gateway finds the replicas."""
    found = []
    for words in commands(program):
        flags = {word for word in words if word.startswith("--")} - PLACES
        values = {flag: value_of(words, flag) for flag in flags if not flag.endswith(("metrics", "chunk-cache"))}
        if "--chunk-cache-config" in values:
            (url,) = json.loads(values.pop("--chunk-cache-config"))["tiers"].values()
            assert url.endswith(":6379/0")
        found.append((flags, values))
    assert len(found) >= 3
    assert all(one == found[0] for one in found), found


def test_the_gateway_knows_its_flags() -> None:
    smg = find_gateway()
    if smg is None:
        pytest.skip("no gateway here (make gateway)")
    text = subprocess.run([smg, "launch", "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    known = set(re.findall(r"--[a-z][\w-]+", text))
    used = {word for words in commands("smg") for word in words if word.startswith("--")}
    assert used <= known
    assert {"--max-buffered-request-bytes", "--model-alias"} <= known, "which the page names"


def test_the_dashboard_is_well_formed() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            by = {label.strip() for one in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in one.split(",")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= by


def test_files_that_the_page_names_are_there() -> None:
    for link in re.findall(r"\]\(((?!http)[^)#]+)", PAGE):
        assert (Path(ROOT / "docs") / link).exists(), link
