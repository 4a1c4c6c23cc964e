"""ring-flash-attn: the batch functions and the recommended one for packed documents, as its README calls them."""

import transformers.modeling_flash_attention_utils as utils

if not hasattr(utils, "is_flash_attn_greater_or_equal_2_10"):  # its adapter for transformers, unused here, asks for it; 5 has it not
    utils.is_flash_attn_greater_or_equal_2_10 = None

import ring_flash_attn as rfa  # noqa: E402

COMMON = {
    "fp32": "flash-attn's kernels take fp16 and bf16",
    "window": "README: window_size is not supported",
    "uneven lengths": "its tests and examples cut sequences evenly",
    "cross-attention": "queries and keys of one sequence",
    "kept keys": "no argument for padding",
}
ONLY_CAUSAL = "it asserts causal"
DOCUMENTS = "the batch function takes none"
BATCHES = "a function for one row of packed documents"


def _batch(function, q, k, v, p):
    out, lse, _ = function(q, k, v, softmax_scale=p.scale, causal=p.causal, return_attn_probs=True)
    return out, lse


def ring(q, k, v, p):
    return _batch(rfa.ring_flash_attn_func, q, k, v, p)


def zigzag(q, k, v, p):
    return _batch(rfa.zigzag_ring_flash_attn_func, q, k, v, p)


def stripe(q, k, v, p):
    return _batch(rfa.stripe_flash_attn_func, q, k, v, p)


def llama3(q, k, v, p):
    prepared = rfa.llama3_flash_attn_prepare_cu_seqlens(p.documents, p.causal, p.rank, p.size)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice = prepared
    out, lse, _ = rfa.llama3_flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride=1, local_k_slice=local_k_slice,
        softmax_scale=p.scale, causal=p.causal, return_attn_probs=True,
    )
    return out[None], lse[None]


for function in (ring, zigzag, stripe, llama3):
    function.package = "ring-flash-attn"
ring.unclaimed = COMMON | {"documents": DOCUMENTS}
zigzag.unclaimed = stripe.unclaimed = ring.unclaimed | {"full": ONLY_CAUSAL}
zigzag.layout, stripe.layout = "zigzag", "striped"
llama3.unclaimed = COMMON | {"full": BATCHES, "causal": BATCHES}
