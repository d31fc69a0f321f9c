"""Calls of kernels of `blind.csv` whose arguments a specification cannot say, such as page tables.

A batch has four sequences, whose tokens lie in a pool of M.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

LENGTHS = 40, 17, 64, 33  # of the sequences, in tokens
LLAMA = "lightllm.models.llama.triton_kernel."
COMMON = "lightllm.common.basemodel.triton_kernel."
FLASHNN = "flashnn.triton_kernels."


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _numbers(x: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=x.device)


def _batch(x: Tensor, pool: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which token of a pool each token of each sequence is; numbers, starts and lengths."""
    tokens = 7 * torch.arange(4 * 64, device=x.device).reshape(4, 64) % pool
    starts = [sum(LENGTHS[:i]) for i in range(4)]
    numbers = _numbers(x, 0, 1, 2, 3), _numbers(x, *starts), _numbers(x, *LENGTHS)
    return tokens.to(torch.int32), *numbers


def copy_kv_index(memory: Tensor) -> None:
    """Notes where the newest token of each of M sequences lies."""
    table = torch.zeros(len(memory), 128, dtype=torch.int32, device=memory.device)
    which = torch.arange(len(memory), dtype=torch.int32, device=memory.device)
    lengths = 1 + which % 128
    _of(COMMON + "copy_kv_index_to_req", "copy_kv_index_to_req")(table, which, lengths, memory)


def splitfuse_copy_kv_index(memory: Tensor) -> None:
    """Notes where the newest tokens of each sequence lie, those of the first ten being old."""
    table, which, _, lengths = _batch(memory, 160)
    name = "splitfuse_copy_kv_index_to_req"
    _of(COMMON + name, name)(table, which, _numbers(memory, 10, 0, 10, 3), lengths, memory)


def penalty(logits: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor) -> None:
    """Lowers the logits of the tokens that a sequence has."""
    tokens = torch.arange(sum(LENGTHS), device=logits.device) * 5 % logits.shape[1]
    ends = _numbers(logits, 0, *(sum(LENGTHS[: i + 1]) for i in range(4)))
    penalties = presence, frequency, repetition
    _of(COMMON + "apply_penalty", "apply_penalty")(
        logits, *penalties, tokens, torch.ones_like(tokens), ends, 64
    )


def dequantize_int4(weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Unpacks eight weights of each number."""
    unpack = _of(COMMON + "dequantize_gemm_int4", "dequantize_int4")
    return unpack(weights, scale, zero, weights.device, scale.dtype, 128)


def token_attention(q: Tensor, k: Tensor) -> Tensor:
    """The scores of one token of each sequence."""
    tokens, which, starts, lengths = _batch(q, len(k))
    scores = torch.empty(q.shape[1], sum(LENGTHS), device=q.device, dtype=q.dtype)
    attend = _of(LLAMA + "token_attention_nopad_att1", "token_att_fwd")
    attend(q, k, scores, tokens, which, starts, lengths, 64)
    return scores


token_attention_grouped = token_attention


def token_softmax(scores: Tensor) -> Tensor:
    """The probabilities of these scores."""
    _, _, starts, lengths = _batch(scores, 1)
    softmax = _of(LLAMA + "token_attention_nopad_softmax", "token_softmax_fwd")
    softmax(scores, starts, lengths, result := torch.empty_like(scores), 64)
    return result


def token_reduce(scores: Tensor, v: Tensor) -> Tensor:
    """The values with these probabilities."""
    batch = _batch(v, len(v))
    result = torch.empty(4, *v.shape[1:], device=v.device, dtype=v.dtype)
    _of(LLAMA + "token_attention_nopad_reduceV", "token_att_fwd2")(scores, v, result, *batch)
    return result


def token_softmax_reduce(scores: Tensor, v: Tensor) -> Tensor:
    """The values with the probabilities of these scores."""
    batch = _batch(v, len(v))
    result = torch.empty(4, *v.shape[1:], device=v.device, dtype=v.dtype)
    reduce = _of(LLAMA + "token_attention_softmax_and_reducev", "token_softmax_reducev_fwd")
    reduce(scores, v, result, *batch, 0)
    return result


def bloom_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Attention of one token of each sequence, in three kernels."""
    result, attend = torch.empty_like(q), "token_flashattention_nopad"
    attend = _of(f"lightllm.models.bloom.triton_kernel.{attend}", "token_attention_fwd")
    attend(q, k, v, result, slopes, *_batch(q, len(k)), 64, sum(LENGTHS))
    return result


def flash_decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one token of each sequence, in parts of 32 tokens that are then joined."""
    tokens, which, _, lengths = _batch(q, len(k))
    parts = torch.empty(4, q.shape[1], 2, q.shape[2], device=q.device)
    sums, result = torch.empty(4, q.shape[1], 2, device=q.device), torch.empty_like(q)
    first = _of(LLAMA + "flash_decoding_stage1", "flash_decode_stage1")
    first(q, k, v, tokens, which, lengths, 64, parts, sums, 32)
    _of(LLAMA + "flash_decoding_stage2", "flash_decode_stage2")(parts, sums, lengths, result, 32)
    return result


def grouped_decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one token of each sequence, whose heads share keys in groups of four."""
    tokens, which, _, lengths = _batch(q, len(k))
    attend = _of(LLAMA + "gqa_decode_flashattention_nopad", "gqa_decode_attention_fwd")
    attend(q, k, v, result := torch.empty_like(q), tokens, which, lengths)
    return result


def context_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all tokens of the sequences."""
    _, _, starts, lengths = _batch(q, 1)
    name = "context_attention_fwd_no_prompt_cache"
    attend = _of(LLAMA + "context_flashattention_nopad", name)
    attend(q, k, v, result := torch.empty_like(q), starts, lengths, 64)
    return result


def _paged(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The key head of each head, the pages of each sequence, and the lengths."""
    pages = torch.arange(16, dtype=torch.int32, device=q.device).flip(0).reshape(4, 4)
    return _numbers(q, 0, 1, 2, 3), pages, _numbers(q, *LENGTHS)


def paged_attention_1(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one token of each sequence, whose keys lie in pages."""
    heads, pages, lengths = _paged(q)
    attend = _of(FLASHNN + "paged_attn_v1", "triton_paged_attention_v1")
    attend(result := torch.empty_like(q), q, k, v, heads, 0.125, pages, lengths)
    return result


def paged_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in as many parts as suit the GPU."""
    _, pages, lengths = _paged(q)
    attend = _of(FLASHNN + "paged_attn", "paged_attention")
    attend(result := torch.empty_like(q), q, k, v, lengths, pages, 0.125, 64)
    return result


def scaled_index_add_backward(
    gradient: Tensor, source: Tensor, index: Tensor, scale: Tensor
) -> Any:
    """The gradients of the rows that are added, and of their scale."""
    found = torch.empty_like(source), torch.empty_like(source)
    add = _of("xformers.ops._triton.k_scaled_index_add", "scaled_index_add_bwd")
    add(gradient, *found, source, scale, index, 0.5)
    return found


def rope_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Turns queries and keys, and puts keys and values into caches with room for more."""
    bias = _of("xformers.ops.fmha.attn_bias", "BlockDiagonalCausalWithOffsetPaddedKeysMask")
    parts = [q.shape[1] // 4] * 4
    mask = bias.from_seqlens(parts, 64, [60, 50, 41, 40], device=q.device)
    caches = [torch.zeros(1, 256, *k.shape[2:], device=k.device, dtype=k.dtype) for _ in range(2)]
    return _of("xformers.ops.rope_padded", "rope_padded")(q, k, v, *caches, mask, adjacents=True)
