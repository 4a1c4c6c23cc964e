"""One rank of four, of which each two have a host name of their own: what `auto` chooses. torch_groups_test.py starts the ranks."""

import os
import re
import tempfile

import annulus
import torch
import torch.distributed as dist

MACHINE = """
name = "far hosts"
source = "assumed"
overlap = false
copy = 1e12
ranks_per_host = {ranks_per_host}
[inside]
latency = 1e-6
bandwidth = 1e11
[between]
latency = 1e-3
bandwidth = 1e7
[kernel.bf16.forward]
rows = [1]
keys = [1]
rates = [[1e12]]
[kernel.bf16.backward]
rows = [1]
keys = [1]
rates = [[1e12]]
"""


def hosts(group):
    """Ranks 0, 1 and 2, 3 are on hosts of their own names: `auto` plans for the hosts of a group, which may be a part of the job."""
    rank, length, problem = dist.get_rank(), 512, dict(heads=2, kv_heads=2, batch=2)
    with tempfile.TemporaryDirectory() as folder:

        def machine(ranks_per_host):
            path = os.path.join(folder, f"{ranks_per_host}.toml")
            with open(path, "w") as file:
                file.write(MACHINE.format(ranks_per_host=ranks_per_host))
            return path

        def planned(ranks, ranks_per_host, **other):
            settings = problem | dict(layout="zigzag", prove=False, machine=machine(ranks_per_host)) | other
            return annulus.plan("{ kind = 'full' }", length, ranks, **settings)

        def seconds(plan):
            return sum(plan["candidates"][0][direction]["seconds"] for direction in ("forward", "backward"))

        os.environ["ANNULUS_MACHINE"] = machine(0)
        for ranks, ranks_per_host in (((0, 1, 2, 3), 2), ((1, 2), 1), ((2, 3), 0)):
            some = group if len(ranks) == 4 else dist.new_group(list(ranks))
            if rank not in ranks:
                continue
            cut = annulus.Sharding("auto", some, length, {"kind": "full"}, **problem)
            number, unit = re.match(r"[^,]*, ([0-9.e+-]+) (s|ms|us) predicted on far hosts; ", cut.reason).groups()
            got = float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
            want = seconds(planned(len(ranks), ranks_per_host, layout=cut.reason.split(",")[0]))
            assert abs(got - want) <= 0.01 * want, (ranks, cut.reason, want)
            alike = seconds(planned(len(ranks), 0))
            assert (got > 2 * alike) == (ranks_per_host > 0), (ranks, cut.reason, alike)
        # Attention sends what is planned for two hosts, which is not what is planned for one.
        chosen, other = ((plan["schedule"], plan["within"]) for plan in (planned(4, 2), planned(4, 0)))
        assert chosen != other, chosen
        part = torch.randn(2, length // 4, 2, 8)
        for again in range(2):  # a plan that is made ahead knows the hosts once the group was used
            if again:
                annulus.plan_ahead("{ kind = 'full' }", length, group=group, layout="zigzag", **problem)
            before = annulus.stats(group)["forward"]
            annulus.attention(part, part, part, "{ kind = 'full' }", group=group, layout="zigzag")
            after = annulus.stats(group)["forward"]
            for (schedule, within), same in ((chosen, True), (other, False)):
                plan = planned(4, 2, schedule=schedule, within=within, head_dim=8, element_bytes=4)["forward"]
                ends = [sum(plan[key][end] for key in plan if key.endswith("_sent")) for end in ("least", "most")]
                counted = sum(after[key] - before[key] for key in ("messages_sent", "bytes_sent"))
                assert (ends[0] <= counted <= ends[1]) == same, (schedule, within, counted, plan)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    hosts(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']}: hosts done", flush=True)
