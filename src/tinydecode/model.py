"""The llama model, read top-down: embed -> layers -> norm -> lm_head.

One forward serves all three ways through attention. *Prefill* runs a whole prompt causally over
itself, *decode* one token against the cache, *chunk* a few tokens on top of what is cached. Decode
is chunk with T = 1.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from tinydecode import _ext, ops
from tinydecode.config import ModelConfig
from tinydecode.kv_cache import KVCache
from tinydecode.weights import LayerWeights, ModelWeights, load_weights, resolve_dtype


class LlamaModel:
    """A decoder of the llama family: configuration plus weights, and the arithmetic between them.

    The model holds no state of a generation; that is `KVCache`.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embed_tokens.device
        self.dtype = weights.embed_tokens.dtype

    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
        """Run prompts from position 0 and cache them; whatever the cache held is forgotten.

        Args:
            token_ids: int64 [B, T], shorter rows padded on the right with any valid id. The
                padding may reach beyond the cache's slots.
            lengths: int32 or int64 [B], real tokens a row, 1 to T.
            cache: its seq_lens become `lengths`.

        Returns:
            float32 [B, V]: the logits after each row's last real token.
        """
        cache.reset()
        hidden = self._forward(token_ids, cache, is_prefill=True)  # [B, T, E]
        cache.seq_lens.copy_(lengths)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return self._logits(hidden[rows, lengths.long() - 1])

    def decode(self, token_ids: Tensor, cache: KVCache) -> Tensor:
        """Run one token a row.

        Args:
            token_ids: int64 [B].
            cache: read, appended to, its seq_lens advanced by 1.

        Returns:
            float32 [B, V].
        """
        return self.chunk(token_ids[:, None], cache)[:, 0]

    def chunk(self, token_ids: Tensor, cache: KVCache) -> Tensor:
        """Run T tokens a row on top of the cached context.

        Args:
            token_ids: int64 [B, T].
            cache: read, appended to, its seq_lens advanced by T.

        Returns:
            float32 [B, T, V]: the logits after each of the T tokens.
        """
        step = ops.fused_step(self.config, self.dtype, self.device)
        if step is not None and token_ids.numel() <= step.MAX_ROWS:
            return self._fused_chunk(step, token_ids, cache)
        logits = self._logits(self._forward(token_ids, cache, is_prefill=False))
        cache.seq_lens.add_(token_ids.shape[1])
        return logits

    def _fused_chunk(self, step: ModuleType, token_ids: Tensor, cache: KVCache) -> Tensor:
        """`chunk` with everything around the five stages of a layer fused into them.

        Advances seq_lens too.

        The same arithmetic as `_forward`, with fewer roundings on the way.
        """
        config, weights = self.config, self.weights
        eps, heads = config.rms_norm_eps, config.num_attention_heads
        residual = step.embed(token_ids.contiguous(), weights.embed_tokens)  # [B, T, E]
        for index, layer in enumerate(weights.layers):
            k_cache, v_cache = cache.layer(index)
            q = step.linear_qkv(
                *(residual, layer.input_layernorm, layer.qkv_proj, eps, heads),
                *(cache.cos, cache.sin, k_cache, v_cache, cache.seq_lens),
            )
            attended = ops.attention(q, k_cache, v_cache, cache.seq_lens)
            step.linear_add(attended, layer.o_proj, residual)
            activated = step.linear_gate_up(
                residual, layer.post_attention_layernorm, layer.gate_up_proj, eps
            )
            step.linear_add(activated, layer.down_proj, residual)
        logits: Tensor = step.linear_logits(
            residual, weights.norm, weights.lm_head, eps, cache.seq_lens
        )
        return logits

    def _forward(self, token_ids: Tensor, cache: KVCache, *, is_prefill: bool) -> Tensor:
        """All layers; returns the normed hidden states [B, T, E]. Does not advance seq_lens."""
        eps = self.config.rms_norm_eps
        layers = self.weights.layers
        # The residual stream. Each block's output is added to it inside the next norm.
        residual = F.embedding(token_ids, self.weights.embed_tokens)  # [B, T, E]
        normed = ops.rms_norm(residual, layers[0].input_layernorm, eps)
        for index, layer in enumerate(layers):
            attended = self._attention(normed, layer, index, cache, is_prefill=is_prefill)
            normed = ops.add_rms_norm(attended, residual, layer.post_attention_layernorm, eps)
            fed_forward = self._mlp(normed, layer)
            next_norm = (
                layers[index + 1].input_layernorm if index + 1 < len(layers) else self.weights.norm
            )
            normed = ops.add_rms_norm(fed_forward, residual, next_norm, eps)
        return normed

    def _attention(
        self, x: Tensor, layer: LayerWeights, index: int, cache: KVCache, *, is_prefill: bool
    ) -> Tensor:
        """[B, T, E] -> [B, T, E]; appends this layer's keys and values to the cache."""
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = F.linear(x, layer.qkv_proj, layer.qkv_bias)
        qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)  # views, [B, T, heads, D]
        k_cache, v_cache = cache.layer(index)

        new = (q, k, v)
        if x.shape[1] > cache.max_seq_len:
            # The rest is a prompt's padding: it has neither slots nor rows in the rotary tables,
            # and no real token looks at it.
            new = (q[:, : cache.max_seq_len], k[:, : cache.max_seq_len], v[:, : cache.max_seq_len])
        ops.rope_kv_append(*new, cache.cos, cache.sin, k_cache, v_cache, cache.seq_lens)
        if is_prefill:
            attended = ops.prefill_attention(q, k, v)
        else:
            attended = ops.attention(q, k_cache, v_cache, cache.seq_lens)
        return F.linear(attended, layer.o_proj, layer.o_bias)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """[B, T, E] -> [B, T, E]: down(silu(gate(x)) * up(x))."""
        gate_up = F.linear(x, layer.gate_up_proj, layer.gate_up_bias)  # [B, T, 2F]
        return F.linear(ops.silu_mul(gate_up), layer.down_proj, layer.down_bias)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> float32 [..., V]."""
        return F.linear(hidden, self.weights.lm_head).float()


def load_hf(
    path: str | os.PathLike[str],
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> LlamaModel:
    """Load a Hugging Face llama-format directory, or a GGUF file, as it is.

    Args:
        path: a directory with config.json and safetensors, or a .gguf file.
        device: "auto" takes CUDA when this torch and this machine have it, else the CPU.
        dtype: of the parameters: a torch dtype, its name, or "auto" for what the files say.
        strict: make a tensor that nothing consumes an error instead of a warning.
        progress: called with (bytes loaded, bytes in total) as tensors arrive.

    Raises:
        FileNotFoundError: the path, its config.json or its weights do not exist.
        NotImplementedError: config.json asks for something this runtime lacks.
        CheckpointError: a file is damaged, or tensors do not fit the configuration.
        ValueError: an unknown device or dtype, or impossible values in config.json.
        RuntimeError: CUDA was asked for and cannot be had.
    """
    path = Path(path)
    target = resolve_device(device)
    if path.suffix == ".gguf" and not path.is_dir():
        from tinydecode import gguf  # needs the optional gguf library

        config = gguf.read_config(path)
    else:
        config = ModelConfig.from_dir(path)
    weights = load_weights(
        path,
        config,
        device=target,
        dtype=resolve_dtype(dtype, path, config, target),
        strict=strict,
        progress=progress,
    )
    return LlamaModel(config, weights)


def resolve_device(device: str | torch.device) -> torch.device:
    """Turn a device argument into a device that exists.

    Args:
        device: "auto", "cpu", "cuda", "cuda:N" or a torch.device.

    Raises:
        ValueError: not a device name, or one this runtime does not run on.
        RuntimeError: CUDA was asked for but this torch or this machine has none, or the compiled
            kernels are installed and cannot be used with it.
    """
    if device == "auto" and not torch.cuda.is_available():
        if warning := _ext.cpu_warning():
            warnings.warn(warning, stacklevel=3)
        return torch.device("cpu")
    try:
        target = torch.device("cuda" if device == "auto" else device)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, found {device!r}") from error
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, found {device!r}")
    if target.type == "cuda":
        _ext.check_usable()
        if torch.version.cuda is None:
            raise RuntimeError(
                f"device {device!r} needs a torch with CUDA, found torch {torch.__version__} "
                "which is built without it; get a CUDA build of torch (the selector on PyTorch's "
                "installation page gives the pip command), or use device 'cpu'"
            )
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"device {device!r} was asked for but torch {torch.__version__} sees no usable "
                "GPU (driver missing or too old, or CUDA_VISIBLE_DEVICES hides it); use 'cpu'"
            )
        index = target.index or 0
        if index >= torch.cuda.device_count():
            raise RuntimeError(
                f"device {device!r} does not exist: {torch.cuda.device_count()} GPU(s)"
            )
        _ext.check_device(index)
        return torch.device("cuda", index)
    return target
