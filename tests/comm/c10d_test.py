#!/usr/bin/env python3
"""Tests communicators over process groups of PyTorch: starts the ranks as processes and loads c10d_tests.so into each.

c10d_test.py CASE RANKS [FILTER] TORCH_ROOT

CASE: suite     the tests of c10d_main.cc, or those that FILTER chooses (googletest's)
      device    those that the part for devices passes over gloo and CPU tensors
      killed    the last rank is killed; the others must say so
      again     a group is destroyed and made anew under the same name
"""

import ctypes
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.getcwd()
sys.path.insert(0, os.path.join(HERE, "integration_tests"))
import torch_python  # noqa: E402

DEADLINE = 250  # seconds, of all ranks together
# Left out are tests that only poll a Work, because gloo completes one only in wait(), tests that wait for a deadline,
# which for a device is that of its group, and tests of the order of summation.
PASSED_BY_A_DEVICE = ("ReportsSize*", "RefusesUnsupported*", "Disagreement*", "AgreementNames*", "GroupedExchange*",
                      "RandomExchanges*", "WorkWaits*", "EmptyExchanges*", "CountsMessages*", "CountsCollectives*",
                      "LargeMessages", "AllReduce",
                      "AllReduceIs*", "AllGather", "ReduceScatter", "Broadcast", "Split", "TensorsOf*", "GathersTexts",
                      "InPlace", "BegunWorkWaits*", "BegunCollectivesOf*")
ON_A_DEVICE = "C10d.HostsFind*:" + ":".join(f"Ranks/Comm*.{test}/*" for test in PASSED_BY_A_DEVICE)


def start(ranks):
    """Runs this program once for each rank; returns 1 if a rank fails or hangs. Then the other ranks are killed."""
    case = sys.argv[1]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        began = time.monotonic()
        children = []
        for rank in range(ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), STORE=os.path.join(folder, "store"))
            for name in ("TEST_PREMATURE_EXIT_FILE", "XML_OUTPUT_FILE") if rank else ():
                env.pop(name, None)  # one rank writes googletest's files
            children.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
        # The rank that the case kills, with its expected exit code.
        expected = {ranks - 1: -signal.SIGKILL} if case == "killed" else {}
        wrong = None
        try:
            while wrong is None and any(c.poll() is None for c in children):
                ended = [(r, c.poll()) for r, c in enumerate(children) if c.poll() is not None]
                wrong = next((f"rank {r} ended with {code}" for r, code in ended if code != expected.get(r, 0)), None)
                if time.monotonic() - began > DEADLINE:
                    wrong = f"not done after {DEADLINE} s"
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
                child.wait()
        wrong = wrong or next((f"rank {r} ended with {c.returncode}" for r, c in enumerate(children)
                               if c.returncode != expected.get(r, 0)), None)
    if wrong:
        print("FAILED:", wrong)
        return 1
    print(f"{ranks} ranks: all is well")
    return 0


def sum_of_ranks(library, name, timeout):
    text = ctypes.create_string_buffer(2000)
    library.sum_of_ranks(name.encode(), ctypes.c_double(timeout), text, ctypes.c_int64(len(text)))
    return text.value.decode()


def check(condition, what):
    if not condition:
        print(f"[  FAILED  ] rank {os.environ['RANK']}: {what}", flush=True)
        os._exit(1)


def run(case, filter):
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def init(number):
        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}{number}", rank=rank,
                                world_size=ranks, timeout=datetime.timedelta(seconds=60))

    init(0)
    library = ctypes.CDLL(os.path.join(HERE, "tests", "comm", "c10d_tests.so"))
    world = dist.group.WORLD.group_name
    expected = str(ranks * (ranks - 1) // 2)
    code = 0
    if case in ("suite", "device"):
        names = {"ANNULUS_WORLD": world}
        made = []
        if ranks > 1:
            made += [("ANNULUS_FIRST", list(range(ranks))), ("ANNULUS_SECOND", list(range(ranks)))]
        if ranks == 4:
            made += [("ANNULUS_ROW", [0, 1]), ("ANNULUS_ROW", [2, 3]), ("ANNULUS_COLUMN", [0, 2]),
                     ("ANNULUS_COLUMN", [1, 3]), ("ANNULUS_ODD", [1, 3])]
        for name, members in made:
            group = dist.new_group(members)
            if rank in members:
                names[name] = group.group_name
        for name, value in names.items():
            os.environ[name] = value
        if case == "device":
            os.environ["ANNULUS_DEVICE"], filter = "1", ON_A_DEVICE
        code = library.run_tests(filter.encode())
    elif case == "killed":
        said = sum_of_ranks(library, world, 30)
        check(said == expected, said)
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        said = sum_of_ranks(library, world, 30)
        check(said.startswith("[comm] sum of ranks: ") and "rank " in said, said)
        check(time.monotonic() - began < 30, "the error came after the deadline")
        print(f"rank {rank}: {said}", flush=True)
        again = sum_of_ranks(library, world, 30)
        check("is dead since an earlier failure" in again, again)
        os._exit(0)
    else:
        said = sum_of_ranks(library, world, 30)
        check(said == expected, said)
        child = os.fork()
        if child == 0:
            said = sum_of_ranks(library, world, 30)
            check("forked" in said, said)
            os._exit(0)
        check(os.waitpid(child, 0)[1] == 0, "the forked process failed")
        check(threads_of_gloo() > 0, "gloo's threads have another name")
        dist.destroy_process_group()
        library.release_ended_groups()
        check(threads_of_gloo() == 0, "the group is kept alive: gloo's threads may outlive the interpreter")
        said = sum_of_ranks(library, world, 30)
        check("no process group is registered" in said and f'"{world}"' in said, said)
        init(1)
        check(dist.group.WORLD.group_name == world, "PyTorch gives the new group another name")
        said = sum_of_ranks(library, world, 30)
        check(said == expected, said)
        sys.exit(0)  # the process exits normally while the group exists
    sys.stdout.flush()
    # Communicators that failed in a test would keep the process from exiting normally.
    os._exit(code)


def threads_of_gloo():
    """The number of this process's threads that run gloo's collectives."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as f:
            names.append(f.read().strip())
    return names.count("pt_gloo_runloop")


def main():
    torch_python.enter()
    case, ranks, *rest = sys.argv[1:]
    if "RANK" in os.environ:
        run(case, rest[0] if rest else "*")
    return start(int(ranks))


sys.exit(main())
