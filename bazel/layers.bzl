"""The layers of the tree and what may use what, so that Bazel enforces it. tests/tools/layers_test.py compares this file
with the includes, and tools/pictures.py draws it for docs/internals/architecture.md.

A layer is a folder at the top. Code may use every layer to the left of its own, and inside its own layer what USES
lists. `tests`, `integration_tests` and `examples` may use all."""

LAYERS = [
    ["common"],
    ["memory"],
    ["comm"],
    ["attention"],
    ["runtime"],
    ["launcher", "python"],  # neither uses the other
    ["benchmarks"],
]

# For each package, the packages of its own layer that it may use.
USES = {
    "common/logging": ["common"],
    "common/control_groups": [],
    "common/simd": ["common"],
    "common/svg": ["common"],
    "common/trace": ["common"],
    "memory": [],
    "memory/pool": ["memory"],
    "memory/tiers": ["memory/pool"],
    "comm/threads": ["comm"],
    "comm/mpi": ["comm"],
    "comm/nccl": ["comm"],
    "comm/c10d": ["comm"],
    "comm/bootstrap": ["comm/mpi", "comm/threads", "comm"],
    "comm/testing": ["comm/bootstrap", "comm/threads", "comm"],
    "attention/plan": ["attention/pattern"],
    "attention/proof": ["attention/plan", "attention/pattern"],
    "attention/oracle": ["attention/pattern"],
    "attention/testing": ["attention/oracle", "attention/plan", "attention/pattern"],
    "attention/dropout": ["attention/pattern"],
    "attention/tiles": ["attention/dropout", "attention/plan", "attention/pattern"],
    "attention/kernels/cpu": ["attention/tiles", "attention/dropout", "attention/plan", "attention/pattern"],
    "attention/kernels": ["attention/kernels/cpu", "attention/tiles", "attention/plan", "attention/pattern"],
    "attention/execution": ["attention/kernels", "attention/tiles", "attention/proof", "attention/plan", "attention/pattern"],
    "attention/modules": ["attention/execution", "attention/plan", "attention/pattern"],
    "runtime/model": ["runtime/model/gpu", "runtime/tensor_files"],
    "runtime/config": ["runtime/model"],
    "runtime/run": ["runtime/tensor_files"],
    "runtime/data/shards": ["runtime/config"],
    "runtime/data": ["runtime/data/shards", "runtime/config"],
    "runtime/huggingface": ["runtime/data/shards", "runtime/config", "runtime/model", "runtime/run", "runtime/tensor_files"],
    "runtime/training/state": ["runtime/config", "runtime/model", "runtime/run"],
    "runtime/training": [
        "runtime/training/state",
        "runtime/huggingface",
        "runtime/data",
        "runtime/config",
        "runtime/model",
        "runtime/run",
        "runtime/tasks",
        "runtime/tensor_files",
    ],
    "runtime/inference": [
        "runtime/training/state",
        "runtime/training",
        "runtime/huggingface",
        "runtime/data/shards",
        "runtime/config",
        "runtime/model",
        "runtime/run",
        "runtime/tensor_files",
    ],
    "runtime/evaluation": [
        "runtime/inference",
        "runtime/training",
        "runtime/data",
        "runtime/data/shards",
        "runtime/huggingface",
        "runtime/config",
        "runtime/model",
        "runtime/tasks",
        "runtime/tensor_files",
    ],
    "runtime/report": ["runtime/evaluation"],
    "runtime/attend": ["runtime/tensor_files"],
    "launcher/network": [],
    "launcher/hosts": ["launcher/network", "launcher/topology"],
    "launcher/doctor": ["launcher/hosts"],
    "launcher/launch": ["launcher/doctor", "launcher/hosts", "launcher/network", "launcher/topology"],
    "launcher/python_programs": [],
    "launcher/tokens": ["launcher/python_programs"],
    "launcher": ["launcher/launch", "launcher/hosts", "launcher/network", "launcher/topology"],
    "launcher/subcommands": [
        "launcher",
        "launcher/python_programs",
        "launcher/tokens",
        "launcher/launch",
        "launcher/doctor",
        "launcher/hosts",
        "launcher/network",
        "launcher/topology",
    ],
    "python/annulus": [],
    "python/ops": [],
    "python/tokenizer": [],
    "python/follower": [],
    "benchmarks/gpu": ["benchmarks"],
    "benchmarks/seeds": ["benchmarks"],
    "benchmarks/program": ["benchmarks/gpu", "benchmarks/seeds", "benchmarks"],
}

# Packages that are an inside of their layer: no other layer may use them.
INSIDE = [
    "attention/kernels/cpu",
    "runtime/model/gpu",
    "launcher/python_programs",
    "launcher/tokens",
    "launcher/doctor",
    "launcher/subcommands",
]

def users():
    """The visibility of this package's targets: the packages that may use it."""
    package = native.package_name()
    layer = package.split("/")[0]
    levels = [i for i in range(len(LAYERS)) if layer in LAYERS[i]]
    if not levels:
        fail("//%s is in no layer of bazel/layers.bzl" % package)
    later = [l for level in LAYERS[levels[0] + 1:] for l in level] if package not in INSIDE else []
    return ["//%s:__subpackages__" % l for l in later + ["integration_tests", "tests"]] + [
        "//%s:__pkg__" % user
        for user in USES
        if package in USES[user]
    ]
