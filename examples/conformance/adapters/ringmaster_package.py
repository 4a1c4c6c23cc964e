"""axolotl-ringmaster: the attention functions that it registers with transformers, over an inner attention of PyTorch: an exchange of
heads, and its ring with the block kernel that it has for CPUs and the reduction over gathered or travelling blocks."""

import types

import ringmaster
from ringmaster.ring import ring_attention
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface

_runtimes = {}
_module = types.SimpleNamespace(training=True, num_key_value_groups=1, is_causal=True)


def _runtime(p, backend):
    if backend not in _runtimes:
        mesh = init_device_mesh("cpu", (p.size,), mesh_dim_names=("cp",))
        config = ringmaster.RingmasterConfig(size=p.size, backend=backend)
        _runtimes[backend] = ringmaster.setup(config, num_kv_heads=p.size, device_mesh=mesh, device_type="cpu", inner_attn="sdpa")
    ringmaster.set_runtime(_runtimes[backend])
    documents = p.documents
    _runtimes[backend].varlen = None if documents is None else (documents, int(documents.diff().max()))
    return _runtimes[backend]


def ulysses(q, k, v, p):
    attend = AttentionInterface()[_runtime(p, ringmaster.Backend.ULYSSES).attn_implementation]
    _module.num_key_value_groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    window = None if p.window is None else p.window[0] + 1
    return attend(_module, q, k, v, None, scaling=p.scale, is_causal=p.causal, sliding_window=window)[0]


def _ring(q, k, v, p, rotate):
    group = _runtime(p, ringmaster.Backend.RING).ring_group
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return ring_attention(
        q, k, v, group=group, causal=p.causal, scaling=p.scale, dropout=0.0, provider="math", rotate_method=rotate,
        attn_implementation="math", window=p.window,
    )


def allgather(q, k, v, p):
    return _ring(q, k, v, p, ringmaster.RotateMethod.ALLGATHER)


def p2p(q, k, v, p):
    return _ring(q, k, v, p, ringmaster.RotateMethod.ALLTOALL)


COMMON = {
    "uneven lengths": "its context manager pads the sequence",
    "cross-attention": "queries and keys of one sequence",
    "kept keys": "README: arbitrary attention masks are rejected",
    "lse": "not returned",
}
for function in (ulysses, allgather, p2p):
    function.package = "axolotl-ringmaster"
    function.unclaimed = COMMON
allgather.unclaimed = p2p.unclaimed = COMMON | {"documents": "another function of the package"}
