"""What the exchange of a mixture's tokens holds outside torch: the connections of an all-to-all, or the buffers of the
library that the flex dispatcher sends with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns, mixture_layers
from llmlaunch.memory.tokens import sequence_split, tokens

TERM = "exchange_buffers"
NODE_DEVICES = 8
FP32_BYTES = 4.0

# DeepEP (csrc/config.hpp get_nvl_buffer_size_hint and get_rdma_buffer_size_hint, deep_ep/buffer.py get_dispatch_config
# and get_combine_config, 1.2.1; megatron/core/transformer/moe/fused_a2a.py get_buffer, core 0.19): for so many ranks,
# the tokens of a channel that wait to be received over NVLink from a rank and over the network from a node. A token
# waits with its source, and with as many choices, weights and scales as there may be; over the network, also a flag.
DEEPEP_WAITING_TOKENS: Mapping[int, tuple[int, int]] = {
    2: (256, 128),
    4: (256, 128),
    8: (256, 128),
    16: (288, 140),
    24: (288, 128),
    32: (288, 128),
    64: (288, 140),
    128: (560, 132),
    144: (720, 132),
    160: (720, 132),
}
DEEPEP_RANKS = tuple(DEEPEP_WAITING_TOKENS)
DEEPEP_CHANNELS = 10  # of the 20 multiprocessors that Megatron gives it
DEEPEP_TOKEN_BYTES = 8.0 + 128.0 * (8.0 + 4.0 + 4.0)
DEEPEP_FLAG_BYTES = 16.0
DEEPEP_WORKSPACE_BYTES = float(32 * 2**20)
NVSHMEM_GRANULE_BYTES = float(2**29)  # in which its heap is taken (NVSHMEM_CUMEM_GRANULARITY of deep_ep/buffer.py)
HYBRIDEP_SCALED = 128.0  # elements that have a scale together, whether tokens are sent in 8 bits or not


class TokenDispatchEffect(Effect):
    """How tokens reach their experts."""

    def on(self, job: Job) -> bool:
        """Where there are experts, or a library for them."""
        return job.shape.moe is not None or job.techniques.token_dispatcher == "flex"

    def connections(self, job: Job, rows: RankColumns) -> FloatColumn:
        """Those that an all-to-all opens from every expert rank to every other in its node, where all-gathers and
        reductions need those of a ring alone."""
        lay, dispatcher = rows.layouts, job.techniques.token_dispatcher
        if not job.facts.exchange.exchange_peer_bytes or dispatcher not in (None, "alltoall"):
            return np.zeros(len(rows))
        beside = np.maximum(np.minimum(lay.expert, NODE_DEVICES // lay.expert_tensor), 1) - 1
        return np.asarray(job.facts.exchange.exchange_peer_bytes * beside)

    def outside_torch(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """The library's buffers."""
        return {TERM: _buffers(job, rows)} if job.techniques.token_dispatcher == "flex" else {}


def _buffers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes that DeepEP or HybridEP takes at the first exchange and keeps. A rank without a mixture
    exchanges nothing."""
    if job.shape.moe is None:
        return np.zeros(len(rows))
    ranks = rows.layouts.expert * rows.layouts.expert_tensor
    library = _hybridep if job.techniques.flex_backend == "hybridep" else _deepep
    return np.where(mixture_layers(job, rows) > 0, library(job, rows, ranks), 0.0)


def _deepep(job: Job, rows: RankColumns, ranks: IntColumn) -> FloatColumn:
    """DeepEP's buffers are as large as tokens may wait in them, however many a micro-batch has. Other numbers of ranks
    than the known ones are refused, and priced as the next larger one."""
    known = np.minimum(np.searchsorted(DEEPEP_RANKS, ranks), len(DEEPEP_RANKS) - 1)
    waiting = np.array(list(DEEPEP_WAITING_TOKENS.values()), dtype=np.float64)[known]
    token_bytes = 2.0 * job.shape.expert_width + DEEPEP_TOKEN_BYTES
    near = DEEPEP_CHANNELS * np.minimum(ranks, NODE_DEVICES) * waiting[:, 0] * token_bytes
    nodes = np.where(ranks > NODE_DEVICES, ranks // NODE_DEVICES, 0)
    far = 2.0 * DEEPEP_CHANNELS * nodes * waiting[:, 1] * (token_bytes + DEEPEP_FLAG_BYTES)
    heap = np.ceil(far / NVSHMEM_GRANULE_BYTES) * NVSHMEM_GRANULE_BYTES
    return np.where(ranks > 1, near + heap + DEEPEP_WORKSPACE_BYTES, 0.0)


def _hybridep(job: Job, rows: RankColumns, ranks: IntColumn) -> FloatColumn:
    """HybridEP has room for all tokens of all ranks on one of them, with probabilities of the experts in its NVLink
    domain and scales; dispatch and combine share it. Between domains both have buffers of their own: what is sent with
    probabilities of all experts, and what comes from each other domain; the sums that are brought back are there on
    both sides (csrc/hybrid_ep/buffer/intranode.cu and internode_doca.cu, branch hybrid-ep of 2026-07)."""
    assert job.shape.moe is not None
    mine = tokens(job, rows) / sequence_split(job, rows)
    experts = float(job.shape.moe.num_experts) * rows.layouts.expert_tensor  # of all ranks, as the dispatcher counts
    domains = np.maximum(np.ceil(ranks / job.facts.exchange.exchange_domain_devices), 1.0)
    others = domains - 1.0
    hidden, near_experts = 2.0 * job.shape.expert_width, FP32_BYTES * experts / domains
    scales = FP32_BYTES * job.shape.expert_width / HYBRIDEP_SCALED
    whole = mine * ranks * (hidden + near_experts + scales)
    sent = np.where(others > 0, mine * (hidden + FP32_BYTES * experts + scales), 0.0)
    come = mine * others * (3.0 * (hidden + near_experts) + scales)
    return np.asarray(whole + sent + come)
