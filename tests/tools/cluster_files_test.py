#!/usr/bin/env python3
"""Tests the files for batch systems and containers: the MPIJob against the operator's schema, the batch script as bash
and Slurm read it, and the Containerfile's instructions and packages.

    cluster_files_test.py CONFIGS_CLUSTER_FILE CONTAINERFILE TORCH_ROOT

With MPIJOB_CRD=FILE, the MPIJob is also checked against the whole definition that the operator publishes
(kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml; last done with v0.8.2).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import unittest

SITE = os.path.dirname(sys.argv.pop())  # the set-up installs PyYAML here
CONTAINERFILE = os.path.abspath(sys.argv.pop())
CLUSTER = os.path.dirname(os.path.abspath(sys.argv.pop()))
if not os.path.isdir(os.path.join(SITE, "yaml")):
    print("SKIPPED: there is no PyYAML beside the LibTorch folder")
    sys.exit(0)
sys.path.append(SITE)
import yaml  # noqa: E402

TEXT, COUNT, YES, ANY = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"x-kubernetes-int-or-string": True}


def a_list(items):
    return {"type": "array", "items": items}


def an_object(required=(), **properties):
    return {"type": "object", "required": list(required), "properties": properties}


def one_of(*words):
    return {"type": "string", "enum": list(words)}


# The members of kubeflow.org/v2beta1 and of Kubernetes's pods that our file uses; any other member is a fault.
RESOURCES = an_object(limits={"type": "object", "additionalProperties": ANY}, requests={"type": "object", "additionalProperties": ANY})
CONTAINER = an_object(
    ["name"], name=TEXT, image=TEXT, imagePullPolicy=TEXT, workingDir=TEXT, command=a_list(TEXT), args=a_list(TEXT),
    env=a_list(an_object(["name"], name=TEXT, value=TEXT)), resources=RESOURCES,
    securityContext=an_object(runAsUser=COUNT, capabilities=an_object(add=a_list(TEXT), drop=a_list(TEXT))),
    volumeMounts=a_list(an_object(["mountPath", "name"], name=TEXT, mountPath=TEXT, readOnly=YES)))
VOLUME = an_object(
    ["name"], name=TEXT, emptyDir=an_object(medium=TEXT, sizeLimit=ANY),
    persistentVolumeClaim=an_object(["claimName"], claimName=TEXT, readOnly=YES))
POD = an_object(["containers"], containers=a_list(CONTAINER), volumes=a_list(VOLUME), terminationGracePeriodSeconds=COUNT)
REPLICAS = an_object(replicas=COUNT, restartPolicy=TEXT, template=an_object(metadata={"type": "object"}, spec=POD))
MPIJOB = an_object(
    apiVersion=TEXT, kind=TEXT, metadata={"type": "object", "additionalProperties": TEXT},
    spec=an_object(
        ["mpiReplicaSpecs"], slotsPerWorker=COUNT, sshAuthMountPath=TEXT, runLauncherAsWorker=YES,
        mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        runPolicy=an_object(cleanPodPolicy=TEXT, backoffLimit=COUNT, activeDeadlineSeconds=COUNT,
                            ttlSecondsAfterFinished=COUNT, suspend=YES),
        mpiReplicaSpecs={"type": "object", "additionalProperties": REPLICAS}))

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}


def faults(value, schema, way=""):
    """Returns where a value does not fit a schema (OpenAPI 3; unknown members are faults unless it allows them)."""
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) and not isinstance(value, bool) else [f"{way}: a number or a text"]
    if kind and (not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{way}: {kind}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{way}: one of {schema['enum']}")
    if isinstance(value, dict):
        found += [f"{way}.{name}: missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is not None:
                found += faults(item, inner, f"{way}.{name}") if isinstance(inner, dict) else []
            elif schema.keys() & {"properties", "additionalProperties"}:
                found.append(f"{way}.{name}: unknown")
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += faults(item, schema["items"], f"{way}[{i}]")
    return found


def read(path):
    with open(path) as f:
        return f.read()


class MpijobTest(unittest.TestCase):
    def setUp(self):
        self.job = yaml.safe_load(read(os.path.join(CLUSTER, "mpijob.yaml")))

    def test_fits_the_schema(self):
        self.assertEqual(faults(self.job, MPIJOB), [])
        self.assertEqual((self.job["apiVersion"], self.job["kind"]), ("kubeflow.org/v2beta1", "MPIJob"))
        if os.environ.get("MPIJOB_CRD"):
            versions = {v["name"]: v for v in yaml.safe_load(read(os.environ["MPIJOB_CRD"]))["spec"]["versions"]}
            self.assertEqual(faults(self.job, versions["v2beta1"]["schema"]["openAPIV3Schema"]), [])

    def test_schema_finds_planted_faults(self):
        worker = self.job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
        for plant, where in (
            (lambda: self.job["spec"].update(slotsPerWorker="8"), ".spec.slotsPerWorker"),
            (lambda: self.job["spec"].update(mpiImplementation="openmpi"), ".spec.mpiImplementation"),
            (lambda: self.job["spec"].update(slots=1), ".spec.slots: unknown"),
            (lambda: worker.pop("containers"), ".containers: missing"),
            (lambda: self.job["spec"].pop("mpiReplicaSpecs"), ".spec.mpiReplicaSpecs: missing"),
        ):
            self.setUp()
            worker = self.job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
            plant()
            self.assertTrue(any(where in f for f in faults(self.job, MPIJOB)), (where, faults(self.job, MPIJOB)))

    def test_parts_agree_with_each_other(self):
        specs = self.job["spec"]["mpiReplicaSpecs"]
        self.assertEqual(set(specs), {"Launcher", "Worker"})
        pods = [s["template"]["spec"] for s in specs.values()]
        self.assertEqual(len({c["image"] for p in pods for c in p["containers"]}), 1)
        for pod in pods:
            volumes = {v["name"] for v in pod["volumes"]}
            self.assertEqual({m["name"] for c in pod["containers"] for m in c["volumeMounts"]}, volumes)
        worker = specs["Worker"]["template"]["spec"]["containers"][0]
        self.assertIn("/dev/shm", [m["mountPath"] for m in worker["volumeMounts"]])
        self.assertEqual(worker["resources"]["limits"]["nvidia.com/gpu"], self.job["spec"]["slotsPerWorker"])
        # The MPIJob uses the user and the sshd configuration of the image.
        image = read(CONTAINERFILE)
        self.assertIn("--uid %d " % worker["securityContext"]["runAsUser"], image)
        self.assertIn(" %s " % worker["args"][-1], image)
        self.assertTrue(self.job["spec"]["sshAuthMountPath"] in image)


class SlurmTest(unittest.TestCase):
    def setUp(self):
        self.path = os.path.join(CLUSTER, "slurm.sbatch")

    def test_is_valid_bash(self):
        subprocess.run(["bash", "-n", self.path], check=True)

    def test_runs_launch_with_its_arguments(self):
        """Replaces annulus by echo: arguments with spaces and quotes arrive unchanged."""
        env = dict(os.environ, ANNULUS="/bin/echo")
        done = subprocess.run(["bash", self.path, "a 'b'; c.toml", "--resume"], env=env, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "launch --timeout-grace 270 train a 'b'; c.toml --resume\n"), done.stderr)
        done = subprocess.run(["bash", self.path], env=env, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("usage: sbatch slurm.sbatch CONFIG", done.stderr)

    def test_options_precede_the_first_command(self):
        lines = read(self.path).splitlines()
        first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
        options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
        self.assertTrue(options and max(options) < first)
        self.assertRegex(read(self.path), r"(?m)^#SBATCH --signal=B:USR1@\d+ ")


class ContainerfileTest(unittest.TestCase):
    def setUp(self):
        # Comments are on lines of their own; after a backslash an instruction continues on the next line.
        text = re.sub(r"(?m)^#.*\n", "", read(CONTAINERFILE))
        self.steps = [line.split(None, 1) for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]

    def test_instructions_are_valid(self):
        known = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
        self.assertEqual([s[0] for s in self.steps if s[0] not in known], [])
        self.assertEqual(self.steps[0][0], "FROM")
        for word, rest in self.steps:
            if word in ("ENTRYPOINT", "CMD"):
                self.assertTrue(all(isinstance(w, str) for w in json.loads(rest)), rest)
            if word == "RUN":
                subprocess.run(["sh", "-n", "-c", rest], check=True)

    def test_packages_exist(self):
        install = next(rest for word, rest in self.steps if "apt-get install" in rest)
        names = re.search(r"apt-get install((?: +-\S+| +[a-z][\w.+-]*)+)", install).group(1).split()
        packages = [n for n in names if not n.startswith("-")]
        self.assertIn("openmpi-bin", packages)
        if not shutil.which("apt-cache"):
            self.skipTest("there is no apt-cache: this is not Debian or Ubuntu")
        for package in packages:
            shown = subprocess.run(["apt-cache", "show", package], capture_output=True, text=True)
            self.assertIn("Package: " + package + "\n", shown.stdout)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
